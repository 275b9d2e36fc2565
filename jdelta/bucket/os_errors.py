"""What an `OSError` means to whoever writes into a bucket."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from jdelta.errors import (
    BucketDeniedError,
    BucketError,
    BucketFullError,
    BucketUnavailableError,
    ObjectNotFoundError,
)

_DENIED = {
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "read-only file system",
    errno.ELOOP: "a symbolic link, which is not followed",
    errno.EISDIR: "a folder is in the way",
    errno.ENOTEMPTY: "a folder is in the way",
    errno.ENOTDIR: "a file is in the way of a folder",
    errno.EEXIST: "a file is in the way of a folder",
    errno.ENAMETOOLONG: "the path is too long for the file system",
    errno.EFBIG: "larger than the file system or the process may write",
    errno.EINVAL: "not accepted by the file system",
    errno.ENXIO: "no regular file",
}
_FULL = {errno.ENOSPC: "disk full", errno.EDQUOT: "disk quota used up"}


def bucket_error(error: OSError, where: str) -> BucketError:
    """The bucket's error that says what an `OSError` at `where` means."""
    code = error.errno or 0
    if code == errno.ENOENT:
        return ObjectNotFoundError(f"{where}: no such object")
    if code in _DENIED:
        return BucketDeniedError(f"{where}: {_DENIED[code]} ({error})")
    if code in _FULL:
        return BucketFullError(f"{where}: {_FULL[code]} ({error})")
    return BucketUnavailableError(f"{where}: the file system failed ({error})")


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Turns every `OSError` inside into the bucket's own, which names `where`."""
    try:
        yield
    except OSError as error:
        raise bucket_error(error, where) from error
