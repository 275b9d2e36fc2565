"""Reading a version's objects: fetched, checked against the manifest, decoded.

Nothing here touches weights in use: what it returns is proved as far as the objects
alone can prove it (sizes, hashes, bounds, order, counts, digest arithmetic).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from jdelta.bucket import Bucket
from jdelta.errors import CorruptError, ObjectNotFoundError
from jdelta.stream.chain import sha256_hex
from jdelta.wire import anchor as anchor_format
from jdelta.wire import delta_object, digest
from jdelta.wire.changes import Steps
from jdelta.wire.dtypes import bits_dtype
from jdelta.wire.manifest import Manifest, ObjectRef
from jdelta.wire.safetensors import max_header_bytes
from jdelta.wire.state import State
from jdelta.wire.tensor import decode_tensor

_T = TypeVar("_T")
_R = TypeVar("_R")


class Meter:
    """Seconds by stage and bytes by kind, of one thread."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.times: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def lap(self, stage: str, start: float) -> float:
        """Adds the time since `start` to `stage`; returns the time now."""
        now = time.perf_counter()
        self.times[stage] = self.times.get(stage, 0.0) + now - start
        return now

    def count(self, kind: str, size: int) -> None:
        """Adds `size` bytes to `kind`."""
        self.bytes[kind] = self.bytes.get(kind, 0) + size

    def plus(self, other: Meter) -> Meter:
        """Both together."""
        both = Meter()
        for meter in (self, other):
            for stage, seconds in meter.times.items():
                both.times[stage] = both.times.get(stage, 0.0) + seconds
            for kind, size in meter.bytes.items():
                both.count(kind, size)
        return both


def parallel(
    function: Callable[[_T], _R], items: Iterable[_T], *, share: float = 1.0
) -> list[_R]:
    """`function` over `items` on a `share` of the cores, at most 8.

    Meant for loops that release the GIL (NumPy, zstd, hashing, reads).
    """
    items = list(items)
    workers = min(len(items), max(1, int(share * (os.cpu_count() or 1))), 8)
    results: list[Any] = [None] * len(items)
    left = deque(enumerate(items))

    def work() -> None:
        while True:
            try:
                index, item = left.popleft()  # atomic: each item is taken once
            except IndexError:
                return
            try:
                results[index] = function(item)
            except BaseException:
                left.clear()
                raise

    with concurrent.futures.ThreadPoolExecutor(max(1, workers - 1), "jdelta") as pool:
        helpers = []
        # No new thread (the interpreter is ending, or too many): fewer do it all.
        with contextlib.suppress(RuntimeError):
            for _ in range(workers - 1):
                helpers.append(pool.submit(work))
        work()
        for helper in helpers:
            helper.result()
    return results


def fetch_object(bucket: Bucket, ref: ObjectRef, meter: Meter, kind: str) -> bytes:
    """An object's bytes, equal to what the manifest promises.

    Raises:
        CorruptError: missing, or of another size or hash.
    """
    start = time.perf_counter()
    try:
        data = bucket.get(ref.name, max_bytes=ref.size)
    except ObjectNotFoundError:
        raise CorruptError(
            f"{ref.name} is missing from {bucket.url}, though a manifest lists it"
        ) from None
    start = meter.lap("fetch", start)
    meter.count(kind, len(data))
    if len(data) != ref.size or sha256_hex(data) != ref.sha256:
        raise CorruptError(
            f"{ref.name} in {bucket.url} has {len(data)} bytes and SHA-256 "
            f"{sha256_hex(data)[:16]}…, its manifest promises {ref.size} bytes and "
            f"{ref.sha256[:16]}…"
        )
    meter.lap("verify", start)
    return data


def fetch_delta(
    bucket: Bucket,
    manifest: Manifest,
    base: State,
    meter: Meter,
    *,
    only: Container[str] | None = None,
) -> tuple[dict[str, Steps], State]:
    """A delta's steps by tensor, consistent with the digests of both its ends.

    Args:
        bucket: Where the objects are.
        manifest: The delta's manifest.
        base: The version it is based on.
        meter: Takes the times and the bytes.
        only: The tensors wanted; None for all.

    Returns:
        The steps, and the version they lead to.

    Raises:
        CorruptError: an object or a tensor does not match its manifest.
        FormatError: a payload does not follow the format.
        TreeError: it changes other tensors than its base version has.
    """
    state = base.after(manifest)
    specs = base.specs
    entries = {n: e for n, e in manifest.changes.items() if only is None or n in only}
    payloads: dict[str, list[memoryview]] = {name: [] for name in entries}
    for index, ref in enumerate(manifest.objects):
        listed = [n for n, e in manifest.changes.items() if index in e.objects]
        if not any(name in entries for name in listed):
            continue
        most = delta_object.max_bytes([specs[name] for name in listed])
        if ref.size > most:
            raise CorruptError(
                f"{ref.name}: {ref.size} bytes are more than changes of its "
                f"{len(listed)} tensors can take ({most}); nothing was fetched"
            )
        data = fetch_object(bucket, ref, meter, "delta")
        for name, payload in delta_object.unpack(data, listed).items():
            if name in entries:
                payloads[name].append(payload)
    start = time.perf_counter()

    def decode(name: str) -> Steps:
        return decode_tensor(specs[name], payloads[name], entries[name].changed)

    steps = dict(zip(entries, parallel(decode, entries), strict=True))
    meter.lap("decode", start)
    for name, entry in entries.items():
        found = digest.add(base.digests[name], steps[name].digest_delta)
        if found != entry.digest:
            raise CorruptError(
                f"version {manifest.version}: the delta of {name!r} leads to digest "
                f"{found:016x}, its manifest promises {entry.digest:016x}"
            )
    return steps, state


def read_anchor(
    bucket: Bucket, manifest: Manifest, meter: Meter
) -> dict[str, np.ndarray]:
    """An anchor's weights as flat bits by tensor, read and hashed in one pass.

    Raises:
        CorruptError: an object is missing or does not match its manifest.
        FormatError: an object is not the safetensors file expected.
    """
    specs = State.of(manifest).specs
    promised = sum(spec.nbytes for spec in specs.values())
    sizes = 0
    for ref in manifest.objects:
        try:
            size = bucket.stat(ref.name).size
        except ObjectNotFoundError:
            raise CorruptError(
                f"{ref.name} is missing from {bucket.url}, though a manifest lists it"
            ) from None
        if size != ref.size:
            raise CorruptError(
                f"{ref.name} has {size} bytes, its manifest promises {ref.size}"
            )
        sizes += size
    if promised > sizes:
        raise CorruptError(
            f"the anchor of version {manifest.version} promises {promised} bytes of "
            f"weights in objects of {sizes} bytes"
        )
    # Headers and the index name each tensor once more.
    most = promised + (len(manifest.objects) + 1) * max_header_bytes(specs)
    if sizes > most:
        raise CorruptError(
            f"the anchor of version {manifest.version} has {sizes} bytes for tensors "
            f"that take at most {most}; nothing was fetched"
        )
    start = time.perf_counter()
    weights = {
        name: np.empty(spec.size, bits_dtype(spec.dtype))
        for name, spec in specs.items()
    }

    def read(item: tuple[int, ObjectRef]) -> None:
        index, ref = item
        if not ref.name.endswith(".safetensors"):
            fetch_object(bucket, ref, Meter(), "anchor")  # the index, for other tools
            return
        listed = {
            name: specs[name]
            for name, entry in manifest.whole.items()
            if entry.object == index
        }
        with bucket.open(ref.name) as stream:
            anchor_format.read_anchor_object(stream, ref, listed, weights.__getitem__)

    parallel(read, enumerate(manifest.objects))
    meter.lap("fetch", start)
    meter.count("anchor", sizes)
    return weights


def prove(
    weights: Mapping[str, np.ndarray],
    state: State,
    meter: Meter,
    *,
    share: float = 1.0,
) -> None:
    """Recomputes every tensor's digest over the whole weights.

    Raises:
        CorruptError: a tensor is not what the version's manifests promise.
    """
    start = time.perf_counter()

    def check(name: str) -> tuple[str, int]:
        return name, digest.full(weights[name])

    for name, found in parallel(check, state.digests, share=share):
        expected = state.digests[name]
        if found != expected:
            raise CorruptError(
                f"version {state.version}: {name!r} has digest {found:016x}, its "
                f"manifest promises {expected:016x}"
            )
    meter.lap("verify", start)
