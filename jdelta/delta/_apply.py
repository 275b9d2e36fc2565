"""Writing a delta's new bits into a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._bits import from_bits, to_bits
from jdelta.delta._blocks import gather_batch
from jdelta.delta._delta import Delta, Group
from jdelta.delta._layout import DEFAULT, Batch, Large, Limits, group_layouts
from jdelta.delta._pages import page_end
from jdelta.delta._spec import LeafSpec, check_same, refuse_sharded, specs_of


def apply(params: Any, delta: Delta, *, _limits: Limits = DEFAULT) -> Any:
    """Set the delta's new bits in `params`.

    Exact: moves bits, never floats. Jittable and donation-safe: with `params` donated
    to the enclosing jit, large leaves are updated in place. The old bits are not
    checked. On CPU, integer leaves are fastest (a float leaf costs a copy).

    Collective: no. Arrays sharded over an explicit mesh axis are refused.

    Args:
        params: tree of arrays, with the names, shapes and published dtypes of the
            delta.
        delta: what `diff`, `merge` or `extract` made. In a jit, an overflowed delta
            cannot be refused: check `delta.overflowed` first.

    Returns:
        The tree with the changes made.

    Raises:
        TreeError: the tree is not the delta's.
        DeltaOverflowError: the delta overflowed (only outside of jit).

    Example:
        >>> params = apply(params, diff(params, target))  # now has target's bits
    """
    specs, leaves = specs_of(params)
    check_same(delta.spec, specs, "apply(params, delta)")
    refuse_sharded(specs, leaves)
    delta.check()
    new = _apply_leaves(leaves, delta, _limits)
    return jax.tree.unflatten(jax.tree.structure(params), new)


@partial(jax.jit, static_argnums=2, inline=True)
def _apply_leaves(leaves: list[Any], delta: Delta, limits: Limits) -> list[Any]:
    # Empty leaves are in no group; copied, so that no result is an argument's buffer.
    out = [jnp.asarray(x) if x.size else jnp.copy(x) for x in leaves]
    layouts = group_layouts(delta.spec, limits)
    for group, layout in zip(delta.groups, layouts, strict=True):
        starts = [b.start for b in layout.batches] + [x.start for x in layout.large]
        cuts = _cuts(group, starts)
        for n, batch in enumerate(layout.batches):
            new = _apply_batch(out, batch, group, cuts[n], cuts[n + 1], delta.spec)
            for i, x in zip(batch.leaves, new, strict=True):
                out[i] = x
        for n, large in enumerate(layout.large, start=len(layout.batches)):
            out[large.leaf] = _apply_large(
                out[large.leaf], large, group, cuts[n], cuts[n + 1]
            )
    return out


def _apply_batch(
    leaves: Sequence[Any],
    batch: Batch,
    group: Group,
    first: jax.Array,
    end: jax.Array,
    specs: tuple[LeafSpec, ...],
) -> list[Any]:
    dtypes = [specs[i].dtype for i in batch.leaves]
    bits = gather_batch([leaves[i] for i in batch.leaves], dtypes, batch.size)

    def write(bits: jax.Array, positions: jax.Array, valid: Any, new: Any) -> Any:
        at = jnp.where(valid, positions - np.uint32(batch.start), np.uint32(batch.size))
        return bits.at[at].set(new, mode="drop", unique_indices=True)

    bits = _each_turn(group, first, end, bits, write)
    out, start = [], 0
    for i in batch.leaves:
        spec = specs[i]
        part = bits[start : start + spec.size].reshape(spec.shape)
        out.append(from_bits(part, spec.dtype))
        start += spec.size
    return out


def _apply_large(
    x: Any, large: Large, group: Group, first: jax.Array, end: jax.Array
) -> Any:
    columns = np.uint32(large.columns)

    def write(bits: jax.Array, positions: jax.Array, valid: Any, new: Any) -> Any:
        at = positions - np.uint32(large.start)
        if large.rows == 1:
            at = jnp.where(valid, at, columns)
            return bits.at[at].set(new, mode="drop", unique_indices=True)
        row = jnp.where(valid, at // columns, np.uint32(large.rows))
        return bits.at[row, at % columns].set(new, mode="drop", unique_indices=True)

    shape = (large.columns,) if large.rows == 1 else (large.rows, large.columns)
    bits = _each_turn(group, first, end, to_bits(x).reshape(shape), write)
    return from_bits(bits.reshape(x.shape), x.dtype)


def _each_turn(
    group: Group, first: jax.Array, end: jax.Array, state: Any, step: Callable[..., Any]
) -> Any:
    """`state = step(state, positions, valid, new)` over the slots `first` to `end`."""

    def body(carry: Any) -> Any:
        slot, state = carry
        positions, valid, stop = read_turn(group, slot, end)
        new = group.new.read(slot, positions.size)
        return stop, step(state, positions, valid, new)

    return lax.while_loop(lambda carry: carry[0] < end, body, (first, state))[1]


def read_turn(
    group: Group, slot: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The positions from `slot` on, which of them are valid, and the next slot."""
    size = group.positions.slack
    left = jnp.minimum(end, page_end(group.slots, slot)) - slot
    stop = slot + jnp.minimum(left, np.uint32(size))
    lane = jnp.arange(size, dtype=np.uint32)
    return group.positions.read(slot, size), lane < stop - slot, stop


def used_slots(group: Group) -> jax.Array:
    """Slots that hold a change, u32 scalar."""
    return jnp.minimum(group.count, np.uint32(group.slots))


def _cuts(group: Group, starts: list[int]) -> jax.Array:
    """First slot at or behind each flat position of `starts`, then the used slots."""
    used = used_slots(group)
    wanted = jnp.array(starts, np.uint32)
    low, high = jnp.zeros_like(wanted), jnp.broadcast_to(used, wanted.shape)

    def halve(_: Any, bounds: Any) -> Any:
        low, high = bounds
        middle = low + (high - low) // 2
        at = jnp.minimum(middle, np.uint32(group.slots - 1))
        below = (group.positions.take(at) < wanted) & (low < high)
        return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

    low, _ = lax.fori_loop(0, group.slots.bit_length(), halve, (low, high))
    return jnp.concatenate([low, used[None]])
