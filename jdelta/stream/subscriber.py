"""The reading end: restore a version, then follow the newest one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jdelta.bucket import Bucket, open_bucket
from jdelta.errors import (
    BucketUnavailableError,
    JDeltaError,
    StateMismatchError,
    WaitTimeoutError,
)
from jdelta.stream.chain import DAMAGE, Chain
from jdelta.stream.fetch import Meter
from jdelta.stream.pace import Pace
from jdelta.stream.rebuild import rebuild, resolve, shaped
from jdelta.stream.records import ReaderStats
from jdelta.stream.stager import Staged, Stager
from jdelta.stream.update import Update
from jdelta.wire import names
from jdelta.wire.control import ReaderStatus
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import VersionId
from jdelta.wire.state import State

_log = logging.getLogger(__name__)


class Subscriber:
    """Follows a run: bit-identical weights, moments after they are committed.

    Args:
        source: The run's URL (a path, `file://`, `memory://`) or a bucket.
        name: If given, the version held is written to the bucket under this name after
            each update (best effort: a reader without write permission goes unseen).
        poll: Seconds between looks at the bucket. None: a directory or memory tells of
            changes within moments; elsewhere a twentieth of the time that versions are
            apart (0.1 to 30 s): each is seen within 5 % of that, at 20 looks a version.

    Thread-safe, except that one `updates` iterator is active at a time. Collective: no.

    Example:
        >>> sub = jdelta.Subscriber("/data/run")              # doctest: +SKIP
        >>> params = sub.restore()                            # doctest: +SKIP
        >>> for update in sub.updates():                      # doctest: +SKIP
        ...     params = update.apply(params)
    """

    def __init__(
        self,
        source: Bucket | str | os.PathLike[str],
        *,
        name: str | None = None,
        poll: float | None = None,
    ):
        """Opens the bucket; reads nothing yet."""
        self._bucket = open_bucket(source)
        self._status_name = None if name is None else names.reader_name(name)
        self._name = name
        self._poll = poll
        self._chain = Chain(self._bucket)
        self._lock = threading.RLock()
        self._held: State | None = None
        self._stager: Stager | None = None
        self._meter = Meter()
        self._torn = 0  # writes that did not end
        self._updates = 0
        self._healed = 0

    # -- looking

    @property
    def version(self) -> int | None:
        """The version held: the last one restored or applied; None if torn or none."""
        return None if self._held is None else self._held.version

    def latest(self) -> int | None:
        """The newest committed version in the bucket, or None before the first."""
        with self._lock:
            held = self._held
            tip = self._chain.latest(None if held is None else held.id)
        return None if tip is None else tip.version

    def wait_for(self, version: int, timeout: float = 60.0) -> int:
        """Blocks until `version` or a newer one is committed; returns the newest.

        Args:
            version: The version waited for.
            timeout: Seconds.

        Raises:
            WaitTimeoutError: it did not appear in time.
        """
        deadline = time.monotonic() + timeout
        pace = Pace(self._poll)
        trouble = None
        while True:
            newest = None
            try:
                newest = self.latest()
                trouble = None
            except BucketUnavailableError as error:
                trouble = error
            if newest is not None and newest >= version:
                return newest
            left = deadline - time.monotonic()
            if left <= 0:
                seen = "no version" if newest is None else f"version {newest}"
                raise WaitTimeoutError(
                    f"{self._bucket.url} did not reach version {version} within "
                    f"{timeout:g} s: it holds {seen}"
                    + (f" ({trouble})" if trouble else "")
                )
            time.sleep(min(pace.wait(), left))

    # -- restoring

    def restore(
        self, version: int | None = None, *, like: Any = None, timeout: float = 60.0
    ) -> Any:
        """Rebuilds and proves a version, and holds it.

        Args:
            version: The version wanted. None: the newest that sound objects lead to.
            like: A JAX tree of arrays or `jax.ShapeDtypeStruct` with the published
                names, dtypes and shapes; a struct's `sharding` says where to put the
                array. None: a dict of NumPy arrays.
            timeout: Seconds to wait for the version to be committed.

        Returns:
            `dict[str, numpy.ndarray]`, or a tree of `jax.Array` shaped like `like`.

        Raises:
            WaitTimeoutError: nothing was committed in time.
            VersionNotFoundError: the version was removed.
            CorruptError: no sound objects lead to it.
            TreeError: `like` has other names, dtypes or shapes, or JAX as it is set
                cannot hold a leaf (64-bit types are off); nothing was fetched.
        """
        place = check = None
        if like is not None:
            from jdelta.stream import _jax

            place, check = _jax.place, functools.partial(_jax.check, like)
        self.wait_for(0 if version is None else version, timeout)
        with self._lock:
            meter = Meter()
            weights, state = self._rebuild(version, meter, check)
            if place is None:
                params = shaped(weights, state)
            else:
                params = place(weights, state.specs, like)
            self._count(meter)
            self._hold(state)
        self._report()
        return params

    def whole(
        self,
        version: int | None = None,
        *,
        check: Callable[[Mapping[str, TensorSpec]], object] | None = None,
        timeout: float = 60.0,
    ) -> Update:
        """Rebuilds and proves a version as an update that replaces every weight.

        What `restore` does, for a receiver that writes into weights it already has:
        the version is held once the update is applied, and a write that fails half-way
        is known as torn.

        Args:
            version: The version wanted. None: the newest that sound objects lead to.
            check: Called with the published tensors before their weights are fetched;
                what it raises ends the call.
            timeout: Seconds to wait for the version to be committed.

        Raises:
            WaitTimeoutError: nothing was committed in time.
            VersionNotFoundError: the version was removed.
            CorruptError: no sound objects lead to it.
        """
        self.wait_for(0 if version is None else version, timeout)
        with self._lock:
            meter = Meter()
            weights, state = self._rebuild(version, meter, check)
            self._count(meter)
        return Update(
            state=state,
            base=None,
            patch=None,
            weights=weights,
            nbytes=sum(meter.bytes.values()),
            times=meter.times,
            _writing=self._replacing,
        )

    # -- following

    def updates(
        self, *, every: bool = False, timeout: float | None = None
    ) -> Iterator[Update]:
        """Yields staged, verified updates from the version held, as they come.

        The next ones are fetched and decoded in a background thread meanwhile. An
        update that is not applied is part of the next one. Where deltas are missing or
        damaged, or nothing is held yet, the update is an anchor. Ends where the run
        ends: after the last version of a publisher that was closed.

        Args:
            every: Yield each retained version, not only the newest.
            timeout: Seconds to wait for the next version; None waits for ever.

        Raises:
            WaitTimeoutError: no newer version came in time.
            RunError: the bucket was wiped and holds another run.
            FormatError: its control objects are malformed.
        """
        pending: Staged | None = None  # yielded, and not applied as far as we know
        with self._lock:
            if self._stager is not None:
                self._stager.stop()
            stager = Stager(
                self._bucket,
                self._chain.run,
                self._held,
                every=every,
                poll=self._poll,
            )
            self._stager = stager
            torn = self._torn
        try:
            while True:
                held = self._held
                if torn != self._torn:
                    torn, pending = self._torn, None
                    stager.reset(None)
                elif pending is not None and _id(held) == pending.vid:
                    pending = None
                elif pending is not None and pending.base not in (None, _id(held)):
                    # Another version was applied or restored behind our back.
                    pending = None
                    stager.reset(held)
                taken = stager.take(timeout, one=every)
                if not taken:
                    return  # closed, or the run ended
                for staged in taken:
                    self._count(staged.meter)
                    self._healed += staged.healed
                    if pending is None or staged.base != pending.vid:
                        pending = staged
                    else:
                        pending = pending.then(staged)
                if pending is None:
                    continue
                if pending.weights is not None:
                    pending.lent = frozenset(pending.weights)
                yield Update(
                    state=pending.state,
                    base=None if pending.base is None else pending.base.version,
                    patch=pending.steps,
                    weights=pending.weights,
                    nbytes=sum(pending.meter.bytes.values()),
                    times=dict(pending.meter.times),
                    _writing=functools.partial(self._writing, pending.base),
                )
        finally:
            stager.stop()

    def close(self) -> None:
        """Stops the background thread. The weights yielded stay yours."""
        with self._lock:
            if self._stager is not None:
                self._stager.stop()
                self._stager = None

    def __enter__(self) -> Subscriber:
        """Returns itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes."""
        self.close()

    def stats(self) -> ReaderStats:
        """Counters since this subscriber was opened."""
        return ReaderStats(
            version=self.version,
            updates=self._updates,
            healed=self._healed,
            bytes_read=dict(self._meter.bytes),
            times=dict(self._meter.times),
        )

    # -- helpers

    def _rebuild(
        self,
        version: int | None,
        meter: Meter,
        check: Callable[[Mapping[str, TensorSpec]], object] | None,
    ) -> tuple[dict[str, np.ndarray], State]:
        vid = resolve(self._chain, version)
        if check is not None:
            try:
                specs = self._chain.state(vid).specs
            except DAMAGE:  # the newest before it will do, or rebuilding says why not
                pass
            else:
                check(specs)
        return rebuild(self._chain, vid, meter, newest=version is None)

    def _hold(self, state: State) -> None:
        self._held = state
        if self._stager is not None:
            self._stager.reset(state)

    @contextlib.contextmanager
    def _replacing(self, update: Update) -> Iterator[None]:
        """`_writing` for weights that did not come through `updates`."""
        with self._writing(None, update):
            yield
        with self._lock:
            self._hold(update.state)

    @contextlib.contextmanager
    def _writing(self, base: VersionId | None, update: Update) -> Iterator[None]:
        """A write that does not end leaves a torn state, which only an anchor heals."""
        before = self._held
        # The version it leads to is fine too: a second copy of the weights is brought
        # there, and whether that copy is the base version's is proved by its bits.
        if base is not None and _id(before) not in (base, update.state.id):
            held = "a torn state or none"
            if before is not None:
                held = f"version {before.version} (epoch {before.id.epoch})"
            raise StateMismatchError(
                f"the update leads from version {base.version} (epoch {base.epoch}) to "
                f"{update.version}, but what is held is {held}; nothing was written; "
                "go on with the next update, which leads from what is held"
            )
        self._held = None
        try:
            yield
        except JDeltaError:
            self._held = before  # receivers refuse before they write
            raise
        except BaseException:
            self._torn += 1
            raise
        self._held = update.state
        self._updates += 1
        for key in ("stage", "apply"):
            seconds = update.times.get(key, 0.0)
            self._meter.times[key] = self._meter.times.get(key, 0.0) + seconds
        self._report()

    def _count(self, meter: Meter) -> None:
        for key, seconds in meter.times.items():
            self._meter.times[key] = self._meter.times.get(key, 0.0) + seconds
        for key, size in meter.bytes.items():
            self._meter.count(key, size)

    def _report(self) -> None:
        held = self._held
        if self._status_name is None or self._name is None or held is None:
            return
        status = ReaderStatus(
            reader=self._name,
            run=self._chain.run or "",
            epoch=held.id.epoch,
            version=held.version,
            time=time.time(),
        )
        try:
            self._bucket.put(self._status_name, status.to_json())
        except JDeltaError as error:
            _log.debug("reader status not written: %s", error)


def _id(state: State | None) -> VersionId | None:
    return None if state is None else state.id
