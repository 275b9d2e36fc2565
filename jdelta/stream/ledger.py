"""What a publisher's threads share: one condition, the failures, counters.

A failure is one of two kinds. What may pass by itself, a bucket that cannot be reached,
is tried again within a budget and interrupts nobody. Everything else stops the
publisher and is raised by every later call: what somebody must act on (no permission,
no room, another publisher, a budget used up), and what is a fault of ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from jdelta.errors import (
    BucketDeniedError,
    BucketError,
    BucketFullError,
    FencedError,
    PublishError,
)
from jdelta.stream.commit import Epoch

_log = logging.getLogger(__name__)

_WHAT_TO_DO = {
    BucketDeniedError: "see that this process may write there, ",
    BucketFullError: "make room, ",
    BucketError: "see that it can be reached, ",
}


class Ledger:
    """Shared state of a publisher's threads; every field is guarded by `changed`.

    Args:
        epoch: The publisher's epoch.
        retry_seconds: How long a bucket may be out of reach without a break.
        on_failure: The user's callback.

    Attributes:
        changed: Held to read or write any field; notified at every change.
        closed: The publisher is closed: threads end.
        left: It was dropped without being closed: threads end when all is committed.
        drained: The copy thread ended because of that.
        trouble: What holds committing up right now.
        fatal: Why nothing more can be committed, or None.
        counters: Events by name.
        times: Seconds by stage.
    """

    def __init__(
        self,
        epoch: Epoch,
        retry_seconds: float,
        on_failure: Callable[[BaseException], None] | None,
    ) -> None:
        """Starts with nothing failed."""
        self._epoch = epoch
        self._retry_seconds = retry_seconds
        self._on_failure = on_failure
        self._since: float | None = None  # the first failure after the last progress
        self.changed = threading.Condition()
        self.closed = self.left = self.drained = False
        self.trouble: BaseException | None = None
        self.fatal: BaseException | None = None
        self.counters: dict[str, int] = {}
        self.times: dict[str, float] = {}

    @property
    def ending(self) -> bool:
        """Whether nothing more is handed over."""
        return self.closed or self.left

    def count(self, event: str, by: int = 1) -> None:
        """Adds to a counter."""
        with self.changed:
            self.counters[event] = self.counters.get(event, 0) + by

    def spend(self, stage: str, seconds: float) -> None:
        """Adds to a stage's time."""
        with self.changed:
            self.times[stage] = self.times.get(stage, 0.0) + seconds

    def note(self, error: BaseException) -> None:
        """Logs and counts a failure that stops nothing, and tells the user of it."""
        self.count("failures")
        self._tell("going on after: %s", error)

    def hold(self, error: BaseException, seconds: float) -> None:
        """Waits before what failed is tried again; returns early at close.

        Raises:
            BaseException: `error`, or that the budget is used up; no further try.
        """
        if not isinstance(error, BucketError) or isinstance(
            error, BucketDeniedError | BucketFullError
        ):
            raise error
        with self.changed:
            self.count("failures")
            first, self.trouble = self.trouble is None, error
            now = time.monotonic()
            self._since = now if self._since is None else self._since
            left = self._since + self._retry_seconds - now
            if self.closed:
                raise error
        if left <= 0:
            raise PublishError(
                f"publishing to {self._epoch.bucket.url} stopped: it failed for "
                f"{self._retry_seconds:g} s (retry_seconds=): {error}; readers stay "
                f"at version {self._version()}. See that it can be reached and open a "
                "new Publisher, which continues the run"
            ) from error
        if first:
            self._tell("retrying: %s", error)
        with self.changed:
            self.changed.wait_for(lambda: self.closed, min(seconds, left))

    def progressed(self, *, through: bool = False) -> None:
        """The bucket took something; `through`: a whole version."""
        with self.changed:
            self._since = None
            if through:
                self.trouble = None

    def stop(self, error: BaseException) -> None:
        """Notes that nothing more can be committed."""
        with self.changed:
            if self.fatal is not None:
                return
            self.fatal = error
            self.count("failures")
            self.changed.notify_all()
        self._tell(f"publishing to {self._epoch.bucket.url} stopped: %s", error)

    def check(self) -> None:
        """Raises if nothing more can be published."""
        with self.changed:
            if self.closed:
                raise PublishError("this Publisher is closed: open a new one")
            fatal = self.fatal
        if fatal is None:
            return
        if isinstance(fatal, FencedError | PublishError):
            raise type(fatal)(str(fatal)) from fatal
        advice = (a for kind, a in _WHAT_TO_DO.items() if isinstance(fatal, kind))
        raise PublishError(
            f"publishing to {self._epoch.bucket.url} stopped: "
            f"{fatal if isinstance(fatal, BucketError) else repr(fatal)}; readers stay "
            f"at version {self._version()}. To go on, {next(advice, '')}open a new "
            "Publisher: it continues the run"
        ) from fatal

    def _version(self) -> int | None:
        last = self._epoch.last
        return None if last is None else last.version

    def _tell(self, message: str, error: BaseException) -> None:
        """To the log and to the user. Holds no lock: the user may ask for `stats`."""
        shown = error if isinstance(error, BucketError) else repr(error)
        _log.warning(message, shown)
        if self._on_failure is not None:
            try:
                self._on_failure(error)
            except Exception:
                _log.exception("on_failure failed")
