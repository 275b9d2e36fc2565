"""The codec of one chunk: exact, small, never larger than the chunk itself."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta.errors import FormatError
from jdelta.wire import fast


def _round_trip(positions, steps, n_elements):
    data = fast.encode(positions, steps, n_elements)
    found_positions, found_steps = fast.decode(data, n_elements, steps.itemsize)
    np.testing.assert_array_equal(found_positions, positions)
    np.testing.assert_array_equal(found_steps, steps)
    assert found_steps.dtype == steps.dtype
    header = 8 + 4 * steps.itemsize
    assert len(data) <= n_elements * steps.itemsize + header
    return data


def _kinds(data):
    """The kind of positions and of values, and the low bits, from the header."""
    return tuple(data[:3])


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@given(data=st.data())
@settings(deadline=None)
def test_any_changes_survive(itemsize, data):
    n_elements = data.draw(st.integers(1, 3000))
    # A pattern of gaps, repeated: short draws that still fill a chunk.
    gaps = data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=12))
    repeats = data.draw(st.integers(1, 300))
    positions = np.cumsum(np.tile(np.array(gaps) + 1, repeats)) - 1
    positions = positions[positions < n_elements]
    top = (1 << 8 * itemsize) - 1
    near = st.integers(1, 300) | st.integers(max(1, top - 300), top)
    element = near.filter(lambda v: v <= top) | st.integers(1, top)
    pool = data.draw(st.lists(element, min_size=1, max_size=12))
    steps = np.resize(np.array(pool, f"u{itemsize}"), positions.size)
    _round_trip(positions, steps, n_elements)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("n_elements", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.15, 0.3, 0.5, 0.8, 0.97, 1.0])
def test_random_bits_never_outgrow_the_chunk(itemsize, n_elements, density):
    rng = np.random.default_rng(5)
    positions = np.flatnonzero(rng.random(n_elements) < density)
    raw = rng.integers(0, 256, (positions.size, itemsize), np.uint8)
    steps = raw.reshape(-1).view(f"u{itemsize}").copy()
    steps[steps == 0] = 1
    _round_trip(positions, steps, n_elements)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_largest_steps_of_either_sign(itemsize):
    half = 1 << 8 * itemsize - 1
    steps = np.ones(200, f"u{itemsize}")
    steps[:4] = half, half - 1, half + 1, 2 * half - 1
    data = _round_trip(np.arange(200) * 100, steps, 20_000)
    assert _kinds(data)[1] == 0


@pytest.mark.parametrize(
    ("density", "bound"), [(0.02417, 9.0), (0.00957, 10.2), (0.13, 6.6), (0.3, 5.2)]
)
def test_trained_weights_cost_few_bits_per_change(trained, density, bound):
    positions, steps = trained(density, 1 << 22)
    data = _round_trip(positions, steps, 1 << 22)
    assert len(data) * 8 / positions.size <= bound


def test_one_chunk_of_each_kind(trained):
    """Every way to store a chunk is taken where it is the right one."""
    n = 1 << 16
    rng = np.random.default_rng(0)
    wide = rng.integers(1, 1 << 32, n, np.uint64).astype(np.uint32)
    every = np.arange(n)
    assert _kinds(_round_trip(*trained(0.02, n), n))[:2] == (0, 0)
    assert _kinds(_round_trip(*trained(0.4, n), n))[:2] == (1, 0)
    assert _kinds(_round_trip(every[::50], wide[::50], n))[:2] == (0, 1)
    assert _kinds(_round_trip(every[::2], wide[::2], n))[:2] == (1, 1)
    assert _kinds(_round_trip(every[:-1], wide[:-1], n)) == (2, 1, 0)


def test_rare_changes_have_more_low_bits(trained):
    low = [_kinds(_round_trip(*trained(d), 1 << 20))[2] for d in (0.05, 0.005, 1e-4)]
    assert low == sorted(low)
    assert low[0] < 2 < low[2]


def test_the_same_changes_give_the_same_bytes(trained):
    positions, steps = trained(0.02)
    data = fast.encode(positions, steps, 1 << 20)
    assert fast.encode(positions.astype(np.uint32), steps.copy(), 1 << 20) == data


# --- strictness: whatever the bytes, a right result or FormatError


def _mutants(data, rng, count):
    """Damaged copies: flipped, cut, grown, overwritten with telling numbers."""
    numbers = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 22, (1 << 22) + 1]
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(mutant))) if mutant else 0
            match rng.integers(6):
                case 0 if mutant:
                    mutant[at] ^= 1 << int(rng.integers(8))
                case 1:
                    del mutant[at:]
                case 2:
                    mutant += rng.bytes(int(rng.integers(1, 9)))
                case 3:
                    mutant[at : at + 4] = struct.pack(
                        "<I", numbers[rng.integers(len(numbers))]
                    )
                case 4:
                    del mutant[at : at + int(rng.integers(1, 5))]
                case 5 if mutant:
                    mutant[at] = int(rng.choice([0, 1, 127, 128, 254, 255]))
        yield bytes(mutant)


def _is_right_or_refused(data, n_elements, itemsize):
    try:
        positions, steps = fast.decode(data, n_elements, itemsize)
    except FormatError:
        return False
    assert positions.size == steps.size <= n_elements
    assert (np.diff(positions) > 0).all()
    if positions.size:
        assert 0 <= positions[0] and positions[-1] < n_elements
    assert steps.all()
    assert steps.dtype.itemsize == itemsize
    return True


def _victims(trained):
    n = 3000
    rng = np.random.default_rng(0)
    every = np.arange(n)
    wide = rng.integers(1, 1 << 32, n, np.uint64).astype(np.uint32)
    yield 2, n, fast.encode(*trained(0.1, n), n)
    yield 2, n, fast.encode(*trained(0.004, n), n)
    yield 2, n, fast.encode(*trained(0.5, n), n)
    yield 4, n, fast.encode(every[::3], wide[::3], n)
    yield 4, n, fast.encode(every[:-1], wide[:-1], n)
    yield 1, n, fast.encode(every[::40], wide[::40].astype(np.uint8) | 1, n)
    yield 2, n, fast.encode(every, np.ones(n, np.uint16), n)
    yield 2, 5, fast.encode(every[:2], np.array([1, 300], np.uint16), 5)


def _attack(trained, per_victim):
    rng = np.random.default_rng(7)
    accepted = total = 0
    for itemsize, n_elements, data in _victims(trained):
        assert _is_right_or_refused(data, n_elements, itemsize)
        for mutant in _mutants(data, rng, per_victim):
            accepted += _is_right_or_refused(mutant, n_elements, itemsize)
            total += 1
    # Some damage stays a valid chunk (a flipped sign): the digest finds that.
    assert 0 < accepted < total / 2


def test_damaged_chunks_are_refused_or_sound(trained):
    _attack(trained, 3000)


@pytest.mark.slow
def test_a_million_damaged_chunks_are_refused_or_sound(trained):
    _attack(trained, 125_000)


@given(st.binary(max_size=200), st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=2000, deadline=None)
def test_random_bytes_are_refused_or_sound(data, n_elements, itemsize):
    _is_right_or_refused(data, n_elements, itemsize)


@given(st.data())
@settings(max_examples=1000, deadline=None)
def test_random_streams_under_a_true_header_are_refused_or_sound(data):
    count = data.draw(st.integers(0, 40))
    head = struct.pack(
        "<BBBBI",
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(0, 15)),
        2,
        count,
    )
    streams = data.draw(st.lists(st.binary(max_size=45), max_size=8))
    body = b"".join(struct.pack("<I", len(s) << 1) + s for s in streams)
    _is_right_or_refused(head + body, 1000, 2)


def _streams(*parts):
    return b"".join(struct.pack("<I", len(p) << 1) + p for p in parts)


def _chunk(*streams, mode=0, values=0, low=0, width=2, count=1):
    return struct.pack("<BBBBI", mode, values, low, width, count) + _streams(*streams)


_GOOD = (b"\x05", b"", b"\x00", b"\x00", b"", b"")
_BAD = {
    "no header": (b"", "ends inside"),
    "cut short": (_chunk(*_GOOD)[:-1], "ends inside"),
    "trailing bytes": (_chunk(*_GOOD) + b"\0", "follow the end"),
    "another width": (_chunk(*_GOOD, width=4), "changes of 4 bytes"),
    "huge count": (_chunk(*_GOOD, count=0xFFFFFFFF), "4294967295 changes"),
    "count past the chunk": (_chunk(*_GOOD, count=101), "101 changes"),
    "unknown positions": (_chunk(*_GOOD, mode=3), "positions of the unknown kind 3"),
    "unknown values": (_chunk(*_GOOD, values=2), "values of the unknown kind 2"),
    "many low bits": (_chunk(*_GOOD, low=15), "15 low bits"),
    "low bits of a bitmap": (_chunk(*_GOOD, mode=1, low=1), "1 low bits"),
    "out of bounds": (_chunk(b"\x64", *_GOOD[1:]), "element 100 of 100"),
    "escape out of bounds": (
        _chunk(b"\xff", struct.pack("<I", 255), *_GOOD[2:]),
        "element 255 of 100",
    ),
    "escape past any chunk": (
        _chunk(b"\xff", struct.pack("<I", 0xFFFFFFFF), *_GOOD[2:]),
        "escape",
    ),
    "needless escape": (_chunk(b"\xff", struct.pack("<I", 5), *_GOOD[2:]), "escape"),
    "missing escape": (_chunk(b"\xff", *_GOOD[1:]), "0 bytes, expected 4"),
    "one gap too many": (_chunk(b"\x05\x05", *_GOOD[1:]), "2 bytes, expected 1"),
    "padding": (_chunk(*_GOOD[:2], b"\x02", *_GOOD[3:]), "past its last element"),
    "needless step escape": (
        _chunk(*_GOOD[:2], b"\x01", b"\x01", b"\xff", b"\x00\x00"),
        "escape",
    ),
    "step past the width": (
        _chunk(*_GOOD[:2], b"\x01", b"\x01", b"\xff", b"\xff\xff"),
        "too large",
    ),
    "largest step upwards": (
        _chunk(*_GOOD[:2], b"\x00", b"\x01", b"\xff", b"\xfe\x7f"),
        "too large",
    ),
    "zero step": (_chunk(b"\x05", b"", b"\0", b"\0", values=1), "by nothing"),
    "dense with another count": (
        _chunk(b"\x01" + b"\0" * 99, b"\0" * 100, mode=2, values=1, count=2),
        "1 changes, its header says 2",
    ),
    "bitmap with another count": (
        _chunk(b"\x01" + b"\0" * 12, *_GOOD[2:], mode=1, count=2),
        "1 changes, its header says 2",
    ),
    "bitmap past the chunk": (
        _chunk(b"\x01" + b"\0" * 11 + b"\x80", *_GOOD[2:], mode=1, count=2),
        "past its last element",
    ),
}


def test_the_chunk_the_bad_ones_are_made_of_is_good():
    positions, steps = fast.decode(_chunk(*_GOOD), 100, 2)
    assert (positions.tolist(), steps.tolist()) == ([5], [1])


@pytest.mark.parametrize(("data", "message"), _BAD.values(), ids=_BAD)
def test_each_lie_is_refused_by_name(data, message):
    with pytest.raises(FormatError, match=message):
        fast.decode(data, 100, 2)


def _frame(content, **options):
    import zstandard

    return zstandard.ZstdCompressor(**options).compress(content)


def _with_frame(frame, count=4000, n_elements=100_000):
    """A chunk whose gaps are a zstd frame of our choosing."""
    signs = b"\0" * (count // 8)
    return (
        struct.pack("<BBBBI", 0, 0, 0, 2, count)
        + struct.pack("<I", len(frame) << 1 | 1)
        + frame
        + _streams(b"", signs, signs, b"", b"")
    )


def test_zstd_frames_are_held_to_what_they_must_be():
    gaps = b"\x03" * 4000
    good = _frame(gaps)
    positions, _ = fast.decode(_with_frame(good), 100_000, 2)
    assert positions[-1] == 4000 * 4 - 1
    bomb = _frame(b"\0" * (1 << 26))
    for frame, message in [
        (good + b"\0", "frame"),
        (good + good, "frame"),
        (good[:-1], "frame"),
        (b"\0" * 20, "frame"),
        (b"", "frame"),
        (_frame(gaps, write_content_size=False), "content|frame"),
        (_frame(gaps[:-1]), "3999 bytes of content, expected 4000"),
        (bomb, "67108864 bytes of content, expected 4000"),
        (_frame(np.random.default_rng(0).bytes(4000)), "stands for 4000"),
        (zlib.compress(gaps), "frame"),
    ]:
        with pytest.raises(FormatError, match=message):
            fast.decode(_with_frame(frame), 100_000, 2)


def test_a_frame_that_lies_about_its_size_is_refused():
    """The size in the header is right, the content is not."""
    short = bytearray(_frame(b"\x03" * 3000))
    long = _frame(b"\x03" * 4000)
    # Both headers: magic, descriptor, two bytes of content size (less 256).
    assert short[4] == long[4] == 0x60
    short[5:7] = long[5:7]
    with pytest.raises(FormatError, match="frame"):
        fast.decode(_with_frame(bytes(short)), 100_000, 2)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("values", [0, 1])
@pytest.mark.parametrize("low", [0, 14])
def test_a_lie_costs_no_more_memory_than_the_chunk_it_claims(mode, values, low):
    whole = (1 << 22).to_bytes(4, "little")
    bomb = _frame(b"\xff" * (1 << 22))
    lies = [
        bytes([mode, values, low, 8]) + whole,
        bytes([mode, values, low, 8]) + whole + _streams(*[b""] * 20),
        bytes([mode, values, low, 8])
        + whole
        + (struct.pack("<I", len(bomb) << 1 | 1) + bomb) * 20,
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(FormatError):
                fast.decode(lie, 1 << 22, 8)
        assert tracemalloc.get_traced_memory()[1] < 4 * 8 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("n", "itemsize"), [(-1, 2), ((1 << 22) + 1, 2), (5, 3)])
def test_no_chunk_has_such_a_size(n, itemsize):
    with pytest.raises(FormatError, match="no chunk has"):
        fast.decode(_chunk(*_GOOD), n, itemsize)
