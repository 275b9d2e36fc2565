"""The commit thread: takes waiting items in order, encodes, uploads, commits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from jdelta.errors import (
    BucketError,
    FormatError,
    GapError,
    StateMismatchError,
)
from jdelta.stream.anchors import AnchorMaker
from jdelta.stream.backlog import Backlog, Item
from jdelta.stream.chain import DAMAGE, Chain
from jdelta.stream.commit import Attempt, Epoch
from jdelta.stream.encode import encode_anchor, encode_delta, full_digests
from jdelta.stream.ledger import Ledger
from jdelta.stream.records import CommitRecord
from jdelta.stream.resume import differences
from jdelta.wire.changes import Changes
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import VersionId
from jdelta.wire.state import State

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 10.0


class Committer:
    """Commits a publisher's backlog, one version at a time, in a thread of its own.

    An encoded version is kept until it is committed: whatever the bucket answers, the
    same bytes are tried again, and what is published meanwhile waits in the backlog.

    Args:
        epoch: The publisher's epoch.
        specs: The published tree.
        backlog: What waits.
        ledger: The publisher's shared state.
        anchors: Told of every commit.
        on_gap: Told of deltas that did not follow each other and are dropped.
        on_commit: The user's callback.
    """

    def __init__(
        self,
        epoch: Epoch,
        specs: Mapping[str, TensorSpec],
        backlog: Backlog,
        ledger: Ledger,
        anchors: AnchorMaker,
        on_gap: Callable[[GapError], None],
        on_commit: Callable[[CommitRecord], None] | None,
    ):
        """Prepares; `start` begins."""
        self._epoch = epoch
        self._specs = specs
        self._elements = sum(spec.size for spec in specs.values())
        self._backlog = backlog
        self._ledger = ledger
        self._anchors = anchors
        self._on_gap = on_gap
        self._on_commit = on_commit
        self.busy = True  # guarded by the ledger; the first item is on its way
        self._thread: threading.Thread | None = None

    def start(self, first: Item) -> None:
        """Starts with the trainer's whole weights, which may be the run's newest."""
        self._thread = threading.Thread(
            target=self._run, args=([first],), name="jdelta-commit", daemon=True
        )
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, first: list[Item]) -> None:
        changed = self._ledger.changed
        try:
            self._begin(first.pop())
            while True:
                with changed:
                    self.busy = False
                    changed.notify_all()
                    changed.wait_for(
                        lambda: (
                            len(self._backlog)
                            or self._ledger.closed
                            or self._ledger.drained
                        )
                    )
                    # Close waited for the backlog, or gave up on it.
                    if self._ledger.closed or not len(self._backlog):
                        return
                    self.busy = True
                try:
                    item = self._backlog.pop()
                except StateMismatchError as error:
                    self._on_gap(GapError(f"deltas do not follow each other: {error}"))
                    continue
                self._commit(item)
        except BaseException as error:
            self._ledger.stop(error)
        finally:
            self._backlog.close()
            with changed:
                self.busy = False
                changed.notify_all()

    def _begin(self, first: Item) -> None:
        """Continues the run with what differs from its newest version, if anything."""
        tip, whole = self._epoch.tip, first.whole or {}
        digests = full_digests(whole)
        if tip is not None:
            self._anchors.resume(tip.id)
            differ = [name for name in tip.specs if tip.digests[name] != digests[name]]
            if not differ:
                return
            _log.warning(
                "the trainer's weights are not version %d of %s: %d of %d tensors "
                "differ, which becomes a version",
                tip.version,
                self._epoch.bucket.url,
                len(differ),
                len(tip.specs),
            )
            first.changes = self._differences(tip, whole, differ)
            if first.changes is not None:
                first.whole = None
                whole.clear()
        self._commit(first, digests)

    def _differences(
        self, tip: State, whole: dict[str, np.ndarray], names: list[str]
    ) -> dict[str, Changes] | None:
        """Changes from the run's newest version; None where whole weights are less."""
        chain = Chain(self._epoch.bucket)
        chain.run = self._epoch.run
        try:
            found = self._insist(lambda: differences(chain, tip, whole, names))
        except DAMAGE as error:
            _log.warning("writing whole weights: %s", error)
            return None
        # At most: most changes take less than an element and a byte for where it is.
        size = sum(len(c.new) + c.new.nbytes for c in (found or {}).values())
        return found if size < tip.nbytes else None

    def _commit(self, item: Item, digests: dict[str, int] | None = None) -> None:
        """Encodes and delivers one version."""
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            # An anchor's files need room before the bucket is even asked.
            attempt = self._insist(
                lambda: stack.enter_context(self._encode(item, digests))
            )
            if item.whole is not None:
                item.whole.clear()  # whoever holds the dict, the memory goes now
            item.changes = item.whole = None
            times = {"copy": item.copy_seconds, "encode": time.perf_counter() - start}
            self._deliver(attempt, times)
        times["total"] = time.perf_counter() - item.handed
        self._record(attempt, item, times)
        self._anchors.committed(attempt.manifest, attempt.state)

    @contextlib.contextmanager
    def _encode(self, item: Item, digests: dict[str, int] | None) -> Iterator[Attempt]:
        tip = self._epoch.tip
        vid = VersionId(self._epoch.number, self._epoch.next_version)
        if item.whole is not None:
            digests = digests or full_digests(item.whole)
            state = State.new(
                self._epoch.run, vid, item.step, item.meta, self._specs, digests
            )
            with encode_anchor(item.whole, state, self._epoch.bucket) as attempt:
                yield attempt
        elif tip is not None:
            changes = item.changes or {}
            yield encode_delta(changes, tip, vid, item.step, item.meta)
        else:
            raise FormatError("a delta cannot be a run's first version")

    def _deliver(self, attempt: Attempt, times: dict[str, float]) -> None:
        """Uploads, commits and points."""
        start = time.perf_counter()
        for name, data in attempt.objects:
            self._insist(partial(self._epoch.upload, attempt.manifest.kind, name, data))
        uploaded = time.perf_counter()
        self._insist(lambda: self._epoch.commit(attempt))
        self._insist(self._epoch.point)
        times["upload"] = uploaded - start
        times["commit"] = time.perf_counter() - uploaded
        self._ledger.progressed(through=True)

    def _insist(self, action: Callable[[], _T]) -> _T:
        """Repeats what fails for a while; what it raises stops the publisher."""
        wait = _FIRST_RETRY_SECONDS
        while True:
            try:
                result = action()
            except BucketError as error:
                self._ledger.hold(error, wait)
                wait = min(2 * wait, _LAST_RETRY_SECONDS)
            else:
                self._ledger.progressed()
                return result

    def _record(self, attempt: Attempt, item: Item, times: dict[str, float]) -> None:
        manifest = attempt.manifest
        self._ledger.count("versions")
        for stage in ("encode", "upload", "commit"):
            self._ledger.spend(stage, times.get(stage, 0.0))
        if self._on_commit is None:
            return
        record = CommitRecord(
            version=manifest.version,
            epoch=manifest.epoch,
            step=manifest.step,
            kind=manifest.kind,
            merged=item.merged,
            changed=self._elements
            if manifest.kind == "anchor"
            else sum(entry.changed for entry in manifest.changes.values()),
            elements=self._elements,
            bytes_written={
                manifest.kind: manifest.nbytes,
                "manifest": len(attempt.document),
            },
            times=times,
        )
        try:
            self._on_commit(record)
        except Exception:
            _log.exception("on_commit failed for version %d", record.version)
