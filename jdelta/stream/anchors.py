"""Anchors made beside the stream: rebuilt from the chain, when enough deltas piled up.

A chain is exact, so an anchor needs nothing from the trainer: neither the step nor the
stream of deltas waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from jdelta.errors import JDeltaError, PublishError
from jdelta.stream.chain import DAMAGE, Chain
from jdelta.stream.commit import Epoch, create
from jdelta.stream.encode import encode_anchor
from jdelta.stream.fetch import Meter
from jdelta.stream.ledger import Ledger
from jdelta.stream.rebuild import rebuild
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.state import State

_log = logging.getLogger(__name__)


class AnchorMaker:
    """Decides when an anchor is due and makes it in a thread of its own.

    Used by the commit thread only.

    Args:
        epoch: The publisher's epoch.
        ledger: Takes failures and times.
        every: An anchor every so many versions; None: only by bytes.
        share: An anchor when the deltas since the last weigh this many times one.
        on_damage: Told why, when the chain in the bucket proves damaged.
    """

    def __init__(
        self,
        epoch: Epoch,
        ledger: Ledger,
        *,
        every: int | None,
        share: float,
        on_damage: Callable[[JDeltaError], None],
    ):
        """Starts as after an anchor."""
        self._epoch = epoch
        self._ledger = ledger
        self._every = every
        self._share = share
        self._on_damage = on_damage
        self._versions = self._bytes = 0
        self._thread: threading.Thread | None = None

    @staticmethod
    def check(every: int | None, share: float) -> None:
        """Raises ValueError for options that mean nothing."""
        if every is not None and every < 1:
            raise ValueError(f"anchor_every must be at least 1, got {every}")
        if not share > 0:
            raise ValueError(f"anchor_share must be positive, got {share}")

    def resume(self, tip: VersionId) -> None:
        """Counts the versions and bytes since the last anchor of a resumed run."""
        chain = Chain(self._epoch.bucket)
        with contextlib.suppress(JDeltaError):  # only sets when the next one is due
            chain.read_run()
            chain.refresh_epochs()
            for manifest in chain.path_back(tip):
                if manifest.kind == "anchor" or chain.alternate_of(manifest):
                    return
                self._add(manifest)

    def committed(self, manifest: Manifest, state: State) -> None:
        """Takes note of a committed version; starts an anchor of it when due."""
        if manifest.kind == "anchor":
            self._versions = self._bytes = 0
            return
        self._add(manifest)
        due = self._bytes >= self._share * state.nbytes or (
            self._every is not None and self._versions >= self._every
        )
        if not due or (self._thread is not None and self._thread.is_alive()):
            return
        self._versions = self._bytes = 0
        thread = threading.Thread(
            target=self._make, args=(manifest.id,), name="jdelta-anchor", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending: no new threads
            return
        self._thread = thread

    def join(self, timeout: float) -> None:
        """Waits for an anchor that is being made."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _add(self, manifest: Manifest) -> None:
        self._versions += 1
        self._bytes += manifest.nbytes

    def _make(self, vid: VersionId) -> None:
        start = time.perf_counter()
        bucket = self._epoch.bucket
        try:
            chain = Chain(bucket)
            chain.read_run()
            bits, state = rebuild(chain, vid, Meter(), share=0.5)
            with encode_anchor(bits, state, bucket, alternate=True) as attempt:
                bits.clear()
                for name, data in attempt.objects:
                    bucket.put(name, data, move=True)
                create(bucket, attempt.name, attempt.document)
            self._epoch.count("anchor", attempt.manifest.nbytes)
            self._epoch.count("manifest", len(attempt.document))
        except Exception as error:
            _log.warning("no anchor of version %d", vid.version)
            if isinstance(error, DAMAGE):
                self._on_damage(
                    PublishError(f"the chain in the bucket is damaged ({error})")
                )
            if isinstance(error, JDeltaError | OSError | MemoryError):
                self._ledger.note(error)  # the next one may succeed
            else:
                self._ledger.stop(error)
        self._ledger.spend("anchor", time.perf_counter() - start)
