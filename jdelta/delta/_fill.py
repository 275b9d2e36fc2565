"""From change words to a list: the positions of all set bits, in order.

The words are cut into rank blocks of 8. A prefix sum over the blocks' bit counts says
at which slot each block starts. Slots are then filled a slice at a time: the starts of
the blocks within the slice are marked, a running sum of the marks gives each slot its
block, and the bit is selected inside it. The number of turns follows the number of set
bits (and blocks), not the capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._blocks import maybe
from jdelta.delta._layout import RANK_WORDS, Limits
from jdelta.delta._pages import Pages, page_end
from jdelta.delta._vary import vary

_U0 = np.uint32(0)
_NONE = np.uint32(0xFFFFFFFF)
_WINDOW = 2**14  # rank blocks whose starts one turn marks


class Index(NamedTuple):
    """A bitmap and where its set bits fall.

    Attributes:
        words: u32[8 * blocks].
        ranks: u32[blocks + 1]: set bits before each block; the last is the total.
        inner: u32[2 * blocks]: set bits up to and with each of a block's first 7 words,
            a byte each.
    """

    words: jax.Array
    ranks: jax.Array
    inner: jax.Array

    @property
    def total(self) -> jax.Array:
        """u32 scalar: set bits in all."""
        return self.ranks[-1]


def build_index(words: jax.Array) -> Index:
    """The index of u32 `words`, whose number is a multiple of 8."""
    counts = lax.population_count(words).reshape(-1, RANK_WORDS)
    sums = jnp.cumsum(jnp.sum(counts, axis=1, dtype=np.uint32), dtype=np.uint32)
    ranks = jnp.concatenate([jnp.zeros(1, np.uint32), sums])
    # Word j counts in the bytes j and above: one product adds it to all of them.
    low = [counts[:, j] * np.uint32((0x01010101 << 8 * j) % 2**32) for j in range(4)]
    high = [counts[:, j] * np.uint32(0x01010101) for j in range(4)]
    high += [
        counts[:, 4 + j] * np.uint32((0x01010101 << 8 * j) % 2**32) for j in range(3)
    ]
    inner = jnp.stack([sum(low[1:], low[0]), sum(high[1:], high[0])], axis=1)
    return Index(words, ranks, inner.reshape(-1))


def running_sum(x: jax.Array) -> jax.Array:
    """The inclusive prefix sums of u32[n], modulo 2^32.

    Eight at a time, level by level: on CPU 8x as fast as `jnp.cumsum`, whose every
    level strides over the whole array.
    """
    if x.size <= 64:
        return jnp.cumsum(x, dtype=np.uint32)
    rows = jnp.pad(x, (0, -x.size % 8)).reshape(-1, 8)
    columns = [rows[:, 0]]
    for j in range(1, 8):
        columns.append(columns[-1] + rows[:, j])
    before = running_sum(columns[-1]) - columns[-1]
    return (jnp.stack(columns, axis=1) + before[:, None]).reshape(-1)[: x.size]


def get(x: jax.Array, i: jax.Array) -> jax.Array:
    """`x[i]` for indices known to be in bounds: no fill, so no select on the values."""
    return x.at[i].get(mode="promise_in_bounds")


def select_bit(word: jax.Array, k: jax.Array) -> jax.Array:
    """Which bit of `word` is its `k`-th set one (both u32, k below the bit count)."""
    at = jnp.zeros_like(word)
    for half in (16, 8, 4, 2, 1):
        low = lax.population_count((word >> at) & np.uint32((1 << half) - 1))
        above = k >= low
        k = jnp.where(above, k - low, k)
        at = jnp.where(above, at + np.uint32(half), at)
    return at


def rank_of(index: Index, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether `position`'s bit is set, and how many set bits lie before it."""
    at = position >> 5
    word, block, inside = get(index.words, at), at >> 3, at & 7
    bit = np.uint32(1) << (position & 31)
    rank = get(index.ranks, block) + lax.population_count(word & (bit - np.uint32(1)))
    return (word & bit) != 0, rank + _before(index, block, inside)


def _before(index: Index, block: jax.Array, inside: jax.Array) -> jax.Array:
    """Set bits of a block before its word number `inside`."""
    last = jnp.maximum(inside, 1) - np.uint32(1)
    packed = get(index.inner, 2 * block + (last >> 2))
    return jnp.where(inside == 0, _U0, (packed >> (8 * (last & 3))) & 255)


def positions_of(index: Index, block: jax.Array, k: jax.Array) -> jax.Array:
    """Position of the `k`-th set bit of each `block` (u32)."""
    low, high = get(index.inner, 2 * block), get(index.inner, 2 * block + 1)
    inside = jnp.zeros_like(block)
    for j in range(RANK_WORDS - 1):
        packed = low if j < 4 else high
        inside += (((packed >> 8 * (j & 3)) & 255) <= k).astype(np.uint32)
    k = k - _before(index, block, inside)
    at = block * np.uint32(RANK_WORDS) + inside
    return at * np.uint32(32) + select_bit(get(index.words, at), k)


# emit(position u32[turn], valid bool[turn]) -> arrays of `turn` values
Emit = Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]


def fill(
    pages: tuple[Pages, ...],
    index: Index,
    slots: int,
    used: jax.Array,
    emit: Emit,
    zero: Any,
    limits: Limits,
) -> tuple[Pages, ...]:
    """Append what `emit` says of each set bit, in order, to `pages`.

    Args:
        pages: paged buffers of `slots` slots; each is filled with one of the arrays
            that `emit` returns.
        index: the bitmap.
        slots: capacity; what does not fit is not written.
        used: u32 scalar, slots in use before.
        emit: see above; positions of lanes that are not valid mean nothing, but are in
            bounds of the bitmap.
        zero: see `jdelta.delta._vary`; `pages` and what `emit` returns vary as it does.
        limits: `limits.slots` is the most slots a turn fills.

    Returns:
        The pages, with min(slots, used + total) slots in use.
    """
    turn = turn_size(slots, limits)
    blocks = index.ranks.size - 1
    window = min(blocks, _WINDOW)
    lane = jnp.arange(turn, dtype=np.uint32)
    # Starts beyond the end for the window to run into.
    starts = jnp.concatenate([index.ranks, jnp.full(window, _NONE)])
    end = jnp.minimum(
        index.total, np.uint32(slots) - jnp.minimum(used, np.uint32(slots))
    )

    def turn_once(state: Any) -> Any:
        done, block, pages = state
        ahead = lax.dynamic_slice(starts, (block + np.uint32(1),), (window,))
        step = jnp.minimum(np.uint32(turn), ahead[-1] - done)
        step = jnp.minimum(step, page_end(slots, used + done) - (used + done))
        marks = jnp.zeros(turn, np.uint32)
        marks = marks.at[ahead - done].add(1, mode="drop", indices_are_sorted=True)
        sums = maybe(step > 0, running_sum, zero, marks)
        at = jnp.minimum(block + sums, np.uint32(blocks - 1))
        position = positions_of(index, at, done + lane - get(index.ranks, at))
        # A conditional is a barrier: fused, all this would be computed for each page.
        values = maybe(step > 0, emit, zero, position, lane < step)
        pages = tuple(
            page.write(used + done, value)
            for page, value in zip(pages, values, strict=True)
        )
        done += step
        block += jnp.sum(ahead <= done, dtype=np.uint32)
        return done, block, pages

    state = (vary(_U0, zero), vary(_U0, zero), pages)
    return lax.while_loop(lambda state: state[0] < end, turn_once, state)[2]


def turn_size(slots: int, limits: Limits) -> int:
    """Slots a turn fills: a power of two that keeps the pages' slack small."""
    wanted = 1 << max(slots // 16, 64).bit_length() - 1
    return min(wanted, limits.slots)
