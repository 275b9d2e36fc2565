"""What every backend must do. A later backend joins by a fixture in conftest.py."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jdelta.bucket import open_bucket
from jdelta.errors import (
    BucketDeniedError,
    BucketError,
    CorruptError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from jdelta.testing import run

ODD_NAMES = [
    "with space/and  two",
    "ünïcödé/模型/🙂.json",
    "percent%2Fslash%00",
    "?query=1&b#fragment+plus",
    "'quotes\"",
    "*glob[a-z]{1,2}",
    "-dash/--help",
    ".hidden/.file",
    "tmp/x",
    "a..b/...",
    "~home/$VAR",
    "e\u0301",
    "x" * 255,
    "/".join(["deep"] * 100),
]
BAD_NAMES = [
    "",
    "/",
    "/etc/passwd",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/..",
    "a/../b",
    "./a",
    "a/./b",
    "a\\b",
    "..\\a",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "a\x85b",
    "lone\ud800",
    "x" * 256,
    "ä" * 128,
    "a/" * 600 + "b",
    ".tmp",
    ".tmp/a",
]


# --- objects


def test_an_empty_bucket_has_nothing(bucket):
    assert list(bucket.list()) == []
    for look in (bucket.get, bucket.stat, bucket.open):
        with pytest.raises(ObjectNotFoundError, match="a/b"):
            look("a/b")
    with pytest.raises(ObjectNotFoundError):
        bucket.get_range("a/b", 0, 0)
    bucket.delete("a/b")
    assert bucket.watch("a/b", None, 0) is None


@pytest.mark.parametrize("size", [0, 1, 4097, 3_000_001])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "path"])
def test_what_was_put_is_got(bucket, size, kind, tmp_path):
    data = random.Random(size).randbytes(size)
    if kind == "path":
        given = tmp_path / "source"
        given.write_bytes(data)
    else:
        given = kind(data)
    before = time.time()
    bucket.put("a/b", given)
    assert bucket.get("a/b") == data
    info = bucket.stat("a/b")
    assert (info.name, info.size) == ("a/b", size)
    assert before - 5 < info.modified < time.time() + 5
    with bucket.open("a/b") as stream:
        assert stream.read() == data
    if kind == "path":
        assert given.read_bytes() == data


def test_another_view_of_the_store_sees_it(backend):
    backend.open().put("a", b"1")
    assert backend.open().get("a") == b"1"


def test_the_url_opens_the_same_bucket(bucket):
    bucket.put("a", b"1")
    assert open_bucket(bucket.url).get("a") == b"1"


def test_put_replaces_and_a_shorter_object_has_no_old_tail(bucket):
    bucket.put("a", b"long content")
    bucket.put("a", b"short")
    assert bucket.get("a") == b"short"


def test_moved_file_is_stored_and_the_call_can_be_repeated(bucket, tmp_path):
    folder = bucket.scratch() or tmp_path
    source = folder / "made-here"
    source.write_bytes(b"x" * 100_000)
    for _ in range(2):
        bucket.put("anchor/1", source, move=True)
        assert bucket.get("anchor/1") == b"x" * 100_000
    source.unlink()
    assert bucket.get("anchor/1") == b"x" * 100_000
    assert [info.name for info in bucket.list()] == ["anchor/1"]


def test_a_file_to_put_that_is_missing_is_named(bucket, tmp_path):
    for act in (bucket.put, bucket.put_if_absent):
        with pytest.raises(BucketError, match="no-such-file"):
            act("a", tmp_path / "no-such-file")
    assert list(bucket.list()) == []


def test_the_tag_changes_with_every_content(bucket):
    tags = set()
    for k in range(100):
        bucket.put("a", b"%03d" % k)  # same size, same millisecond
        tags.add(bucket.stat("a").tag)
    assert len(tags) == 100


def test_the_tag_is_the_same_for_every_reader(backend):
    backend.open().put("a", b"1")
    seen = backend.open().stat("a")
    assert seen == backend.open().stat("a") == next(backend.open().list())
    assert seen == backend.open().watch("a", None, 0)


def test_an_open_stream_is_not_torn_by_a_later_write(bucket):
    bucket.put("a", b"1" * 100_000)
    with bucket.open("a") as stream:
        start = stream.read(10)
        bucket.put("a", b"2" * 100_000)
        rest = b""
        while part := stream.read(70_000):
            rest += part
    assert start + rest == b"1" * 100_000


def test_open_reads_into_a_buffer(bucket):
    bucket.put("a", bytes(range(256)))
    with bucket.open("a") as stream:
        buffer = bytearray(300)
        assert stream.readinto(buffer) == 256
        assert buffer[:256] == bytes(range(256))
        assert stream.readinto(buffer) == 0


# --- sizes and ranges


def test_get_refuses_more_than_expected_and_names_both_sizes(bucket):
    bucket.put("a", b"12345")
    assert bucket.get("a", max_bytes=5) == b"12345"
    with pytest.raises(CorruptError, match=r"a .*5 bytes.* 4 "):
        bucket.get("a", max_bytes=4)
    bucket.put("a", b"")
    assert bucket.get("a", max_bytes=0) == b""


def test_ranges_are_exact(bucket):
    data = random.Random(0).randbytes(10_000)
    bucket.put("a", data)
    for start, length in [(0, 0), (0, 10_000), (10_000, 0), (1, 1), (9_999, 1)]:
        assert bucket.get_range("a", start, length) == data[start : start + length]


@pytest.mark.parametrize("start, length", [(0, 11), (10, 1), (11, 0), (5, 1 << 62)])
def test_a_range_past_the_end_is_an_error(bucket, start, length):
    bucket.put("a", b"0123456789")
    with pytest.raises(CorruptError, match="10 bytes"):
        bucket.get_range("a", start, length)


@pytest.mark.parametrize("start, length", [(-1, 1), (0, -1)])
def test_a_negative_range_is_an_error(bucket, start, length):
    bucket.put("a", b"0123456789")
    with pytest.raises(ValueError, match="negative"):
        bucket.get_range("a", start, length)


# --- names


def test_odd_names_round_trip(bucket):
    for name in ODD_NAMES:
        bucket.put(name, name.encode())
    for name in ODD_NAMES:
        assert bucket.get(name) == name.encode()
    assert [i.name for i in bucket.list()] == sorted(ODD_NAMES)
    for name in ODD_NAMES:
        bucket.delete(name)
    assert list(bucket.list()) == []


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_everywhere(bucket, name):
    calls = [
        lambda: bucket.put(name, b""),
        lambda: bucket.put_if_absent(name, b""),
        lambda: bucket.replace_if_unchanged(name, b"", None),
        lambda: bucket.get(name),
        lambda: bucket.get_range(name, 0, 0),
        lambda: bucket.open(name),
        lambda: bucket.stat(name),
        lambda: bucket.delete(name),
        lambda: bucket.watch(name, None, 0),
    ]
    for call in calls:
        with pytest.raises(BucketDeniedError, match="object name"):
            call()
    assert list(bucket.list()) == []


# --- lists


def test_lists_are_sorted_by_full_name_and_prefixes_are_lexical(bucket):
    names = ["a/1", "a/2", "a-b", "a.b", "a0", "ab/c/d", "logs/1", "logs_old/1", "z"]
    for name in random.Random(1).sample(names, len(names)):
        bucket.put(name, b"")
    # "-" and "." sort before "/", "0" after it: folders are not walked as one.
    assert [i.name for i in bucket.list()] == sorted(names)
    for prefix in ["", "a", "a/", "a/1", "ab", "ab/c", "ab/c/", "logs", "logs/", "zz"]:
        expected = sorted(name for name in names if name.startswith(prefix))
        assert [i.name for i in bucket.list(prefix)] == expected


@pytest.mark.parametrize("prefix", ["..", "../", "/", "a//", ".tmp", "a/../", "\0"])
def test_a_prefix_that_no_name_has_lists_nothing(bucket, prefix):
    bucket.put("a/b", b"")
    assert list(bucket.list(prefix)) == []


def test_a_list_may_be_consumed_while_objects_are_deleted(bucket):
    for k in range(50):
        bucket.put(f"d{k % 5}/{k:02}", b"")
    for info in bucket.list():
        bucket.delete(info.name)
    assert list(bucket.list()) == []


def test_delete_is_idempotent_and_leaves_neighbours(bucket):
    bucket.put("a/b/c", b"1")
    bucket.put("a/d", b"2")
    bucket.delete("a/b/c")
    bucket.delete("a/b/c")
    bucket.delete("a/b")
    bucket.delete("a")
    bucket.delete("a/d/e")
    assert [i.name for i in bucket.list()] == ["a/d"]
    bucket.put("a/b", b"3")  # was a folder
    assert bucket.get("a/b") == b"3"


# --- conditional writes


def test_put_if_absent_keeps_what_is_there(bucket):
    bucket.put_if_absent("a", b"first")
    with pytest.raises(ObjectExistsError, match="a"):
        bucket.put_if_absent("a", b"second")
    assert bucket.get("a") == b"first"
    bucket.delete("a")
    bucket.put_if_absent("a", b"third")
    assert bucket.get("a") == b"third"


def test_replace_if_unchanged(bucket):
    bucket.replace_if_unchanged("a", b"1", None)
    first = bucket.stat("a").tag
    with pytest.raises(ObjectChangedError):
        bucket.replace_if_unchanged("a", b"x", None)
    bucket.replace_if_unchanged("a", b"2", first)
    with pytest.raises(ObjectChangedError, match="read it again"):
        bucket.replace_if_unchanged("a", b"x", first)
    assert bucket.get("a") == b"2"
    second = bucket.stat("a").tag
    bucket.delete("a")
    with pytest.raises(ObjectChangedError):
        bucket.replace_if_unchanged("a", b"x", second)
    assert list(bucket.list()) == []


def meet(bucket, me: object, count: int) -> None:
    """Returns when `count` processes have called it, for a race to be one."""
    bucket.put(f"meet/{me}", b"")
    while sum(1 for _ in bucket.list("meet/")) < count:
        time.sleep(0.001)


def race_to_create(bucket, rounds: int, racer: int) -> list[int]:
    """The rounds this racer won; each round's object holds its winner."""
    won = []
    for k in range(rounds):
        try:
            bucket.put_if_absent(f"round/{k}", b"%d" % racer)
            won.append(k)
        except ObjectExistsError:
            pass
    return won


def check_race(bucket, won: list[list[int]], rounds: int) -> None:
    assert sorted(k for each in won for k in each) == list(range(rounds))
    for racer, each in enumerate(won):
        for k in each:
            assert bucket.get(f"round/{k}") == b"%d" % racer


def test_put_if_absent_has_one_winner_among_16_threads(backend):
    if not backend.open().capabilities.put_if_absent:
        pytest.skip("this backend does not promise it")
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda r: race_to_create(backend.open(), 20, r), range(16)))
    check_race(backend.open(), won, 20)


def create_in_threads(url: str, first: int) -> list[list[int]]:
    racers = range(first, first + 4)
    meet(open_bucket(url), first, 4)
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda r: race_to_create(open_bucket(url), 20, r), racers))


def test_put_if_absent_has_one_winner_among_processes(backend):
    bucket = backend.open()
    if not (backend.shared and bucket.capabilities.put_if_absent):
        pytest.skip("this backend does not promise it to other processes")
    ended = run(*[(create_in_threads, bucket.url, first) for first in (0, 4, 8, 12)])
    check_race(bucket, [won for each in ended for won in each.value], 20)


def count_up(bucket, times: int) -> None:
    """Adds one to a number, `times` times, as optimistic writers do."""
    while times:
        tag = bucket.stat("counter").tag
        number = int(bucket.get("counter"))
        try:
            bucket.replace_if_unchanged("counter", b"%d" % (number + 1), tag)
            times -= 1
        except ObjectChangedError:
            pass


def test_replace_if_unchanged_loses_no_update_among_threads(backend):
    bucket = backend.open()
    if not bucket.capabilities.replace_if_unchanged:
        pytest.skip("this backend does not promise it")
    bucket.put("counter", b"0")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: count_up(backend.open(), 10), range(8)))
    assert bucket.get("counter") == b"80"


def count_up_at(url: str, me: int) -> None:
    meet(open_bucket(url), me, 4)
    count_up(open_bucket(url), 25)


def test_replace_if_unchanged_loses_no_update_among_processes(backend):
    bucket = backend.open()
    if not (backend.shared and bucket.capabilities.replace_if_unchanged):
        pytest.skip("this backend does not promise it to other processes")
    bucket.put("counter", b"0")
    run(*[(count_up_at, bucket.url, me) for me in range(4)])
    assert bucket.get("counter") == b"100"


# --- concurrent writers and readers


def write_patterns(bucket, seed: int, times: int) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        bucket.put("a/shared", rng.choice(b"abcdef").to_bytes() * rng.randrange(200000))


def check_pattern(data: bytes) -> None:
    assert len(set(data)) <= 1, "two writers' bytes in one object"


def read_until(bucket, done: threading.Event) -> int:
    reads = 0
    while not done.is_set():
        data = bucket.get("a/shared")
        check_pattern(data)
        with bucket.open("a/shared") as stream:
            check_pattern(stream.read())
        assert [i.name for i in bucket.list()] == ["a/shared"]
        reads += 1
    return reads


def test_objects_are_never_torn_among_threads(backend):
    backend.open().put("a/shared", b"")
    done = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read_until, backend.open(), done) for _ in range(2)]
        writers = [pool.submit(write_patterns, backend.open(), k, 40) for k in range(4)]
        for writer in writers:
            writer.result()
        done.set()
        assert all(reader.result() > 0 for reader in readers)


def write_patterns_at(url: str, seed: int) -> None:
    write_patterns(open_bucket(url), seed, 60)


def test_objects_are_never_torn_among_processes(backend):
    if not backend.shared:
        pytest.skip("this backend is private to the process")
    bucket = backend.open()
    bucket.put("a/shared", b"")
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_until, backend.open(), done)
        run(*[(write_patterns_at, bucket.url, seed) for seed in range(3)])
        done.set()
        assert reader.result() > 0


def test_deletes_do_not_disturb_writes_of_neighbours(backend):
    def churn(k: int) -> None:
        bucket = backend.open()
        for _ in range(60):
            bucket.put(f"deep/er/{k}", b"%d" % k)
            bucket.delete(f"deep/er/{k}")
        bucket.put(f"deep/er/{k}", b"%d" % k)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(churn, range(6)))
    names = [i.name for i in backend.open().list("deep/")]
    assert names == [f"deep/er/{k}" for k in range(6)]


# --- watch


def test_watch_returns_at_once_what_is_new_already(bucket):
    bucket.put("a", b"1")
    assert bucket.watch("a", None, 10) == bucket.stat("a")
    assert bucket.watch("a", "another tag", 10) == bucket.stat("a")


def test_watch_ends_in_time_without_news(bucket):
    bucket.put("a", b"1")
    start = time.monotonic()
    assert bucket.watch("a", bucket.stat("a").tag, 0.1) is None
    assert bucket.watch("b", None, 0.1) is None
    assert 0.19 < time.monotonic() - start < 5


def test_watch_wakes_up_when_the_object_is_made_and_replaced(backend):
    bucket = backend.open()

    def write_twice() -> None:
        time.sleep(0.1)
        backend.open().put("w/a", b"1")
        time.sleep(0.2)
        backend.open().put("w/a", b"2")

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_twice)
        first = bucket.watch("w/a", None, 30)
        assert first is not None
        second = bucket.watch("w/a", first.tag, 30)
        assert second is not None
        assert second.tag != first.tag
        writing.result()
    assert bucket.get("w/a") == b"2"


def test_watch_sits_out_an_absence(backend):
    bucket = backend.open()
    bucket.put("a", b"1")
    tag = bucket.stat("a").tag
    bucket.delete("a")
    assert bucket.watch("a", tag, 0.05) is None
    bucket.put("a", b"2")
    assert bucket.watch("a", tag, 0) is not None


# --- against a model


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_agree_with_a_dict(bucket, seed):
    rng, model = random.Random(seed), {}
    names = [f"{a}/{b}" for a in ("x", "x-", "y/z") for b in ("1", "2")]
    for step in range(100):
        name, data = rng.choice(names), b"%d" % step
        match rng.randrange(6):
            case 0 | 1:
                bucket.put(name, data)
                model[name] = data
            case 2:
                try:
                    bucket.put_if_absent(name, data)
                    assert name not in model
                    model[name] = data
                except ObjectExistsError:
                    assert name in model
            case 3:
                bucket.delete(name)
                model.pop(name, None)
            case 4:
                tag = bucket.stat(name).tag if name in model else None
                bucket.replace_if_unchanged(name, data, tag)
                model[name] = data
            case _:
                prefix = rng.choice(["", "x", "x/", "y", "y/z/1"])
                expected = sorted(n for n in model if n.startswith(prefix))
                assert [i.name for i in bucket.list(prefix)] == expected
    assert {i.name: bucket.get(i.name) for i in bucket.list()} == model
