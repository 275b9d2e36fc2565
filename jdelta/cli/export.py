"""`jdelta export`: one version as a plain safetensors checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jdelta.cli._shared import (
    Debug,
    Json,
    Url,
    command,
    human_bytes,
    print_json,
)
from jdelta.errors import CorruptError, JDeltaError

if TYPE_CHECKING:
    import numpy as np

    from jdelta.wire.anchor import AnchorFile
    from jdelta.wire.dtypes import TensorSpec
    from jdelta.wire.manifest import Manifest

_SHARD_GB = 5.0  # what Hugging Face checkpoints use


@command
def export(
    url: Url,
    to: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="A new or empty directory.")
    ],
    version: Annotated[int, typer.Option("--version", min=0, help="Which version.")],
    shard_gb: Annotated[
        float,
        typer.Option(min=1e-6, help="Largest file, in GB; more weights make more."),
    ] = _SHARD_GB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a version as a safetensors checkpoint that any tool opens.

    The version is proved, written beside DIR, read back and proved again; only then
    does it appear under DIR, whole. An interrupted export leaves nothing there.
    """
    import jdelta
    from jdelta.wire import anchor
    from jdelta.wire.bits import to_bits
    from jdelta.wire.dtypes import tensor_spec

    _check_free(to)
    weights, manifest = jdelta.load(url, version)
    with _staged(to) as folder:
        tensors = (
            (tensor_spec(name, array), to_bits(array))
            for name, array in weights.items()
        )
        files = anchor.write_anchor(tensors, folder, shard_bytes=int(shard_gb * 1e9))
        _prove(files, manifest)
        _name_like_a_checkpoint(folder)
        names = sorted(path.name for path in folder.iterdir())
        size = sum(path.stat().st_size for path in folder.iterdir())
    if as_json:
        print_json(
            {
                "version": manifest.version,
                "step": manifest.step,
                "to": str(to),
                "files": names,
                "bytes": size,
                "digest": f"{manifest.digest:016x}",
            }
        )
        return
    typer.echo(
        f"version {manifest.version} (step {manifest.step}) is in {to}: "
        f"{len(names)} files, {human_bytes(size)}, proved"
    )


def _check_free(to: Path) -> None:
    if to.is_dir():
        if any(to.iterdir()):
            raise JDeltaError(f"{to} is not empty; give a new or an empty directory")
    elif to.exists() or to.is_symlink():
        raise JDeltaError(f"{to} exists and is not a directory")


@contextmanager
def _staged(to: Path) -> Iterator[Path]:
    """A folder beside `to` that becomes `to` if the body ends well, else is removed."""
    to = Path(os.path.abspath(to))
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        try:
            yield folder
            for path in folder.iterdir():
                _sync(path)
            _sync(folder)
            # mkdtemp makes a private folder; a checkpoint is an ordinary one.
            folder.chmod(0o777 & ~_umask())
            if to.is_dir():
                to.rmdir()  # empty: checked before, and refused by the system if not
            folder.rename(to)
            _sync(to.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise JDeltaError(f"could not write the checkpoint {to}: {error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _name_like_a_checkpoint(folder: Path) -> None:
    """A checkpoint of one file is `model.safetensors` alone; more have an index."""
    files = list(folder.glob("*.safetensors"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        for path in folder.glob("*.index.json"):
            path.unlink()


def _prove(files: list[AnchorFile], manifest: Manifest) -> None:
    """Read the files back and digest every tensor.

    Raises:
        CorruptError: What is on disk is not the version.
    """
    from jdelta.wire import digest
    from jdelta.wire.manifest import version_digest

    found = version_digest(
        (spec, digest.full(bits))
        for file in files
        if file.tensors
        for spec, bits in _read(file)
    )
    if found != manifest.digest:
        raise CorruptError(
            f"the files have digest {found:016x}, version {manifest.version} has "
            f"{manifest.digest:016x}: the disk did not keep what was written"
        )


def _read(file: AnchorFile) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """The flat bits of each tensor in a safetensors file, mapped, not loaded."""
    import numpy as np

    from jdelta.wire import safetensors
    from jdelta.wire.dtypes import bits_dtype

    raw = np.memmap(file.path, np.uint8, mode="r")
    for spec, start, end in safetensors.parse(raw.data, file.tensors).tensors:
        yield spec, np.asarray(raw[start:end]).view(bits_dtype(spec.dtype))
