"""Two deltas, one after the other, as one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._apply import read_turn, used_slots
from jdelta.delta._blocks import round_up
from jdelta.delta._delta import NO_MARK, Delta, Group
from jdelta.delta._diff import check_capacity, empty_pages, slot_count
from jdelta.delta._fill import Index, build_index, fill, rank_of
from jdelta.delta._layout import DEFAULT, Limits
from jdelta.delta._pages import Pages
from jdelta.delta._spec import check_same
from jdelta.delta._vary import vary, zero_of
from jdelta.errors import TreeError

_U0 = np.uint32(0)


def merge(
    first: Delta,
    second: Delta,
    *,
    capacity: float | None = None,
    _limits: Limits = DEFAULT,
) -> Delta:
    """The delta that does what `first` and then `second` do.

    Old bits come from the first that has the element, new bits from the last; elements
    that came back to where they were are dropped. Jittable; beside the deltas it needs
    three bitmaps (3/8 byte an element). Collective: as `diff`.

    Args:
        first: the earlier delta.
        second: the later one, made against the tree that `first` leads to.
        capacity: as for `diff`; by default the larger of the two.

    Returns:
        The merged delta. It is marked as overflowed when one of the two is, or when the
        changes do not fit.

    Raises:
        TreeError: the deltas are of different trees.

    Example:
        >>> both = merge(diff(a, b), diff(b, c))  # changes the same as diff(a, c)
    """
    check_same(first.spec, second.spec, "merge(first, second)")
    if capacity is not None:
        check_capacity(capacity)
    for a, b in zip(first.groups, second.groups, strict=True):
        if a.segments != b.segments:
            raise TreeError("merge(first, second): the deltas order their leaves apart")
    return _merge_groups(first, second, capacity, _limits)


@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _merge_groups(
    first: Delta, second: Delta, capacity: float | None, limits: Limits
) -> Delta:
    groups = []
    for a, b in zip(first.groups, second.groups, strict=True):
        slots = max(a.slots, b.slots)
        if capacity is not None:
            slots = slot_count(a.size, capacity, limits)
        groups.append(_merge_group(a, b, slots, limits))
    merged = Delta(tuple(groups), first.spec)
    if first.marks is None or second.marks is None:
        return merged
    # Two that do not follow each other lead from no snapshot there is.
    follows = jnp.all(first.marks[1] == second.marks[0])
    return merged.between(
        jnp.where(follows, first.marks[0], np.uint32(NO_MARK)), second.marks[1]
    )


def _merge_group(first: Group, second: Group, slots: int, limits: Limits) -> Group:
    zero = zero_of(first.count, second.count)
    one, two, either = _bitmaps(first, second, zero)

    def emit(position: jax.Array, _: jax.Array) -> Any:
        in_one, at_one = rank_of(one, position)
        in_two, at_two = rank_of(two, position)
        old = jnp.where(in_one, _take(first.old, at_one), _take(second.old, at_two))
        new = jnp.where(in_two, _take(second.new, at_two), _take(first.new, at_one))
        return position, old, new

    width = first.old.pages[0].dtype.itemsize
    pages = vary(empty_pages(slots, width, limits), zero)
    used = vary(np.uint32(0), zero)
    positions, old, new = fill(pages, either, slots, used, emit, zero, limits)
    lost = (first.count > np.uint32(first.slots)) | (
        second.count > np.uint32(second.slots)
    )
    least = jnp.maximum(jnp.maximum(first.count, second.count), np.uint32(slots + 1))
    return Group(
        count=jnp.where(lost, jnp.maximum(least, either.total), either.total),
        positions=positions,
        old=old,
        new=new,
        segments=first.segments,
        size=first.size,
    )


def _bitmaps(first: Group, second: Group, zero: Any) -> tuple[Index, Index, Index]:
    """The elements of `first`, of `second`, and of the merged delta."""
    empty = vary(jnp.zeros(round_up(first.size) // 32, np.uint32), zero)
    start = vary(np.uint32(0), zero)

    def add_first(carry: Any) -> Any:
        slot, words = carry
        positions, valid, stop = read_turn(first, slot, used_slots(first))
        return stop, _add(words, positions, jnp.where(valid, _bit(positions), _U0))

    used = used_slots(first)
    _, words = lax.while_loop(lambda c: c[0] < used, add_first, (start, empty))
    one = build_index(words)

    def add_second(carry: Any) -> Any:
        slot, words, merged = carry
        positions, valid, stop = read_turn(second, slot, used_slots(second))
        new, bit = second.new.read(slot, positions.size), _bit(positions)
        last = np.uint32(first.size - 1)  # what is not valid may be out of range
        known, at = rank_of(one, jnp.minimum(positions, last))
        back = _take(first.old, at) == new
        change = jnp.where(known, jnp.where(back, _U0 - bit, _U0), bit)
        words = _add(words, positions, jnp.where(valid, bit, _U0))
        merged = _add(merged, positions, jnp.where(valid, change, _U0))
        return stop, words, merged

    used_second = used_slots(second)
    _, words, merged = lax.while_loop(
        lambda c: c[0] < used_second, add_second, (start, empty, words)
    )
    return one, build_index(words), build_index(merged)


def _bit(position: jax.Array) -> jax.Array:
    return np.uint32(1) << (position & 31)


def _add(words: jax.Array, position: jax.Array, change: jax.Array) -> jax.Array:
    # Each bit is set or cleared at most once, so adding is setting.
    return words.at[position >> 5].add(change, mode="drop")


def _take(pages: Pages, slot: jax.Array) -> jax.Array:
    return pages.take(jnp.minimum(slot, np.uint32(pages.slots - 1)))
