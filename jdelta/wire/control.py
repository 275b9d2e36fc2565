"""The small documents around the versions: run, epochs, pointer, readers."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Self

from jdelta.errors import FormatError
from jdelta.wire import names
from jdelta.wire._documents import Fields, dump, load
from jdelta.wire.manifest import VersionId, parse_version_id

MAX_DOCUMENT_BYTES = 1 << 16


class _Document(abc.ABC):
    """A dataclass that is one JSON document."""

    _kind: ClassVar[str]

    def to_json(self) -> bytes:
        """The document; the same bytes for the same values.

        Raises:
            FormatError: a field is none that a reader would take.
        """
        data = dump(self._kind, vars(self))
        self.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Self:
        """The values of a document.

        Raises:
            FormatError: it is something else, or follows a newer format.
        """
        fields = load(data, cls._kind, MAX_DOCUMENT_BYTES)
        found = cls._from(fields)
        fields.end()
        return found

    @classmethod
    @abc.abstractmethod
    def _from(cls, fields: Fields) -> Self:
        """Takes and checks the fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo(_Document):
    """`run.json`: which run a bucket holds.

    Attributes:
        run: The run's id.
        created: When the run began, seconds since 1970.
    """

    run: str
    created: float

    _kind: ClassVar[str] = "run"

    @classmethod
    def _from(cls, fields: Fields) -> Self:
        return cls(run=fields.text("run", 128), created=fields.number("created"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochClaim(_Document):
    """`epochs/…json`: a publisher's claim to write the run from here on.

    Attributes:
        run: The run.
        epoch: The epoch claimed.
        base: The last version of the run that it continues; None for a fresh start.
        writer: An id of the publisher, new each time one is opened.
        created: When, seconds since 1970.
    """

    run: str
    epoch: int
    base: VersionId | None
    writer: str
    created: float

    _kind: ClassVar[str] = "epoch"

    @classmethod
    def _from(cls, fields: Fields) -> Self:
        base = fields.take("base")
        found = cls(
            run=fields.text("run", 128),
            epoch=fields.integer("epoch", 1, names.MAX_EPOCH),
            base=None if base is None else parse_version_id(base, "epoch: base"),
            writer=fields.text("writer", 128),
            created=fields.number("created"),
        )
        fields.end()
        if found.base is not None and found.base.epoch >= found.epoch:
            raise FormatError(
                f"epoch: epoch {found.epoch} cannot continue epoch {found.base.epoch}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pointer(_Document):
    """`pointer.json`: the newest committed version, as far as its writer knows.

    Attributes:
        run: The run.
        epoch: The epoch of the version.
        version: The version.
        closed: The epoch whose publisher was closed after it: nothing follows unless a
            later one is claimed. None while it goes on.
    """

    run: str
    epoch: int
    version: int
    closed: int | None

    @property
    def id(self) -> VersionId:
        """The version pointed to."""
        return VersionId(self.epoch, self.version)

    _kind: ClassVar[str] = "pointer"

    @classmethod
    def _from(cls, fields: Fields) -> Self:
        found = cls(
            run=fields.text("run", 128),
            epoch=fields.integer("epoch", 1, names.MAX_EPOCH),
            version=fields.integer("version", 0, names.MAX_VERSION),
            closed=fields.take("closed"),
        )
        fields.end()
        closed = found.closed
        if closed is not None and (type(closed) is not int or closed < found.epoch):
            raise FormatError(f"pointer: closed is no epoch: {str(closed)[:80]}")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderStatus(_Document):
    """`readers/<id>.json`: which version a subscriber holds.

    Attributes:
        reader: The subscriber's name.
        run: The run.
        epoch: The epoch of the version held.
        version: The version held.
        time: When it said so, seconds since 1970.
    """

    reader: str
    run: str
    epoch: int
    version: int
    time: float

    _kind: ClassVar[str] = "reader"

    @classmethod
    def _from(cls, fields: Fields) -> Self:
        return cls(
            reader=fields.text("reader", 128),
            run=fields.text("run", 128),
            epoch=fields.integer("epoch", 1, names.MAX_EPOCH),
            version=fields.integer("version", 0, names.MAX_VERSION),
            time=fields.number("time"),
        )
