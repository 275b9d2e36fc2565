"""The changes of one tensor as bytes, and back; and what they make of its weights.

A payload is the tensor's grid and a run of chunk records, one for every chunk of
`CHUNK_ELEMENTS` consecutive elements of a box that changed, in order. FORMAT.md has the
bytes.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jdelta.errors import FormatError, StateMismatchError, TreeError
from jdelta.wire import bits, boxes, digest, fast
from jdelta.wire._streams import StreamReader
from jdelta.wire.changes import Changes, Steps
from jdelta.wire.dtypes import TensorSpec, bits_dtype

CHUNK_ELEMENTS = fast.MAX_ELEMENTS
"""Consecutive elements that are coded on their own."""

# Chunk index, bytes of the coded changes, what they add to the digest.
_RECORD = struct.Struct("<IIQ")


class EncodedTensor(NamedTuple):
    """The changes of one tensor as bytes.

    Attributes:
        payload: What a delta object stores for the tensor.
        changed: Elements that change.
        digest_delta: What the changes add to the tensor's digest.
    """

    payload: bytes
    changed: int
    digest_delta: int


def encode_tensor(
    spec: TensorSpec, changes: Changes, grid: boxes.Grid = ()
) -> EncodedTensor:
    """The payload of one tensor's changes; the same bytes for the same changes.

    Args:
        spec: The tensor.
        changes: What changed; at least one element.
        grid: Into how many boxes each dimension is cut.

    Raises:
        TreeError: the changes are not of this tensor: out of bounds or order, of
            another width, or without a difference.

    Runs on the calling thread; large arrays are worked on with the GIL released.
    """
    _check_changes(spec, changes)
    pieces = [struct.pack(f"<B{len(grid)}I", len(grid), *grid)]
    moved = 0
    for chunk, positions, inside, old, new in _chunks(spec, changes, grid):
        place = _Chunk(spec, grid, chunk)
        data = fast.encode(inside, bits.step(old, new, spec.dtype), place.size)
        delta = digest.difference(positions, old, new)
        moved = digest.add(moved, delta)
        pieces += [_RECORD.pack(chunk, len(data), delta), data]
    return EncodedTensor(b"".join(pieces), changes.positions.size, moved)


def decode_tensor(
    spec: TensorSpec, payloads: Sequence[bytes | memoryview], changed: int
) -> Steps:
    """The steps that `encode_tensor` coded, checked.

    Args:
        spec: The tensor.
        payloads: Bytes from delta objects, trusted in nothing: each has some chunks,
            in order.
        changed: How many elements the manifest says they change.

    Raises:
        FormatError: the bytes are not `changed` changes of this tensor.

    Runs on the calling thread; large arrays are worked on with the GIL released.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    last, count, moved = -1, 0, 0
    grid: boxes.Grid | None = None
    for payload in payloads:
        reader = StreamReader(payload)
        grid, before = _read_grid(reader, spec), grid
        if before not in (None, grid):
            raise FormatError(f"{spec.name!r}: grids {before} and {grid} at once")
        while reader.left:
            chunk, length, delta = _RECORD.unpack(reader.take(_RECORD.size))
            place = _Chunk(spec, grid, chunk)
            if chunk <= last or place.size <= 0:
                raise FormatError(
                    f"{spec.name!r}: chunk {chunk} is out of order or out of bounds"
                )
            try:
                inside, steps = fast.decode(
                    reader.take(length), place.size, spec.itemsize
                )
            except FormatError as error:
                raise FormatError(f"{spec.name!r}, chunk {chunk}: {error}") from None
            if not inside.size:
                raise FormatError(f"{spec.name!r}: chunk {chunk} changes nothing")
            found.append((place.outside(inside), steps))
            last, count, moved = chunk, count + inside.size, digest.add(moved, delta)
            if count > changed:
                break
    if count != changed:
        raise FormatError(
            f"{spec.name!r}: {count} elements change, the manifest says {changed}"
        )
    if len(found) == 1 and not grid:
        return Steps(*found[0], moved)
    if not found:
        return Steps(np.empty(0, np.int64), np.empty(0, bits_dtype(spec.dtype)), 0)
    positions = np.concatenate([positions for positions, _ in found])
    steps = np.concatenate([steps for _, steps in found])
    if grid:
        order = np.argsort(positions, kind="stable")
        positions, steps = positions[order], steps[order]
    return Steps(positions, steps, moved)


class _Chunk:
    """Where a chunk lies: which box, and which of its elements."""

    def __init__(self, spec: TensorSpec, grid: boxes.Grid, number: int):
        """Chunks are counted box by box, as many for each as the largest needs."""
        per_box = max(1, -(-boxes.largest(spec.shape, grid) // CHUNK_ELEMENTS))
        index, at = divmod(number, per_box)
        self._spec, self._whole = spec, not grid
        inside = index < math.prod(grid)
        self._box = boxes.box(spec.shape, grid, index if inside else 0)
        self._start = at * CHUNK_ELEMENTS
        left = self._box.size - self._start if inside else 0
        self.size = min(CHUNK_ELEMENTS, left)
        """Elements; none where there is no such chunk."""

    def outside(self, inside: np.ndarray) -> np.ndarray:
        """Flat positions in the tensor of positions in the chunk."""
        inside += self._start
        if self._whole:
            return inside
        return boxes.outside(self._spec.shape, self._box, inside)


def _read_grid(reader: StreamReader, spec: TensorSpec) -> boxes.Grid:
    (dimensions,) = reader.take(1)
    if not dimensions:
        return ()
    if dimensions == len(spec.shape):
        grid = struct.unpack(f"<{dimensions}I", reader.take(4 * dimensions))
        fits = all(1 <= g <= max(1, n) for g, n in zip(grid, spec.shape, strict=True))
        if fits and math.prod(grid) > 1:
            return grid
    raise FormatError(f"{spec.name!r}: a grid that is none of {spec}")


def stage(bits_flat: np.ndarray, steps: Steps, spec: TensorSpec) -> np.ndarray:
    """The new bits of the elements that change. Writes nothing.

    Args:
        bits_flat: The base version's flat bits.
        steps: Decoded steps; their positions lie within `spec`.
        spec: The tensor.

    Returns:
        Unsigned integers to store at `steps.positions`.

    Raises:
        StateMismatchError: the elements in hand are not the base version's.
    """
    return prove_steps(bits_flat[steps.positions], steps, spec)


def prove_steps(old: np.ndarray, steps: Steps, spec: TensorSpec) -> np.ndarray:
    """`stage` for elements already gathered: `old[i]` lies at `steps.positions[i]`."""
    new = bits.advance(old, steps.steps, spec.dtype)
    found = digest.difference(steps.positions, old, new)
    if found != steps.digest_delta:
        raise StateMismatchError(
            f"{spec.name!r}: the weights in hand are not the ones this delta was made "
            f"against (digest difference {found:016x}, expected "
            f"{steps.digest_delta:016x}); nothing was written; restore a proved copy"
        )
    return new


def _chunks(
    spec: TensorSpec, changes: Changes, grid: boxes.Grid
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """The chunks that hold changes: number, positions, positions in it, old, new."""
    positions, old, new = changes
    if not positions.size:
        return
    if not grid:
        for chunk, part in _split(positions):
            inside = (positions[part] - chunk * CHUNK_ELEMENTS).astype(np.uint32)
            yield chunk, positions[part], inside, old[part], new[part]
        return
    which, inside = boxes.locate(spec.shape, grid, positions)
    order = np.lexsort((inside, which))
    which, inside = which[order], inside[order]
    per_box = max(1, -(-boxes.largest(spec.shape, grid) // CHUNK_ELEMENTS))
    chunks = which * per_box + inside // CHUNK_ELEMENTS
    cuts = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(chunks)]
    for low, high in itertools.pairwise(cuts):
        at = order[low:high]
        local = (inside[low:high] % CHUNK_ELEMENTS).astype(np.uint32)
        yield int(chunks[low]), positions[at], local, old[at], new[at]


def _split(positions: np.ndarray) -> list[tuple[int, slice]]:
    """The chunks that hold changes, and which changes each holds."""
    first = int(positions[0]) // CHUNK_ELEMENTS
    last = int(positions[-1]) // CHUNK_ELEMENTS
    # Borders between chunks: none past the last position, so none overflows its dtype.
    borders = np.arange(first + 1, last + 1, dtype=np.int64) * CHUNK_ELEMENTS
    inner = np.searchsorted(positions, borders.astype(positions.dtype))
    cuts = [0, *inner.tolist(), positions.size]
    return [
        (first + i, slice(cuts[i], cuts[i + 1]))
        for i in range(last + 1 - first)
        if cuts[i] < cuts[i + 1]
    ]


def _check_changes(spec: TensorSpec, changes: Changes) -> None:
    positions, old, new = changes
    width = bits_dtype(spec.dtype)
    if old.dtype != width or new.dtype != width:
        raise TreeError(
            f"{spec.name!r}: changes of {spec.dtype} are {width} bits, got {old.dtype} "
            f"and {new.dtype}"
        )
    if not positions.size == old.size == new.size:
        raise TreeError(
            f"{spec.name!r}: {positions.size} positions, {old.size} old and {new.size} "
            "new elements"
        )
    if not positions.size:
        return
    if positions.dtype.kind not in "ui" or not (
        0 <= int(positions[0]) and int(positions[-1]) < spec.size
    ):
        raise TreeError(
            f"{spec.name!r}: positions {positions[0]}..{positions[-1]} are out of "
            f"bounds for {spec.size} elements"
        )
    if not (positions[1:] > positions[:-1]).all():
        raise TreeError(f"{spec.name!r}: positions are not strictly increasing")
    if (old == new).any():
        raise TreeError(f"{spec.name!r}: a change leaves an element as it was")
