"""Writing a delta's new bits into a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._bits import from_bits, to_bits
from jdelta.delta._blocks import batch_bits, piece_of
from jdelta.delta._delta import Delta, Group
from jdelta.delta._layout import DEFAULT, Limits, group_layouts
from jdelta.delta._pages import page_end
from jdelta.delta._spec import check_same, refuse_sharded, specs_of
from jdelta.delta._vary import vary, zero_of


def apply(params: Any, delta: Delta, *, _limits: Limits = DEFAULT) -> Any:
    """Set the delta's new bits in `params`.

    Exact: moves bits, never floats. Jittable and donation-safe: with `params` donated
    to the enclosing jit, large leaves are updated in place (one over 2^30 elements is
    copied once). The old bits are not checked. On CPU, integer leaves are fastest (a
    float leaf costs a copy).

    Collective: as `diff`. Arrays sharded over an explicit mesh axis are refused.

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
    pieces: dict[int, list[jax.Array]] = {}
    layouts = group_layouts(delta.spec, limits)
    zero = zero_of(leaves, [group.count for group in delta.groups])
    for group, layout in zip(delta.groups, layouts, strict=True):
        parts = [*layout.batches, *((piece,) for piece in layout.pieces)]
        cuts = _cuts(group, [part[0].start for part in parts], zero)
        for n, batch in enumerate(layout.batches):
            dtypes = [delta.spec[s.leaf].dtype for s in batch]
            size = batch[-1].start + batch[-1].size - batch[0].start
            bits = batch_bits([out[s.leaf] for s in batch], dtypes, size)
            bits = _write(vary(bits, zero), batch[0].start, group, cuts[n], cuts[n + 1])
            for segment in batch:
                at = segment.start - batch[0].start
                new = bits[at : at + segment.size].reshape(out[segment.leaf].shape)
                out[segment.leaf] = from_bits(new, out[segment.leaf].dtype)
        for n, piece in enumerate(layout.pieces, start=len(layout.batches)):
            bits = piece_of(to_bits(out[piece.leaf]), piece)
            new = _write(vary(bits, zero), piece.start, group, cuts[n], cuts[n + 1])
            pieces.setdefault(piece.leaf, []).append(new)
    for leaf, parts in pieces.items():
        bits = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        out[leaf] = from_bits(bits.reshape(out[leaf].shape), out[leaf].dtype)
    return out


def _write(
    bits: jax.Array, start: int, group: Group, first: jax.Array, end: jax.Array
) -> jax.Array:
    """Flat `bits`, which begin at `start` in the group, with some slots' new bits."""

    def write(bits: jax.Array, positions: jax.Array, valid: Any, new: Any) -> Any:
        at = jnp.where(valid, positions - np.uint32(start), np.uint32(bits.size))
        return bits.at[at].set(new, mode="drop", unique_indices=True)

    return _each_turn(group, first, end, bits, write)


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


def _cuts(group: Group, starts: list[int], zero: Any) -> jax.Array:
    """First slot at or behind each flat position of `starts`, then the used slots."""
    used = vary(used_slots(group), zero)
    wanted = vary(jnp.array(starts, np.uint32), zero)
    low = vary(jnp.zeros_like(wanted), zero)
    high = jnp.broadcast_to(used, wanted.shape)

    def halve(_: Any, bounds: Any) -> Any:
        low, high = bounds
        middle = low + (high - low) // 2
        at = jnp.minimum(middle, np.uint32(group.slots - 1))
        below = (group.positions.take(at) < wanted) & (low < high)
        return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

    low, _ = lax.fori_loop(0, group.slots.bit_length(), halve, (low, high))
    return jnp.concatenate([low, used[None]])
