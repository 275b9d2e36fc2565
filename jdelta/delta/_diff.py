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
    batch_bits,
    block_bits,
    choose,
    drop_first,
    round_up,
)
from jdelta.delta._delta import Delta, Group
from jdelta.delta._fill import build_index, fill, get, turn_size
from jdelta.delta._layout import DEFAULT, GroupLayout, Limits, Segment, group_layouts
from jdelta.delta._pages import Pages
from jdelta.delta._spec import LeafSpec, check_same, refuse_sharded, specs_of
from jdelta.delta._vary import vary, zero_of
from jdelta.delta._words import pack


def diff(
    old: Any, new: Any, *, capacity: float = 0.1, _limits: Limits = DEFAULT
) -> Delta:
    """Find every element of `new` whose bits differ from `old`'s.

    Exact for every dtype of 1, 2, 4 or 8 bytes an element and every bit pattern.
    Jittable; reads each array once and copies no large one. On CPU, run it in a jit of
    its own over arrays of the published dtype, not in the jit that updates them.

    Collective: no, for replicated arrays; inside `jax.shard_map` each shard is an array
    of its own. XLA gathers what is sharded over an automatic mesh axis: then every
    process of the mesh has to call it. Sharding over an explicit axis is refused.

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
        TreeError: the trees differ, or a leaf is no array or has an unsupported dtype.
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
    zero = zero_of(olds, news)
    count = vary(np.uint32(0), zero)
    pages = vary(empty_pages(slots, layout.width, limits), zero)

    def sweep(table: Table, reads: list[Any]) -> None:
        """Goes over blocks; what is found in one is still in the cache."""

        def body(state: Any) -> Any:
            unit, count, pages = state
            place = table.row(unit)
            old, new = choose(place.piece, reads, zero, place.at)
            index = build_index(drop_first(pack(old, new), place.skip))

            def emit(position: jax.Array, _: jax.Array) -> Any:
                return place.start + position, get(old, position), get(new, position)

            pages = fill(pages, index, slots, count, emit, zero, limits)
            return unit + np.uint32(1), count + index.total, pages

        nonlocal count, pages
        units = np.uint32(len(table.piece))
        state = (np.uint32(0), count, pages)
        _, count, pages = lax.while_loop(lambda s: s[0] < units, body, state)

    def read_batch(batch: tuple[Segment, ...], block: int) -> Any:
        return lambda at: tuple(
            batch_bits(
                [leaves[segment.leaf] for segment in batch],
                [specs[segment.leaf].dtype for segment in batch],
                block,
            )
            for leaves in (olds, news)
        )

    def read_block(piece: Segment, block: int) -> Any:
        return lambda at: tuple(
            block_bits(leaves[piece.leaf], specs[piece.leaf].dtype, piece, at, block)
            for leaves in (olds, news)
        )

    stride = max(1, limits.sweep // limits.batch)
    for first in range(0, len(layout.batches), stride):
        batches = layout.batches[first : first + stride]
        whole = [
            Segment(0, 0, batch[0].start, sum(segment.size for segment in batch))
            for batch in batches
        ]
        block = round_up(max(segment.size for segment in whole))
        reads = [read_batch(batch, block) for batch in batches]
        sweep(Table.of(whole, block), reads)
    for first in range(0, len(layout.pieces), limits.sweep):
        pieces = layout.pieces[first : first + limits.sweep]
        block = min(limits.block, round_up(max(piece.size for piece in pieces)))
        reads = [read_block(piece, block) for piece in pieces]
        sweep(Table.of(pieces, block), reads)
    positions, old, new = pages
    return Group(
        count=jnp.asarray(count),
        positions=positions,
        old=old,
        new=new,
        segments=layout.segments,
        size=layout.size,
    )
