"""Rebuilding a version: an anchor and the deltas after it, proved whole."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping

import numpy as np

from jdelta.bucket import Bucket
from jdelta.errors import (
    CorruptError,
    FormatError,
    StateMismatchError,
    TreeError,
    VersionNotFoundError,
)
from jdelta.stream.chain import DAMAGE, Chain
from jdelta.stream.fetch import Meter, fetch_delta, parallel, prove, read_anchor
from jdelta.wire import bits
from jdelta.wire.changes import Steps
from jdelta.wire.dtypes import numpy_dtype
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.state import State
from jdelta.wire.tensor import stage

_log = logging.getLogger(__name__)


def load(
    source: Bucket | Chain | str | os.PathLike[str], version: int | None = None
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
    weights, state = rebuild(chain, vid, Meter())
    return shaped(weights, state), chain.manifest(state.id)


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
) -> tuple[dict[str, np.ndarray], State]:
    """The flat bits of `vid` by tensor, proved by the digests of its state.

    Starts from the nearest sound anchor; a damaged anchor is passed over for an
    earlier one, since the chain through it is the same weights.

    Args:
        chain: The run.
        vid: The version wanted.
        meter: Takes the times and the bytes.
        newest: Where something on the way is damaged, stop at the version before it
            instead of raising: the newest that can be proved.
        share: Share of the cores to use.

    Raises:
        CorruptError: no path of sound objects leads to `vid`.
        VersionNotFoundError: a manifest on the way is missing.
        FormatError: a manifest on the way is malformed or of a newer format.
    """
    walk = _Walk(chain, meter, newest, share)
    at: VersionId | None = vid
    while True:
        try:
            return walk.rebuild(at)
        except DAMAGE as error:
            # No way leads there: perhaps one leads to before what is damaged.
            at = chain.before(walk.bad) if newest else None
            if at is None:
                raise
            _log.warning("going back to version %d: %s", at.version, error)


def shaped(weights: Mapping[str, np.ndarray], state: State) -> dict[str, np.ndarray]:
    """Views of flat bits in their published dtypes and shapes."""
    return {
        name: weights[name].view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        for name, spec in state.specs.items()
    }


class _Walk:
    """One way back to an anchor and forward again."""

    def __init__(self, chain: Chain, meter: Meter, newest: bool, share: float):
        self._chain = chain
        self._meter = meter
        self._newest = newest
        self._share = share
        self._deltas: list[Manifest] = []  # newest first
        self._damaged: list[str] = []
        self.bad = VersionId(0, 0)  # no way leads to this version or through it

    def rebuild(self, vid: VersionId) -> tuple[dict[str, np.ndarray], State]:
        self._deltas, self._damaged, self.bad = [], [], vid
        for manifest in self._chain.path_back(vid):
            for anchor in _anchors(self._chain, manifest, self._damaged):
                for careful in (False, True):
                    weights = self._read(anchor)
                    if weights is None:
                        break
                    found = self._forward(weights, State.of(anchor), careful)
                    if found is not None:
                        return weights, found
                    del weights
                    if not self._newest:
                        break
            self._deltas.append(manifest)
            self.bad = manifest.base or manifest.id
        raise CorruptError(
            f"version {vid.version} of {self._chain.bucket.url} cannot be rebuilt: no "
            f"sound anchor before it ({'; '.join(self._damaged) or 'none was found'})"
        )

    def _read(self, anchor: Manifest) -> dict[str, np.ndarray] | None:
        """The weights of an anchor; None if it is not sound."""
        try:
            weights = read_anchor(self._chain.bucket, anchor, self._meter)
            if not self._deltas:
                prove(weights, State.of(anchor), self._meter, share=self._share)
            return weights
        except FormatError as error:
            self._damaged.append(str(error))
            return None

    def _forward(
        self, weights: dict[str, np.ndarray], state: State, careful: bool
    ) -> State | None:
        """Brings weights of `state` over the deltas; None if that proves wrong.

        Careful: prove each delta against the weights it changes, and stop before one
        that does not fit, rather than only the weights that all of them lead to.
        """
        bucket, meter, share = self._chain.bucket, self._meter, self._share
        for delta in reversed(self._deltas):
            try:
                steps, after = fetch_delta(bucket, delta, state, meter)
                if careful:
                    for name, change in steps.items():
                        stage(weights[name], change, state.specs[name])
            except (FormatError, TreeError, StateMismatchError) as error:
                if not self._newest:
                    raise
                _log.warning("stopping at version %d: %s", state.version, error)
                break
            _advance(weights, steps, state, meter, share)
            state = after
        try:
            if self._deltas:
                prove(weights, state, meter, share=share)
        except FormatError as error:
            self._damaged.append(str(error))
            return None
        return state


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
    state: State,
    meter: Meter,
    share: float,
) -> None:
    """Applies one delta to weights of our own: a failure discards them all."""
    start = time.perf_counter()

    def apply(name: str) -> None:
        # Not proved here: the digests of the whole end state are, once.
        at = steps[name].positions
        old = weights[name][at]
        weights[name][at] = bits.advance(
            old, steps[name].steps, state.specs[name].dtype
        )

    parallel(apply, steps, share=share)
    meter.lap("apply", start)
