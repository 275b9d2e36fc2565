"""What a publisher and a subscriber measured: plain values, times in seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """One committed version, as handed to `Publisher(on_commit=...)`.

    Attributes:
        version: The version committed.
        epoch: Its epoch.
        step: The step given to `publish` (the last one, where steps were merged).
        kind: "anchor" or "delta".
        merged: How many published deltas this version holds.
        changed: Elements that differ from the base version (all, for an anchor).
        elements: Elements of the published tree.
        bytes_written: Bytes put into the bucket for it, by kind of object.
        times: Seconds by stage: copy, encode, upload, commit, and `total` from the
            `publish` call to the commit.
    """

    version: int
    epoch: int
    step: int | None
    kind: str
    merged: int
    changed: int
    elements: int
    bytes_written: dict[str, int]
    times: dict[str, float]

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / max(1, self.elements)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherStats:
    """A `Publisher`'s counters since it was opened.

    Attributes:
        versions: Versions committed.
        published: Deltas handed to `publish`.
        merged: Deltas that were merged into another because the bucket was behind.
        overflowed: Deltas that overflowed their capacity.
        gaps: Deltas left out because they did not follow the last one published.
        failures: Attempts of the background threads that failed (and were retried).
        trouble: What holds committing up right now (a bucket that cannot be reached is
            retried without an error); None while all is well.
        waiting: Deltas handed over and not yet committed.
        bytes_written: Bytes put into the bucket, by kind: delta, anchor, manifest,
            pointer, control.
        times: Seconds spent by stage: copy, encode, upload, commit, anchor.
    """

    versions: int
    published: int
    merged: int
    overflowed: int
    gaps: int
    failures: int
    trouble: str | None
    waiting: int
    bytes_written: dict[str, int]
    times: dict[str, float]

    @property
    def total_bytes(self) -> int:
        """Every byte put into the bucket."""
        return sum(self.bytes_written.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderStats:
    """A `Subscriber`'s counters since it was opened.

    Attributes:
        version: The version held, or None.
        updates: Updates applied.
        healed: Times an anchor was used because the chain of deltas was broken.
        bytes_read: Bytes fetched, by kind: delta, anchor, manifest.
        times: Seconds by stage: fetch, verify, decode, stage, apply.
    """

    version: int | None
    updates: int
    healed: int
    bytes_read: dict[str, int]
    times: dict[str, float]
