"""Makes the golden chain: a tiny run, byte for byte what format version 1 is.

    python tests/data/make_chain.py FOLDER

It refuses to overwrite: the chain in the repository stays as it is for good, and later
code must read it. Weights come from SHA-256, so that nothing but the format decides.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

from jdelta.wire import anchor, delta_object, digest, dtypes, names
from jdelta.wire.changes import Changes
from jdelta.wire.control import EpochClaim, Pointer, ReaderStatus, RunInfo
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import (
    ChangedTensor,
    Manifest,
    ObjectRef,
    VersionId,
    WholeTensor,
    version_digest,
)
from jdelta.wire.tensor import encode_tensor

RUN = "golden"
TIME = 1_764_547_200.0
SPECS = {
    spec.name: spec
    for spec in (
        TensorSpec("model.embed.weight", "BF16", (96, 40)),
        TensorSpec("model.layers.0.mlp.weight", "BF16", (48, 32)),
        TensorSpec("model.layers.0.norm.weight", "F32", (48,)),
        TensorSpec("model.layers.0.experts", "F8_E4M3", (4, 6, 5)),
        TensorSpec("model.layers.0.empty", "F16", (0, 3)),
        TensorSpec("model.scale", "F64", ()),
        TensorSpec("model.mask", "BOOL", (11,)),
        TensorSpec("model.steps.ünï", "I64", (3,)),
    )
}
# Who wrote each version.
IDS = (VersionId(1, 0), VersionId(1, 1), VersionId(1, 2), VersionId(2, 3))
# How many of 256 elements change; a version that is not listed changes nothing.
_SHARES = {
    "model.embed.weight": {1: 8, 2: 8, 3: 256},
    "model.layers.0.mlp.weight": {1: 3, 2: 90},
    "model.layers.0.norm.weight": {1: 200, 3: 40},
    "model.layers.0.experts": {2: 20, 3: 128},
    "model.scale": {3: 256},
    "model.mask": {1: 100},
    "model.steps.ünï": {1: 256, 2: 256, 3: 256},
}

# How its publisher's shards cut a tensor; in one piece if it is not listed.
_GRIDS = {"model.layers.0.mlp.weight": (2, 2), "model.layers.0.experts": (3, 1, 2)}


def weights(version: int) -> dict[str, np.ndarray]:
    """Every tensor's flat bits at a version."""
    found = {}
    for name, spec in SPECS.items():
        kind = dtypes.bits_dtype(spec.dtype)
        bits = _random(f"{name} 0", spec.nbytes).view(kind.newbyteorder("<"))
        bits = bits.astype(kind)
        if spec.dtype == "BOOL":
            bits &= kind.type(1)
        for at in range(1, version + 1):
            share = _SHARES.get(name, {}).get(at, 0)
            chosen = _random(f"{name} which {at}", spec.size) < share
            if spec.dtype == "BOOL":
                moved = bits ^ kind.type(1)
            else:
                sizes = _random(f"{name} by {at}", spec.size).astype(kind)
                # Mostly one up or down, now and then far, to any bits at all.
                moved = np.where(sizes & 1, bits + kind.type(1), bits - kind.type(1))
                moved = np.where(sizes > 250, ~bits, moved)
            bits = np.where(chosen, moved, bits)
        found[name] = bits
    return found


def make(folder: Path) -> None:
    """Writes the chain. Raises FileExistsError if something is there."""
    folder.mkdir(parents=True)
    _put(folder, names.RUN, RunInfo(run=RUN, created=TIME).to_json())
    _claim(folder, 1, None)
    _anchor(folder, IDS[0], alternate=False)
    for version in (1, 2):
        _delta(folder, IDS[version - 1], IDS[version], "delta")
    _claim(folder, 2, IDS[2])
    _delta(folder, IDS[2], IDS[3], "delta")
    _anchor(folder, IDS[3], alternate=True)
    _delta(folder, IDS[0], IDS[3], "fold")
    pointer = Pointer(run=RUN, epoch=IDS[3].epoch, version=IDS[3].version, closed=2)
    _put(folder, names.POINTER, pointer.to_json())
    reader = ReaderStatus(reader="rollout-0", run=RUN, epoch=1, version=2, time=TIME)
    _put(folder, names.reader_name("rollout-0"), reader.to_json())


def _random(seed: str, size: int) -> np.ndarray:
    blocks = (
        hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(size // 32 + 1)
    )
    return np.frombuffer(b"".join(blocks), np.uint8)[:size].copy()


def _put(folder: Path, name: str, data: bytes) -> ObjectRef:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
    return ObjectRef(name, len(data), hashlib.sha256(data).hexdigest())


def _digest(bits: dict[str, np.ndarray]) -> int:
    return version_digest((spec, digest.full(bits[n])) for n, spec in SPECS.items())


def _claim(folder: Path, epoch: int, base: VersionId | None) -> None:
    claim = EpochClaim(
        run=RUN, epoch=epoch, base=base, writer=f"writer-{epoch}", created=TIME
    )
    _put(folder, names.epoch_name(epoch), claim.to_json())


def _anchor(folder: Path, vid: VersionId, *, alternate: bool) -> None:
    bits = weights(vid.version)
    home = names.anchor_folder(*vid, alternate=alternate)
    files = anchor.write_anchor(
        ((spec, bits[name]) for name, spec in SPECS.items()),
        folder / home,
        shard_bytes=4096,
    )
    refs = []
    for file in files:
        data = file.path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        refs.append(ObjectRef(f"{home}/{file.path.name}", len(data), sha256))
    where = {name: index for index, file in enumerate(files) for name in file.tensors}
    manifest = Manifest(
        run=RUN,
        epoch=vid.epoch,
        version=vid.version,
        kind="anchor",
        base=None,
        step=10 * vid.version,
        meta={"lr": 1e-6, "policy": "p☃"} if vid.version == 3 else {},
        created=TIME + vid.version,
        codec="none",
        values="none",
        objects=tuple(refs),
        digest=_digest(bits),
        tensors={
            name: WholeTensor(
                spec.dtype, spec.shape, digest.full(bits[name]), where[name]
            )
            for name, spec in SPECS.items()
        },
    )
    kind = "anchor" if alternate else None
    _put(folder, names.manifest_name(*vid, alternate=kind), manifest.to_json())


def _delta(folder: Path, base: VersionId, vid: VersionId, kind: str) -> None:
    old, new = weights(base.version), weights(vid.version)
    encoded = {}
    for name, spec in SPECS.items():
        changes = Changes.between(old[name], new[name])
        if changes.positions.size:
            encoded[name] = encode_tensor(spec, changes, _GRIDS.get(name, ()))
    fold = base.version if kind == "fold" else None
    ref = _put(
        folder,
        names.delta_name(*vid, 0, base=fold),
        delta_object.pack(
            encoded,
            {"version": vid.version, "base": base.version, "codec": "fast"},
        ),
    )
    manifest = Manifest(
        run=RUN,
        epoch=vid.epoch,
        version=vid.version,
        kind=kind,
        base=base,
        step=10 * vid.version,
        meta={"lr": 1e-6, "policy": "p☃"} if vid.version == 3 else {},
        created=TIME + vid.version,
        objects=(ref,),
        digest=_digest(new),
        tensors={
            name: ChangedTensor(tensor.changed, digest.full(new[name]), (0,))
            for name, tensor in encoded.items()
        },
    )
    alternate = None if fold is None else "fold"
    name = names.manifest_name(*vid, alternate=alternate, base=fold)
    _put(folder, name, manifest.to_json())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
