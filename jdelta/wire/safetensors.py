"""A strict reader of safetensors headers. The writer is the safetensors library."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from jdelta.errors import FormatError
from jdelta.wire._documents import parse_object
from jdelta.wire.dtypes import NAMES, TensorSpec

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_SPARE_BYTES = 1 << 16
_MAX_DIMENSIONS = 32


class StoredTensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        spec: Its name, dtype and shape.
        start: The first of its bytes, counted from the file's begin.
        end: The byte after its last.
    """

    spec: TensorSpec
    start: int
    end: int


class Header(NamedTuple):
    """What a safetensors file says it holds.

    Attributes:
        tensors: The tensors, in the order of their bytes.
        metadata: The texts under `__metadata__`.
    """

    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]


def max_header_bytes(names: Iterable[str]) -> int:
    """The most bytes that the header of a file with these tensors can have."""
    # Names may stand twice, in metadata too, each byte escaped as `\\u0000`.
    needed = sum(2048 + 14 * len(name.encode()) for name in names)
    return min(MAX_HEADER_BYTES, _SPARE_BYTES + needed)


def header_length(
    first: bytes | memoryview, file_size: int, names: Iterable[str]
) -> int:
    """The bytes of the JSON header, from the file's first 8 bytes.

    Args:
        first: Those bytes.
        file_size: Bytes of the whole file.
        names: The tensors expected: they bound what a header can need.

    Raises:
        FormatError: the file cannot hold such a header.
    """
    length = int.from_bytes(first, "little")
    if (
        len(first) != LENGTH_BYTES
        or not 2 <= length <= max_header_bytes(names)
        or length > file_size - LENGTH_BYTES
    ):
        raise FormatError(
            f"no safetensors file: a header of {length} bytes in a file of {file_size}"
        )
    return length


def parse_header(data: bytes | memoryview, file_size: int) -> Header:
    """Checks a JSON header against the file's size.

    Args:
        data: The header, without the 8 bytes of its length.
        file_size: Bytes of the whole file.

    Raises:
        FormatError: it is malformed, or its tensors overlap, leave holes, have other
            sizes than their shapes, or do not end where the file ends.
    """
    fields = parse_object(data, "safetensors header", MAX_HEADER_BYTES)
    metadata = fields.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise FormatError("safetensors header: __metadata__ is not texts by name")
    begin = LENGTH_BYTES + len(data)
    tensors = sorted(
        (_parse_tensor(name, entry, begin) for name, entry in fields.items()),
        key=lambda tensor: (tensor.start, tensor.end),
    )
    at = begin
    for tensor in tensors:
        if tensor.start != at:
            raise FormatError(
                f"safetensors header: {tensor.spec.name!r} begins at byte "
                f"{tensor.start}, expected {at}: tensors overlap or leave holes"
            )
        at = tensor.end
    if at != file_size:
        raise FormatError(
            f"safetensors header: tensors end at byte {at} of a file of {file_size}"
        )
    return Header(tuple(tensors), metadata)


def parse(data: bytes | memoryview, names: Collection[str]) -> Header:
    """The header of a whole file in memory, which must hold the tensors `names`.

    Raises:
        FormatError: as `parse_header`.
    """
    view = memoryview(data).cast("B")
    length = header_length(view[:LENGTH_BYTES], view.nbytes, names)
    header = parse_header(view[LENGTH_BYTES : LENGTH_BYTES + length], view.nbytes)
    check_names(header, names)
    return header


def check_names(header: Header, names: Collection[str]) -> None:
    """Checks that a file holds the tensors `names`: no fewer, no more.

    Raises:
        FormatError: it does not.
    """
    wrong = {tensor.spec.name for tensor in header.tensors} ^ set(names)
    if wrong:
        raise FormatError(
            f"a file holds other tensors than its manifest lists: {sorted(wrong)[:5]} "
            f"of {len(wrong)}"
        )


def _parse_tensor(name: str, entry: Any, begin: int) -> StoredTensor:
    where = f"safetensors header: {name[:80]!r}"
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where} is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in NAMES:
        raise FormatError(f"{where} has the unknown dtype {str(dtype)[:20]!r}")
    if not _integers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"{where} has a malformed shape")
    if not _integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where} has malformed data_offsets")
    spec = TensorSpec(name, dtype, tuple(shape))
    if math.prod(shape) * spec.itemsize != offsets[1] - offsets[0]:
        raise FormatError(
            f"{where} has {offsets[1] - offsets[0]} bytes for {dtype}{shape}"
        )
    return StoredTensor(spec, begin + offsets[0], begin + offsets[1])


def _integers(value: Any) -> bool:
    return type(value) is list and all(
        type(n) is int and 0 <= n < 1 << 63 for n in value
    )
