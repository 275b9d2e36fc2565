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

_BLOCK = 1 << 16
_OFFSET = 0x9E3779B9
# Seeds of the factors: near_0, near_1, far_0, far_1.
_SEEDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
_MASK = 0xFFFFFFFF


def full(bits: np.ndarray, start: int = 0) -> int:
    """The digest of a tensor, or of the slice of one that begins at element `start`.

    Args:
        bits: Flat unsigned integers of the element's width.
        start: The flat position of `bits[0]` in its tensor.

    Returns:
        The digest, or what the slice adds to it, 0 <= d < 2^64.
    """
    words = _words(bits)
    at = start * (words.size // bits.size) if bits.size else 0
    sums = [0, 0]
    done = 0
    while done < words.size:
        far, near = divmod(at + done, _BLOCK)
        block = words[done : done + _BLOCK - near]
        mixed = _table()[block]
        for lane, total in enumerate(_dot(mixed, near)):
            sums[lane] += total * _far(lane, far)
        done += block.size
    return pack(*sums)


def difference(positions: np.ndarray, old: np.ndarray, new: np.ndarray) -> int:
    """What changing `old` to `new` at `positions` adds to a tensor's digest.

    Args:
        positions: Flat positions of the elements, any integer dtype.
        old: Their bits before, unsigned integers of the element's width.
        new: Their bits after.
    """
    count = max(1, old.dtype.itemsize // 2)
    sums = [0, 0]
    table = _table()
    old_words, new_words = _words(old), _words(new)
    for part in range(count):
        at = positions.astype(np.uint64) * np.uint64(count) + np.uint64(part)
        moved = table[new_words[part::count]] - table[old_words[part::count]]
        near = (at & np.uint64(_BLOCK - 1)).astype(np.intp)
        far = at >> np.uint64(16)
        for lane in (0, 1):
            factor = _near()[lane][near] * _far_array(lane, far)
            sums[lane] += int(np.sum(moved * factor, dtype=np.uint32))
    return pack(*sums)


def add(first: int, second: int) -> int:
    """The lane by lane sum of two digests."""
    return pack((first >> 32) + (second >> 32), (first & _MASK) + (second & _MASK))


def total(parts: Iterable[int]) -> int:
    """The lane by lane sum of digests."""
    return functools.reduce(add, parts, 0)


def pack(lane0: int, lane1: int) -> int:
    """A digest from its lanes, each taken modulo 2^32."""
    return (lane0 & _MASK) << 32 | (lane1 & _MASK)


def _words(bits: np.ndarray) -> np.ndarray:
    """The 16-bit words of elements, the low part first; the bytes of 1-byte ones."""
    if bits.dtype.itemsize == 1:
        return bits
    return np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).view("<u2")


def _dot(mixed: np.ndarray, near: int) -> tuple[int, int]:
    first, second = (
        int(np.sum(mixed * factors[near : near + mixed.size], dtype=np.uint32))
        for factors in _near()
    )
    return first, second


def _fmix32(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finalizer."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@functools.cache
def _table() -> np.ndarray:
    """`mix` of every 16-bit word."""
    return _fmix32(np.arange(_BLOCK, dtype=np.uint32) + np.uint32(_OFFSET))


@functools.cache
def _near() -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(_BLOCK, dtype=np.uint32)
    first, second = (
        _fmix32(at + np.uint32(seed)) | np.uint32(1) for seed in _SEEDS[:2]
    )
    return first, second


def _far_array(lane: int, far: np.ndarray) -> np.ndarray:
    # Two rounds, so that blocks past 2^32 have factors of their own.
    low = (far & np.uint64(_MASK)).astype(np.uint32)
    high = (far >> np.uint64(32)).astype(np.uint32)
    seed = np.uint32(_SEEDS[2 + lane])
    return _fmix32(_fmix32(low + seed) ^ high) | np.uint32(1)


def _far(lane: int, far: int) -> int:
    return int(_far_array(lane, np.array([far], np.uint64))[0])
