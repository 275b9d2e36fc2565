"""An anchor: one version as a plain safetensors folder that any tool opens.

Files `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`, as a
Hugging Face checkpoint has them. The files are written by the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save, save_file

from jdelta.errors import CorruptError, FormatError, TreeError
from jdelta.wire import safetensors
from jdelta.wire.dtypes import TensorSpec, bits_dtype, numpy_dtype
from jdelta.wire.manifest import ObjectRef, check_tensor_name

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 512 << 20
_BLOCK_BYTES = 2 << 20


class AnchorFile(NamedTuple):
    """One file of an anchor.

    Attributes:
        path: Where it lies.
        tensors: The names of the tensors in it; none in the index.
    """

    path: Path
    tensors: tuple[str, ...]


def check_storable(specs: Iterable[TensorSpec]) -> None:
    """Raises TreeError for a dtype that the installed safetensors cannot write."""
    for spec in {spec.dtype: spec for spec in specs}.values():
        try:
            save({"x": np.empty(0, numpy_dtype(spec.dtype))})
        except SafetensorError as error:
            raise TreeError(
                f"the installed safetensors cannot write {spec.name!r} ({spec}): "
                f"{error}; a newer one can, or publish another dtype"
            ) from error


def write_anchor(
    tensors: Iterable[tuple[TensorSpec, np.ndarray]],
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[AnchorFile]:
    """Writes a version whole: tensors in the order given, the index last.

    Args:
        tensors: What each tensor is, and its flat bits. Taken one file's worth at a
            time, so a generator bounds the memory used.
        folder: An empty folder, or one to be made.
        shard_bytes: A file is closed before it grows past this; a larger tensor has a
            file of its own.

    Returns:
        The files: the shards in order, then the index.

    Raises:
        TreeError: a tensor's name, dtype or bits cannot be stored; two have one name.

    Collective: no. Holds at most `shard_bytes` and one tensor; copies none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Path, tuple[str, ...]]] = []
    batch: dict[str, np.ndarray] = {}
    seen: set[str] = set()
    held = written = 0

    def close() -> None:
        path = folder / f"part-{len(shards) + 1:05d}"
        try:
            # "pt" is what transformers asks for.
            save_file(batch, path, {"format": "pt"})
        except SafetensorError as error:
            failed = re.search(r"os error (\d+)", str(error))
            if failed is None:
                raise
            raise OSError(int(failed[1]), str(error)) from error
        shards.append((path, tuple(batch)))
        batch.clear()

    for spec, bits in tensors:
        check_storable([spec])
        array = _as_stored(spec, bits)
        if spec.name in seen:
            raise TreeError(f"two tensors are published as {spec.name!r}")
        seen.add(spec.name)
        if batch and held + array.nbytes > shard_bytes:
            close()
            held = 0
        batch[spec.name] = array
        held += array.nbytes
        written += array.nbytes
    if batch or not shards:
        close()
    files = []
    for number, (path, names) in enumerate(shards, 1):
        final = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(final)
        files.append(AnchorFile(final, names))
    index = folder / INDEX
    index.write_text(_index(files, written), "ascii")
    for file in files:
        # The library makes files that only their owner may read.
        file.path.chmod(index.stat().st_mode)
    return [*files, AnchorFile(index, ())]


def read_anchor_object(
    stream: BinaryIO,
    ref: ObjectRef,
    specs: Mapping[str, TensorSpec],
    into: Callable[[str], np.ndarray],
) -> None:
    """Reads and hashes one file of an anchor in one pass, straight into arrays.

    The arrays hold nothing of worth until this returns.

    Args:
        stream: The object, at its first byte; needs `readinto`.
        ref: Its size and SHA-256, from the manifest.
        specs: The tensors it must hold: no fewer, no more.
        into: Gives a tensor's flat bits, of its size and width, to read into.

    Raises:
        CorruptError: size or SHA-256 differ.
        FormatError: it is not the safetensors file expected.

    Runs on the calling thread; reads and hashes with the GIL released.
    """
    source = _Hashed(stream, ref)
    length = safetensors.header_length(
        source.take(safetensors.LENGTH_BYTES), ref.size, specs
    )
    header = safetensors.parse_header(source.take(length), ref.size)
    safetensors.check_names(header, specs)
    for tensor in header.tensors:
        if tensor.spec != specs[tensor.spec.name]:
            raise FormatError(
                f"{ref.name}: {tensor.spec}, its manifest lists "
                f"{specs[tensor.spec.name]}"
            )
    for tensor in header.tensors:
        target = into(tensor.spec.name)
        if target.nbytes != tensor.end - tensor.start or not target.flags.c_contiguous:
            raise TreeError(
                f"{tensor.spec.name!r}: {target.nbytes} bytes to read into, expected "
                f"{tensor.end - tensor.start} contiguous ones"
            )
        if target.nbytes:
            source.fill(target.reshape(-1).view(np.uint8).data)
    source.finish()


class _Hashed:
    """A stream read front to back, hashed as it is read."""

    def __init__(self, stream: BinaryIO, ref: ObjectRef):
        self._stream = stream
        self._ref = ref
        self._hash = hashlib.sha256()

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, target: memoryview) -> None:
        at = 0
        while at < target.nbytes:
            block = target[at : at + _BLOCK_BYTES]
            got = self._stream.readinto(block)  # pyright: ignore[reportAttributeAccessIssue]
            if not got:
                raise CorruptError(f"{self._ref.name} ends early")
            self._hash.update(block[:got])
            at += got

    def finish(self) -> None:
        if self._stream.read(1):
            raise CorruptError(
                f"{self._ref.name} is longer than the {self._ref.size} bytes its "
                "manifest promises"
            )
        if self._hash.hexdigest() != self._ref.sha256:
            raise CorruptError(
                f"{self._ref.name} has SHA-256 {self._hash.hexdigest()[:16]}…, its "
                f"manifest promises {self._ref.sha256[:16]}…"
            )


def _as_stored(spec: TensorSpec, bits: np.ndarray) -> np.ndarray:
    check_tensor_name(spec.name)
    if bits.dtype != bits_dtype(spec.dtype) or bits.size != spec.size:
        raise TreeError(
            f"{spec.name!r}: {bits.size} elements of {bits.dtype} are not the bits of "
            f"{spec}"
        )
    # The library writes raw memory: strided arrays would be written as garbage.
    array = np.ascontiguousarray(bits).view(numpy_dtype(spec.dtype))
    return array.reshape(spec.shape)


def _index(files: list[AnchorFile], total: int) -> str:
    where = {name: file.path.name for file in files for name in file.tensors}
    document = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(where.items())),
    }
    return json.dumps(document, indent=2) + "\n"
