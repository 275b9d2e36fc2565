"""Taking up a run: what differs between weights in hand and a version in the bucket.

Costs what differs: a tensor whose digest is the version's is not read. The others are
rebuilt one at a time, out of the anchor's bytes and the deltas after it, and compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jdelta.errors import CorruptError, ObjectNotFoundError, VersionNotFoundError
from jdelta.stream.chain import Chain
from jdelta.stream.fetch import Meter, fetch_delta
from jdelta.wire import bits as bit_order
from jdelta.wire import digest, safetensors
from jdelta.wire.changes import Changes, Steps, compose
from jdelta.wire.dtypes import bits_dtype
from jdelta.wire.manifest import Manifest
from jdelta.wire.state import State


def differences(
    chain: Chain, tip: State, weights: Mapping[str, np.ndarray], names: list[str]
) -> dict[str, Changes] | None:
    """The changes from a version to other weights of the same tree.

    Args:
        chain: The run.
        tip: The version.
        weights: Flat bits by tensor.
        names: The tensors that differ.

    Returns:
        Changes by tensor; None where they would take as much memory as the weights.

    Raises:
        FormatError, VersionNotFoundError, TreeError, RunError: something on the way to
            the version is damaged.
        BucketError: the bucket cannot be read.

    Holds the deltas since the anchor, as far as they touch those tensors, the changes
    found and one tensor.
    """
    room = tip.nbytes
    anchor, steps = _steps(chain, tip, names, room)
    if steps is None:
        return None
    stored = _Stored(chain, anchor)
    found: dict[str, Changes] = {}
    for name in names:
        spec = tip.specs[name]
        old = stored.read(name)
        patch = steps.pop(name, None)
        if patch is not None:
            at = patch.positions
            old[at] = bit_order.advance(old[at], patch.steps, spec.dtype)
        if digest.full(old) != tip.digests[name]:
            raise CorruptError(
                f"{name!r} of version {tip.version} does not have the digest that its "
                "manifests promise"
            )
        changes = Changes.between(old, weights[name])
        if spec.size <= 1 << 32:
            changes = changes._replace(positions=changes.positions.astype(np.uint32))
        found[name] = changes
        room -= sum(array.nbytes for array in found[name])
        if room < 0:
            return None
    return found


def _steps(
    chain: Chain, tip: State, names: list[str], room: int
) -> tuple[Manifest, dict[str, Steps] | None]:
    """The nearest anchor, and the deltas after it as one, as far as they matter."""
    deltas: list[Manifest] = []
    for manifest in chain.path_back(tip.id):
        anchor = chain.anchor_of(manifest.id)
        if anchor is not None:
            break
        deltas.append(manifest)
    else:
        raise VersionNotFoundError(f"no anchor before version {tip.version}")
    steps: dict[str, Steps] = {}
    state = State.of(anchor)
    for delta in reversed(deltas):
        later, state = fetch_delta(chain.bucket, delta, state, Meter(), only=set(names))
        for name, patch in later.items():
            first = steps.get(name)
            steps[name] = patch if first is None else compose(first, patch)
        if sum(p.positions.nbytes + p.steps.nbytes for p in steps.values()) > room:
            return anchor, None
    return anchor, steps


class _Stored:
    """An anchor's tensors, read one by one. They are proved by their digests."""

    def __init__(self, chain: Chain, anchor: Manifest):
        """Reads nothing yet."""
        self._bucket, self._anchor = chain.bucket, anchor
        self._specs = State.of(anchor).specs
        self._headers: dict[int, dict[str, safetensors.StoredTensor]] = {}

    def read(self, name: str) -> np.ndarray:
        spec, index = self._specs[name], self._anchor.whole[name].object
        if index not in self._headers:
            self._headers[index] = self._header(index)
        stored = self._headers[index].get(name)
        ref = self._anchor.objects[index]
        if stored is None or stored.spec != spec:
            raise CorruptError(f"{ref.name} does not hold {name!r} ({spec})")
        data = self._get(ref.name, stored.start, spec.nbytes)
        kind = bits_dtype(spec.dtype)
        return np.frombuffer(bytearray(data), kind.newbyteorder("<")).astype(
            kind, copy=False
        )

    def _get(self, name: str, start: int, length: int) -> bytes:
        try:
            return self._bucket.get_range(name, start, length)
        except ObjectNotFoundError:
            raise CorruptError(
                f"{name} is missing from {self._bucket.url}, though a manifest lists it"
            ) from None

    def _header(self, index: int) -> dict[str, safetensors.StoredTensor]:
        ref = self._anchor.objects[index]
        first = self._get(ref.name, 0, safetensors.LENGTH_BYTES)
        listed = [n for n, e in self._anchor.whole.items() if e.object == index]
        length = safetensors.header_length(first, ref.size, listed)
        data = self._get(ref.name, safetensors.LENGTH_BYTES, length)
        header = safetensors.parse_header(data, ref.size)
        return {tensor.spec.name: tensor for tensor in header.tensors}
