"""The writing end: `publish` hands over and returns; threads do the rest.

Three threads, none of which runs a collective or a jitted function: one copies deltas
from the device (here), one encodes and commits (`committer`), and now and then one
rebuilds an anchor from the chain (`anchors`). Each reads only memory that cannot be
donated away.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdelta.bucket import Bucket, open_bucket
from jdelta.errors import (
    DeltaOverflowError,
    GapError,
    JDeltaError,
    PublishError,
    StateMismatchError,
    TreeError,
    WaitTimeoutError,
)
from jdelta.stream import source
from jdelta.stream.anchors import AnchorMaker
from jdelta.stream.backlog import Backlog, Item, WhenBehind
from jdelta.stream.commit import claim_epoch
from jdelta.stream.committer import Committer
from jdelta.stream.follow import Follower
from jdelta.stream.ledger import Ledger
from jdelta.stream.records import CommitRecord, PublisherStats
from jdelta.wire._documents import MAX_INT

_log = logging.getLogger(__name__)

MAX_HANDED = 8
"""Deltas that may be on their way from the device, holding its memory."""


@dataclasses.dataclass
class _Handed:
    """What `publish` took: a delta, or copies of whole weights and a delta's marks."""

    delta: Any
    whole: dict[str, Any] | None
    step: int | None
    at: float


@dataclasses.dataclass
class _Rescue:
    """Whole weights to fall back on, until the delta they came with is safe."""

    params: Any
    step: int | None
    delta: Any


class Publisher:
    """Streams a trainer's weights into a bucket, a version for every `publish`.

    Opening it claims the run's next epoch (from then on no earlier publisher of the run
    can commit) and copies `params` to host memory. If they equal the newest version,
    the run continues with deltas; else an anchor is written first.

    Args:
        bucket: The run's URL (a path, `file://`, `memory://`) or a bucket.
        params: The weights readers should hold now: a tree of `jax.Array` (each fully
            addressable) or a dict of NumPy arrays, in the published dtypes. For a
            wrapped optimizer this is `jdelta.published(opt_state, params)`. Read
            before this returns; the caller may donate them afterwards.
        anchor_every: Make an anchor every so many versions. None: only by bytes.
        anchor_share: Make an anchor when the deltas since the last one weigh this many
            times an anchor. Anchors are rebuilt from the bucket in the background;
            neither training nor the stream of deltas waits.
        when_behind: What to do while the bucket is slower than training. "merge":
            waiting deltas become one version. "spill": each is kept, on disk.
        spool: Folder for "spill"; None for a temporary one.
        spool_bytes: Bound on the spool; past it the newest two are merged.
        run: Insist on this run id (and create the run with it).
        step: The trainer's step that `params` are of, if they become a version.
        on_commit: Called with a `CommitRecord` after each commit, on the commit thread.

    Raises:
        TreeError: the run in the bucket publishes another tree.
        RunError: the bucket holds another run than `run`.
        BucketError: the bucket cannot be read or written.

    Thread-safe. Collective: no. Close it, or use it as a context manager: at close
    everything handed over is committed.

    Example:
        >>> pub = jdelta.Publisher("/data/run", params)        # doctest: +SKIP
        >>> for step in range(100):                            # doctest: +SKIP
        ...     params, opt_state, delta = train_step(params, opt_state, batch())
        ...     pub.publish(delta, step=step, params=params)
        >>> pub.close()                                        # doctest: +SKIP
    """

    def __init__(
        self,
        bucket: Bucket | str | os.PathLike[str],
        params: Any,
        *,
        anchor_every: int | None = None,
        anchor_share: float = 2.0,
        when_behind: WhenBehind = "merge",
        spool: str | Path | None = None,
        spool_bytes: int = 16 << 30,
        run: str | None = None,
        step: int | None = None,
        on_commit: Callable[[CommitRecord], None] | None = None,
    ):
        """Claims the run's next epoch and takes a copy of `params`."""
        self._bucket = open_bucket(bucket)
        # All that can be wrong is, before the claim stops an earlier publisher.
        AnchorMaker.check(anchor_every, anchor_share)
        step = _checked_step(step)
        leaves = source.named_leaves(params)
        self._specs = source.specs_of(leaves)
        folder = None if spool is None else Path(spool)
        self._backlog = Backlog(self._specs, when_behind, folder, spool_bytes)
        first = source.snapshot(leaves)
        self._ledger = Ledger()
        self._epoch = claim_epoch(self._bucket, self._specs, run)
        self._anchors = AnchorMaker(
            self._epoch,
            self._ledger,
            every=anchor_every,
            share=anchor_share,
            on_damage=self._ask_whole,
        )
        self._committer = Committer(
            self._epoch,
            self._specs,
            self._backlog,
            self._ledger,
            self._anchors,
            self._ask_whole,
            on_commit,
        )
        # Guarded by the ledger's condition.
        self._incoming: deque[_Handed] = deque()
        self._copying = False
        self._asked: JDeltaError | None = None  # why whole weights must come next
        self._dropping = False  # deltas are useless until whole weights come
        self._checked: Any = None  # the spec of the last delta that was checked
        self._rescue: _Rescue | None = None  # of the last publish
        # Held while something is handed over; the user's `params()` runs under it.
        self._handing = threading.RLock()

        self._follower = Follower(self._specs)
        self._follower.reset(first)
        self._committer.start(Item(changes=None, whole=first, step=step, merged=0))
        self._thread = threading.Thread(
            target=self._copy_loop, name="jdelta-copy", daemon=True
        )
        self._thread.start()
        self._at_exit = _close_at_exit(self)

    @property
    def run(self) -> str:
        """The run's id."""
        return self._epoch.run

    @property
    def epoch(self) -> int:
        """The epoch this publisher claimed."""
        return self._epoch.number

    @property
    def version(self) -> int | None:
        """The newest committed version, or None before the first."""
        tip = self._epoch.tip
        return None if tip is None else tip.version

    def publish(
        self, delta: Any, *, step: int | None = None, params: Any = None
    ) -> None:
        """Hands a delta over and returns; it becomes a version in the background.

        Args:
            delta: A `jdelta.Delta` (an output of the jitted step, not waited for), or a
                dict of `jdelta.wire.changes.Changes` by published name, which is
                copied. Each starts from what the one before led to. One that does not
                is left out and whole weights are asked for: with deltas of
                `jdelta.extract` always, with others as far as their bits before differ
                from a sample of 4 M published elements (all, in a smaller tree).
            step: The trainer's step, for the manifest: a host integer.
            params: The weights after this step, in the published dtypes, or a function
                that returns them. Looked at only when whole weights are needed (a delta
                overflowed its capacity or did not follow, the chain in the bucket was
                damaged, or the deltas that wait for it take more memory than weights):
                then they are copied on the device, without waiting, and written as an
                anchor. Kept until the delta is on the host.

        Waits only while `MAX_HANDED` deltas are on their way from the device.

        Raises:
            PublishError: something failed in the background since the last call that
                somebody must act on (no permission, a full disk). This delta was
                accepted all the same and committing is retried. A bucket that cannot be
                reached is retried without an error: see `stats().trouble`.
            DeltaOverflowError, GapError: whole weights are needed, because a delta did
                not fit or did not follow, and `params` was not given; the delta was not
                accepted.
            TreeError: not a delta of the published tree; not accepted, and nothing is
                changed by the call.
            FencedError: another publisher took over; nothing more is accepted.
        """
        at = time.perf_counter()
        step = _checked_step(step)
        with self._handing:
            self._ledger.check(self._bucket.url, self.version)
            self._check(delta)
            heavy = params is not None and self._backlog.heavy
            if self._asked is not None or heavy:
                # Older weights cannot make up for a delta that is left out now.
                self._rescue = None
                self._hand_whole(_Rescue(params, step, delta), at)
            else:
                delta = source.own_delta(delta)
                with self._ledger.changed:
                    self._make_room()
                    self._incoming.append(_Handed(delta, None, step, at))
                    self._rescue = _Rescue(params, step, delta)
                    self._ledger.changed.notify_all()
            self._ledger.count("published")
        failure = self._ledger.take_failure()
        if failure is not None:
            raise PublishError(
                f"publishing to {self._bucket.url} failed in the background "
                f"(this delta was accepted, committing is retried): {failure}"
            ) from failure

    def flush(self, timeout: float = 60.0) -> int:
        """Blocks until everything handed over is committed; returns the version.

        Args:
            timeout: Seconds.

        Raises:
            WaitTimeoutError: the bucket did not take it in time.
            PublishError: it cannot be committed.
            DeltaOverflowError, GapError: whole weights are needed, and no `params` came
                with the last `publish` or they are gone.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._handing:
                self._ledger.check(self._bucket.url, self.version)
                if self._asked is not None and not self._waiting():
                    rescue = self._rescue or _Rescue(None, None, None)
                    self._hand_whole(rescue, time.perf_counter())
            with self._ledger.changed:
                if not self._waiting() and self._asked is None:
                    self._ledger.check(self._bucket.url, self.version)
                    return self.version or 0
                left = deadline - time.monotonic()
                if left <= 0:
                    failure = self._ledger.trouble or self._ledger.failure
                    raise WaitTimeoutError(
                        f"{self._bucket.url} did not take everything within "
                        f"{timeout:g} s: {self._waiting()} deltas wait, version "
                        f"{self.version} is the newest"
                        + (f" ({failure})" if failure else "")
                    )
                if self._waiting():
                    self._ledger.changed.wait(left)

    def close(self, timeout: float = 60.0) -> None:
        """Commits what was handed over and ends the threads.

        Args:
            timeout: Seconds to wait for the bucket.

        Raises:
            PublishError: something could not be committed; readers stay at the last
                committed version, which is whole.
            WaitTimeoutError: the bucket did not take everything in time.
            DeltaOverflowError, GapError: see `flush`.
        """
        with self._ledger.changed:
            if self._ledger.closed:
                return
        deadline = time.monotonic() + timeout
        try:
            self.flush(timeout)
            self._anchors.join(deadline - time.monotonic())
        finally:
            with self._ledger.changed:
                self._ledger.closed = True
                self._ledger.changed.notify_all()
            left = max(1.0, deadline - time.monotonic())
            for part in (self._thread, self._committer):
                part.join(left)
            self._backlog.close()
            self._rescue = None
            atexit.unregister(self._at_exit)
        failure = self._ledger.take_failure()
        if failure is not None:
            raise PublishError(
                f"every version was committed to {self._bucket.url}, but: {failure}"
            ) from failure

    def __enter__(self) -> Publisher:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Closes; an error of the training loop is not masked by one of closing."""
        if kind is None:
            self.close()
            return
        with contextlib.suppress(JDeltaError):
            self.close()

    def stats(self) -> PublisherStats:
        """Counters since this publisher was opened."""
        with self._ledger.changed:
            counters = self._ledger.counters
            return PublisherStats(
                versions=counters.get("versions", 0),
                published=counters.get("published", 0),
                merged=counters.get("merged", 0),
                overflowed=counters.get("overflowed", 0),
                gaps=counters.get("gaps", 0),
                failures=counters.get("failures", 0),
                trouble=None
                if self._ledger.trouble is None
                else str(self._ledger.trouble),
                waiting=self._waiting(),
                bytes_written=self._epoch.written(),
                times=dict(self._ledger.times),
            )

    # -- the hand-over

    def _waiting(self) -> int:
        with self._ledger.changed:
            busy = int(self._copying) + int(self._committer.busy)
            return len(self._incoming) + len(self._backlog) + busy

    def _make_room(self) -> None:
        """Bounds the deltas that hold device memory; never waits for the bucket."""
        self._ledger.changed.wait_for(
            lambda: (
                len(self._incoming) < MAX_HANDED
                or self._ledger.closed
                or self._ledger.fatal
            )
        )
        self._ledger.check(self._bucket.url, self.version)

    def _check(self, delta: Any) -> None:
        """Checks a delta's tree (once for each compiled step)."""
        source.refuse_traced(delta)
        spec = getattr(delta, "spec", None)
        if spec is None or spec is not self._checked:
            source.check_delta(delta, self._specs)
            self._checked = spec

    def _hand_whole(self, rescue: _Rescue, at: float) -> None:
        """Hands whole weights over; the caller holds `_handing`."""
        asked, params = (
            self._asked or PublishError("the bucket is behind"),
            rescue.params,
        )
        if params is None:
            raise type(asked)(
                f"whole weights are needed: {asked}; call publish with params= (the "
                "weights after the step); a delta alone is not accepted"
            )
        params = params() if callable(params) else params
        leaves = source.named_leaves(params)
        if any(getattr(leaf, "is_deleted", bool)() for leaf in leaves.values()):
            raise type(asked)(
                f"whole weights are needed: {asked}; the last params were donated "
                "since: call publish once more with params="
            )
        if source.specs_of(leaves) != self._specs:
            raise TreeError(
                "params is not the published tree: pass the weights in the published "
                "dtypes (jdelta.published(opt_state, params) for a wrapped optimizer)"
            )
        whole = source.device_copy(leaves)
        with self._ledger.changed:
            # Deltas that still wait hold nothing that these weights do not.
            self._incoming.append(_Handed(rescue.delta, whole, rescue.step, at))
            self._asked = self._rescue = None
            self._ledger.changed.notify_all()

    def _ask_whole(self, asked: JDeltaError) -> None:
        """Deltas are dropped until whole weights come (any thread)."""
        with self._ledger.changed:
            self._dropping = True
            if not any(handed.whole is not None for handed in self._incoming):
                self._asked = self._asked or asked
            self._ledger.changed.notify_all()

    # -- the copy thread

    def _copy_loop(self) -> None:
        changed = self._ledger.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._incoming or self._ledger.closed)
                if not self._incoming:
                    return
                handed = self._incoming.popleft()
                self._copying = True
                changed.notify_all()
            try:
                self._take(handed)
            except (DeltaOverflowError, GapError) as error:
                _log.warning("a whole version comes next: %s", error)
                self._ledger.count(
                    "gaps" if isinstance(error, GapError) else "overflowed"
                )
                self._ask_whole(error)
            except Exception as error:  # a failed device array, a full spool
                self._ledger.fail(error)
                self._ask_whole(PublishError(f"a delta was lost ({error})"))
            del handed  # lets go of the device's buffers
            with changed:
                self._copying = False
                changed.notify_all()

    def _take(self, handed: _Handed) -> None:
        """Copies what was handed over to the host, into the backlog."""
        start = time.perf_counter()
        changes = whole = None
        if handed.whole is not None:
            whole = source.host_bits(handed.whole)
            self._follower.reset(whole, source.marks_of(handed.delta))
            with self._ledger.changed:
                self._dropping = False
        else:
            with self._ledger.changed:
                if self._dropping:
                    return
            changes = source.to_changes(handed.delta)
            self._follower.check(changes, source.marks_of(handed.delta))
        item = Item(
            changes=changes,
            whole=whole,
            step=handed.step,
            handed=handed.at,
            copy_seconds=time.perf_counter() - start,
        )
        try:
            if self._backlog.push(item):
                self._ledger.count("merged")
        except StateMismatchError as error:
            raise GapError(
                f"this delta does not follow the last one: {error}"
            ) from None
        with self._ledger.changed:
            # Its weights are safe: whatever the user's `params` holds may go.
            if self._rescue is not None and self._rescue.delta is handed.delta:
                self._rescue = None
        self._ledger.spend("copy", item.copy_seconds)


def _checked_step(step: Any) -> int | None:
    if step is None:
        return None
    number = operator.index(step)
    if not 0 <= number <= MAX_INT:
        raise ValueError(f"step must be 0 to {MAX_INT}, got {number}")
    return number


def _close_at_exit(publisher: Publisher) -> Callable[[], None]:
    """Closes a forgotten publisher when the interpreter ends."""
    reference = weakref.ref(publisher)

    def close() -> None:
        forgotten = reference()
        if forgotten is not None:
            try:
                forgotten.close()
            except JDeltaError as error:
                _log.error("%s", error)

    atexit.register(close)
    return close
