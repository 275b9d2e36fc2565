"""The changes of one tensor as bytes, and back; and what they make of its weights.

A payload is a run of chunk records, one for every chunk of `CHUNK_ELEMENTS` consecutive
elements that changed, in order. FORMAT.md has the bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from jdelta.errors import FormatError, StateMismatchError, TreeError
from jdelta.wire import bits, digest, fast
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


def encode_tensor(spec: TensorSpec, changes: Changes) -> EncodedTensor:
    """The payload of one tensor's changes; the same bytes for the same changes.

    Args:
        spec: The tensor.
        changes: What changed; at least one element.

    Raises:
        TreeError: the changes are not of this tensor: out of bounds or order, of
            another width, or without a difference.

    Runs on the calling thread; large arrays are worked on with the GIL released.
    """
    _check_changes(spec, changes)
    pieces: list[bytes] = []
    moved = 0
    for chunk, part in _split(changes.positions):
        start = chunk * CHUNK_ELEMENTS
        positions, old, new = (array[part] for array in changes)
        data = fast.encode(
            (positions - start).astype(np.uint32),
            bits.step(old, new, spec.dtype),
            min(CHUNK_ELEMENTS, spec.size - start),
        )
        delta = digest.difference(positions, old, new)
        moved = digest.add(moved, delta)
        pieces += [_RECORD.pack(chunk, len(data), delta), data]
    return EncodedTensor(b"".join(pieces), changes.positions.size, moved)


def decode_tensor(spec: TensorSpec, payload: bytes | memoryview, changed: int) -> Steps:
    """The steps that `encode_tensor` coded, checked.

    Args:
        spec: The tensor.
        payload: Bytes from a delta object: trusted in nothing.
        changed: How many elements the manifest says they change.

    Raises:
        FormatError: the bytes are not `changed` changes of this tensor.

    Runs on the calling thread; large arrays are worked on with the GIL released.
    """
    reader = StreamReader(payload)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    last, count, moved = -1, 0, 0
    while count < changed:
        chunk, length, delta = _RECORD.unpack(reader.take(_RECORD.size))
        start = chunk * CHUNK_ELEMENTS
        if chunk <= last or start >= spec.size:
            raise FormatError(
                f"{spec.name!r}: chunk {chunk} is out of order or out of bounds"
            )
        try:
            positions, steps = fast.decode(
                reader.take(length),
                min(CHUNK_ELEMENTS, spec.size - start),
                spec.itemsize,
            )
        except FormatError as error:
            raise FormatError(f"{spec.name!r}, chunk {chunk}: {error}") from None
        if not positions.size:
            raise FormatError(f"{spec.name!r}: chunk {chunk} changes nothing")
        positions += start
        found.append((positions, steps))
        last, count, moved = chunk, count + positions.size, digest.add(moved, delta)
    reader.end()
    if count != changed:
        raise FormatError(
            f"{spec.name!r}: {count} elements change, the manifest says {changed}"
        )
    if len(found) == 1:
        return Steps(*found[0], moved)
    if not found:
        return Steps(np.empty(0, np.int64), np.empty(0, bits_dtype(spec.dtype)), 0)
    return Steps(
        np.concatenate([positions for positions, _ in found]),
        np.concatenate([steps for _, steps in found]),
        moved,
    )


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


def _split(positions: np.ndarray) -> list[tuple[int, slice]]:
    """The chunks that hold changes, and which changes each holds."""
    if not positions.size:
        return []
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
