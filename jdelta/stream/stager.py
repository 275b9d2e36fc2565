"""The subscriber's background thread: fetches, verifies and decodes ahead.

It reads bytes only: no JAX, no collective, no weight in use.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from jdelta.bucket import Bucket
from jdelta.errors import (
    BucketUnavailableError,
    CorruptError,
    FormatError,
    JDeltaError,
    RunError,
    TreeError,
    VersionNotFoundError,
    WaitTimeoutError,
)
from jdelta.stream.chain import Chain
from jdelta.stream.fetch import Meter, fetch_delta
from jdelta.stream.rebuild import rebuild
from jdelta.wire.changes import Steps
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.tensor import stage

_log = logging.getLogger(__name__)

# Staged and not yet taken: past this the thread waits for the consumer.
MAX_STAGED_BYTES = 96 << 20


@dataclasses.dataclass(kw_only=True)
class Staged:
    """One version, ready to apply: steps from `base`, or whole weights."""

    manifest: Manifest
    base: VersionId | None
    steps: dict[str, Steps] | None
    weights: dict[str, np.ndarray] | None
    meter: Meter
    healed: bool = False

    @property
    def vid(self) -> VersionId:
        """The version it leads to."""
        return self.manifest.id

    @property
    def nbytes(self) -> int:
        """Host memory of what is staged."""
        if self.weights is not None:
            return sum(bits.nbytes for bits in self.weights.values())
        steps = (self.steps or {}).values()
        return sum(s.positions.nbytes + s.steps.nbytes for s in steps)

    def merged_into(self, later: list[Staged]) -> dict[str, np.ndarray]:
        """This anchor's weights brought to the last of the versions after it."""
        weights = self.weights or {}
        specs = self.manifest.specs()
        for staged in later:
            for name, steps in (staged.steps or {}).items():
                weights[name][steps.positions] = stage(
                    weights[name], steps, specs[name]
                )
        return weights


class Stager:
    """Stages the versions after a cursor, in order, a bounded amount ahead."""

    def __init__(
        self, bucket: Bucket, cursor: VersionId | None, *, every: bool, poll: float
    ):
        """Starts the thread."""
        self._chain = Chain(bucket)
        self._cursor = cursor
        self._every = every
        self._poll = poll
        self._staged: deque[Staged] = deque()
        self._changed = threading.Condition()
        self._generation = 0
        self._stopped = False
        self._trouble: JDeltaError | None = None
        self._fatal: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="jdelta-stager", daemon=True
        )
        self._thread.start()

    # -- the consumer's side

    def take(self, timeout: float | None, *, one: bool) -> list[Staged]:
        """Waits for staged versions and takes them: the oldest, or all.

        Raises:
            WaitTimeoutError: none came in time.
            JDeltaError: the bucket cannot be followed any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._staged:
                if self._fatal is not None:
                    raise self._fatal
                if self._stopped:
                    return []
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    held = self._cursor
                    raise WaitTimeoutError(
                        f"{self._chain.bucket.url}: no version after "
                        f"{'none' if held is None else held.version} within "
                        f"{timeout:g} s"
                        + (f" ({self._trouble})" if self._trouble else "")
                    )
                self._changed.wait(left)
            count = 1 if one else len(self._staged)
            taken = [self._staged.popleft() for _ in range(count)]
            self._changed.notify_all()
            return taken

    def reset(self, cursor: VersionId | None) -> None:
        """Forgets what is staged and begins again after `cursor` (None: an anchor)."""
        with self._changed:
            self._staged.clear()
            self._cursor = cursor
            self._generation += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread; a consumer waiting in `take` gets nothing."""
        with self._changed:
            self._stopped = True
            self._staged.clear()
            self._changed.notify_all()

    # -- the thread's side

    def _run(self) -> None:
        try:
            while not self._stopped:
                with self._changed:
                    cursor, generation = self._cursor, self._generation
                progressed = False
                try:
                    for staged in self._after(cursor):
                        if not self._put(staged, generation):
                            break
                        progressed = True
                        self._trouble = None
                except RunError:
                    raise
                except BucketUnavailableError as error:
                    self._trouble = error
                except (FormatError, VersionNotFoundError, TreeError) as error:
                    if self._trouble is None:
                        _log.warning("cannot follow for now: %s", error)
                    self._trouble = error
                if not progressed:
                    with self._changed:
                        if not self._stopped and self._generation == generation:
                            self._changed.wait(self._poll)
        except BaseException as error:  # handed to the consumer
            with self._changed:
                self._fatal = error
                self._changed.notify_all()

    def _put(self, staged: Staged, generation: int) -> bool:
        with self._changed:
            while (
                self._staged
                and sum(s.nbytes for s in self._staged) + staged.nbytes
                > MAX_STAGED_BYTES
                and not self._stopped
                and self._generation == generation
            ):
                self._changed.wait()
            if self._stopped or self._generation != generation:
                return False
            self._staged.append(staged)
            self._cursor = staged.vid
            self._changed.notify_all()
            return True

    def _after(self, cursor: VersionId | None) -> Iterator[Staged]:
        """What leads from `cursor` to the newest version, oldest first."""
        chain = self._chain
        tip = chain.latest(cursor)
        if tip is None or tip == cursor:
            return
        if cursor is None or not chain.contains(cursor):
            # Nothing held, or held from a publisher that was fenced.
            yield self._whole(tip, healed=cursor is not None)
            return
        path: list[Manifest] = []
        try:
            path.extend(chain.path_back(tip, stop=cursor))
        except VersionNotFoundError:
            yield self._whole(tip, healed=True)
            return
        path.reverse()
        if path[0].base != cursor:
            # An anchor stands on the way: the run went on without a delta.
            yield self._whole((path[0] if self._every else path[-1]).id)
            return
        if not self._every and _size(path) > _whole_size(path[-1]):
            yield self._whole(tip)
            return
        base = chain.manifest(cursor)
        for manifest in path:
            if manifest.kind == "anchor":
                yield self._whole(manifest.id)
                base = manifest
                continue
            try:
                yield self._delta(manifest, base)
            except (FormatError, VersionNotFoundError) as error:
                anchor = self._anchor_after(path, manifest)
                if anchor is None:
                    raise
                _log.warning("healing from an anchor: %s", error)
                yield self._whole(anchor if self._every else tip, healed=True)
                return
            base = manifest

    def _delta(self, manifest: Manifest, base: Manifest) -> Staged:
        meter = Meter()
        try:
            steps = fetch_delta(self._chain.bucket, manifest, base, meter)
        except CorruptError:
            # Once more: a flaw of the way here is not a flaw of the object.
            steps = fetch_delta(self._chain.bucket, manifest, base, meter)
        return Staged(
            manifest=manifest, base=base.id, steps=steps, weights=None, meter=meter
        )

    def _whole(self, vid: VersionId, *, healed: bool = False) -> Staged:
        meter = Meter()
        weights, manifest = rebuild(self._chain, vid, meter)
        return Staged(
            manifest=manifest,
            base=None,
            steps=None,
            weights=weights,
            meter=meter,
            healed=healed,
        )

    def _anchor_after(self, path: list[Manifest], bad: Manifest) -> VersionId | None:
        """The first version from `bad` on that has an anchor of its own."""
        for manifest in path[path.index(bad) :]:
            try:
                if self._chain.anchor_of(manifest.id) is not None:
                    return manifest.id
            except FormatError:
                continue
        return None


def _size(path: list[Manifest]) -> int:
    return sum(ref.size for manifest in path for ref in manifest.objects)


def _whole_size(manifest: Manifest) -> int:
    return sum(spec.nbytes for spec in manifest.specs().values())
