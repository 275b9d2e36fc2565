"""File work below one folder that no symbolic link can lead astray.

Names are walked part by part, each opened relative to the one before and never through
a symbolic link, so that whoever can write into a bucket still cannot make a reader or a
writer touch a file outside of it, whatever is swapped meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jdelta.bucket.os_errors import translated
from jdelta.bucket.protocol import Data
from jdelta.errors import (
    BucketDeniedError,
    BucketError,
)

LOCK = "lock"
"""Name of the lock file, among the unfinished files."""

COPY_BYTES = 4 << 20
ABANDONED_SECONDS = 24 * 3600.0

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@contextlib.contextmanager
def open_folder(
    root: str, parts: Sequence[str], *, create: bool = False
) -> Iterator[int]:
    """A descriptor of the folder `root/parts[0]/...`, made where asked to.

    Raises:
        FileNotFoundError: it does not exist (or was removed while being made).
        NotADirectoryError: a part is a file.
        OSError: with `ELOOP` where a part below `root` is a symbolic link.
        BucketDeniedError: `root` itself is no folder.
    """
    if create and not os.path.isdir(root):
        os.makedirs(root, exist_ok=True)
        with open_folder(os.path.dirname(root), ()) as above:
            sync_folder(above)
    try:
        folder = os.open(root, _FOLDER)
    except NotADirectoryError as error:
        raise BucketDeniedError(f"the bucket {root} is no folder") from error
    try:
        for part in parts:
            below = _descend(folder, part, create)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _descend(folder: int, part: str, create: bool) -> int:
    flags = _FOLDER | os.O_NOFOLLOW
    try:
        return os.open(part, flags, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError:
        # Linux says so of a symbolic link to a folder, too.
        found = os.stat(part, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part) from None
        raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, dir_fd=folder)
        sync_folder(folder)
    return os.open(part, flags, dir_fd=folder)


def sync_folder(folder: int) -> None:
    """Makes a folder's entries outlive a crash of the machine."""
    try:
        os.fsync(folder)
    except OSError as error:
        # Some file systems cannot, and need not, sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def open_file(folder: int, name: str) -> tuple[int, os.stat_result]:
    """A regular file in a folder, opened for reading, and its stat.

    Raises:
        FileNotFoundError: there is none (or a folder).
        OSError: with `ENXIO` for a pipe or device; opening one does not wait.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(name, flags, dir_fd=folder)
    try:
        found = os.fstat(file)
        check_regular(found, name)
    except BaseException:
        os.close(file)
        raise
    return file, found


def check_regular(found: os.stat_result, name: str) -> None:
    """Raises the `OSError` that fits when a stat is not a regular file's."""
    if stat.S_ISREG(found.st_mode):
        return
    code = errno.ENXIO
    if stat.S_ISDIR(found.st_mode):
        code = errno.ENOENT
    elif stat.S_ISLNK(found.st_mode):
        code = errno.ELOOP
    raise OSError(code, os.strerror(code), name)


def read_exactly(file: int, start: int, length: int) -> bytes:
    """`length` bytes from `start`; fewer only where the file ends."""
    parts: list[bytes] = []
    while length > 0:
        part = os.pread(file, min(length, 1 << 30), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class ObjectStream(io.FileIO):
    """An unbuffered stream whose errors are the bucket's."""

    def __init__(self, file: int, where: str):
        """Takes over the descriptor `file`."""
        super().__init__(file, "rb")
        self._where = where

    def read(self, size: int | None = -1) -> bytes:
        """Reads at most `size` bytes, or all."""
        with translated(self._where):
            return super().read(-1 if size is None else size)

    def readall(self) -> bytes:
        """Reads all that is left."""
        with translated(self._where):
            return super().readall()

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer and returns how many bytes it got."""
        with translated(self._where):
            return super().readinto(buffer)


def write_temporary(folder: int, name: str, data: Data, *, move: bool) -> None:
    """Writes a new file, synced to the disk; the caller removes it on failure.

    With `move` the new file may be a second link to the file `data`.
    """
    linked = move and isinstance(data, Path) and _link(data, folder, name)
    if linked:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        if not linked:
            _fill(file, data)
        # An inode is soon used again and the kernel's clock ticks in milliseconds: a
        # time in nanoseconds keeps the tags of two contents apart.
        now = time.time_ns()
        with contextlib.suppress(PermissionError):  # a linked file of somebody else's
            os.utime(file, ns=(now, now))
        os.fsync(file)
    finally:
        os.close(file)


def _link(source: Path, folder: int, name: str) -> bool:
    try:
        if not stat.S_ISREG(os.lstat(source).st_mode):
            return False
        os.link(source, name, dst_dir_fd=folder)
    except OSError:  # another file system, or one without links: copy instead
        return False
    return True


def _fill(file: int, data: Data) -> None:
    if not isinstance(data, Path):
        _write(file, memoryview(data).cast("B"))
        return
    try:
        source = open(data, "rb", buffering=0)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise BucketError(f"cannot read the file to put, {data}: {error}") from error
    with source:
        buffer = memoryview(bytearray(COPY_BYTES))
        while True:
            try:
                length = source.readinto(buffer)
            except OSError as error:
                raise BucketError(
                    f"cannot read the file to put, {data}: {error}"
                ) from error
            if not length:
                return
            _write(file, buffer[:length])


def _write(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data[: 1 << 30]) :]


def remove_abandoned(folder: int) -> None:
    """Removes unfinished files that nobody touched for a day. Best effort."""
    limit = time.time() - ABANDONED_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == LOCK:
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if _newest(folder, entry.name) < limit:
                        shutil.rmtree(entry.name, dir_fd=folder)
                elif entry.stat(follow_symlinks=False).st_mtime < limit:
                    os.unlink(entry.name, dir_fd=folder)


def _newest(folder: int, name: str) -> float:
    """The time of the last change in a folder or of a file directly in it."""
    below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    try:
        times = [os.fstat(below).st_mtime]
        with os.scandir(below) as entries:
            times += [e.stat(follow_symlinks=False).st_mtime for e in entries]
        return max(times)
    finally:
        os.close(below)
