"""What a store must offer, and the names it takes.

The protocol asks for no more than a plain object store can give: whole objects that
change in one step. What only some stores have is declared in `Capabilities`, and
callers look there before they rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias

from jdelta.errors import BucketDeniedError, CorruptError

Data: TypeAlias = bytes | bytearray | memoryview | Path
"""What can be put: bytes, or the path of a local file that holds them."""

RESERVED = ".tmp"
"""First folder of no object: directories keep unfinished files there."""

MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255


class ObjectInfo(NamedTuple):
    """What a store says of an object without sending it.

    Attributes:
        name: Its full name.
        size: Bytes.
        tag: Opaque text that differs between two contents the name ever had. Stores may
            also change it when the same bytes are written again.
        modified: Seconds since 1970, by the clock of the store or of the writer.
    """

    name: str
    size: int
    tag: str
    modified: float


class Capabilities(NamedTuple):
    """What a backend offers beyond plain reading and writing.

    Attributes:
        put_if_absent: `put_if_absent` has exactly one winner among racing writers.
            Where this is false the method still looks before it writes, so it refuses
            to replace an object it can see, but two racing writers may both succeed.
        replace_if_unchanged: the same for `replace_if_unchanged`.
        watch: `watch` returns within moments of a change. Where this is false it asks
            the store now and then, and each question may cost a request.
    """

    put_if_absent: bool
    replace_if_unchanged: bool
    watch: bool


class Bucket(Protocol):
    """A flat map from names to byte strings; each object changes in one step.

    A reader sees an object whole, as one writer wrote it, or not at all: never a
    mixture and never a beginning. Once a writing call returned, the object outlives a
    crash of the process and, where the store can promise that, of the machine. A call
    that raised may still have acted (the answer can get lost); repeating it is
    harmless.

    Every method may be called from any thread, and buckets may be shared by threads.
    Collective: no. Names follow `safe_name`. Methods raise only errors from
    `jdelta.errors`, never an `OSError`: `ObjectNotFoundError` where there is no such
    object, `BucketDeniedError` where repeating the call would not help,
    `BucketUnavailableError` where it may.
    """

    @property
    def url(self) -> str:
        """Text that `open_bucket` opens to the same bucket; used in messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this backend offers beyond plain reading and writing."""
        ...

    def put(self, name: str, data: Data, *, move: bool = False) -> None:
        """Writes an object, replacing any other of that name.

        Args:
            name: Its name.
            data: Its bytes, or a local file that holds them.
            move: The caller will never write to the file `data` again, so the backend
                may share its blocks instead of copying them (see `scratch`). The file
                itself is left where it is, for the call to be repeatable: removing it
                is up to the caller.
        """
        ...

    def put_if_absent(self, name: str, data: Data) -> None:
        """Writes an object unless there is one of that name.

        Raises:
            ObjectExistsError: there is one. After a lost answer it may be the caller's
                own: compare its bytes.
        """
        ...

    def replace_if_unchanged(self, name: str, data: Data, tag: str | None) -> None:
        """Writes an object if the one of that name is still the one with this tag.

        Args:
            name: Its name.
            data: Its bytes.
            tag: `ObjectInfo.tag` of the object to replace, or None for "there is none".

        Raises:
            ObjectChangedError: it is another one, or there is none, or (for None) there
                is one.
        """
        ...

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """The bytes of an object.

        Raises:
            ObjectNotFoundError: there is none.
            CorruptError: it is larger than `max_bytes`; none of it was read.
        """
        ...

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes of an object from offset `start`.

        Raises:
            ObjectNotFoundError: there is none.
            CorruptError: it ends before `start + length`.
            ValueError: `start` or `length` is negative.
        """
        ...

    def open(self, name: str) -> BinaryIO:
        """An object as an unbuffered stream to be read once, from start to end.

        The stream goes on showing the object as it was when opened, whatever is written
        meanwhile. It offers `read` and `readinto`, both of which may return less than
        asked for, and raises the bucket's errors. The caller closes it.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def stat(self, name: str) -> ObjectInfo:
        """An object's size, tag and time.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose full name starts with `prefix`, sorted by name.

        The prefix is compared letter by letter: `logs` also lists `logs_old/1`. Objects
        written or deleted during the walk may or may not appear.
        """
        ...

    def delete(self, name: str) -> None:
        """Deletes an object; deleting one that does not exist is no error."""
        ...

    def watch(self, name: str, tag: str | None, timeout: float) -> ObjectInfo | None:
        """Waits until an object is another one than the one with this tag.

        Args:
            name: Its name.
            tag: The tag already seen, or None for "none seen": then any object counts.
            timeout: Seconds to wait at most; 0 looks once.

        Returns:
            The object now there, or None when the time is over. While there is no
            object the wait goes on.
        """
        ...

    def scratch(self) -> Path | None:
        """A local folder from which `put(move=True)` need not copy, or None.

        Its contents are no objects. Make a fresh folder inside it (`tempfile.mkdtemp`)
        and remove that afterwards; what a crash leaves behind is removed by a later
        writer, a day after its last change.
        """
        ...


def safe_name(name: str) -> str:
    r"""Checks that a name is one that every backend takes, and returns it.

    A name is one or more parts joined by single slashes. No part is empty, `.` or `..`,
    or holds a backslash, a control character or a character that UTF-8 cannot write; a
    part has at most 255 bytes in UTF-8 and a name at most 1024. The first part is not
    `.tmp`. Everything else is allowed, blanks and any script among it.

    Raises:
        BucketDeniedError: the name breaks a rule; the message says which.

    Example:
        >>> safe_name("manifests/e000001/v0000000017.json")
        'manifests/e000001/v0000000017.json'
    """
    problem = name_problem(name)
    if problem is not None:
        raise BucketDeniedError(f"object name {name!r:.300} {problem}")
    return name


def name_problem(name: str) -> str | None:
    """What is wrong with a name, in words that follow "name ...", or None."""
    if not isinstance(name, str):
        return f"is no text but {type(name).__name__}"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "cannot be written in UTF-8"
    if len(encoded) > MAX_NAME_BYTES:
        return f"has {len(encoded)} bytes, more than {MAX_NAME_BYTES}"
    if "\\" in name:
        return "holds a backslash"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return "holds a control character"
    parts = name.split("/")
    if "" in parts:
        return "is empty, starts or ends with a slash, or holds two in a row"
    if "." in parts or ".." in parts:
        return "holds a part '.' or '..'"
    if any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"has a part of more than {MAX_PART_BYTES} bytes"
    if parts[0] == RESERVED:
        return f"starts with {RESERVED!r}, which is kept for unfinished files"
    return None


def check_size(where: str, size: int, max_bytes: int | None) -> None:
    """Refuses an object of `size` bytes where at most `max_bytes` are expected."""
    if max_bytes is not None and size > max_bytes:
        raise CorruptError(
            f"{where} has {size} bytes where at most {max_bytes} were expected; "
            "none of it was read"
        )


def check_range(where: str, size: int, start: int, length: int) -> None:
    """Refuses a range that is negative or goes past the end of an object."""
    if start < 0 or length < 0:
        raise ValueError(f"{where}: the range {start}+{length} is negative")
    if start + length > size:
        raise CorruptError(
            f"{where} has {size} bytes: there is no range {start}+{length} in it"
        )
