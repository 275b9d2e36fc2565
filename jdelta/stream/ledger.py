"""What a publisher's threads share: one condition, failures, counters."""

from __future__ import annotations

import threading

from jdelta.errors import (
    BucketFullError,
    BucketUnavailableError,
    FormatError,
    JDeltaError,
    PublishError,
)


class Ledger:
    """Shared state of a publisher's threads; every field is guarded by `changed`.

    Attributes:
        changed: Held to read or write any field; notified at every change.
        closed: The publisher is closed: threads end.
        failure: A background failure nobody was told of yet.
        trouble: What holds committing up right now, whether or not it was told.
        fatal: Why nothing more can be committed, or None.
        counters: Events by name.
        times: Seconds by stage.
    """

    def __init__(self) -> None:
        """Starts with nothing failed."""
        self.changed = threading.Condition()
        self.closed = False
        self.failure: BaseException | None = None
        self.trouble: BaseException | None = None
        self.fatal: BaseException | None = None
        self.counters: dict[str, int] = {}
        self.times: dict[str, float] = {}

    def count(self, event: str, by: int = 1) -> None:
        """Adds to a counter."""
        with self.changed:
            self.counters[event] = self.counters.get(event, 0) + by

    def spend(self, stage: str, seconds: float) -> None:
        """Adds to a stage's time."""
        with self.changed:
            self.times[stage] = self.times.get(stage, 0.0) + seconds

    def fail(self, error: BaseException) -> None:
        """Notes a failure; the next call surfaces it if the user has to act on it.

        A bucket that cannot be reached for a while is retried and no news.
        """
        passing = isinstance(error, BucketUnavailableError)
        with self.changed:
            self.count("failures")
            if not passing or isinstance(error, BucketFullError):
                self.failure = error
            self.changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Notes that nothing more can be committed."""
        with self.changed:
            self.fatal = self.fatal or error
            self.changed.notify_all()

    def take_failure(self) -> BaseException | None:
        """The failure not surfaced yet, once."""
        with self.changed:
            failure, self.failure = self.failure, None
            return failure

    def check(self, url: str, version: int | None) -> None:
        """Raises if nothing more can be published."""
        with self.changed:
            if self.closed:
                raise PublishError("this Publisher is closed: open a new one")
            fatal = self.fatal
        if fatal is None:
            return
        if isinstance(fatal, JDeltaError) and not isinstance(fatal, FormatError):
            raise fatal
        raise PublishError(
            f"publishing to {url} stopped: {fatal!r}; readers stay at version "
            f"{version}. Open a new Publisher to continue the run"
        ) from fatal
