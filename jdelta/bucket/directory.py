"""A bucket in a folder of a local or shared file system."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jdelta.bucket import _files
from jdelta.bucket.os_errors import translated
from jdelta.bucket.protocol import (
    RESERVED,
    Capabilities,
    Data,
    ObjectInfo,
    check_range,
    check_size,
    name_problem,
    safe_name,
)
from jdelta.errors import (
    BucketDeniedError,
    BucketUnavailableError,
    CorruptError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
)

_POLL_SECONDS = 0.02
_LOCK_SECONDS = 30.0
_PLACE_TRIES = 64
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class DirectoryBucket:
    """Objects are the regular files below a folder; names are their relative paths.

    Every write goes to a new file in the hidden folder `.tmp`, is synced to the disk,
    then takes its name in one step, and the folder is synced: a crash leaves the old
    object or the new one. What a crash leaves in `.tmp` is harmless and is removed a
    day later. The folder itself is made by the first write; until then the bucket is
    empty.

    `put_if_absent` is atomic wherever hard links are. `replace_if_unchanged` (and
    `put_if_absent` on file systems without hard links) holds a lock file, so it
    excludes other conditional writers on one host, and those on other hosts where the
    file system has working locks; a plain `put` or `delete` of the same name does not
    wait for it.

    Symbolic links below the folder are no objects: lists leave them out, reading or
    writing through one is refused. A name can be a file or a folder but not both, so
    `a` and `a/b` cannot be objects at once.

    Thread-safe; any number of processes may share the folder. Collective: no.

    Example:
        >>> bucket = DirectoryBucket("/tmp/run")
        >>> bucket.put("pointer.json", b"{}")
        >>> bucket.get("pointer.json")
        b'{}'
    """

    capabilities = Capabilities(
        put_if_absent=True, replace_if_unchanged=True, watch=True
    )

    def __init__(self, root: str | os.PathLike[str]):
        """Names the folder; touches nothing."""
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)
        self._swept = False

    def __repr__(self) -> str:
        """The folder, for messages."""
        return f"DirectoryBucket({self.url})"

    def put(self, name: str, data: Data, *, move: bool = False) -> None:
        """See `Bucket.put`."""
        with self._staged(name, data, move) as (unfinished, temporary):

            def rename(folder: int, base: str) -> None:
                os.rename(temporary, base, src_dir_fd=unfinished, dst_dir_fd=folder)

            self._place(name, rename)

    def put_if_absent(self, name: str, data: Data) -> None:
        """See `Bucket.put_if_absent`."""
        with self._staged(name, data) as (unfinished, temporary):
            try:
                self._place_new(name, unfinished, temporary)
            except FileExistsError:
                raise ObjectExistsError(f"{self.url} already has {name}") from None

    def replace_if_unchanged(self, name: str, data: Data, tag: str | None) -> None:
        """See `Bucket.replace_if_unchanged`."""
        self._check_tag(name, tag)
        with self._staged(name, data) as (unfinished, temporary):
            with self._locked(unfinished):
                self._check_tag(name, tag)
                if tag is not None:

                    def rename(folder: int, base: str) -> None:
                        os.rename(
                            temporary, base, src_dir_fd=unfinished, dst_dir_fd=folder
                        )

                    self._place(name, rename)
                    return
            try:
                self._place_new(name, unfinished, temporary)
            except FileExistsError:
                raise ObjectChangedError(
                    f"{name} appeared in {self.url} meanwhile; read it"
                ) from None

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See `Bucket.get`."""
        where = self._where(name)
        with self._opened(name) as (file, size):
            check_size(where, size, max_bytes)
            data = _files.read_exactly(file, 0, size)
        if len(data) != size:
            raise CorruptError(f"{where} shrank from {size} to {len(data)} bytes")
        return data

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See `Bucket.get_range`."""
        where = self._where(name)
        with self._opened(name) as (file, size):
            check_range(where, size, start, length)
            data = _files.read_exactly(file, start, length)
        if len(data) != length:
            raise CorruptError(f"{where} shrank while it was read")
        return data

    def open(self, name: str) -> BinaryIO:
        """See `Bucket.open`."""
        with self._opened(name) as (file, _):
            return _files.ObjectStream(os.dup(file), self._where(name))

    def stat(self, name: str) -> ObjectInfo:
        """See `Bucket.stat`."""
        *parts, base = safe_name(name).split("/")
        with self._reading(name), _files.open_folder(self.url, parts) as folder:
            found = os.stat(base, dir_fd=folder, follow_symlinks=False)
            _files.check_regular(found, base)
        return _info(name, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Bucket.list`."""
        walk = [iter(self._scan("", prefix))]
        while walk:
            entry = next(walk[-1], None)
            if entry is None:
                walk.pop()
            elif isinstance(entry, ObjectInfo):
                yield entry
            else:
                walk.append(iter(self._scan(entry, prefix)))

    def delete(self, name: str) -> None:
        """See `Bucket.delete`; folders that become empty go as well."""
        parts = safe_name(name).split("/")
        gone = (FileNotFoundError, NotADirectoryError)
        with translated(self._where(name)), contextlib.suppress(*gone):
            with _files.open_folder(self.url, parts[:-1]) as folder:
                found = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
                _files.check_regular(found, parts[-1])
                os.unlink(parts[-1], dir_fd=folder)
                _files.sync_folder(folder)
        with contextlib.suppress(OSError):  # full of others, or pruned already
            for depth in range(len(parts) - 1, 0, -1):
                with _files.open_folder(self.url, parts[: depth - 1]) as folder:
                    os.rmdir(parts[depth - 1], dir_fd=folder)

    def watch(self, name: str, tag: str | None, timeout: float) -> ObjectInfo | None:
        """See `Bucket.watch`. Looks every 20 ms."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(ObjectNotFoundError):
                found = self.stat(name)
                if found.tag != tag:
                    return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _POLL_SECONDS))

    def scratch(self) -> Path:
        """See `Bucket.scratch`: the folder `.tmp`, made if need be."""
        path = self.root / RESERVED
        with (
            translated(str(path)),
            _files.open_folder(self.url, [RESERVED], create=True) as unfinished,
        ):
            self._sweep(unfinished)
        return path

    # --- reading

    def _where(self, name: str) -> str:
        return f"{name} in {self.url}"

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A file where the name asks for a folder means that the object is absent."""
        try:
            with translated(self._where(name)):
                yield
        except BucketDeniedError as error:
            if isinstance(error.__cause__, NotADirectoryError) and self.root.is_dir():
                raise ObjectNotFoundError(f"{self.url} has no {name}") from None
            raise

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """The object's descriptor and its size; closed at the end."""
        *parts, base = safe_name(name).split("/")
        with self._reading(name):
            with _files.open_folder(self.url, parts) as folder:
                file, found = _files.open_file(folder, base)
            try:
                yield file, found.st_size
            finally:
                os.close(file)

    def _scan(self, above: str, prefix: str) -> Sequence[ObjectInfo | str]:
        """A folder's objects and folders (ending in a slash) that the prefix wants."""
        found: dict[str, ObjectInfo | str] = {}
        parts = above.split("/")[:-1]
        gone = (FileNotFoundError, NotADirectoryError)
        with (
            translated(f"list of {above or 'all'} in {self.url}"),
            contextlib.suppress(*gone),
            _files.open_folder(self.url, parts) as folder,
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                name = above + entry.name
                if name_problem(name) is not None:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    name += "/"
                    if name.startswith(prefix) or prefix.startswith(name):
                        found[name] = name
                elif name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        info = _info(name, entry.stat(follow_symlinks=False))
                        found[name] = info
        return [found[name] for name in sorted(found)]

    def _check_tag(self, name: str, tag: str | None) -> None:
        try:
            found = self.stat(name).tag
        except ObjectNotFoundError:
            found = None
        if found != tag:
            raise ObjectChangedError(
                f"{self._where(name)} has tag {found}, expected {tag}: somebody else "
                "wrote it; read it again"
            )

    # --- writing

    @contextlib.contextmanager
    def _staged(
        self, name: str, data: Data, move: bool = False
    ) -> Iterator[tuple[int, str]]:
        """A finished file without an object's name: its folder and its name there."""
        safe_name(name)
        temporary = uuid.uuid4().hex
        with (
            translated(self._where(name)),
            _files.open_folder(self.url, [RESERVED], create=True) as unfinished,
        ):
            self._sweep(unfinished)
            try:
                _files.write_temporary(unfinished, temporary, data, move=move)
                yield unfinished, temporary
            except FileNotFoundError as error:
                raise BucketUnavailableError(
                    f"{self.url} was removed during a write of {name}"
                ) from error
            finally:
                # It is still there after a failure, and after hard links.
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=unfinished)

    def _place(self, name: str, act: Callable[[int, str], None]) -> None:
        """Lets `act` give a staged file its name, in folders made for it."""
        *parts, base = name.split("/")
        for _ in range(_PLACE_TRIES):
            try:
                with _files.open_folder(self.url, parts, create=True) as folder:
                    act(folder, base)
                    _files.sync_folder(folder)
                return
            except FileNotFoundError:
                continue  # a delete pruned the folder under our feet: make it again
        raise BucketUnavailableError(
            f"{self._where(name)}: its folder, or the unfinished file in {RESERVED}, "
            "is removed again and again"
        )

    def _place_new(self, name: str, unfinished: int, temporary: str) -> None:
        """Gives a staged file its name unless that is taken: `FileExistsError`."""

        def link(folder: int, base: str) -> None:
            os.link(temporary, base, src_dir_fd=unfinished, dst_dir_fd=folder)

        def rename(folder: int, base: str) -> None:
            try:
                os.stat(base, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                os.rename(temporary, base, src_dir_fd=unfinished, dst_dir_fd=folder)
            else:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), base)

        try:
            self._place(name, link)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with self._locked(unfinished):
                self._place(name, rename)

    @contextlib.contextmanager
    def _locked(self, unfinished: int) -> Iterator[None]:
        """Excludes other conditional writers, threads and processes alike."""
        import fcntl  # here, so that other buckets work where there is none

        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(_files.LOCK, flags, 0o666, dir_fd=unfinished)
        deadline = time.monotonic() + _LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise BucketUnavailableError(
                            f"{self.url}: another process has held the lock "
                            f"{RESERVED}/{_files.LOCK} for {_LOCK_SECONDS:.0f} s"
                        ) from None
                    time.sleep(0.002)
            try:
                yield
            finally:
                # Not left to close: a forked child may hold the same lock open.
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def _sweep(self, unfinished: int) -> None:
        if not self._swept:
            self._swept = True
            _files.remove_abandoned(unfinished)


def _info(name: str, found: os.stat_result) -> ObjectInfo:
    tag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return ObjectInfo(name, found.st_size, tag, found.st_mtime)
