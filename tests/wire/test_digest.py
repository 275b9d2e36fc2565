"""The additive digest, against its definition in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta.wire import digest

_MASK = 0xFFFFFFFF


def _fmix32(x):
    x &= _MASK
    x ^= x >> 16
    x = x * 0x85EBCA6B & _MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _MASK
    return x ^ x >> 16


def _reference(elements, itemsize, start=0):
    """FORMAT.md, word by word."""
    lanes = [0, 0]
    per = max(1, itemsize // 2)
    for position, element in enumerate(elements, start):
        for part in range(per):
            word = element if itemsize == 1 else element >> 16 * part & 0xFFFF
            at = position * per + part
            mixed = _fmix32(word + 0x9E3779B9)
            far = at >> 16
            for lane, (near_seed, far_seed) in enumerate(
                [(0x243F6A88, 0x13198A2E), (0x85A308D3, 0x03707344)]
            ):
                near = _fmix32((at & 0xFFFF) + near_seed) | 1
                inner = _fmix32((far & _MASK) + far_seed) ^ far >> 32
                lanes[lane] += mixed * near * (_fmix32(inner) | 1)
    return (lanes[0] & _MASK) << 32 | lanes[1] & _MASK


def _random(itemsize, size, seed=0):
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (size, itemsize), np.uint8)
    return raw.reshape(-1).view(f"u{itemsize}")


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 1, 65_530, (1 << 32) - 3, 1 << 47])
def test_full_is_the_definition(itemsize, start):
    bits = _random(itemsize, 40)
    expected = _reference(bits.tolist(), itemsize, start)
    assert digest.full(bits, start) == expected


def test_full_is_the_definition_over_many_blocks():
    bits = _random(2, 70_000)
    assert digest.full(bits) == _reference(bits.tolist(), 2)


def test_known_values():
    """The digest is part of the format: these may never change."""
    assert digest.full(np.zeros(0, np.uint16)) == 0
    assert digest.full(np.zeros(1, np.uint16)) == 0x8132653A3252D376
    assert digest.full(np.arange(1000, dtype=np.uint16)) == 0x9E692F3783E78997
    assert digest.full(np.arange(1000, dtype=np.uint32)) == 0x66DDA393BCB6DF63
    assert digest.full(np.arange(200, dtype=np.uint8)) == 0x25B97E947924B548


@given(st.integers(1, 200_000), st.integers(0, 200_000), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_digests_of_slices_add_up(size, cut, itemsize):
    bits = _random(itemsize, size, seed=size)
    cut = min(cut, size)
    parts = digest.full(bits[:cut]), digest.full(bits[cut:], cut)
    assert digest.add(*parts) == digest.total(parts) == digest.full(bits)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_difference_leads_from_one_digest_to_the_other(itemsize, dtype, share):
    old = _random(itemsize, 100_003, seed=1)
    new = np.where(
        np.random.default_rng(2).random(old.size) < share,
        _random(itemsize, old.size, seed=3),
        old,
    )
    at = np.flatnonzero(old != new)
    moved = digest.difference(at.astype(dtype), old[at], new[at])
    assert digest.add(digest.full(old), moved) == digest.full(new)
    shuffled = np.random.default_rng(4).permutation(at)
    assert digest.difference(shuffled, old[shuffled], new[shuffled]) == moved


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@given(st.integers(0, 1 << 44), st.data())
def test_difference_at_positions_past_32_bits(itemsize, position, data):
    element = st.integers(0, (1 << 8 * itemsize) - 1)
    old, new = data.draw(element), data.draw(element)
    moved = digest.difference(
        np.array([position], np.uint64),
        np.array([old], f"u{itemsize}"),
        np.array([new], f"u{itemsize}"),
    )
    expected = _reference([new], itemsize, position)
    assert digest.add(_reference([old], itemsize, position), moved) == expected


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_difference_at_the_end_of_32_bit_positions(itemsize):
    positions = np.array([5, (1 << 32) - 2, (1 << 32) - 1])
    old, new = _random(itemsize, 3, seed=1), _random(itemsize, 3, seed=2)
    moved = {
        digest.difference(positions.astype(dtype), old, new)
        for dtype in (np.uint32, np.uint64, np.int64)
    }
    expected = digest.total(
        digest.difference(positions[i : i + 1], old[i : i + 1], new[i : i + 1])
        for i in range(3)
    )
    assert moved == {expected}


@pytest.mark.parametrize("itemsize", [1, 2])
def test_every_change_of_one_word_shows(itemsize):
    """By the bijection: no two words mix alike."""
    values = np.arange(1 << 8 * itemsize, dtype=np.uint32).astype(f"u{itemsize}")
    for position in (0, 70_000):
        seen = {
            digest.full(values[i : i + 1], position) for i in range(0, values.size, 29)
        }
        assert len(seen) == len(range(0, values.size, 29))


def test_every_swap_of_neighbours_shows():
    bits = np.arange(3000, dtype=np.uint16)
    whole = digest.full(bits)
    for i in range(bits.size - 1):
        swapped = bits.copy()
        swapped[[i, i + 1]] = bits[[i + 1, i]]
        assert digest.full(swapped) != whole


def test_a_wrong_old_value_shows_in_the_difference():
    """Adding the same step to another old value moves the digest otherwise."""
    old = np.arange(0, 65_000, dtype=np.uint16)
    at = np.array([12_345], np.int64)
    moved = {
        digest.difference(at, old[i : i + 1], old[i : i + 1] + np.uint16(1))
        for i in range(0, old.size, 7)
    }
    assert len(moved) == len(range(0, old.size, 7))


def test_lanes_wrap_each_on_their_own():
    assert digest.add(0xFFFFFFFF_00000001, 0x00000001_FFFFFFFF) == 0
    assert digest.add(0x00000000_FFFFFFFF, 0x00000000_00000002) == 1
