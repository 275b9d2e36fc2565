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
    BucketError,
    BucketUnavailableError,
    CorruptError,
    FormatError,
    JDeltaError,
    ObjectNotFoundError,
    RunError,
    VersionNotFoundError,
    WaitTimeoutError,
)
from jdelta.stream.chain import DAMAGE, Chain
from jdelta.stream.fetch import Meter, fetch_delta
from jdelta.stream.pace import LONGEST_SECONDS, SHORTEST_SECONDS, Pace
from jdelta.stream.rebuild import rebuild
from jdelta.wire import names
from jdelta.wire.changes import Steps, compose
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.state import State
from jdelta.wire.tensor import stage

_log = logging.getLogger(__name__)

# Staged and not yet taken: past this the thread waits for the consumer.
MAX_STAGED_BYTES = 96 << 20


@dataclasses.dataclass(kw_only=True)
class Staged:
    """One version, ready to apply: steps from `base`, or whole weights."""

    state: State
    base: VersionId | None
    steps: dict[str, Steps] | None
    weights: dict[str, np.ndarray] | None
    meter: Meter
    healed: bool = False
    lent: frozenset[str] = frozenset()
    """Tensors of `weights` that somebody else holds, too: not to be written to."""

    @property
    def vid(self) -> VersionId:
        """The version it leads to."""
        return self.state.id

    @property
    def nbytes(self) -> int:
        """Host memory of what is staged."""
        if self.weights is not None:
            return sum(bits.nbytes for bits in self.weights.values())
        steps = (self.steps or {}).values()
        return sum(s.positions.nbytes + s.steps.nbytes for s in steps)

    def then(self, later: Staged) -> Staged:
        """This version and the delta after it as one. May write to this one's weights.

        Raises:
            StateMismatchError: the delta was not made against this version.
        """
        steps = weights = None
        lent = self.lent
        if self.weights is not None:
            weights, specs = dict(self.weights), self.state.specs
            for name, after in (later.steps or {}).items():
                new = stage(weights[name], after, specs[name])
                if name in lent:
                    weights[name] = weights[name].copy()
                    lent -= {name}
                weights[name][after.positions] = new
        else:
            steps = dict(self.steps or {})
            for name, after in (later.steps or {}).items():
                first = steps.get(name)
                steps[name] = after if first is None else compose(first, after)
        return Staged(
            state=later.state,
            base=self.base,
            steps=steps,
            weights=weights,
            meter=self.meter.plus(later.meter),
            lent=lent,
        )


class Stager:
    """Stages the versions after a cursor, in order, a bounded amount ahead."""

    def __init__(
        self,
        bucket: Bucket,
        run: str | None,
        cursor: State | None,
        *,
        every: bool,
        poll: float | None,
    ):
        """Starts the thread."""
        self._chain = Chain(bucket)
        self._chain.run = run
        self._cursor = cursor
        self._every = every
        self._pace = Pace(poll)
        self._told = poll is None and bucket.capabilities.watch
        self._ended = False  # the version at the cursor is the run's last
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

        None at all: the run ended, or this was stopped.

        Raises:
            WaitTimeoutError: none came in time.
            JDeltaError: the bucket cannot be followed any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._staged:
                if self._fatal is not None:
                    raise self._fatal
                if self._stopped or self._ended:
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

    def reset(self, cursor: State | None) -> None:
        """Forgets what is staged and begins again after `cursor` (None: an anchor)."""
        with self._changed:
            self._staged.clear()
            self._cursor = cursor
            self._ended = False
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
        failures = 0
        try:
            while not self._stopped:
                with self._changed:
                    cursor, generation = self._cursor, self._generation
                progressed, tag = 0, None
                try:
                    if self._told:
                        tag = self._pointer_tag()
                    for staged in self._after(cursor):
                        if not self._put(staged, generation):
                            break
                        progressed += 1
                    self._trouble, failures = None, 0
                except BucketUnavailableError as error:
                    self._trouble = error
                except DAMAGE as error:
                    if isinstance(error, RunError):
                        self._check_run()
                    if self._trouble is None:
                        _log.warning("cannot follow for now: %s", error)
                    self._trouble = error
                if progressed:
                    self._pace.came(progressed)
                    continue
                failures += self._trouble is not None
                self._idle(generation, tag, failures)
        except BaseException as error:  # handed to the consumer
            with self._changed:
                self._fatal = error
                self._changed.notify_all()

    def _idle(self, generation: int, tag: str | None, failures: int) -> None:
        """Waits until there may be news: the pointer moved, or it is time to look."""
        if self._told and not failures:
            begin = time.monotonic()
            while time.monotonic() - begin < LONGEST_SECONDS:
                try:
                    if self._chain.bucket.watch(names.POINTER, tag, SHORTEST_SECONDS):
                        return
                except BucketError:
                    break  # looking says what is wrong
                with self._changed:
                    if self._stopped or self._generation != generation:
                        return
            else:
                return
        with self._changed:
            if not self._stopped and self._generation == generation:
                # What is broken is not looked at as often as what is awaited.
                self._changed.wait(self._pace.wait() * min(1 << failures, 32))

    def _pointer_tag(self) -> str | None:
        try:
            return self._chain.bucket.stat(names.POINTER).tag
        except ObjectNotFoundError:
            return None

    def _check_run(self) -> None:
        """Raises RunError if not one object but the bucket is another run's."""
        try:
            self._chain.read_run()
        except (BucketUnavailableError, FormatError) as error:
            self._trouble = error

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
            self._cursor = staged.state
            self._changed.notify_all()
            return True

    def _after(self, cursor: State | None) -> Iterator[Staged]:
        """What leads from `cursor` to the newest version, oldest first."""
        chain = self._chain
        tip = chain.latest(None if cursor is None else cursor.id)
        if tip is None or (cursor is not None and tip == cursor.id):
            if tip is not None and chain.ended == tip:
                with self._changed:
                    self._ended = self._cursor is cursor
                    self._changed.notify_all()
            return
        if cursor is None or not chain.contains(cursor.id):
            # Nothing held, or held from a publisher that was fenced.
            yield self._whole(tip, newest=True, healed=cursor is not None)
            return
        try:
            path = self._path(cursor.id, tip)
        except DAMAGE as error:
            _log.warning("healing from an anchor: %s", error)
            yield self._heal(cursor.id, tip)
            return
        if not path or (not self._every and self._shorter_by_anchor(path, cursor)):
            # An anchor stands on the way or is less to fetch.
            yield self._whole(tip)
            return
        base = cursor
        for manifest in path:
            try:
                if manifest.kind == "anchor":
                    staged = self._whole(manifest.id)
                else:
                    staged = self._delta(manifest, base)
            except DAMAGE as error:
                if manifest.kind == "anchor":
                    raise
                _log.warning("healing from an anchor: %s", error)
                yield self._heal(base.id, tip)
                return
            yield staged
            base = staged.state

    def _path(self, cursor: VersionId, tip: VersionId) -> list[Manifest]:
        """The deltas from `cursor` to `tip`, with `every` anchors between them, too.

        Empty where an anchor stands between the two and only the newest is wanted.
        """
        if self._every:
            return list(self._each(cursor, tip))
        path = [*self._chain.path_back(tip, stop=cursor)]
        path.reverse()
        return path if path[0].base == cursor else []

    def _each(self, cursor: VersionId, tip: VersionId) -> Iterator[Manifest]:
        """Every version's manifest, up to the first that cannot be had."""
        at = cursor
        while at != tip:
            vid = self._chain.locate(at.version + 1)
            try:
                if vid is None:
                    raise VersionNotFoundError(f"no version {at.version + 1}")
                yield self._chain.manifest(vid)
            except DAMAGE:
                if at == cursor:
                    raise
                return
            at = vid

    def _heal(self, cursor: VersionId, tip: VersionId) -> Staged:
        """A version after `cursor` by way of an anchor: the newest, or the first."""
        numbers = range(cursor.version + 1, tip.version + 1)
        for number in numbers if self._every else reversed(numbers):
            vid = self._chain.locate(number)
            if vid is None or not self._anchored(vid):
                continue
            goal = vid if self._every else tip
            try:
                staged = self._whole(goal, newest=goal == tip, healed=True)
                if staged.vid.version > cursor.version:
                    return staged
            except DAMAGE as error:
                _log.debug("no healing from version %d: %s", number, error)
            if goal == tip:
                break
        raise VersionNotFoundError(
            f"{self._chain.bucket.url}: what follows version {cursor.version} is "
            "damaged, and there is no anchor after it yet"
        )

    def _delta(self, manifest: Manifest, base: State) -> Staged:
        meter = Meter()
        try:
            steps, state = fetch_delta(self._chain.bucket, manifest, base, meter)
        except CorruptError:
            # Once more: a flaw of the way here is not a flaw of the object.
            steps, state = fetch_delta(self._chain.bucket, manifest, base, meter)
        return Staged(state=state, base=base.id, steps=steps, weights=None, meter=meter)

    def _shorter_by_anchor(self, path: list[Manifest], base: State) -> bool:
        """Whether an anchor of one of these, and what follows it, is less to fetch."""
        room = _size(path) - base.nbytes
        for manifest in reversed(path):
            if room <= 0:
                return False
            if self._anchored(manifest.id):
                return True
            room -= manifest.nbytes
        return False

    def _anchored(self, vid: VersionId) -> bool:
        try:
            return self._chain.anchor_of(vid) is not None
        except DAMAGE:
            return False

    def _whole(
        self, vid: VersionId, *, newest: bool = False, healed: bool = False
    ) -> Staged:
        meter = Meter()
        weights, state = rebuild(self._chain, vid, meter, newest=newest)
        return Staged(
            state=state,
            base=None,
            steps=None,
            weights=weights,
            meter=meter,
            healed=healed,
        )


def _size(path: list[Manifest]) -> int:
    return sum(manifest.nbytes for manifest in path)
