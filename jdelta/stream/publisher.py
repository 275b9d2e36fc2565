"""The writing end: `publish` hands over and returns; threads do the rest.

Three threads, none of which runs a collective or a jitted function: one copies deltas
from the device, one encodes and commits, and now and then one rebuilds an anchor from
the chain. Each reads only memory that cannot be donated away.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdelta.bucket import Bucket, open_bucket
from jdelta.errors import (
    BucketError,
    DeltaOverflowError,
    FormatError,
    JDeltaError,
    PublishError,
    TreeError,
    WaitTimeoutError,
)
from jdelta.stream import source
from jdelta.stream.backlog import Backlog, Item, WhenBehind
from jdelta.stream.chain import Chain
from jdelta.stream.commit import Attempt, Epoch, claim_epoch, create
from jdelta.stream.encode import encode_anchor, encode_delta, full_digests
from jdelta.stream.fetch import Meter
from jdelta.stream.rebuild import rebuild
from jdelta.stream.records import CommitRecord, PublisherStats
from jdelta.wire.manifest import Manifest, VersionId

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 10.0


@dataclasses.dataclass
class _Handed:
    """What `publish` took: a delta, or copies of whole weights."""

    delta: Any
    whole: dict[str, Any] | None
    step: int | None
    at: float


class Publisher:
    """Streams a trainer's weights into a bucket, a version for every `publish`.

    Opening it claims the run's next epoch (from then on no earlier publisher of the run
    can commit) and copies `params` to host memory. If they equal the newest version,
    the run continues with deltas; else an anchor is written first.

    Args:
        bucket: The run's URL (a path, `file://`, `memory://`) or a bucket.
        params: The weights readers should hold now: a tree of `jax.Array` (each fully
            addressable) or a dict of NumPy arrays, in the published dtypes. For a
            wrapped optimizer this is `jdelta.published(opt_state)`. Read before this
            returns; the caller may donate them afterwards.
        anchor_every: Make an anchor every so many versions. None: only by bytes.
        anchor_share: Make an anchor when the deltas since the last one weigh this many
            times an anchor. Anchors are rebuilt from the bucket in the background;
            neither training nor the stream of deltas waits.
        when_behind: What to do while the bucket is slower than training. "merge":
            waiting deltas become one version. "spill": each is kept, on disk.
        spool: Folder for "spill"; None for a temporary one.
        spool_bytes: Bound on the spool; past it the newest two are merged.
        run: Insist on this run id (and create the run with it).
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
        bucket: Bucket | str,
        params: Any,
        *,
        anchor_every: int | None = None,
        anchor_share: float = 2.0,
        when_behind: WhenBehind = "merge",
        spool: str | Path | None = None,
        spool_bytes: int = 16 << 30,
        run: str | None = None,
        on_commit: Callable[[CommitRecord], None] | None = None,
    ):
        """Claims the run's next epoch and takes a copy of `params`."""
        if anchor_every is not None and anchor_every < 1:
            raise ValueError(f"anchor_every must be at least 1, got {anchor_every}")
        if not anchor_share > 0:
            raise ValueError(f"anchor_share must be positive, got {anchor_share}")
        self._backlog = Backlog(
            when_behind, None if spool is None else Path(spool), spool_bytes
        )
        self._bucket = open_bucket(bucket) if isinstance(bucket, str) else bucket
        leaves = source.named_leaves(params)
        self._specs = source.specs_of(leaves)
        self._elements = sum(spec.size for spec in self._specs.values())
        self._epoch: Epoch = claim_epoch(self._bucket, self._specs, run)
        first = Item(changes=None, whole=source.snapshot(leaves), step=None, merged=0)
        self._anchor_every = anchor_every
        self._anchor_share = anchor_share
        self._on_commit = on_commit

        # Everything below is guarded by `_changed`.
        self._changed = threading.Condition()
        self._incoming: deque[_Handed] = deque()
        self._copying = False
        self._committing = True  # the first item is on its way
        self._closed = False
        self._failure: BaseException | None = None  # not surfaced yet
        self._fatal: BaseException | None = None  # nothing more can be committed
        self._dropping = False  # the copy thread's: wait for whole weights
        self._needs_whole: str | None = None  # why the next publish must bring them
        self._checked: Any = None  # the spec of the last delta that was checked
        self._params: Any = None  # of the last publish; donated ones are not used
        self._published = self._merged = self._overflowed = self._failures = 0
        self._versions = 0
        self._times: dict[str, float] = {}
        self._retrying: BaseException | None = None
        self._since_anchor = [0, 0]  # versions, bytes
        self._anchor_thread: threading.Thread | None = None

        self._threads = [
            threading.Thread(target=self._copy_loop, name="jdelta-copy", daemon=True),
            threading.Thread(
                target=self._commit_loop,
                args=([first],),
                name="jdelta-commit",
                daemon=True,
            ),
        ]
        for thread in self._threads:
            thread.start()
        self._atexit = _close_at_exit(self)

    # -- the trainer's side

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
                dict of `jdelta.wire.Changes` by published name. Deltas follow each
                other without gaps.
            step: The trainer's step, for the manifest.
            params: The weights after this step, in the published dtypes. Looked at only
                when whole weights are needed (an earlier delta overflowed its
                capacity, or the chain in the bucket was damaged): then they are copied
                on the device, without waiting, and written as an anchor.

        Raises:
            PublishError: something failed in the background since the last call. This
                delta was accepted all the same and committing is retried.
            DeltaOverflowError: whole weights are needed and `params` was not given; the
                delta was not accepted.
            TreeError: not a delta of the published tree; not accepted.
            FencedError: another publisher took over; nothing more is accepted.
        """
        at = time.perf_counter()
        with self._changed:
            self._raise_if_over()
            if self._needs_whole is not None:
                self._hand_whole(params, step, at)
            else:
                spec = getattr(delta, "spec", None)
                if spec is None or spec is not self._checked:
                    try:
                        source.check_delta(delta, self._specs)
                    except TreeError as error:
                        self._needs_whole = f"a delta was refused ({error})"
                        raise
                    self._checked = spec
                if spec is not None:
                    delta.start_copy()
                self._incoming.append(_Handed(delta, None, step, at))
            self._params = params
            self._published += 1
            self._changed.notify_all()
            failure, self._failure = self._failure, None
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
            DeltaOverflowError: whole weights are needed and the last `params` given to
                `publish` are gone.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._fatal is not None:
                    raise self._fatal_error()
                if self._needs_whole is not None and not self._busy():
                    self._hand_whole(self._params, None, time.perf_counter())
                    self._changed.notify_all()
                if not self._busy():
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(
                        f"{self._bucket.url} did not take everything within "
                        f"{timeout:g} s: {self._waiting()} deltas wait, version "
                        f"{self.version} is the newest"
                        + (f" ({self._failure})" if self._failure else "")
                    )
                self._changed.wait(left)
            return self.version or 0

    def close(self, timeout: float = 60.0) -> None:
        """Commits what was handed over and ends the threads.

        Args:
            timeout: Seconds to wait for the bucket.

        Raises:
            PublishError: something could not be committed; readers stay at the last
                committed version, which is whole.
            WaitTimeoutError: the bucket did not take everything in time.
            DeltaOverflowError: see `flush`.
        """
        if self._closed:
            return
        started = time.monotonic()
        try:
            self.flush(timeout)
            with self._changed:
                failure, self._failure = self._failure, None
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            left = max(1.0, timeout - (time.monotonic() - started))
            for thread in [*self._threads, self._anchor_thread]:
                if thread is not None and thread is not threading.current_thread():
                    thread.join(left)
            self._backlog.close()
            self._params = None
            atexit.unregister(self._atexit)
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
        with self._changed:
            return PublisherStats(
                versions=self._versions,
                published=self._published,
                merged=self._merged,
                overflowed=self._overflowed,
                failures=self._failures,
                waiting=self._waiting(),
                bytes_written=self._epoch.written(),
                times=dict(self._times),
            )

    # -- state, under the lock

    def _busy(self) -> bool:
        return bool(self._waiting())

    def _waiting(self) -> int:
        busy = int(self._copying) + int(self._committing)
        return len(self._incoming) + len(self._backlog) + busy

    def _raise_if_over(self) -> None:
        if self._closed:
            raise PublishError("this Publisher is closed: open a new one")
        if self._fatal is not None:
            raise self._fatal_error()

    def _fatal_error(self) -> JDeltaError:
        fatal = self._fatal
        if isinstance(fatal, JDeltaError) and not isinstance(fatal, FormatError):
            return fatal
        return PublishError(
            f"publishing to {self._bucket.url} stopped: {fatal!r}; readers stay at "
            f"version {self.version}. Open a new Publisher to continue the run"
        )

    def _hand_whole(self, params: Any, step: int | None, at: float) -> None:
        if params is None:
            raise DeltaOverflowError(
                f"whole weights are needed because {self._needs_whole}: call publish "
                "with params= (the weights after the step); this delta was not accepted"
            )
        leaves = source.named_leaves(params)
        specs = source.specs_of(leaves)
        if specs != self._specs:
            raise TreeError(
                "params is not the published tree: pass the weights in the published "
                "dtypes (jdelta.published(opt_state) for a wrapped optimizer)"
            )
        if any(getattr(leaf, "is_deleted", bool)() for leaf in leaves.values()):
            raise DeltaOverflowError(
                f"whole weights are needed because {self._needs_whole}, and the last "
                "params were donated since: call publish once more with params="
            )
        whole = source.device_copy(leaves)
        self._incoming.append(_Handed(None, whole, step, at))
        self._needs_whole = None

    def _ask_whole(self, why: str) -> None:
        self._dropping = True
        if not any(handed.whole is not None for handed in self._incoming):
            self._needs_whole = why

    def _spend(self, stage: str, seconds: float) -> None:
        self._times[stage] = self._times.get(stage, 0.0) + seconds

    # -- the copy thread

    def _copy_loop(self) -> None:
        while True:
            with self._changed:
                while not self._incoming and not self._closed:
                    self._changed.wait()
                if not self._incoming:
                    return
                handed = self._incoming.popleft()
                self._copying = True
            item = None
            try:
                item = self._copy(handed)
            except DeltaOverflowError as error:
                with self._changed:
                    self._overflowed += 1
                    self._ask_whole(str(error))
                _log.warning("a whole version comes next: %s", error)
            except Exception as error:  # a failed or deleted device array
                with self._changed:
                    self._failures += 1
                    self._failure = error
                    self._ask_whole(f"a delta could not be copied ({error})")
            del handed  # lets go of the device's buffers
            merged = False
            try:
                if item is not None and (item.whole is not None or not self._dropping):
                    merged = self._backlog.push(item)  # may take long: no lock held
                    self._dropping = False
            except Exception as error:
                with self._changed:
                    self._failures += 1
                    self._failure = error
                    self._ask_whole(f"a delta could not be kept ({error})")
            with self._changed:
                self._copying = False
                self._merged += merged
                if item is not None:
                    self._spend("copy", item.copy_seconds)
                self._changed.notify_all()

    @staticmethod
    def _copy(handed: _Handed) -> Item:
        start = time.perf_counter()
        changes = whole = None
        if handed.whole is not None:
            whole = source.host_bits(handed.whole)
        else:
            changes = source.to_changes(handed.delta)
        return Item(
            changes=changes,
            whole=whole,
            step=handed.step,
            handed=handed.at,
            copy_seconds=time.perf_counter() - start,
        )

    # -- the commit thread

    def _commit_loop(self, first: list[Item]) -> None:
        try:
            self._begin(first.pop())
            while True:
                with self._changed:
                    self._committing = False
                    self._changed.notify_all()
                    while not len(self._backlog):
                        if self._closed and not self._copying and not self._incoming:
                            return
                        self._changed.wait()
                    if self._closed:
                        return  # close gave up on what is left
                    self._committing = True
                item = self._backlog.pop()
                if not self._commit_item(item):
                    return
        except BaseException as error:
            _log.exception("publishing to %s stopped", self._bucket.url)
            with self._changed:
                self._fatal = error
        finally:
            with self._changed:
                self._committing = False
                self._changed.notify_all()

    def _begin(self, first: Item) -> None:
        """Continues the run if the trainer's weights are its newest version's."""
        tip = self._epoch.tip
        digests = full_digests(first.whole or {})
        if tip is not None and all(
            tip.tensors[name].digest == value for name, value in digests.items()
        ):
            self._count_chain(tip)
            return
        if tip is not None:
            _log.warning(
                "the trainer's weights are not version %d of %s: writing an anchor",
                tip.version,
                self._bucket.url,
            )
        self._commit_item(first, digests)

    def _commit_item(self, item: Item, digests: dict[str, int] | None = None) -> bool:
        """Encodes and delivers; False if close came first."""
        start = time.perf_counter()
        tip = self._epoch.tip
        vid = VersionId(self._epoch.number, self._epoch.next_version)
        with contextlib.ExitStack() as stack:
            if item.whole is not None:
                attempt = stack.enter_context(
                    encode_anchor(
                        item.whole,
                        self._specs,
                        digests or full_digests(item.whole),
                        self._bucket,
                        run=self._epoch.run,
                        vid=vid,
                        step=item.step,
                    )
                )
            elif tip is not None:
                attempt = encode_delta(
                    item.changes or {}, self._specs, tip, vid, item.step
                )
            else:
                raise FormatError("a delta cannot be the first version")
            item.changes = item.whole = None
            times = {"copy": item.copy_seconds, "encode": time.perf_counter() - start}
            if not self._deliver(attempt, times):
                return False
        times["total"] = time.perf_counter() - item.handed
        self._record(attempt, item, times)
        self._plan_anchor(attempt.manifest)
        return True

    def _deliver(self, attempt: Attempt, times: dict[str, float]) -> bool:
        """Uploads, commits and points, as often as it takes; False if closed first."""
        wait = _FIRST_RETRY_SECONDS
        steps = [
            ("upload", lambda: self._epoch.upload(attempt)),
            ("commit", lambda: self._epoch.commit(attempt)),
            ("commit", self._epoch.point),
        ]
        while steps:
            stage, action = steps[0]
            start = time.perf_counter()
            try:
                action()
                steps.pop(0)
                wait = _FIRST_RETRY_SECONDS
            except BucketError as error:
                if not self._pause(error, wait):
                    return False
                wait = min(2 * wait, _LAST_RETRY_SECONDS)
            times[stage] = times.get(stage, 0.0) + time.perf_counter() - start
        with self._changed:
            if isinstance(self._failure, BucketError):
                self._failure = None  # it went through before anybody had to know
            self._retrying = None
        return True

    def _pause(self, error: BucketError, seconds: float) -> bool:
        """Notes a failure once an episode and waits; False if close came."""
        with self._changed:
            self._failures += 1
            if self._retrying is None or str(self._retrying) != str(error):
                _log.warning("retrying: %s", error)
                self._failure = error
            self._retrying = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed, seconds)
            if self._closed:
                self._fatal = self._fatal or error
                return False
            return True

    def _record(self, attempt: Attempt, item: Item, times: dict[str, float]) -> None:
        manifest = attempt.manifest
        record = CommitRecord(
            version=manifest.version,
            epoch=manifest.epoch,
            step=manifest.step,
            kind=manifest.kind,
            merged=item.merged,
            changed=sum(entry.changed for entry in manifest.tensors.values()),
            elements=self._elements,
            bytes_written={
                manifest.kind: _object_bytes(manifest),
                "manifest": len(attempt.document),
            },
            times=times,
        )
        with self._changed:
            self._versions += 1
            for stage in ("encode", "upload", "commit"):
                self._spend(stage, times.get(stage, 0.0))
        if self._on_commit is not None:
            try:
                self._on_commit(record)
            except Exception:
                _log.exception("on_commit failed for version %d", record.version)

    # -- anchors, rebuilt from the chain

    def _count_chain(self, tip: Manifest) -> None:
        """Versions and bytes since the last anchor, for a run that is resumed."""
        chain = Chain(self._bucket)
        chain.read_run()
        chain.refresh_epochs()
        with contextlib.suppress(JDeltaError):  # only sets when the next anchor is due
            for manifest in chain.path_back(tip.id):
                if manifest.kind == "anchor" or chain.alternate_of(manifest):
                    return
                self._since_anchor[0] += 1
                self._since_anchor[1] += _object_bytes(manifest)

    def _plan_anchor(self, manifest: Manifest) -> None:
        if manifest.kind == "anchor":
            self._since_anchor = [0, 0]
            return
        self._since_anchor[0] += 1
        self._since_anchor[1] += _object_bytes(manifest)
        versions, size = self._since_anchor
        whole = sum(spec.nbytes for spec in self._specs.values())
        due = size >= self._anchor_share * whole or (
            self._anchor_every is not None and versions >= self._anchor_every
        )
        running = self._anchor_thread is not None and self._anchor_thread.is_alive()
        if not due or running:
            return
        self._since_anchor = [0, 0]
        self._anchor_thread = threading.Thread(
            target=self._make_anchor,
            args=(manifest,),
            name="jdelta-anchor",
            daemon=True,
        )
        self._anchor_thread.start()

    def _make_anchor(self, manifest: Manifest) -> None:
        start = time.perf_counter()
        try:
            chain = Chain(self._bucket)
            chain.read_run()
            bits, _ = rebuild(chain, manifest.id, Meter())
            digests = {name: e.digest for name, e in manifest.tensors.items()}
            with encode_anchor(
                bits,
                self._specs,
                digests,
                self._bucket,
                run=manifest.run,
                vid=manifest.id,
                step=manifest.step,
                alternate=True,
            ) as attempt:
                bits.clear()
                for name, data in attempt.objects:
                    self._bucket.put(name, data)
                create(self._bucket, attempt.name, attempt.document)
                self._epoch.count("anchor", _object_bytes(attempt.manifest))
                self._epoch.count("manifest", len(attempt.document))
        except Exception as error:
            with self._changed:
                self._failures += 1
                self._failure = error
                if isinstance(error, FormatError):
                    self._ask_whole(f"the chain in the bucket is damaged ({error})")
        with self._changed:
            self._spend("anchor", time.perf_counter() - start)


def _object_bytes(manifest: Manifest) -> int:
    return sum(ref.size for ref in manifest.objects)


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
