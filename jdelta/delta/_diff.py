"""What changed between two trees of arrays, found inside the jitted step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._bits import uint
from jdelta.delta._blocks import (
    Table,
    block_bits,
    choose,
    drop_first,
    gather_batch,
    pick_bits,
    round_up,
)
from jdelta.delta._delta import Delta, Group
from jdelta.delta._fill import build_index, fill, get, turn_size
from jdelta.delta._layout import (
    DEFAULT,
    Batch,
    GroupLayout,
    Large,
    Limits,
    group_layouts,
)
from jdelta.delta._pages import Pages
from jdelta.delta._spec import LeafSpec, check_same, refuse_sharded, specs_of
from jdelta.delta._words import array_words, pack


def diff(
    old: Any, new: Any, *, capacity: float = 0.1, _limits: Limits = DEFAULT
) -> Delta:
    """Find every element of `new` whose bits differ from `old`'s.

    Exact for every dtype of 1, 2, 4 or 8 bytes an element and every bit pattern.
    Jittable; reads each array once and copies no large one. On CPU, run it in a jit of
    its own over arrays of the published dtype, not in the jit that updates them.

    Collective: no. Arrays sharded over an explicit mesh axis are refused; over an
    automatic one they are gathered by XLA.

    Args:
        old: tree of arrays in the published dtype.
        new: the same structure, shapes and dtypes.
        capacity: slots as a share of each width's elements, over 0 and up to 1, where
            a delta cannot overflow. Time follows what changed, memory the capacity.
            Small groups have at least 1024 slots.

    Returns:
        The delta. When more elements changed than fit, its counts are still right, the
        slots hold the first changes, and `overflowed` is true.

    Raises:
        TreeError: the trees differ, a leaf is no array or has an unsupported dtype, or
            more than 2^32 - 1 elements of one width.
        ValueError: a capacity out of range.

    Example:
        >>> old = {"w": jnp.zeros((2, 2), jnp.bfloat16)}
        >>> new = {"w": old["w"].at[1, 0].set(-0.0)}
        >>> diff(old, new).to_host()["w"][0]
        array([2], dtype=uint32)
    """
    check_capacity(capacity)
    old_specs, olds = specs_of(old)
    new_specs, news = specs_of(new)
    check_same(old_specs, new_specs, "diff(old, new)")
    refuse_sharded(old_specs, olds)
    refuse_sharded(new_specs, news)
    return diff_leaves(olds, news, old_specs, float(capacity), _limits)


def check_capacity(capacity: float) -> None:
    """Raise ValueError unless `capacity` is a share."""
    if not 0 < capacity <= 1:
        raise ValueError(f"capacity must be over 0 and at most 1, got {capacity!r}")


@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def diff_leaves(
    olds: Sequence[Any],
    news: Sequence[Any],
    specs: tuple[LeafSpec, ...],
    capacity: float,
    limits: Limits = DEFAULT,
) -> Delta:
    """`diff` of checked leaves, over the specs' dtypes.

    A leaf may hold its bits instead, as unsigned integers of the width, or be wider:
    then it is narrowed as it is read, without a copy.
    """
    groups = tuple(
        _diff_group(
            layout, specs, olds, news, slot_count(layout.size, capacity, limits), limits
        )
        for layout in group_layouts(specs, limits)
    )
    return Delta(groups, specs)


def slot_count(size: int, capacity: float, limits: Limits) -> int:
    """Slots of a group of `size` elements."""
    return min(size, max(int(np.ceil(size * capacity)), limits.slot_floor))


def empty_pages(slots: int, width: int, limits: Limits) -> tuple[Pages, Pages, Pages]:
    """Buffers for positions, old and new bits."""
    slack = turn_size(slots, limits)
    return (
        Pages.zeros(slots, slack, np.dtype(np.uint32)),
        Pages.zeros(slots, slack, np.dtype(uint(width))),
        Pages.zeros(slots, slack, np.dtype(uint(width))),
    )


def _diff_group(
    layout: GroupLayout,
    specs: tuple[LeafSpec, ...],
    olds: Sequence[Any],
    news: Sequence[Any],
    slots: int,
    limits: Limits,
) -> Group:
    count, pages = np.uint32(0), empty_pages(slots, layout.width, limits)
    if layout.batches:
        count, pages = _sweep_small(
            layout, specs, olds, news, slots, count, pages, limits
        )
    if layout.large:
        count, pages = _sweep_large(
            layout, specs, olds, news, slots, count, pages, limits
        )
    positions, old, new = pages
    return Group(
        count=jnp.asarray(count),
        positions=positions,
        old=old,
        new=new,
        leaves=layout.leaves,
        starts=layout.starts,
        size=layout.size,
    )


def _sweep_small(
    layout: GroupLayout,
    specs: tuple[LeafSpec, ...],
    olds: Sequence[Any],
    news: Sequence[Any],
    slots: int,
    count: Any,
    pages: Any,
    limits: Limits,
) -> tuple[Any, Any]:
    """The small leaves: each batch is copied together, then worked on."""
    block = round_up(max(batch.size for batch in layout.batches))
    starts = jnp.array([batch.start for batch in layout.batches], np.uint32)

    def copy(batch: Batch) -> Any:
        return lambda: tuple(
            gather_batch(
                [leaves[i] for i in batch.leaves],
                [specs[i].dtype for i in batch.leaves],
                block,
            )
            for leaves in (olds, news)
        )

    copies = [copy(batch) for batch in layout.batches]

    def work(unit: jax.Array, count: jax.Array, pages: Any) -> Any:
        old, new = choose(unit, copies)
        index = build_index(pack(old, new))
        start = get(starts, unit)

        def emit(position: jax.Array, _: jax.Array) -> Any:
            return start + position, get(old, position), get(new, position)

        pages = fill(pages, index, slots, count, emit, limits)
        return count + index.total, pages

    return _each(len(copies), work, count, pages)


def _sweep_large(
    layout: GroupLayout,
    specs: tuple[LeafSpec, ...],
    olds: Sequence[Any],
    news: Sequence[Any],
    slots: int,
    count: Any,
    pages: Any,
    limits: Limits,
) -> tuple[Any, Any]:
    """The large leaves, a block at a time: what is found is still in the cache."""
    largest = max(large.columns for large in layout.large)
    block = min(limits.block, round_up(largest))
    table = Table.of(layout.large, block)

    # The views are taken inside the branches: outside, XLA would make a copy of each
    # array as integers.
    def words(large: Large) -> Any:
        dtype = specs[large.leaf].dtype

        def read(row: jax.Array, column: jax.Array, skip: jax.Array) -> jax.Array:
            old, new = (
                block_bits(leaves[large.leaf], dtype, large, row, column, block)
                for leaves in (olds, news)
            )
            return drop_first(array_words(old, new), skip, block // 32)

        return read

    def picks(large: Large) -> Any:
        dtype = specs[large.leaf].dtype
        return lambda row, column: tuple(
            pick_bits(leaves[large.leaf], dtype, large, row, column)
            for leaves in (olds, news)
        )

    readers = [words(large) for large in layout.large]
    pickers = [picks(large) for large in layout.large]

    def work(unit: jax.Array, count: jax.Array, pages: Any) -> Any:
        place = table.at(unit)
        index = build_index(
            choose(place.leaf, readers, place.row, place.column, place.skip)
        )

        def emit(position: jax.Array, _: jax.Array) -> Any:
            old, new = choose(place.leaf, pickers, place.row, place.column + position)
            return place.start + position, old, new

        pages = fill(pages, index, slots, count, emit, limits)
        return count + index.total, pages

    return _each(len(table.leaf), work, count, pages)


def _each(units: int, work: Any, count: Any, pages: Any) -> tuple[Any, Any]:
    def body(state: Any) -> Any:
        unit, count, pages = state
        return unit + np.uint32(1), *work(unit, count, pages)

    state = (np.uint32(0), count, pages)
    _, count, pages = lax.while_loop(lambda s: s[0] < np.uint32(units), body, state)
    return count, pages
