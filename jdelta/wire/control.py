"""The small documents around the versions: run, epochs, pointer, readers."""

from __future__ import annotations

import dataclasses

from jdelta.errors import FormatError
from jdelta.wire import names
from jdelta.wire._documents import dump, load
from jdelta.wire.manifest import VersionId, parse_version_id

MAX_DOCUMENT_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """`run.json`: which run a bucket holds.

    Attributes:
        run: The run's id.
        created: When the run began, seconds since 1970.
    """

    run: str
    created: float

    def to_json(self) -> bytes:
        """The document."""
        return dump("run", {"run": self.run, "created": self.created})

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> RunInfo:
        """Reads the document. Raises FormatError if it is something else."""
        fields = load(data, "run")
        found = cls(run=fields.text("run", 128), created=fields.number("created"))
        fields.end()
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochClaim:
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

    def to_json(self) -> bytes:
        """The document."""
        return dump(
            "epoch",
            {
                "run": self.run,
                "epoch": self.epoch,
                "base": None if self.base is None else list(self.base),
                "writer": self.writer,
                "created": self.created,
            },
        )

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> EpochClaim:
        """Reads the document. Raises FormatError if it is something else."""
        fields = load(data, "epoch")
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
class Pointer:
    """`pointer.json`: the newest committed version, as far as its writer knows.

    Attributes:
        run: The run.
        epoch: The epoch of the version.
        version: The version.
        manifest: The name of the manifest that commits it.
        sha256: The SHA-256 of that manifest, 64 hexadecimal digits.
    """

    run: str
    epoch: int
    version: int
    manifest: str
    sha256: str

    def to_json(self) -> bytes:
        """The document."""
        return dump("pointer", dataclasses.asdict(self))

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Pointer:
        """Reads the document. Raises FormatError if it is something else."""
        fields = load(data, "pointer")
        found = cls(
            run=fields.text("run", 128),
            epoch=fields.integer("epoch", 1, names.MAX_EPOCH),
            version=fields.integer("version", 0, names.MAX_VERSION),
            manifest=fields.text("manifest"),
            sha256=fields.hexadecimal("sha256", 64),
        )
        fields.end()
        if found.manifest != names.manifest_name(found.epoch, found.version):
            raise FormatError(
                f"pointer: {found.manifest[:80]!r} is not the manifest of version "
                f"{found.version} of epoch {found.epoch}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderStatus:
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

    def to_json(self) -> bytes:
        """The document."""
        return dump("reader", dataclasses.asdict(self))

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> ReaderStatus:
        """Reads the document. Raises FormatError if it is something else."""
        fields = load(data, "reader")
        found = cls(
            reader=fields.text("reader", 128),
            run=fields.text("run", 128),
            epoch=fields.integer("epoch", 1, names.MAX_EPOCH),
            version=fields.integer("version", 0, names.MAX_VERSION),
            time=fields.number("time"),
        )
        fields.end()
        return found
