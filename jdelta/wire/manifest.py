"""The manifest: the immutable document that commits one version.

What is checked when one is read is checked when one is made: a publisher cannot write a
manifest that no reader takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from jdelta.errors import FormatError, TreeError
from jdelta.wire import digest as digests
from jdelta.wire import names
from jdelta.wire._documents import MAX_INT, Fields, dump, is_hexadecimal, is_text, load
from jdelta.wire.dtypes import NAMES, TensorSpec
from jdelta.wire.tensor import CHUNK_ELEMENTS

KINDS = ("anchor", "delta", "fold")
MAX_OBJECTS = 1 << 17
MAX_TENSORS = 1 << 20
MAX_TENSOR_BYTES = 1 << 50
MAX_TOTAL_BYTES = 1 << 53
_MAX_DIMENSIONS = 32
_MAX_TENSOR_NAME = 1024
_KIND = "manifest"
# What else the format leaves room for is refused by name.
_KNOWN = {"layout": "identity", "shards": 1, "chunk_elements": CHUNK_ELEMENTS}
_KNOWN_OF_DELTAS = {"codec": "fast", "values": "steps", **_KNOWN}
_KNOWN_OF_ANCHORS = {"codec": "none", "values": "none", **_KNOWN}


class VersionId(NamedTuple):
    """A version as objects are named by it: the epoch that wrote it, and its number."""

    epoch: int
    version: int


class ObjectRef(NamedTuple):
    """One object of a version.

    Attributes:
        name: Its name in the bucket.
        size: Its bytes.
        sha256: The SHA-256 of its bytes, 64 hexadecimal digits.
    """

    name: str
    size: int
    sha256: str


class TensorEntry(NamedTuple):
    """One tensor of a version.

    Attributes:
        dtype: Its safetensors dtype name.
        shape: Its shape.
        changed: Elements that differ from the base version; all of them in an anchor.
        digest: The digest of its weights at this version.
        object: Which of the manifest's objects holds it; None where nothing changed.
    """

    dtype: str
    shape: tuple[int, ...]
    changed: int
    digest: int
    object: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one version is, and where its bytes are.

    Attributes:
        run: The run it belongs to.
        epoch: The epoch that wrote it.
        version: The version.
        kind: "anchor", "delta", or "fold" (a delta from an older version).
        base: The version its changes are relative to; None for an anchor.
        step: The trainer's step, if it was told.
        created: When it was made, seconds since 1970.
        objects: Its objects.
        tensors: Every tensor of the version by published name, changed or not.
        codec: How a delta's chunks are coded: "fast"; "none" for an anchor.
        values: What a delta's values are: "steps" in bit order; "none" for an anchor.
        layout: How published coordinates map to the trainer's: "identity".
        shards: Over how many shards each tensor is split: 1.
        chunk_elements: Consecutive elements of a chunk.

    Raises:
        FormatError: a field is none that a reader would take.
    """

    run: str
    epoch: int
    version: int
    kind: str
    base: VersionId | None
    step: int | None
    created: float
    objects: tuple[ObjectRef, ...]
    tensors: dict[str, TensorEntry]
    codec: str = "fast"
    values: str = "steps"
    layout: str = "identity"
    shards: int = 1
    chunk_elements: int = CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        """Checks every field."""
        _validate(self)

    @property
    def id(self) -> VersionId:
        """The version it describes."""
        return VersionId(self.epoch, self.version)

    @property
    def digest(self) -> int:
        """The digest of the whole version; see `version_digest`."""
        return version_digest(
            (spec, self.tensors[name].digest) for name, spec in self.specs().items()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its objects."""
        return sum(ref.size for ref in self.objects)

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name."""
        return {
            name: TensorSpec(name, entry.dtype, entry.shape)
            for name, entry in self.tensors.items()
        }

    def same_weights(self, other: Manifest) -> bool:
        """Whether both describe the same version with the same weights."""
        return (
            (self.run, self.id, self.step) == (other.run, other.id, other.step)
            and self.specs() == other.specs()
            and all(
                entry.digest == other.tensors[name].digest
                for name, entry in self.tensors.items()
            )
        )

    def to_json(self) -> bytes:
        """The document; the same bytes for the same manifest."""
        return dump(
            _KIND,
            {
                "run": self.run,
                "epoch": self.epoch,
                "version": self.version,
                "kind": self.kind,
                "base": None if self.base is None else list(self.base),
                "step": self.step,
                "created": float(self.created),
                "codec": self.codec,
                "values": self.values,
                "layout": self.layout,
                "shards": self.shards,
                "chunk_elements": self.chunk_elements,
                "digest": f"{self.digest:016x}",
                "objects": [ref._asdict() for ref in self.objects],
                "tensors": {
                    name: {
                        "dtype": entry.dtype,
                        "shape": list(entry.shape),
                        "changed": entry.changed,
                        "digest": f"{entry.digest:016x}",
                        "object": entry.object,
                    }
                    for name, entry in self.tensors.items()
                },
            },
        )

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """The manifest a document holds.

        Raises:
            FormatError: it is not a manifest, breaks a rule of the format, or follows
                a newer one.
        """
        fields = load(data, _KIND)
        base = fields.take("base")
        step = fields.take("step")
        stated = fields.hexadecimal("digest", 16)
        objects = fields.array("objects", MAX_OBJECTS)
        tensors = fields.take("tensors")
        if type(tensors) is not dict:
            fields.fail("tensors", "is not a JSON object")
        manifest = cls(
            run=fields.text("run", 128),
            epoch=fields.integer("epoch"),
            version=fields.integer("version"),
            kind=fields.text("kind"),
            base=None if base is None else parse_version_id(base, f"{_KIND}: base"),
            step=step,
            created=fields.number("created"),
            objects=tuple(
                _parse_object(ref, f"{_KIND}: object {i}")
                for i, ref in enumerate(objects)
            ),
            tensors={
                name: _parse_tensor(entry, f"{_KIND}: tensor {name[:80]!r}")
                for name, entry in tensors.items()
            },
            codec=fields.text("codec"),
            values=fields.text("values"),
            layout=fields.text("layout"),
            shards=fields.integer("shards"),
            chunk_elements=fields.integer("chunk_elements"),
        )
        fields.end()
        if f"{manifest.digest:016x}" != stated:
            raise FormatError(
                f"{_KIND}: the version's digest is {manifest.digest:016x} by its "
                f"tensors, the document says {stated}"
            )
        return manifest


def version_digest(tensors: Any) -> int:
    """The digest of a version: the sum of its tensors' digests, keyed by what they are.

    With h the SHA-256 of `name NUL dtype NUL shape` (UTF-8, dimensions joined by
    commas) as little-endian 32-bit words, each lane k is the sum over the tensors of
    `(h_k | 1) * lane_k + h_(k+2)` modulo 2^32. It follows a change of one tensor at
    the cost of that tensor.

    Args:
        tensors: Pairs of a `TensorSpec` and the tensor's digest.
    """
    lanes = [0, 0]
    for spec, digest in tensors:
        key = "\0".join([spec.name, spec.dtype, ",".join(map(str, spec.shape))])
        hashed = hashlib.sha256(key.encode()).digest()
        words = [int.from_bytes(hashed[i : i + 4], "little") for i in range(0, 16, 4)]
        for lane, part in enumerate((digest >> 32, digest & 0xFFFFFFFF)):
            lanes[lane] += (words[lane] | 1) * part + words[lane + 2]
    return digests.pack(*lanes)


def parse_version_id(value: Any, where: str) -> VersionId:
    """A version id from `[epoch, version]`.

    Raises:
        FormatError: it is something else.
    """
    if (
        type(value) is not list
        or [type(part) for part in value] != [int, int]
        or not 1 <= value[0] <= names.MAX_EPOCH
        or not 0 <= value[1] <= names.MAX_VERSION
    ):
        raise FormatError(f"{where} is not [epoch, version]")
    return VersionId(*value)


def check_tensor_name(name: str) -> str:
    """Returns `name` if a tensor can be published under it.

    Raises:
        TreeError: it is empty, too long, not UTF-8, has control characters, or is the
            one name safetensors keeps for itself.
    """
    if (
        not 1 <= len(name) <= _MAX_TENSOR_NAME
        or name == "__metadata__"
        or any(c < " " or c == "\x7f" for c in name)
        or not is_text(name)
    ):
        raise TreeError(
            f"no tensor can be published as {name[:80]!r}: names have 1 to "
            f"{_MAX_TENSOR_NAME} characters, no control characters, and '__metadata__' "
            "is taken by safetensors"
        )
    return name


def check_tree(specs: Collection[TensorSpec]) -> None:
    """Raises TreeError unless a manifest can describe a tree of such tensors."""
    for spec in specs:
        check_tensor_name(spec.name)
        if not _fits(spec):
            raise TreeError(
                f"{spec.name!r}: {spec} cannot be published: at most "
                f"{_MAX_DIMENSIONS} dimensions and {MAX_TENSOR_BYTES} bytes"
            )
    total = sum(spec.nbytes for spec in specs)
    if len(specs) > MAX_TENSORS or total > MAX_TOTAL_BYTES:
        raise TreeError(
            f"{len(specs)} tensors of {total} bytes cannot be published as one tree: "
            f"at most {MAX_TENSORS} of {MAX_TOTAL_BYTES}"
        )


def _fits(spec: TensorSpec) -> bool:
    return (
        len(spec.shape) <= _MAX_DIMENSIONS
        and all(_int(n, 0, MAX_TENSOR_BYTES) for n in spec.shape)
        # An empty tensor's other dimensions are bounded too: arrays have a limit.
        and math.prod(n for n in spec.shape if n) <= MAX_TENSOR_BYTES
        and spec.nbytes <= MAX_TENSOR_BYTES
    )


def _parse_object(value: Any, where: str) -> ObjectRef:
    fields = Fields(value, where)
    ref = ObjectRef(
        fields.text("name"), fields.integer("size"), fields.hexadecimal("sha256", 64)
    )
    fields.end()
    return ref


def _parse_tensor(value: Any, where: str) -> TensorEntry:
    fields = Fields(value, where)
    shape = fields.array("shape", _MAX_DIMENSIONS)
    entry = TensorEntry(
        dtype=fields.text("dtype"),
        shape=tuple(shape),
        changed=fields.integer("changed"),
        digest=int(fields.hexadecimal("digest", 16), 16),
        object=fields.take("object"),
    )
    fields.end()
    return entry


def _validate(m: Manifest) -> None:
    _need(type(m.run) is str and 1 <= len(m.run) <= 128 and is_text(m.run), "run")
    _need(_int(m.epoch, 1, names.MAX_EPOCH), "epoch")
    _need(_int(m.version, 0, names.MAX_VERSION), "version")
    _need(m.kind in KINDS, "kind")
    _need(m.step is None or _int(m.step, 0), "step")
    _need(type(m.created) in (int, float) and 0 <= m.created <= MAX_INT, "created")
    known = _KNOWN_OF_ANCHORS if m.kind == "anchor" else _KNOWN_OF_DELTAS
    for field, only in known.items():
        if getattr(m, field) != only:
            raise FormatError(
                f"{_KIND}: {field} {getattr(m, field)!r} is not known to this jdelta, "
                f"which reads {only!r} in a {m.kind}"
            )
    if m.kind != "anchor":
        _need(
            isinstance(m.base, VersionId)
            and _int(m.base.epoch, 1, m.epoch)
            and _int(m.base.version, 0, m.version - 1),
            "base",
        )
    else:
        _need(m.base is None, "base")
    _need(len(m.objects) <= MAX_OBJECTS, "objects")
    for ref in m.objects:
        names.check_object_name(ref.name)
        _need(_int(ref.size, 0), f"size of {ref.name!r}")
        _need(is_hexadecimal(ref.sha256, 64), f"sha256 of {ref.name!r}")
    _need(len({ref.name for ref in m.objects}) == len(m.objects), "objects")
    _need(len(m.tensors) <= MAX_TENSORS, "tensors")
    total = 0
    for name, entry in m.tensors.items():
        total += _check_tensor(m, name, entry)
    _need(total <= MAX_TOTAL_BYTES, "tensors")


def _check_tensor(m: Manifest, name: str, entry: TensorEntry) -> int:
    try:
        check_tensor_name(name)
    except TreeError as error:
        raise FormatError(f"{_KIND}: {error}") from None
    where = f"tensor {name[:80]!r}"
    _need(entry.dtype in NAMES, f"dtype {str(entry.dtype)[:20]!r} of {where}")
    spec = TensorSpec(name, entry.dtype, entry.shape)
    _need(_fits(spec), f"shape of {where}")
    _need(_int(entry.digest, 0, (1 << 64) - 1), f"digest of {where}")
    _need(_int(entry.changed, 0, spec.size), f"changed of {where}")
    if entry.object is None:
        _need(m.kind != "anchor" and entry.changed == 0, f"object of {where}")
        return spec.nbytes
    _need(_int(entry.object, 0, len(m.objects) - 1), f"object of {where}")
    if m.kind == "anchor":
        _need(entry.changed == spec.size, f"changed of {where}")
    else:
        _need(entry.changed > 0, f"changed of {where}")
    return spec.nbytes


def _int(value: Any, low: int, high: int = MAX_INT) -> bool:
    return type(value) is int and low <= value <= high


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(f"{_KIND}: {what} is missing, malformed or out of range")
