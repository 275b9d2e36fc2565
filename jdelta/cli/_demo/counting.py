"""A bucket that counts the bytes put into it, by kind."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jdelta.bucket import Bucket, Capabilities, Data, ObjectInfo


def kind(name: str) -> str:
    """The kind of object: `anchors`, `deltas`, `manifests`, `pointer` or `control`."""
    head = name.partition("/")[0]
    if head in ("anchors", "deltas", "manifests"):
        return head
    return "pointer" if name == "pointer.json" else "control"


class CountingBucket:
    """Passes every operation on to another bucket, and counts what was written."""

    def __init__(self, inner: Bucket) -> None:
        """Count what goes into `inner`."""
        self._inner = inner
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()
        self.newest_delta = 0
        """Bytes of the delta object put last."""

    @property
    def written(self) -> dict[str, int]:
        """Bytes of every successful write so far, by kind; overwritten ones too."""
        with self._lock:
            return dict(self._written)

    def _count(self, name: str, data: Data) -> None:
        if isinstance(data, Path):
            size = data.stat().st_size
        else:
            size = memoryview(data).nbytes
        with self._lock:
            self._written[kind(name)] += size
            if kind(name) == "deltas":
                self.newest_delta = size

    @property
    def url(self) -> str:
        """Where the bucket is."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the bucket can do."""
        return self._inner.capabilities

    def put(self, name: str, data: Data, *, move: bool = False) -> None:
        """Write an object."""
        self._inner.put(name, data, move=move)
        self._count(name, data)

    def put_if_absent(self, name: str, data: Data) -> None:
        """Write an object unless there is one of that name."""
        self._inner.put_if_absent(name, data)
        self._count(name, data)

    def replace_if_unchanged(self, name: str, data: Data, tag: str | None) -> None:
        """Write an object if the one there is the one known by `tag`."""
        self._inner.replace_if_unchanged(name, data, tag)
        self._count(name, data)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """Read an object."""
        return self._inner.get(name, max_bytes=max_bytes)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Read a part of an object."""
        return self._inner.get_range(name, start, length)

    def open(self, name: str) -> BinaryIO:
        """Read an object from its beginning on."""
        return self._inner.open(name)

    def stat(self, name: str) -> ObjectInfo:
        """Describe an object."""
        return self._inner.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Describe the objects whose names start with `prefix`."""
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._inner.delete(name)

    def watch(self, name: str, tag: str | None, timeout: float) -> ObjectInfo | None:
        """Wait for an object to be another than the one known by `tag`."""
        return self._inner.watch(name, tag, timeout)

    def scratch(self) -> Path | None:
        """The inner bucket's folder for files that `put` may move."""
        return self._inner.scratch()
