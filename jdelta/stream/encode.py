"""Making a version's objects and manifest out of host bytes."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jdelta.bucket import Bucket
from jdelta.bucket.os_errors import translated
from jdelta.stream.chain import sha256_hex
from jdelta.stream.commit import Attempt
from jdelta.stream.fetch import parallel
from jdelta.wire import delta_object, digest, names
from jdelta.wire.anchor import write_anchor
from jdelta.wire.changes import Changes
from jdelta.wire.manifest import (
    ChangedTensor,
    Manifest,
    ObjectRef,
    VersionId,
    WholeTensor,
)
from jdelta.wire.state import State
from jdelta.wire.tensor import encode_tensor

# Encoding takes half the cores: the other half belongs to the trainer.
_SHARE = 0.5

# Objects are made in memory; a large delta is cut into several.
MAX_DELTA_OBJECT_BYTES = 64 << 20


def full_digests(bits: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Every tensor's digest over its whole weights."""
    found = parallel(lambda name: digest.full(bits[name]), bits, share=_SHARE)
    return dict(zip(bits, found, strict=True))


def encode_delta(
    changes: Mapping[str, Changes],
    base: State,
    vid: VersionId,
    step: int | None,
    meta: Mapping[str, Any],
) -> Attempt:
    """A delta on `base`: its digests follow from the base's in O(changed)."""
    specs = base.specs
    encoded = dict(
        zip(
            changes,
            parallel(
                lambda name: encode_tensor(specs[name], changes[name]),
                changes,
                share=_SHARE,
            ),
            strict=True,
        )
    )
    groups: list[dict] = []
    room = 0
    for name, tensor in encoded.items():
        if not groups or room < len(tensor.payload):
            groups.append({})
            room = MAX_DELTA_OBJECT_BYTES
        groups[-1][name] = tensor
        room -= len(tensor.payload)
    objects, refs, where = [], [], {}
    for index, group in enumerate(groups):
        name = names.delta_name(vid.epoch, vid.version, index)
        data = delta_object.pack(
            group,
            {"version": vid.version, "base": base.id.version, "codec": "fast"},
        )
        objects.append((name, data))
        refs.append(ObjectRef(name=name, size=len(data), sha256=sha256_hex(data)))
        where.update(dict.fromkeys(group, index))
    tensors = {
        name: ChangedTensor(
            tensor.changed,
            digest.add(base.digests[name], tensor.digest_delta),
            (where[name],),
        )
        for name, tensor in encoded.items()
    }
    state = base.then(
        vid, step, meta, {n: entry.digest for n, entry in tensors.items()}
    )
    manifest = Manifest(
        run=base.run,
        epoch=vid.epoch,
        version=vid.version,
        kind="delta",
        base=base.id,
        step=step,
        meta=meta,
        created=time.time(),
        objects=tuple(refs),
        digest=state.digest,
        tensors=tensors,
    )
    return Attempt(
        manifest=manifest,
        state=state,
        document=manifest.to_json(),
        objects=objects,
        name=names.manifest_name(vid.epoch, vid.version),
    )


@contextlib.contextmanager
def encode_anchor(
    bits: Mapping[str, np.ndarray],
    state: State,
    bucket: Bucket,
    *,
    alternate: bool = False,
) -> Iterator[Attempt]:
    """An anchor's files, in scratch space that is removed at the end.

    Args:
        bits: Flat bits by tensor.
        state: The version that they are.
        bucket: Gives the scratch space where it can, so that files need no copy.
        alternate: It is made later, for a version committed as a delta.
    """
    vid, specs = state.id, state.specs
    folder = names.anchor_folder(vid.epoch, vid.version, alternate=alternate)
    parent = bucket.scratch()
    with translated(f"{parent or tempfile.gettempdir()} (where anchors are prepared)"):
        scratch = Path(tempfile.mkdtemp(prefix="jdelta-anchor-", dir=parent))
    try:
        with translated(f"{scratch} (where an anchor is prepared)"):
            files = write_anchor(((specs[name], bits[name]) for name in specs), scratch)
            objects = [(f"{folder}/{file.path.name}", file.path) for file in files]
            refs = tuple(_reference(name, path) for name, path in objects)
        where = {
            name: index for index, file in enumerate(files) for name in file.tensors
        }
        manifest = Manifest(
            run=state.run,
            epoch=vid.epoch,
            version=vid.version,
            kind="anchor",
            codec="none",
            values="none",
            base=None,
            step=state.step,
            meta=state.meta,
            created=time.time(),
            objects=refs,
            digest=state.digest,
            tensors={
                name: WholeTensor(
                    spec.dtype, spec.shape, state.digests[name], where[name]
                )
                for name, spec in specs.items()
            },
        )
        yield Attempt(
            manifest=manifest,
            state=state,
            document=manifest.to_json(),
            objects=list(objects),
            name=names.manifest_name(
                vid.epoch, vid.version, alternate="anchor" if alternate else None
            ),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _reference(name: str, path: Path) -> ObjectRef:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ObjectRef(name=name, size=path.stat().st_size, sha256=sha256)
