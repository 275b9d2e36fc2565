"""A bucket that fails where it is told to.

Example:
    A crash after every single store operation, in one process::

        for k, left in every_fault(publish_three, fresh, Fault.CUT_AFTER):
            check_that_a_reader_gets_a_whole_version(left)
"""

from __future__ import annotations

import contextlib
import enum
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from jdelta.bucket import Bucket, Capabilities, Data, ObjectInfo
from jdelta.errors import BucketError, BucketUnavailableError, JDeltaError


class Fault(enum.Enum):
    """What happens at an operation.

    "Before" means that the store never heard of it, "after" that it acted and the
    answer got lost.
    """

    RAISE_BEFORE = "raise before"
    RAISE_AFTER = "raise after"
    CUT_BEFORE = "cut before"
    """Raise, and from then on every operation raises: the store is out of reach, or (as
    the store sees it) this process has died."""
    CUT_AFTER = "cut after"
    KILL_BEFORE = "kill before"
    """SIGKILL of this process: run it as a child (`jdelta.testing.run`)."""
    KILL_AFTER = "kill after"
    TRUNCATE = "truncate"
    """The second half of the bytes is lost, in the answer of a read or in what a write
    stores, without any error."""
    FLIP = "flip"
    """One bit in the middle is the other way round, likewise."""


class Operation(NamedTuple):
    """One call of a bucket's method: the method's name and the object's."""

    op: str
    name: str


Plan: TypeAlias = Callable[[int, Operation], Fault | None]
"""Says what happens at the k-th counted operation, from 0; None for nothing unusual.
Called under a lock, in the order of the count."""

WRITES = frozenset({"put", "put_if_absent", "replace_if_unchanged", "delete"})
READS = frozenset({"get", "get_range", "open", "stat", "list", "watch"})


def at(k: int, fault: Fault) -> Plan:
    """The plan under which the k-th counted operation, from 0, meets `fault`."""
    return lambda index, operation: fault if index == k else None


class FaultyBucket:
    """Wraps any bucket, counts its operations and makes some of them fail.

    Thread-safe; offers everything `Bucket` does. `scratch` is never counted.

    Attributes:
        inner: The bucket wrapped, which never fails by itself.
        operations: The counted operations so far, in order.
        fired: The indices at which a fault was asked for.
    """

    def __init__(
        self,
        inner: Bucket,
        plan: Plan | None = None,
        *,
        count_reads: bool = False,
        delay: float = 0.0,
        error: type[BucketError] = BucketUnavailableError,
    ):
        """Wraps a bucket.

        Args:
            inner: The bucket that does the work.
            plan: Says which operations fail, and how; none by default.
            count_reads: Count reading operations, too, and ask the plan about them.
            delay: Seconds by which every operation is late.
            error: What is raised.
        """
        self.inner = inner
        self.operations: list[Operation] = []
        self.fired: list[int] = []
        self._plan = plan
        self._counted = WRITES | READS if count_reads else WRITES
        self._delay = delay
        self._error = error
        self._cut = False
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The wrapped bucket's."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The wrapped bucket's."""
        return self.inner.capabilities

    def put(self, name: str, data: Data, *, move: bool = False) -> None:
        """See `Bucket.put`."""
        self._write("put", name, data, lambda d: self.inner.put(name, d, move=move))

    def put_if_absent(self, name: str, data: Data) -> None:
        """See `Bucket.put_if_absent`."""
        act = self.inner.put_if_absent
        self._write("put_if_absent", name, data, lambda d: act(name, d))

    def replace_if_unchanged(self, name: str, data: Data, tag: str | None) -> None:
        """See `Bucket.replace_if_unchanged`."""
        act = self.inner.replace_if_unchanged
        self._write("replace_if_unchanged", name, data, lambda d: act(name, d, tag))

    def delete(self, name: str) -> None:
        """See `Bucket.delete`."""
        with self._around("delete", name):
            self.inner.delete(name)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See `Bucket.get`."""
        with self._around("get", name) as fault:
            return _damaged(self.inner.get(name, max_bytes=max_bytes), fault)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See `Bucket.get_range`."""
        with self._around("get_range", name) as fault:
            return _damaged(self.inner.get_range(name, start, length), fault)

    def open(self, name: str) -> BinaryIO:
        """See `Bucket.open`."""
        with self._around("open", name) as fault:
            stream = self.inner.open(name)
            if fault is None:
                return stream
            with stream:
                return io.BytesIO(_damaged(stream.read(), fault))

    def stat(self, name: str) -> ObjectInfo:
        """See `Bucket.stat`."""
        with self._around("stat", name):
            return self.inner.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Bucket.list`; it is one operation and is done when this returns."""
        with self._around("list", prefix):
            return iter([*self.inner.list(prefix)])

    def watch(self, name: str, tag: str | None, timeout: float) -> ObjectInfo | None:
        """See `Bucket.watch`."""
        with self._around("watch", name):
            return self.inner.watch(name, tag, timeout)

    def scratch(self) -> Path | None:
        """See `Bucket.scratch`."""
        return self.inner.scratch()

    def _write(
        self, op: str, name: str, data: Data, act: Callable[[Data], None]
    ) -> None:
        with self._around(op, name) as fault:
            if fault in (Fault.TRUNCATE, Fault.FLIP):
                plain = data.read_bytes() if isinstance(data, Path) else bytes(data)
                data = _damaged(plain, fault)
            act(data)

    @contextlib.contextmanager
    def _around(self, op: str, name: str) -> Iterator[Fault | None]:
        fault = self._before(op, name)
        try:
            yield fault
        finally:  # after an error of the store's, too: that answer gets lost as well
            self._after(fault, op, name)

    def _before(self, op: str, name: str) -> Fault | None:
        if self._delay:
            time.sleep(self._delay)
        fault = None
        with self._lock:
            if self._cut:
                raise self._error(f"{self.url} is cut off ({op} of {name})")
            if op in self._counted:
                index = len(self.operations)
                self.operations.append(Operation(op, name))
                if self._plan is not None:
                    fault = self._plan(index, self.operations[-1])
                if fault is not None:
                    self.fired.append(index)
                self._cut = fault is Fault.CUT_BEFORE
        if fault is Fault.KILL_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in (Fault.RAISE_BEFORE, Fault.CUT_BEFORE):
            raise self._error(f"planned fault before {op} of {name} in {self.url}")
        return fault

    def _after(self, fault: Fault | None, op: str, name: str) -> None:
        if fault is Fault.KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is Fault.CUT_AFTER:
            with self._lock:
                self._cut = True
        if fault in (Fault.RAISE_AFTER, Fault.CUT_AFTER):
            raise self._error(f"planned fault after {op} of {name} in {self.url}")


def every_fault(
    scenario: Callable[[FaultyBucket], object],
    fresh: Callable[[], Bucket],
    fault: Fault,
    *,
    count_reads: bool = False,
) -> Iterator[tuple[int, Bucket]]:
    """Runs a scenario once per store operation, with a fault at that operation.

    Args:
        scenario: Uses the bucket it is given. The `JDeltaError` by which it ends, if
            any, is swallowed; any other exception is not. It must end its threads.
        fresh: Makes an empty bucket for each run.
        fault: What happens at the k-th operation. The kinds that kill the process
            belong in a child, not here.
        count_reads: Let it happen at reading operations, too.

    Yields:
        k and the bucket as the scenario left it, for k = 0, 1, ... until a run made
        fewer than k + 1 operations.

    Raises:
        ValueError: `fault` would kill this process.
    """
    if fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER):
        raise ValueError(f"{fault} would kill this process")
    k = 0
    while True:
        inner = fresh()
        bucket = FaultyBucket(inner, at(k, fault), count_reads=count_reads)
        try:
            scenario(bucket)
        except JDeltaError:
            pass
        if not bucket.fired:
            return
        yield k, inner
        k += 1


def _damaged(data: bytes, fault: Fault | None) -> bytes:
    if fault is Fault.TRUNCATE:
        return data[: len(data) // 2]
    if fault is Fault.FLIP and data:
        changed = bytearray(data)
        changed[len(data) // 2] ^= 0x10
        return bytes(changed)
    return data
