"""The codec `fast`: the changes of one chunk, at the cost of the changes alone.

Positions are gaps between changes: a few low bits, packed raw, and a high byte, entropy
coded. Steps are a sign bit, one bit for "more than one unit", and a byte for those that
are; or, where they are large, the byte planes of whole words. Dense chunks store a
bitmap of the changed elements, or a step for every element. FORMAT.md has the bytes.
"""

from __future__ import annotations

import struct

import numpy as np

from jdelta.errors import FormatError
from jdelta.wire._streams import StreamReader, put

MAX_ELEMENTS = 1 << 22
"""The most elements a chunk may have."""

_HEAD = struct.Struct("<BBBBI")
_GAPS, _BITMAP, _DENSE = 0, 1, 2
_SMALL, _PLANES = 0, 1
_ESCAPE = 255
# A bitmap is tried where 1 element in so many changed, and gaps below 1 in so many.
_BITMAP_FROM, _BITMAP_ALWAYS_FROM = 8, 3
_MAX_LOW_BITS = 14  # of gaps below 2^22
_Pieces = list[bytes | memoryview]


def encode(positions: np.ndarray, steps: np.ndarray, n_elements: int) -> bytes:
    """The bytes of one chunk's changes; the same for the same arguments.

    Args:
        positions: Positions in the chunk, strictly increasing.
        steps: Nonzero steps, unsigned integers of the element's width.
        n_elements: Elements of the chunk, at most `MAX_ELEMENTS`.

    Returns:
        At most as many bytes as the chunk's elements have, and a header of 8 bytes and
        4 per byte of an element.
    """
    pieces, mode, low_bits = _put_positions(positions, n_elements)
    values = _put_values(pieces, steps)
    if _size(pieces) > n_elements * steps.itemsize // 2:
        spread = np.zeros(n_elements, steps.dtype)
        spread[positions] = steps
        dense: _Pieces = []
        _put_planes(dense, spread)
        if _size(dense) < _size(pieces):
            pieces, mode, low_bits, values = dense, _DENSE, 0, _PLANES
    head = _HEAD.pack(mode, values, low_bits, steps.itemsize, positions.size)
    return b"".join([head, *pieces])


def decode(
    data: bytes | memoryview, n_elements: int, itemsize: int
) -> tuple[np.ndarray, np.ndarray]:
    """The positions (int64) and steps of one chunk, checked.

    Args:
        data: The bytes `encode` made, or anything else.
        n_elements: Elements of the chunk.
        itemsize: Bytes of an element.

    Raises:
        FormatError: the bytes are not a chunk of that many elements of that width.
    """
    if not 0 <= n_elements <= MAX_ELEMENTS or itemsize not in (1, 2, 4, 8):
        raise FormatError(f"no chunk has {n_elements} elements of {itemsize} bytes")
    reader = StreamReader(data)
    mode, values, low_bits, width, count = _HEAD.unpack(reader.take(_HEAD.size))
    if width != itemsize or count > n_elements:
        raise FormatError(
            f"a chunk holds {count} changes of {width} bytes, expected at most "
            f"{n_elements} of {itemsize}"
        )
    if low_bits > _MAX_LOW_BITS or (low_bits and mode != _GAPS):
        raise FormatError(f"a chunk has gaps of {low_bits} low bits")
    if mode == _DENSE:
        positions = None
    elif mode == _BITMAP:
        positions = _take_bitmap(reader, count, n_elements)
    elif mode == _GAPS:
        positions = _take_gaps(reader, count, low_bits, n_elements)
    else:
        raise FormatError(f"a chunk has positions of the unknown kind {mode}")
    if values == _PLANES:
        steps = _take_planes(
            reader, count if positions is not None else n_elements, itemsize
        )
    elif values == _SMALL and positions is not None:
        steps = _take_small(reader, count, itemsize)
    else:
        raise FormatError(f"a chunk has values of the unknown kind {values}")
    reader.end()
    if positions is None:
        positions = np.flatnonzero(steps)
        steps = steps[positions]
        if positions.size != count:
            raise FormatError(
                f"a chunk holds {positions.size} changes, its header says {count}"
            )
    elif not steps.all():
        raise FormatError("a chunk changes an element by nothing")
    return positions, steps


def _size(pieces: _Pieces) -> int:
    return sum(len(piece) for piece in pieces)


def _put_positions(positions: np.ndarray, n_elements: int) -> tuple[_Pieces, int, int]:
    """The shorter of a bitmap and of gaps, which kind it is, and a gap's low bits."""
    gaps: _Pieces = []
    bitmap: _Pieces = []
    if positions.size * _BITMAP_FROM < n_elements:
        return gaps, _GAPS, _put_gaps(gaps, positions)
    flags = np.zeros(n_elements, np.bool_)
    flags[positions] = True
    put(bitmap, np.packbits(flags, bitorder="little"), squeeze=True)
    if positions.size * _BITMAP_ALWAYS_FROM < n_elements:
        low_bits = _put_gaps(gaps, positions)
        if _size(gaps) <= _size(bitmap):
            return gaps, _GAPS, low_bits
    return bitmap, _BITMAP, 0


def _take_bitmap(reader: StreamReader, count: int, n_elements: int) -> np.ndarray:
    packed = np.frombuffer(reader.stream(-(-n_elements // 8)), np.uint8)
    _check_padding(packed, n_elements)
    positions = np.flatnonzero(
        np.unpackbits(packed, count=n_elements, bitorder="little").view(np.bool_)
    )
    if positions.size != count:
        raise FormatError(
            f"a chunk's bitmap has {positions.size} changes, its header says {count}"
        )
    return positions


def _put_gaps(out: _Pieces, positions: np.ndarray) -> int:
    at = positions.astype(np.uint32)
    gaps = np.empty_like(at)
    gaps[:1] = at[:1]
    np.subtract(at[1:], at[:-1], out=gaps[1:])
    gaps[1:] -= np.uint32(1)
    low_bits = _choose_low_bits(gaps)
    low = gaps.astype(np.uint8 if low_bits <= 8 else np.uint16)
    for bit in range(low_bits):
        plane = (low >> low.dtype.type(bit)) & low.dtype.type(1)
        put(out, np.packbits(plane, bitorder="little"), squeeze=False)
    gaps >>= np.uint32(low_bits)
    put(out, np.minimum(gaps, np.uint32(_ESCAPE)).astype(np.uint8), squeeze=True)
    put(out, gaps[gaps >= _ESCAPE].astype("<u4"), squeeze=False)
    return low_bits


def _choose_low_bits(gaps: np.ndarray) -> int:
    """The fewest low bits with which at most one high part in 1000 escapes."""
    for low_bits in range(_MAX_LOW_BITS):
        if np.count_nonzero(gaps >= (_ESCAPE << low_bits)) <= gaps.size // 1000:
            return low_bits
    return _MAX_LOW_BITS


def _take_gaps(
    reader: StreamReader, count: int, low_bits: int, n_elements: int
) -> np.ndarray:
    low = np.zeros(count, np.uint8 if low_bits <= 8 else np.uint16)
    for bit in range(low_bits):
        flags = _take_flags(reader, count).astype(low.dtype, copy=False)
        flags <<= low.dtype.type(bit)
        low |= flags
    high = np.frombuffer(reader.stream(count), np.uint8)
    gaps = high.astype(np.uint32)
    escaped = np.flatnonzero(high == _ESCAPE)
    wide = np.frombuffer(reader.stream(4 * escaped.size), "<u4")
    if (wide < _ESCAPE).any() or (wide >= MAX_ELEMENTS >> low_bits).any():
        raise FormatError("a chunk has a gap that its escape cannot stand for")
    gaps[escaped] = wide
    gaps <<= np.uint32(low_bits)
    gaps += low
    gaps[1:] += np.uint32(1)
    positions = np.cumsum(gaps, dtype=np.int64)
    if count and positions[-1] >= n_elements:
        raise FormatError(f"a chunk changes element {positions[-1]} of {n_elements}")
    return positions


def _put_values(out: _Pieces, steps: np.ndarray) -> int:
    """The shorter of small steps and of byte planes; returns which."""
    small: _Pieces = []
    more, wide = _put_small(small, steps)
    # Planes are worth a try where few steps are of one unit or many need an escape.
    if more * 2 > steps.size or wide * 8 > steps.size:
        planes: _Pieces = []
        _put_planes(planes, steps)
        if _size(planes) < _size(small):
            out += planes
            return _PLANES
    out += small
    return _SMALL


def _put_small(out: _Pieces, steps: np.ndarray) -> tuple[int, int]:
    """Returns how many steps are of more than one unit, and how many escape."""
    one = steps.dtype.type(1)
    signs = steps >> steps.dtype.type(steps.itemsize * 8 - 1)
    # Two's complement: all ones for a negative step.
    mask = np.negative(signs)
    sizes = steps ^ mask
    sizes += signs
    put(out, np.packbits(signs.astype(np.bool_), bitorder="little"), squeeze=False)
    flags = sizes > one
    put(out, np.packbits(flags, bitorder="little"), squeeze=True)
    rest = sizes[np.flatnonzero(flags)]
    rest -= steps.dtype.type(2)
    wide = rest[rest >= _ESCAPE]
    capped = np.minimum(rest, rest.dtype.type(_ESCAPE)).astype(np.uint8)
    put(out, capped, squeeze=True)
    put(out, wide.astype(wide.dtype.newbyteorder("<"), copy=False), squeeze=False)
    return rest.size, wide.size


def _take_small(reader: StreamReader, count: int, itemsize: int) -> np.ndarray:
    dtype = np.dtype(f"u{itemsize}")
    signs = _take_flags(reader, count)
    more = np.flatnonzero(_take_flags(reader, count).view(np.bool_))
    capped = np.frombuffer(reader.stream(more.size), np.uint8)
    rest = capped.astype(dtype)
    escaped = np.flatnonzero(capped == _ESCAPE)
    wide = np.frombuffer(
        reader.stream(itemsize * escaped.size), dtype.newbyteorder("<")
    )
    if (wide < _ESCAPE).any():
        raise FormatError("a chunk has a step that its escape cannot stand for")
    rest[escaped] = wide
    # The largest size, 2^(w-1), has no positive step.
    largest = (1 << (itemsize * 8 - 1)) - 2
    if (rest > largest).any() or not signs[more[rest == largest]].all():
        raise FormatError("a chunk has a step that is too large")
    rest += dtype.type(2)
    sizes = np.ones(count, dtype)
    sizes[more] = rest
    mask = np.negative(signs.astype(dtype))
    sizes ^= mask
    sizes -= mask
    return sizes


def _put_planes(out: _Pieces, steps: np.ndarray) -> None:
    for plane in _zigzag(steps).view(np.uint8).reshape(-1, steps.itemsize).T:
        put(out, np.ascontiguousarray(plane), squeeze=True)


def _take_planes(reader: StreamReader, count: int, itemsize: int) -> np.ndarray:
    words = np.empty((count, itemsize), np.uint8)
    for byte in range(itemsize):
        words[:, byte] = np.frombuffer(reader.stream(count), np.uint8)
    dtype = np.dtype(f"u{itemsize}")
    little = words.reshape(-1).view(dtype.newbyteorder("<"))
    steps = little.astype(dtype, copy=False)
    signs = steps & dtype.type(1)
    np.negative(signs, out=signs)
    steps >>= dtype.type(1)
    steps ^= signs
    return steps


def _zigzag(steps: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..., in little-endian words."""
    signs = steps.view(f"i{steps.itemsize}") >> (steps.itemsize * 8 - 1)
    zigzag = (steps << steps.dtype.type(1)) ^ signs.view(steps.dtype)
    return zigzag.astype(steps.dtype.newbyteorder("<"), copy=False)


def _take_flags(reader: StreamReader, count: int) -> np.ndarray:
    packed = np.frombuffer(reader.stream(-(-count // 8)), np.uint8)
    _check_padding(packed, count)
    return np.unpackbits(packed, count=count, bitorder="little")


def _check_padding(packed: np.ndarray, count: int) -> None:
    if count % 8 and packed[-1] >> (count % 8):
        raise FormatError("a chunk has bits set past its last element")
