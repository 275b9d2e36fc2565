"""A bucket in this process's memory, for tests and for trying things out."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jdelta.bucket.protocol import (
    Capabilities,
    Data,
    ObjectInfo,
    check_range,
    check_size,
    safe_name,
)
from jdelta.errors import (
    BucketError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
)


class _Object(NamedTuple):
    data: bytes
    info: ObjectInfo


class _Store:
    """The objects of one name, shared by all buckets of that name."""

    def __init__(self):
        self.changed = threading.Condition()
        self.objects: dict[str, _Object] = {}
        self.written = 0


_stores: dict[str, _Store] = {}
_stores_lock = threading.Lock()


class MemoryBucket:
    """A bucket that lives as long as the process and is seen by this process alone.

    All buckets of one name share their objects, so that a publisher and a subscriber in
    one process meet. Thread-safe. Collective: no.

    Example:
        >>> MemoryBucket("doc").put("a", b"1")
        >>> MemoryBucket("doc").get("a")
        b'1'
    """

    capabilities = Capabilities(
        put_if_absent=True, replace_if_unchanged=True, watch=True
    )

    def __init__(self, name: str):
        """Opens the bucket of that name, an empty one if there is none yet."""
        self.url = f"memory://{name}"
        with _stores_lock:
            self._store = _stores.setdefault(name, _Store())

    def __repr__(self) -> str:
        """The URL, for messages."""
        return f"MemoryBucket({self.url})"

    def put(self, name: str, data: Data, *, move: bool = False) -> None:
        """See `Bucket.put`."""
        safe_name(name)
        content = _content(data)
        with self._store.changed:
            self._write(name, content)

    def put_if_absent(self, name: str, data: Data) -> None:
        """See `Bucket.put_if_absent`."""
        safe_name(name)
        content = _content(data)
        with self._store.changed:
            if name in self._store.objects:
                raise ObjectExistsError(f"{self.url} already has {name}")
            self._write(name, content)

    def replace_if_unchanged(self, name: str, data: Data, tag: str | None) -> None:
        """See `Bucket.replace_if_unchanged`."""
        safe_name(name)
        content = _content(data)
        with self._store.changed:
            found = self._store.objects.get(name)
            found_tag = None if found is None else found.info.tag
            if found_tag != tag:
                raise ObjectChangedError(
                    f"{name} in {self.url} has tag {found_tag}, expected {tag}: "
                    "somebody else wrote it; read it again"
                )
            self._write(name, content)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See `Bucket.get`."""
        found = self._find(name)
        check_size(f"{name} in {self.url}", found.info.size, max_bytes)
        return found.data

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See `Bucket.get_range`."""
        found = self._find(name)
        check_range(f"{name} in {self.url}", found.info.size, start, length)
        return found.data[start : start + length]

    def open(self, name: str) -> BinaryIO:
        """See `Bucket.open`."""
        return io.BytesIO(self._find(name).data)

    def stat(self, name: str) -> ObjectInfo:
        """See `Bucket.stat`."""
        return self._find(name).info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Bucket.list`."""
        with self._store.changed:
            found = [o.info for n, o in self._store.objects.items()]
        return iter(sorted(info for info in found if info.name.startswith(prefix)))

    def delete(self, name: str) -> None:
        """See `Bucket.delete`."""
        safe_name(name)
        with self._store.changed:
            self._store.objects.pop(name, None)

    def watch(self, name: str, tag: str | None, timeout: float) -> ObjectInfo | None:
        """See `Bucket.watch`."""
        safe_name(name)

        def news() -> ObjectInfo | None:
            found = self._store.objects.get(name)
            return None if found is None or found.info.tag == tag else found.info

        with self._store.changed:
            return self._store.changed.wait_for(news, timeout)

    def scratch(self) -> Path | None:
        """None: memory has no folder."""
        return None

    def drop(self) -> None:
        """Frees all objects; buckets of this name that are open become empty."""
        with self._store.changed:
            self._store.objects.clear()

    def _find(self, name: str) -> _Object:
        safe_name(name)
        with self._store.changed:
            found = self._store.objects.get(name)
        if found is None:
            raise ObjectNotFoundError(f"{self.url} has no {name}")
        return found

    def _write(self, name: str, content: bytes) -> None:
        self._store.written += 1
        info = ObjectInfo(name, len(content), str(self._store.written), time.time())
        self._store.objects[name] = _Object(content, info)
        self._store.changed.notify_all()


def _content(data: Data) -> bytes:
    if not isinstance(data, Path):
        return bytes(data)
    try:
        return data.read_bytes()
    except OSError as error:
        raise BucketError(f"cannot read the file to put, {data}: {error}") from error
