"""Rebuilding a version: an anchor and the deltas after it, proved whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np

from jdelta.bucket import Bucket
from jdelta.errors import (
    CorruptError,
    FormatError,
    VersionNotFoundError,
)
from jdelta.stream.chain import Chain
from jdelta.stream.fetch import Meter, fetch_delta, parallel, prove, read_anchor
from jdelta.wire import bits
from jdelta.wire.changes import Steps
from jdelta.wire.dtypes import numpy_dtype
from jdelta.wire.manifest import Manifest, VersionId

_log = logging.getLogger(__name__)


def load(
    source: Bucket | Chain | str, version: int | None = None
) -> tuple[dict[str, np.ndarray], Manifest]:
    """Rebuilds and proves one version, with NumPy alone.

    Args:
        source: A bucket, its URL, or a `Chain` over it.
        version: The version wanted; None for the newest.

    Returns:
        The weights by published name, host arrays of the published dtypes and shapes,
        and the version's manifest.

    Raises:
        VersionNotFoundError: the bucket is empty, or the version is not in it.
        CorruptError: no path of sound objects leads to the version.

    Collective: no. Runs on the calling thread.

    Example:
        >>> weights, manifest = jdelta.load("/data/run")  # doctest: +SKIP
        >>> weights["layers.0.kernel"].dtype              # doctest: +SKIP
        dtype(bfloat16)
    """
    chain = source if isinstance(source, Chain) else Chain(source)
    vid = resolve(chain, version)
    weights, manifest = rebuild(chain, vid, Meter())
    return shaped(weights, manifest), manifest


def resolve(chain: Chain, version: int | None) -> VersionId:
    """Which committed version a number (None: the newest) means in this run.

    Raises:
        VersionNotFoundError: there is no such version.
    """
    tip = chain.latest()
    if tip is None:
        raise VersionNotFoundError(
            f"{chain.bucket.url} holds no committed version: nothing was published "
            "there yet, or the URL is not a run's"
        )
    if version is None:
        return tip
    vid = chain.locate(version)
    if version < 0 or version > tip.version or vid is None:
        raise VersionNotFoundError(
            f"{chain.bucket.url} has no version {version}; its newest is {tip.version}"
        )
    return vid


def rebuild(
    chain: Chain,
    vid: VersionId,
    meter: Meter,
    *,
    newest: bool = False,
    share: float = 1.0,
) -> tuple[dict[str, np.ndarray], Manifest]:
    """The flat bits of `vid` by tensor, proved by their digests, and its manifest.

    Starts from the nearest sound anchor; a damaged anchor is passed over for an
    earlier one, since the chain through it is the same weights.

    Args:
        chain: The run.
        vid: The version wanted.
        meter: Takes the times and the bytes.
        newest: Where a delta on the way is damaged, stop at the version before it
            instead of raising: the newest that can be proved.
        share: Share of the cores to use.

    Raises:
        CorruptError: no path of sound objects leads to `vid`.
        VersionNotFoundError: a manifest on the way is missing.
    """
    damaged: list[str] = []
    deltas: list[Manifest] = []  # newest first
    for manifest in chain.path_back(vid):
        for anchor in _anchors(chain, manifest, damaged):
            try:
                weights = read_anchor(chain.bucket, anchor, meter)
                if not deltas:
                    prove(weights, manifest, meter, share=share)
            except FormatError as error:
                damaged.append(str(error))
                continue
            base = manifest
            for delta in reversed(deltas):
                try:
                    steps = fetch_delta(chain.bucket, delta, base, meter)
                except FormatError as error:
                    if not newest:
                        raise
                    _log.warning("stopping at version %d: %s", base.version, error)
                    break
                _advance(weights, steps, delta, meter, share)
                base = delta
            if deltas:
                prove(weights, base, meter, share=share)
            return weights, base
        deltas.append(manifest)
    raise CorruptError(
        f"version {vid.version} of {chain.bucket.url} cannot be rebuilt: no sound "
        f"anchor before it ({'; '.join(damaged) or 'none was found'})"
    )


def shaped(weights: dict[str, np.ndarray], manifest: Manifest) -> dict[str, np.ndarray]:
    """Views of flat bits in their published dtypes and shapes."""
    return {
        name: weights[name].view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        for name, spec in manifest.specs().items()
    }


def _anchors(
    chain: Chain, manifest: Manifest, damaged: list[str]
) -> Iterator[Manifest]:
    if manifest.kind == "anchor":
        yield manifest
        return
    try:
        alternate = chain.alternate_of(manifest)
    except FormatError as error:
        damaged.append(str(error))
        return
    if alternate is not None:
        yield alternate


def _advance(
    weights: dict[str, np.ndarray],
    steps: dict[str, Steps],
    delta: Manifest,
    meter: Meter,
    share: float,
) -> None:
    """Applies one delta to weights of our own: a failure discards them all."""
    specs = delta.specs()
    start = time.perf_counter()

    def apply(name: str) -> None:
        # Not proved here: the digests of the whole end state are, once.
        at = steps[name].positions
        old = weights[name][at]
        weights[name][at] = bits.advance(old, steps[name].steps, specs[name].dtype)

    parallel(apply, steps, share=share)
    meter.lap("apply", start)
