"""From a URL to a bucket."""

from __future__ import annotations

import os
import re
from typing import cast
from urllib.parse import unquote

from jdelta.bucket.directory import DirectoryBucket
from jdelta.bucket.memory import MemoryBucket
from jdelta.bucket.protocol import Bucket
from jdelta.errors import BucketError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_USABLE = "a path, file:///path or memory://name"


def open_bucket(url: Bucket | str | os.PathLike[str]) -> Bucket:
    """Opens the bucket a URL names. Nothing is read or written yet.

    Args:
        url: The path of a folder (`runs/a`, `~/runs/a`), `file:///path` (percent signs
            decoded), or `memory://name` (inside this process). A bucket is returned
            as it is.

    Raises:
        BucketError: no backend for such a URL, or it is malformed.

    Example:
        >>> open_bucket("memory://demo").url
        'memory://demo'
    """
    if hasattr(url, "put_if_absent"):
        return cast(Bucket, url)
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str) or not text or "\0" in text:
        raise BucketError(f"{url!r} is no bucket URL; give {_USABLE}")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return DirectoryBucket(os.path.expanduser(text))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "memory":
        if not rest:
            raise BucketError(f"{text} names no bucket; give memory://name")
        return MemoryBucket(rest)
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash or not path:
            raise BucketError(
                f"{text}: a file URL names an absolute path on this machine, "
                "file:///path"
            )
        path = unquote("/" + path)
        if "\0" in path:
            raise BucketError(f"{text} holds a NUL character")
        return DirectoryBucket(path)
    raise BucketError(
        f"this version of jdelta has no backend for {scheme}:// ({text}); "
        f"give {_USABLE}"
    )
