"""The writing end: `publish` hands over and returns; threads do the rest.

Three threads, none of which runs a collective or a jitted function: one copies deltas
from the device (`copier`), one encodes and commits (`committer`), and now and then one
rebuilds an anchor from the chain (`anchors`).
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jdelta.bucket import Bucket, open_bucket
from jdelta.errors import BucketError, FencedError, JDeltaError, WaitTimeoutError
from jdelta.stream import source
from jdelta.stream.anchors import AnchorMaker
from jdelta.stream.backlog import Backlog, Item, WhenBehind
from jdelta.stream.commit import claim_epoch
from jdelta.stream.committer import Committer
from jdelta.stream.copier import Copier
from jdelta.stream.ledger import Ledger
from jdelta.stream.records import CommitRecord, PublisherStats
from jdelta.wire._documents import MAX_INT
from jdelta.wire.manifest import check_meta

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0
_SILENT_SECONDS = 1.0


class Publisher:
    """Streams a trainer's weights into a bucket, a version for every `publish`.

    Opening it claims the run's next epoch (from then on no earlier publisher of the run
    can commit) and copies `params` to host memory. A run that is there is continued:
    where `params` differ from its newest version, what differs becomes a version first.

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
        meta: Your own words on that version, as for `publish`.
        retry_seconds: How long a bucket that cannot be reached is tried again without a
            success in between; then publishing stops. `math.inf`: for ever.
        on_commit: Called with a `CommitRecord` after each commit, on the commit thread.
        on_failure: Called with the error when the bucket fails (once, until a version
            goes through again), an anchor cannot be made, or publishing stops; on the
            thread that failed.

    Raises:
        TreeError: the run in the bucket publishes another tree.
        RunError: the bucket holds another run than `run`.
        BucketError: the bucket cannot be read or written.

    Thread-safe. Collective: no. Close it, or use it as a context manager: at close
    everything handed over is committed. One that is dropped instead commits that in the
    background, with a ResourceWarning.

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
        meta: Mapping[str, Any] | None = None,
        retry_seconds: float = 3600.0,
        on_commit: Callable[[CommitRecord], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        """Claims the run's next epoch and takes a copy of `params`."""
        self._bucket = open_bucket(bucket)
        # All that can be wrong is, before the claim stops an earlier publisher.
        AnchorMaker.check(anchor_every, anchor_share)
        step, meta = _checked_step(step), check_meta(meta or {})
        leaves = source.named_leaves(params)
        self._specs = source.specs_of(leaves)
        folder = None if spool is None else Path(spool)
        self._backlog = Backlog(self._specs, when_behind, folder, spool_bytes)
        first = source.snapshot(leaves)
        self._epoch = claim_epoch(self._bucket, self._specs, run)
        self._ledger = Ledger(self._epoch, retry_seconds, on_failure)
        self._copier = Copier(self._specs, first, self._backlog, self._ledger)
        self._anchors = AnchorMaker(
            self._epoch,
            self._ledger,
            every=anchor_every,
            share=anchor_share,
            on_damage=self._copier.ask_whole,
        )
        self._committer = Committer(
            self._epoch,
            self._specs,
            self._backlog,
            self._ledger,
            self._anchors,
            self._copier.ask_whole,
            on_commit,
        )
        self._committer.start(
            Item(changes=None, whole=first, step=step, meta=meta, merged=0)
        )
        self._copier.start()
        # No thread holds the publisher itself: when it is dropped, they end.
        at_exit = _close_at_exit(self)
        self._dropped = weakref.finalize(
            self, _leave, self._ledger, self._committer, self._bucket.url, at_exit
        )
        self._dropped.atexit = False
        self._at_exit = at_exit

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
        last = self._epoch.last
        return None if last is None else last.version

    def publish(
        self,
        delta: Any,
        *,
        step: int | None = None,
        params: Any = None,
        meta: Mapping[str, Any] | None = None,
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
            meta: Your own words on the version (learning rate, name of the policy):
                a dict that JSON can hold, in at most 4 KiB. Readers find it in
                `Update.meta`. Where deltas are merged, the last one's.

        Waits only while `MAX_HANDED` deltas are on their way from the device.

        Raises:
            PublishError: publishing stopped, for a reason that somebody must act on: no
                permission, a full disk, a bucket out of reach for `retry_seconds`.
                Readers stay at the last committed version; a new Publisher continues
                the run. Until then a bucket that cannot be reached is retried without
                an error: see `stats().trouble` and `on_failure`.
            DeltaOverflowError, GapError: whole weights are needed, because a delta did
                not fit or did not follow, and `params` was not given; the delta was not
                accepted.
            TreeError: not a delta of the published tree; not accepted, and nothing is
                changed by the call.
            TypeError, ValueError: a step or a meta that cannot be kept; not accepted.
            FencedError: another publisher took over; nothing more is accepted.
        """
        self._copier.hand(delta, _checked_step(step), check_meta(meta or {}), params)

    def flush(self, timeout: float = _CLOSE_SECONDS) -> int:
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
            if not self._waiting():
                self._copier.hand_rescue()
            with self._ledger.changed:
                if not self._waiting() and self._copier.asked is None:
                    self._ledger.check()
                    return self.version or 0
                left = deadline - time.monotonic()
                if left <= 0:
                    failure = self._ledger.trouble
                    raise WaitTimeoutError(
                        f"{self._bucket.url} did not take everything within "
                        f"{timeout:g} s: {self._waiting()} deltas wait, version "
                        f"{self.version} is the newest"
                        + (f" ({failure})" if failure else "")
                    )
                if self._waiting():
                    self._ledger.changed.wait(left)

    def close(self, timeout: float = _CLOSE_SECONDS, *, ended: bool = True) -> None:
        """Commits what was handed over and ends the threads.

        Args:
            timeout: Seconds to wait for the bucket.
            ended: Tell followers that the run is over: their loops over `updates` end.
                False where it goes on soon in another process. A context manager that
                is left by an error, and the end of the interpreter, say False.

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
            self._flush_aloud(timeout)
            self._anchors.join(deadline - time.monotonic())
            if ended:
                self._end()
        except BaseException:
            deadline = time.monotonic()
            raise
        finally:
            with self._ledger.changed:
                self._ledger.closed = True
                self._ledger.changed.notify_all()
            left = max(1.0, deadline - time.monotonic())
            for part in (self._copier, self._committer):
                part.join(left)
            self._copier.forget()
            self._dropped.detach()
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Publisher:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Closes; an error of the training loop is not masked by one of closing."""
        if kind is None:
            self.close()
            return
        try:
            self.close(ended=False)
        except (JDeltaError, KeyboardInterrupt) as error:
            _log.warning("the publisher was closed with work left: %r", error)

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

    def _flush_aloud(self, timeout: float) -> None:
        """As `flush`; says what is waited for when that takes more than a moment."""
        try:
            self.flush(min(_SILENT_SECONDS, timeout))
        except WaitTimeoutError as error:
            left = timeout - _SILENT_SECONDS
            if left <= 0:
                raise
            _log.warning("%s; waiting %g s more, an interrupt ends it", error, left)
            self.flush(left)

    def _end(self) -> None:
        """Leaves the mark that nothing follows; without it followers wait on."""
        try:
            self._epoch.check_fence(self._epoch.next_version)
            self._epoch.point(closed=True)
        except (BucketError, FencedError) as error:
            _log.warning("followers are not told that the run is over: %s", error)

    def _waiting(self) -> int:
        with self._ledger.changed:
            busy = int(self._committer.busy)
            return self._copier.waiting + len(self._backlog) + busy


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
                forgotten.close(ended=False)
            except JDeltaError as error:
                _log.error("%s", error)

    atexit.register(close)
    return close


def _leave(
    ledger: Ledger, committer: Committer, url: str, at_exit: Callable[[], None]
) -> None:
    """Lets a dropped publisher's threads commit what was handed over, and end."""
    atexit.unregister(at_exit)
    atexit.register(committer.join, _CLOSE_SECONDS)
    with ledger.changed:
        ledger.left = True
        ledger.changed.notify_all()
    warnings.warn(
        f"a Publisher of {url} was dropped without close()", ResourceWarning, 2
    )
