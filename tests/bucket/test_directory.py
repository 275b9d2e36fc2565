"""What only the directory backend does: files, links, full disks, crashes."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest

from jdelta.bucket import DirectoryBucket
from jdelta.bucket.os_errors import bucket_error
from jdelta.errors import (
    BucketDeniedError,
    BucketError,
    BucketFullError,
    BucketUnavailableError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from jdelta.testing import Processes, run


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def bucket(root) -> DirectoryBucket:
    return DirectoryBucket(root)


def unfinished(root: Path) -> list[str]:
    return sorted(set(os.listdir(root / ".tmp")) - {"lock"})


# --- layout


def test_reading_does_not_make_the_folder(root, bucket):
    assert list(bucket.list()) == []
    bucket.delete("a")
    with pytest.raises(ObjectChangedError):
        bucket.replace_if_unchanged("a", b"", "tag")
    assert not root.exists()


def test_the_folder_and_its_parents_are_made_by_the_first_write(tmp_path):
    bucket = DirectoryBucket(tmp_path / "not" / "yet" / "there")
    bucket.put("a/b", b"1")
    assert (tmp_path / "not" / "yet" / "there" / "a" / "b").read_bytes() == b"1"


def test_a_relative_path_is_kept_through_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bucket = DirectoryBucket("store")
    monkeypatch.chdir("/")
    bucket.put("a", b"1")
    assert (tmp_path / "store" / "a").read_bytes() == b"1"
    assert bucket.url == str(tmp_path / "store")


def test_emptied_folders_are_removed_but_not_the_bucket(root, bucket):
    bucket.put("a/b/c/d", b"")
    bucket.put("a/e", b"")
    bucket.delete("a/b/c/d")
    assert sorted(os.listdir(root / "a")) == ["e"]
    bucket.delete("a/e")
    assert os.listdir(root) == [".tmp"]


def test_files_of_others_with_impossible_names_are_left_out(root, bucket):
    bucket.put("a", b"")
    (root / "line\nbreak").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"")
    (root / "back\\slash").mkdir()
    (root / "back\\slash" / "x").write_bytes(b"")
    assert [i.name for i in bucket.list()] == ["a"]


def test_a_folder_is_no_object_and_cannot_become_one(bucket):
    bucket.put("a/b", b"1")
    for look in (bucket.get, bucket.stat, bucket.open):
        with pytest.raises(ObjectNotFoundError):
            look("a")
    with pytest.raises(BucketDeniedError, match="folder is in the way"):
        bucket.put("a", b"2")
    with pytest.raises(BucketDeniedError, match="file is in the way"):
        bucket.put("a/b/c", b"2")
    with pytest.raises(ObjectNotFoundError):
        bucket.get("a/b/c")
    assert bucket.get("a/b") == b"1"


def test_a_file_instead_of_the_folder_is_denied_not_empty(root, bucket):
    root.write_bytes(b"")
    for call in (
        lambda: bucket.get("a"),
        lambda: bucket.stat("a"),
        lambda: list(bucket.list()),
        lambda: bucket.put("a", b""),
        lambda: bucket.scratch(),
    ):
        with pytest.raises(BucketDeniedError, match="store"):
            call()


def test_the_time_in_the_tag_is_finer_than_the_kernels_ticks(root, bucket):
    """Inodes are used again at once, so the tag needs a time that never repeats."""
    for _ in range(10):
        before = time.time_ns()
        bucket.put("a", b"1")
        assert before <= os.stat(root / "a").st_mtime_ns <= time.time_ns()


def test_a_moved_file_is_not_copied(root, bucket):
    source = Path(tempfile.mkdtemp(dir=bucket.scratch()), "weights")
    source.write_bytes(b"x" * 1000)
    bucket.put("anchor", source, move=True)
    assert (root / "anchor").stat().st_ino == source.stat().st_ino
    assert [i.name for i in bucket.list()] == ["anchor"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")
def test_a_moved_file_of_another_file_system_is_copied(root, bucket):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        source = Path(other, "weights")
        source.write_bytes(b"x" * 1000)
        if source.stat().st_dev == root.parent.stat().st_dev:
            pytest.skip("no second file system")
        bucket.put("anchor", source, move=True)
    assert bucket.get("anchor") == b"x" * 1000


def test_objects_are_readable_as_the_umask_says(root, bucket):
    old = os.umask(0o027)
    try:
        bucket.put("a/b", b"")
    finally:
        os.umask(old)
    assert stat.S_IMODE((root / "a" / "b").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o750


# --- unfinished files


def test_nothing_unfinished_remains(root, bucket):
    bucket.put("a", b"1")
    bucket.put_if_absent("b", b"1")
    with pytest.raises(ObjectExistsError):
        bucket.put_if_absent("b", b"1")
    bucket.replace_if_unchanged("a", b"2", bucket.stat("a").tag)
    with pytest.raises(BucketError):
        bucket.put("c", root / "missing")
    bucket.put("folder/x", b"")
    with pytest.raises(BucketDeniedError):
        bucket.put("folder", b"")
    assert unfinished(root) == []


def test_old_unfinished_files_are_removed_by_a_later_writer(root, bucket):
    scratch = bucket.scratch()
    old, young = scratch / "old", scratch / "young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "weights").write_bytes(b"")
    (scratch / "crashed").write_bytes(b"")
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (old / "weights", old, young, scratch / "crashed"):
        os.utime(path, (two_days_ago, two_days_ago))
    DirectoryBucket(root).put("a", b"")
    assert unfinished(root) == ["young"]


def test_no_hard_links(root, bucket, monkeypatch):
    """As on FAT: `os.link` is refused by the system."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    bucket.put_if_absent("a", b"1")
    with pytest.raises(ObjectExistsError):
        bucket.put_if_absent("a", b"2")
    with pytest.raises(ObjectChangedError):
        bucket.replace_if_unchanged("a", b"2", None)
    bucket.replace_if_unchanged("b", b"3", None)
    source = root / ".tmp" / "source"
    source.write_bytes(b"4")
    bucket.put("c", source, move=True)
    assert [bucket.get(name) for name in "abc"] == [b"1", b"3", b"4"]


def test_a_lock_held_by_a_stuck_process_is_reported(bucket, root, monkeypatch):
    monkeypatch.setattr("jdelta.bucket.directory._LOCK_SECONDS", 0.1)
    bucket.put("a", b"1")
    tag = bucket.stat("a").tag
    with Processes() as group:
        holder = group.start(
            "import fcntl, sys, time\n"
            "lock = open(sys.argv[1], 'a')\n"
            "fcntl.flock(lock, fcntl.LOCK_EX)\n"
            "print('held')\n"
            "time.sleep(60)\n",
            root / ".tmp" / "lock",
        )
        holder.wait_for("held")
        with pytest.raises(BucketUnavailableError, match="another process"):
            bucket.replace_if_unchanged("a", b"2", tag)
        bucket.put("a", b"3")  # does not wait for it
        tag = bucket.stat("a").tag
        holder.kill()
    bucket.replace_if_unchanged("a", b"4", tag)
    assert unfinished(root) == []


# --- what else may lie in the folder


def test_symbolic_links_out_of_the_bucket_are_not_followed(root, bucket, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    bucket.put("inside", b"1")
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "dangling").symlink_to(outside / "nothing")
    (root / "same").symlink_to("inside")
    (root / "loop").symlink_to("loop")
    assert [i.name for i in bucket.list()] == ["inside"]
    assert list(bucket.list("folder/")) == []
    for name in ("file", "folder/secret", "dangling", "same", "loop"):
        for look in (bucket.get, bucket.stat, bucket.open, bucket.delete):
            with pytest.raises(BucketDeniedError, match="symbolic link"):
                look(name)
    with pytest.raises(BucketDeniedError, match="symbolic link"):
        bucket.put("folder/new", b"2")
    assert (outside / "secret").read_bytes() == b"secret"
    assert os.listdir(outside) == ["secret"]
    bucket.put("file", b"2")  # takes the link's place
    assert bucket.get("file") == b"2"
    assert (outside / "secret").read_bytes() == b"secret"


def test_unfinished_files_do_not_leave_the_bucket(root, bucket, tmp_path):
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / ".tmp").symlink_to(tmp_path / "outside")
    for call in (lambda: bucket.put("a", b"1"), bucket.scratch):
        with pytest.raises(BucketDeniedError, match="symbolic link"):
            call()
    assert os.listdir(tmp_path / "outside") == []


def test_the_bucket_itself_may_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    root.mkdir()
    DirectoryBucket(tmp_path / "link").put("a", b"1")
    assert DirectoryBucket(root).get("a") == b"1"


@pytest.mark.timeout(20)
def test_pipes_and_sockets_do_not_hang_a_reader(root, bucket):
    bucket.put("a", b"1")
    os.mkfifo(root / "pipe")
    for look in (bucket.get, bucket.stat, bucket.open):
        with pytest.raises(BucketDeniedError, match="no regular file"):
            look("pipe")
    assert [i.name for i in bucket.list()] == ["a"]


def test_a_tree_deeper_than_names_reach_is_listed(root, bucket):
    bucket.put("a", b"")
    folder = os.open(root, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("deep" * 5, dir_fd=folder)
        below = os.open("deep" * 5, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    assert [i.name for i in bucket.list()] == ["a"]


# --- errors


@pytest.mark.parametrize(
    "code, kind",
    [
        (errno.ENOENT, ObjectNotFoundError),
        (errno.EACCES, BucketDeniedError),
        (errno.EPERM, BucketDeniedError),
        (errno.EROFS, BucketDeniedError),
        (errno.ENOSPC, BucketFullError),
        (errno.EDQUOT, BucketFullError),
        (errno.EIO, BucketUnavailableError),
        (errno.ESTALE, BucketUnavailableError),
        (errno.EMFILE, BucketUnavailableError),
    ],
)
def test_each_errno_has_its_error(code, kind):
    error = bucket_error(OSError(code, os.strerror(code)), "a in /bucket")
    assert type(error) is kind
    assert "a in /bucket" in str(error)
    assert kind is ObjectNotFoundError or os.strerror(code) in str(error)


def test_reading_a_stream_raises_the_buckets_errors(bucket):
    bucket.put("a", b"1")
    with bucket.open("a") as stream:
        os.close(stream.fileno())  # a broken descriptor: EBADF at each read
        for call in (stream.read, lambda: stream.readinto(bytearray(1))):
            with pytest.raises(BucketUnavailableError, match="a in"):
                call()
        os.dup2(os.open(os.devnull, os.O_RDONLY), stream.fileno())


_LIMITED = """
import resource, sys
from jdelta.bucket import open_bucket
from jdelta.errors import BucketDeniedError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
bucket = open_bucket(sys.argv[1])
bucket.put("a", b"1")
try:
    bucket.put("a", bytes(200_000))
except BucketDeniedError as error:
    print(error)
"""


def test_too_large_for_the_process_limit(tmp_path):
    ended = run((_LIMITED, tmp_path / "store"))
    assert "a in" in ended[0].stdout
    assert "File too large" in ended[0].stdout
    assert DirectoryBucket(tmp_path / "store").get("a") == b"1"
    assert unfinished(tmp_path / "store") == []


CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18


def _call(function: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def _private_mounts() -> str | None:
    """Gives this process mounts of its own; says why where that is impossible."""
    try:
        try:
            _call("unshare", CLONE_NEWNS)
        except PermissionError:
            _call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    except (OSError, AttributeError) as error:
        return f"no private mounts here: {error}"
    return None


def _mount(path: str, size: str) -> str | None:
    try:
        options = f"size={size}".encode()
        _call("mount", b"tmpfs", path.encode(), b"tmpfs", 0, options)
    except OSError as error:
        return f"cannot mount a small file system: {error}"
    return None


def fill_a_disk(path: str) -> str | None:
    """In a process of its own: everything on a file system of 256 KiB."""
    why = _private_mounts() or _mount(path, "256k")
    if why:
        return why
    bucket = DirectoryBucket(path)
    bucket.put("a/old", b"old")
    bucket.put("b", b"b")
    tag = bucket.stat("b").tag
    source = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp", "jdelta-large")
    source.write_bytes(bytes(1 << 20))
    writes = [
        lambda: bucket.put("a/old", bytes(1 << 20)),
        lambda: bucket.put("new/folder/x", bytes(1 << 20)),
        lambda: bucket.put("a/old", source),
        lambda: bucket.put("a/old", source, move=True),
        lambda: bucket.put_if_absent("c", bytes(1 << 20)),
        lambda: bucket.replace_if_unchanged("b", bytes(1 << 20), tag),
    ]
    try:
        for write in writes:
            with pytest.raises(BucketUnavailableError, match=f"{path}.*disk full"):
                write()
            assert unfinished(Path(path)) == []
            assert {i.name for i in bucket.list()} == {"a/old", "b"}
            assert bucket.get("a/old") == b"old"
            assert bucket.get("b") == b"b"
    finally:
        source.unlink()
    bucket.put("a/old", bytes(100_000))  # there is room for that
    assert bucket.get("a/old") == bytes(100_000)
    return None


def write_to_a_read_only_disk(path: str) -> str | None:
    why = _private_mounts() or _mount(path, "1m")
    if why:
        return why
    full, empty = DirectoryBucket(path + "/full"), DirectoryBucket(path + "/empty")
    full.put("a/b", b"old")
    tag = full.stat("a/b").tag
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", MS_REMOUNT | MS_RDONLY, None)
    assert full.get("a/b") == b"old"
    assert [i.name for i in full.list()] == ["a/b"]
    assert list(empty.list()) == []
    writes = [
        lambda: full.put("a/b", b"new"),
        lambda: full.put_if_absent("c", b"new"),
        lambda: full.replace_if_unchanged("a/b", b"new", tag),
        lambda: full.delete("a/b"),
        lambda: empty.put("a", b""),
        lambda: empty.scratch(),
    ]
    for write in writes:
        with pytest.raises(BucketDeniedError, match=f"{path}.*[Rr]ead-only"):
            write()
    full.delete("not there")
    assert full.get("a/b") == b"old"
    return None


@pytest.mark.parametrize("scenario", [fill_a_disk, write_to_a_read_only_disk])
def test_a_real_file_system(scenario, tmp_path):
    (ended,) = run((scenario, str(tmp_path)))
    if ended.value is not None:
        pytest.skip(ended.value)


def work_without_permission() -> None:
    """In a process of its own, which gives up being root."""
    with tempfile.TemporaryDirectory() as path:
        bucket = DirectoryBucket(path + "/store")
        bucket.put("open/a", b"1")
        bucket.put("closed/b", b"1")
        os.chmod(path, 0o755)
        os.chmod(path + "/store/closed/b", 0)
        folders = [path + "/store/open", path + "/store", path + "/store/.tmp"]
        for folder in folders:
            os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            assert bucket.get("open/a") == b"1"
            for call in (
                lambda: bucket.get("closed/b"),
                lambda: bucket.put("open/a", b"2"),
                lambda: bucket.put_if_absent("x", b"2"),
                lambda: bucket.delete("open/a"),
            ):
                with pytest.raises(BucketDeniedError, match="permission denied"):
                    call()
            assert bucket.stat("closed/b").size == 1
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            for folder in folders:
                os.chmod(folder, 0o755)


def test_without_permission():
    run(work_without_permission)


# --- crashes

_PUT_A_PIPE = """
import sys
from pathlib import Path
from jdelta.bucket import open_bucket
bucket = open_bucket(sys.argv[1])
print("started")
getattr(bucket, sys.argv[3])("a/b", Path(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "method, old", [("put", None), ("put", b"old"), ("put_if_absent", None)]
)
def test_a_kill_halfway_through_the_bytes_changes_nothing(
    root, bucket, tmp_path, method, old
):
    if old:
        bucket.put("a/b", old)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Processes() as group:
        child = group.start(_PUT_A_PIPE, root, pipe, method)
        with open(pipe, "wb", buffering=0) as source:
            source.write(bytes(50_000))
            half = _wait_for_bytes(root / ".tmp")
            child.kill()
            assert half.stat().st_size > 0
    assert [i.name for i in bucket.list()] == (["a/b"] if old else [])
    if old:
        assert bucket.get("a/b") == old
    assert unfinished(root) == [half.name]  # harmless, and gone in a day
    bucket.put("a/b", b"next")
    assert bucket.get("a/b") == b"next"


def _wait_for_bytes(folder: Path) -> Path:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if folder.is_dir():
            for path in folder.iterdir():
                if path.name != "lock" and path.stat().st_size:
                    return path
        time.sleep(0.005)
    raise AssertionError("the child did not begin to write")


_PUT_FOREVER = """
import sys
from jdelta.bucket import open_bucket
bucket = open_bucket(sys.argv[1])
print("started")
k = 0
while True:
    k += 1
    bucket.put("a/b", bytes([k % 251]) * 1_000_000)
    bucket.put_if_absent(f"new/{k}", bytes([k % 251]) * 300_000)
    bucket.delete(f"new/{k - 1}")
"""


def test_a_kill_at_any_moment_leaves_whole_objects(root, bucket):
    rng = random.Random(0)
    for _ in range(8):
        with Processes() as group:
            child = group.start(_PUT_FOREVER, root)
            child.wait_for("started")
            time.sleep(rng.uniform(0, 0.05))
            child.signal(signal.SIGKILL)
            child.wait(check=False)
        for info in bucket.list():
            data = bucket.get(info.name)
            assert len(data) == (1_000_000 if info.name == "a/b" else 300_000)
            assert len(set(data)) == 1
            if info.name != "a/b":
                bucket.delete(info.name)
    assert bucket.stat("a/b").size == 1_000_000
