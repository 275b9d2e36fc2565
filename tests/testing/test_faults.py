from __future__ import annotations

import signal
import threading

import pytest

from jdelta.bucket import DirectoryBucket, MemoryBucket
from jdelta.errors import (
    BucketDeniedError,
    BucketUnavailableError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from jdelta.testing import Fault, FaultyBucket, Operation, at, every_fault, run


@pytest.fixture
def inner():
    bucket = MemoryBucket("test-faults")
    yield bucket
    bucket.drop()


def test_operations_are_counted_in_order(inner):
    bucket = FaultyBucket(inner)
    bucket.put("a", b"1")
    bucket.get("a")
    bucket.put_if_absent("b", b"1")
    bucket.delete("a")
    assert bucket.operations == [
        Operation("put", "a"),
        Operation("put_if_absent", "b"),
        Operation("delete", "a"),
    ]
    bucket = FaultyBucket(inner, count_reads=True)
    bucket.get("b")
    list(bucket.list("b"))
    assert bucket.operations == [Operation("get", "b"), Operation("list", "b")]


def test_raise_before_and_after(inner):
    bucket = FaultyBucket(inner, at(1, Fault.RAISE_BEFORE))
    bucket.put("a", b"1")
    with pytest.raises(BucketUnavailableError, match="before put of a"):
        bucket.put("a", b"2")
    assert inner.get("a") == b"1"
    bucket.put("a", b"3")
    assert bucket.fired == [1]

    bucket = FaultyBucket(inner, at(0, Fault.RAISE_AFTER), error=BucketDeniedError)
    with pytest.raises(BucketDeniedError, match="after put_if_absent of b"):
        bucket.put_if_absent("b", b"1")
    assert inner.get("b") == b"1"
    with pytest.raises(ObjectExistsError):
        bucket.put_if_absent("b", b"1")


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
def test_a_cut_is_for_good(inner, fault):
    bucket = FaultyBucket(inner, at(0, fault))
    for _ in range(2):
        with pytest.raises(BucketUnavailableError):
            bucket.put("a", b"1")
    for call in (
        lambda: bucket.get("a"),
        lambda: bucket.list(),
        lambda: bucket.delete("a"),
        lambda: bucket.watch("a", None, 0),
    ):
        with pytest.raises(BucketUnavailableError, match="cut off"):
            call()
    assert [i.name for i in inner.list()] == (["a"] if fault is Fault.CUT_AFTER else [])


def test_an_answer_of_no_gets_lost_too(inner):
    bucket = FaultyBucket(inner, at(0, Fault.CUT_AFTER), count_reads=True)
    with pytest.raises(BucketUnavailableError):
        bucket.get("not there")
    with pytest.raises(BucketUnavailableError):
        bucket.put("a", b"")
    with pytest.raises(ObjectNotFoundError):
        inner.get("a")


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.FLIP])
def test_damage_in_answers_and_in_the_store(inner, fault, tmp_path):
    data = bytes(100)
    damaged = (
        data[:50] if fault is Fault.TRUNCATE else b"%b\x10%b" % (data[:50], data[51:])
    )
    inner.put("a", data)
    bucket = FaultyBucket(inner, lambda k, operation: fault, count_reads=True)
    assert bucket.get("a") == damaged
    assert bucket.get_range("a", 0, 100) == damaged
    with bucket.open("a") as stream:
        assert stream.read() == damaged
    assert inner.get("a") == data
    source = tmp_path / "source"
    source.write_bytes(data)
    for given in (data, source):
        bucket.put("b", given)
        assert inner.get("b") == damaged
        inner.delete("b")


@pytest.mark.parametrize("delay", [0.05])
def test_a_slow_bucket(inner, delay):
    ended = threading.Event()
    bucket = FaultyBucket(inner, delay=delay)
    timer = threading.Timer(delay / 2, ended.set)
    timer.start()
    bucket.put("a", b"")
    assert ended.is_set()
    timer.join()


def write_three(bucket) -> None:
    for name in "abc":
        bucket.put(name, b"1")
        bucket.get(name)


def test_every_fault_meets_each_operation_once(inner):
    def fresh():
        inner.drop()
        return inner

    left = {
        fault: [
            (k, [i.name for i in bucket.list()])
            for k, bucket in every_fault(write_three, fresh, fault)
        ]
        for fault in (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.TRUNCATE)
    }
    assert left == {
        Fault.CUT_BEFORE: [(0, []), (1, ["a"]), (2, ["a", "b"])],
        Fault.CUT_AFTER: [(0, ["a"]), (1, ["a", "b"]), (2, ["a", "b", "c"])],
        Fault.TRUNCATE: [(k, ["a", "b", "c"]) for k in range(3)],
    }
    count = every_fault(write_three, fresh, Fault.RAISE_AFTER, count_reads=True)
    assert len(list(count)) == 6
    with pytest.raises(ValueError, match="kill"):
        next(every_fault(write_three, fresh, Fault.KILL_AFTER))


def test_every_fault_hides_no_mistake_of_the_scenario(inner):
    def wrong(bucket):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(every_fault(wrong, lambda: inner, Fault.CUT_AFTER))


def die(path: str, fault: str, k: int) -> None:
    write_three(FaultyBucket(DirectoryBucket(path), at(k, Fault[fault])))


@pytest.mark.parametrize(
    "fault, left", [("KILL_BEFORE", ["a"]), ("KILL_AFTER", ["a", "b"])]
)
def test_kills(tmp_path, fault, left):
    (ended,) = run((die, str(tmp_path), fault, 1), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [i.name for i in DirectoryBucket(tmp_path).list()] == left
