"""The copy thread: what was published comes from the device to the backlog, in order.

It runs no collective and no jitted function, and reads only memory that cannot be
donated away: the deltas themselves, and copies of whole weights made at the hand-over.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jdelta.errors import (
    DeltaOverflowError,
    GapError,
    JDeltaError,
    PublishError,
    StateMismatchError,
    TreeError,
)
from jdelta.stream import source
from jdelta.stream.backlog import Backlog, Item
from jdelta.stream.follow import Follower
from jdelta.stream.ledger import Ledger
from jdelta.wire.dtypes import TensorSpec

_log = logging.getLogger(__name__)

MAX_HANDED = 8
"""Deltas that may be on their way from the device, holding its memory."""


@dataclasses.dataclass
class _Handed:
    """A delta, or copies of whole weights and the delta they came with."""

    delta: Any
    whole: dict[str, Any] | None
    step: int | None
    meta: Mapping[str, Any]
    at: float


@dataclasses.dataclass
class _Rescue:
    """Whole weights to fall back on, until the delta they came with is safe."""

    params: Any
    step: int | None
    meta: Mapping[str, Any]
    delta: Any


class Copier:
    """Takes deltas and whole weights to the backlog, in a thread of its own.

    A delta that did not fit its capacity, or does not follow the one before, is left
    out, and so are those after it until whole weights come.

    Args:
        specs: The published tree.
        first: Flat bits by tensor: what is published before the first delta.
        backlog: Where they go.
        ledger: The publisher's shared state.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        first: Mapping[str, np.ndarray],
        backlog: Backlog,
        ledger: Ledger,
    ):
        """Prepares; `start` begins."""
        self._specs = specs
        self._backlog = backlog
        self._ledger = ledger
        self._follower = Follower(specs)
        self._follower.reset(first)
        # Guarded by the ledger's condition.
        self._incoming: deque[_Handed] = deque()
        self._copying = False
        self._asked: JDeltaError | None = None  # why whole weights must come next
        self._dropping = False  # deltas are useless until whole weights come
        self._rescue: _Rescue | None = None  # of the last delta
        # Held while something is handed over; the user's `params()` runs under it.
        self._handing = threading.RLock()
        self._checked: Any = None  # the spec of the last delta that was checked
        self._thread = threading.Thread(
            target=self._run, name="jdelta-copy", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the thread to end."""
        self._thread.join(timeout)

    @property
    def waiting(self) -> int:
        """What was handed over and is not in the backlog yet."""
        with self._ledger.changed:
            return len(self._incoming) + int(self._copying)

    @property
    def asked(self) -> JDeltaError | None:
        """Why whole weights must come next, or None."""
        return self._asked

    def hand(
        self, delta: Any, step: int | None, meta: Mapping[str, Any], params: Any
    ) -> None:
        """Takes a delta, or the whole weights that stand for it.

        Waits only while `MAX_HANDED` deltas are on their way from the device.

        Raises:
            TreeError: not a delta of the published tree, or not its weights.
            JDeltaError: whole weights are needed and `params` is None, or nothing more
                can be published.
        """
        at = time.perf_counter()
        with self._handing:
            self._ledger.check()
            self._check(delta)
            heavy = params is not None and self._backlog.heavy
            if self._asked is not None or heavy:
                # Older weights cannot make up for a delta that is left out now.
                self._rescue = None
                self._hand_whole(_Rescue(params, step, meta, delta), at)
            else:
                handed = _Handed(source.own_delta(delta), None, step, meta, at)
                with self._ledger.changed:
                    self._make_room()
                    self._incoming.append(handed)
                    self._rescue = _Rescue(params, step, meta, handed.delta)
                    self._ledger.changed.notify_all()
            self._ledger.count("published")

    def hand_rescue(self) -> None:
        """Hands over the weights that came last, if whole ones are asked for.

        Raises:
            JDeltaError: there are none.
        """
        with self._handing:
            self._ledger.check()
            if self._asked is not None:
                rescue = self._rescue or _Rescue(None, None, {}, None)
                self._hand_whole(rescue, time.perf_counter())

    def ask_whole(self, asked: JDeltaError) -> None:
        """Deltas are left out until whole weights come (any thread)."""
        with self._ledger.changed:
            self._dropping = True
            if not any(handed.whole is not None for handed in self._incoming):
                self._asked = self._asked or asked
            self._ledger.changed.notify_all()

    def forget(self) -> None:
        """Lets go of the user's weights."""
        self._rescue = None

    def _check(self, delta: Any) -> None:
        """Checks a delta's tree (once for each compiled step)."""
        source.refuse_traced(delta)
        spec = getattr(delta, "spec", None)
        if spec is None or spec is not self._checked:
            source.check_delta(delta, self._specs)
            self._checked = spec

    def _make_room(self) -> None:
        """Bounds the deltas that hold device memory; never waits for the bucket."""
        self._ledger.changed.wait_for(
            lambda: (
                len(self._incoming) < MAX_HANDED
                or self._ledger.closed
                or self._ledger.fatal
            )
        )
        self._ledger.check()

    def _hand_whole(self, rescue: _Rescue, at: float) -> None:
        asked = self._asked or PublishError("the bucket is behind")
        params = rescue.params
        if params is None:
            raise type(asked)(
                f"whole weights are needed: {asked}; call publish with params= (the "
                "weights after the step); a delta alone is not accepted"
            )
        leaves = source.named_leaves(params() if callable(params) else params)
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
            self._incoming.append(
                _Handed(rescue.delta, whole, rescue.step, rescue.meta, at)
            )
            self._asked = self._rescue = None
            self._ledger.changed.notify_all()

    # -- the thread

    def _run(self) -> None:
        changed = self._ledger.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._incoming or self._ledger.ending)
                if not self._incoming:
                    self._ledger.drained = True
                    changed.notify_all()
                    return
                handed = self._incoming.popleft()
                self._copying = True
                changed.notify_all()
            try:
                self._take(handed)
            except (DeltaOverflowError, GapError) as error:
                _log.warning("a whole version comes next: %s", error)
                kind = "gaps" if isinstance(error, GapError) else "overflowed"
                self._ledger.count(kind)
                self.ask_whole(error)
            except Exception as error:  # the step that made it failed on the device
                self._ledger.note(error)
                self.ask_whole(PublishError(f"a delta was lost ({error!r})"))
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
            meta=handed.meta,
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
