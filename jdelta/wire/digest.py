"""The additive digest of a tensor's weights.

Two lanes of 32 bits, packed as `lane 0 << 32 | lane 1`. A tensor's bytes are read as
little-endian 16-bit words (1-byte dtypes: one word per byte) x_0, x_1, ... and

    lane_k = sum over w of  mix(x_w) * near_k(w mod 2^16) * far_k(w div 2^16)  mod 2^32

where `mix(x) = fmix32(x + 0x9E3779B9)`, MurmurHash3's finalizer, is a bijection of
32-bit words and both factors are odd. So the digest adds up over any split of a tensor,
follows a change at the cost of the change, and differs for sure when one word differs.
It is not linear in x: a wrong old value shows in the difference of a change. It is no
cryptographic hash; objects carry SHA-256 beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

_PERIOD = 1 << 16  # words that share a far factor
_BLOCK = 1 << 15  # words worked on at once: with the tables they stay in cache
_OFFSET = 0x9E3779B9
# Seeds of the factors, lane 0 and 1: the first binary digits of pi, in 32-bit words.
_NEAR_SEEDS = (0x243F6A88, 0x85A308D3)
_FAR_SEEDS = (0x13198A2E, 0x03707344)
_MASK = 0xFFFFFFFF


def full(bits: np.ndarray, start: int = 0) -> int:
    """The digest of a tensor, or of the slice of one that begins at element `start`.

    Args:
        bits: Flat unsigned integers of the element's width.
        start: The flat position of `bits[0]` in its tensor.

    Returns:
        The digest, or what the slice adds to it, 0 <= d < 2^64.

    One pass with under 1 MiB of scratch, the GIL released.
    """
    words = _words(bits)
    begin = start * _words_per_element(bits)
    first = begin // _PERIOD
    fars = np.arange(first, (begin + words.size) // _PERIOD + 1, dtype=np.uint64)
    factors = [_far(lane, fars).tolist() for lane in (0, 1)]
    mixing = _Mixing(min(_BLOCK, words.size))
    sums = [0, 0]
    at, end = begin, begin + words.size
    while at < end:
        far, near = divmod(at, _PERIOD)
        size = min(_BLOCK - near % _BLOCK, end - at)
        mixed = mixing(words[at - begin : at - begin + size])
        for lane, table in enumerate(_near_tables()):
            part = np.einsum("i,i", mixed, table[near : near + size])
            sums[lane] += int(part) * factors[lane][far - first]
        at += size
    return pack(*sums)


def difference(positions: np.ndarray, old: np.ndarray, new: np.ndarray) -> int:
    """What changing `old` to `new` at `positions` adds to a tensor's digest.

    Args:
        positions: Flat positions of the elements, any integer dtype, any order.
        old: Their bits before, unsigned integers of the element's width.
        new: Their bits after.

    O(changed), with under 2 MiB of scratch, the GIL released.
    """
    per_element = _words_per_element(old)
    size = min(_BLOCK, positions.size)
    mixing = _Mixing(size)
    at = np.empty(size, np.uint64)
    index = np.empty(size, np.intp)
    moved = np.empty(size, np.uint32)
    factor = np.empty(size, np.uint32)
    sums = [0, 0]
    for begin in range(0, positions.size, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        count = min(_BLOCK, positions.size - begin)
        old_words, new_words = _words(old[block]), _words(new[block])
        for word in range(per_element):
            a, i, m, f = at[:count], index[:count], moved[:count], factor[:count]
            # Widened first: positions may have 32 bits, word numbers need more.
            np.copyto(a, positions[block], casting="unsafe")
            a *= np.uint64(per_element)
            a += np.uint64(word)
            np.copyto(m, mixing(new_words[word::per_element]))
            m -= mixing(old_words[word::per_element])
            np.bitwise_and(a, np.uint64(_PERIOD - 1), out=i, casting="unsafe")
            a >>= np.uint64(16)
            first, last = int(a.min()), int(a.max())
            for lane, table in enumerate(_near_tables()):
                np.take(table, i, out=f, mode="wrap")
                sums[lane] += _far_dot(lane, a, first, last, f, m)
    return pack(*sums)


def add(first: int, second: int) -> int:
    """The lane by lane sum of two digests."""
    return pack((first >> 32) + (second >> 32), (first & _MASK) + (second & _MASK))


def subtract(first: int, second: int) -> int:
    """The lane by lane difference of two digests."""
    return pack((first >> 32) - (second >> 32), (first & _MASK) - (second & _MASK))


def total(parts: Iterable[int]) -> int:
    """The lane by lane sum of digests."""
    return functools.reduce(add, parts, 0)


def pack(lane0: int, lane1: int) -> int:
    """A digest from its lanes, each taken modulo 2^32."""
    return (lane0 & _MASK) << 32 | (lane1 & _MASK)


def _words_per_element(bits: np.ndarray) -> int:
    return max(1, bits.dtype.itemsize // 2)


def _words(bits: np.ndarray) -> np.ndarray:
    """The 16-bit words of elements, the low part first; the bytes of 1-byte ones."""
    if bits.dtype.itemsize == 1:
        return bits
    return np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).view("<u2")


class _Mixing:
    """`mix` of words by table, into one reused buffer."""

    def __init__(self, size: int):
        self._index = np.empty(size, np.intp)
        self._mixed = np.empty(size, np.uint32)

    def __call__(self, words: np.ndarray) -> np.ndarray:
        index, mixed = self._index[: words.size], self._mixed[: words.size]
        np.copyto(index, words)
        # "wrap" checks nothing and buffers nothing; every word is in the table.
        return np.take(_mix_table(), index, out=mixed, mode="wrap")


def _fmix32(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finalizer."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@functools.cache
def _mix_table() -> np.ndarray:
    """`mix` of every 16-bit word."""
    return _fmix32(np.arange(_PERIOD, dtype=np.uint32) + np.uint32(_OFFSET))


@functools.cache
def _near_tables() -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(_PERIOD, dtype=np.uint32)
    first, second = (
        _fmix32(at + np.uint32(seed)) | np.uint32(1) for seed in _NEAR_SEEDS
    )
    return first, second


def _far(lane: int, far: np.ndarray) -> np.ndarray:
    low = (far & np.uint64(_MASK)).astype(np.uint32)
    high = (far >> np.uint64(32)).astype(np.uint32)
    # Two rounds, so that every 64-bit number has a factor of its own.
    mixed = _fmix32(_fmix32(low + np.uint32(_FAR_SEEDS[lane])) ^ high)
    return mixed | np.uint32(1)


def _far_dot(
    lane: int,
    far: np.ndarray,
    first: int,
    last: int,
    factor: np.ndarray,
    moved: np.ndarray,
) -> int:
    """Sum of moved * factor * far factor. Overwrites `factor`."""
    if first == last:
        return int(np.einsum("i,i", factor, moved)) * int(_far(lane, far[:1])[0])
    if last - first < far.size:
        table = _far(lane, np.arange(first, last + 1, dtype=np.uint64))
        near = (far - np.uint64(first)).astype(np.intp)
        factor *= np.take(table, near, mode="wrap")
    else:
        factor *= _far(lane, far)
    return int(np.einsum("i,i", factor, moved))
