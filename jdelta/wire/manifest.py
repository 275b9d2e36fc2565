"""The manifest: the immutable document that commits one version.

What is checked when one is read is checked when one is made: a publisher cannot write a
manifest that no reader takes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jdelta.errors import FormatError, TreeError
from jdelta.wire import digest as digests
from jdelta.wire import names
from jdelta.wire._documents import MAX_INT, Fields, dump, is_hexadecimal, is_text, load
from jdelta.wire.dtypes import NAMES, TensorSpec

KINDS = ("anchor", "delta", "fold")
MAX_OBJECTS = 1 << 17
MAX_TENSORS = 1 << 20
MAX_TENSOR_BYTES = 1 << 50
MAX_TOTAL_BYTES = 1 << 53
MAX_META_BYTES = 4096
_MAX_DIMENSIONS = 32
_MAX_TENSOR_NAME = 1024
_KIND = "manifest"
# What else the format leaves room for is refused by name.
_KNOWN_OF_DELTAS = {"codec": "fast", "values": "steps"}
_KNOWN_OF_ANCHORS = {"codec": "none", "values": "none"}


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


class WholeTensor(NamedTuple):
    """One tensor of an anchor.

    Attributes:
        dtype: Its safetensors dtype name.
        shape: Its shape.
        digest: The digest of its weights.
        object: Which of the manifest's objects holds it.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: int
    object: int


class ChangedTensor(NamedTuple):
    """One tensor that a delta changes.

    Attributes:
        changed: Elements that differ from the base version.
        digest: The digest of its weights at this version.
        objects: Which of the manifest's objects hold its changes, in the order of its
            chunks.
    """

    changed: int
    digest: int
    objects: tuple[int, ...]


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
        meta: The user's own words on it, a JSON object.
        created: When it was made, seconds since 1970.
        objects: Its objects.
        digest: The digest of the whole version; see `version_digest`.
        tensors: By published name: every tensor of an anchor, those that a delta
            changes.
        codec: How a delta's chunks are coded: "fast"; "none" for an anchor.
        values: What a delta's values are: "steps" in bit order; "none" for an anchor.

    Raises:
        FormatError: a field is none that a reader would take.
    """

    run: str
    epoch: int
    version: int
    kind: str
    base: VersionId | None
    step: int | None
    meta: Mapping[str, Any]
    created: float
    objects: tuple[ObjectRef, ...]
    digest: int
    tensors: Mapping[str, WholeTensor | ChangedTensor]
    codec: str = "fast"
    values: str = "steps"

    def __post_init__(self) -> None:
        """Checks every field."""
        _validate(self)

    @property
    def id(self) -> VersionId:
        """The version it describes."""
        return VersionId(self.epoch, self.version)

    @property
    def nbytes(self) -> int:
        """Bytes of its objects."""
        return sum(ref.size for ref in self.objects)

    @property
    def changes(self) -> Mapping[str, ChangedTensor]:
        """The tensors that a delta changes; none for an anchor, which replaces all."""
        return {
            name: entry
            for name, entry in self.tensors.items()
            if isinstance(entry, ChangedTensor)
        }

    @property
    def whole(self) -> Mapping[str, WholeTensor]:
        """The tensors of an anchor; none for a delta."""
        return {
            name: entry
            for name, entry in self.tensors.items()
            if isinstance(entry, WholeTensor)
        }

    def same_weights(self, other: Manifest) -> bool:
        """Whether both describe the same version with the same weights."""
        return all(
            getattr(self, field) == getattr(other, field)
            for field in ("run", "id", "step", "meta", "digest")
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
                "meta": self.meta,
                "created": float(self.created),
                "codec": self.codec,
                "values": self.values,
                "digest": f"{self.digest:016x}",
                "objects": [ref._asdict() for ref in self.objects],
                "tensors": {
                    name: {
                        "dtype": entry.dtype,
                        "shape": list(entry.shape),
                        "digest": f"{entry.digest:016x}",
                        "object": entry.object,
                    }
                    if isinstance(entry, WholeTensor)
                    else [entry.changed, f"{entry.digest:016x}", *entry.objects]
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
        objects = fields.array("objects", MAX_OBJECTS)
        tensors = fields.take("tensors")
        if type(tensors) is not dict:
            fields.fail("tensors", "is not a JSON object")
        kind = fields.text("kind")
        parse: Callable[[Any, str], Any] = _parse_changed
        if kind == "anchor":
            parse = _parse_whole
        manifest = cls(
            run=fields.text("run", 128),
            epoch=fields.integer("epoch"),
            version=fields.integer("version"),
            kind=kind,
            base=None if base is None else parse_version_id(base, f"{_KIND}: base"),
            step=step,
            meta=fields.take("meta"),
            created=fields.number("created"),
            objects=tuple(
                _parse_object(ref, f"{_KIND}: object {i}")
                for i, ref in enumerate(objects)
            ),
            digest=int(fields.hexadecimal("digest", 16), 16),
            tensors={
                name: parse(entry, f"{_KIND}: tensor {name[:80]!r}")
                for name, entry in tensors.items()
            },
            codec=fields.text("codec"),
            values=fields.text("values"),
        )
        fields.end()
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
    found = 0
    for spec, digest in tensors:
        found = digests.add(found, weighted(spec, digest))
    return found


def weighted(spec: TensorSpec, digest: int) -> int:
    """What one tensor adds to the digest of a version that has it."""
    words = _key(spec)
    return digests.pack(
        *(
            (words[lane] | 1) * part + words[lane + 2]
            for lane, part in enumerate((digest >> 32, digest & 0xFFFFFFFF))
        )
    )


@functools.lru_cache(1 << 16)
def _key(spec: TensorSpec) -> tuple[int, ...]:
    key = "\0".join([spec.name, spec.dtype, ",".join(map(str, spec.shape))])
    hashed = hashlib.sha256(key.encode()).digest()
    return tuple(int.from_bytes(hashed[i : i + 4], "little") for i in range(0, 16, 4))


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


def check_meta(meta: Any) -> dict[str, Any]:
    """A copy of what a user says about a version, as it is read back.

    Raises:
        TypeError: it is not a dict, or holds what JSON cannot.
        ValueError: it is too large, or holds a number or a text that JSON cannot.
    """
    if not isinstance(meta, Mapping):
        raise TypeError(f"expected a dict, got a {type(meta).__name__}")
    text = json.dumps(dict(meta), allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_META_BYTES:
        raise ValueError(
            f"{len(text)} bytes as JSON, at most {MAX_META_BYTES} are kept"
        )
    copy = json.loads(text)
    if not _texts(copy):
        raise ValueError("a text that UTF-8 cannot hold, or a number of over 20 digits")
    return copy


def _texts(value: Any) -> bool:
    if isinstance(value, dict):
        return all(is_text(key) and _texts(below) for key, below in value.items())
    if isinstance(value, list):
        return all(_texts(below) for below in value)
    if isinstance(value, str):
        return is_text(value)
    return not isinstance(value, int) or abs(value) < 10**20


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


def _parse_whole(value: Any, where: str) -> WholeTensor:
    fields = Fields(value, where)
    entry = WholeTensor(
        dtype=fields.text("dtype"),
        shape=tuple(fields.array("shape", _MAX_DIMENSIONS)),
        digest=int(fields.hexadecimal("digest", 16), 16),
        object=fields.integer("object"),
    )
    fields.end()
    return entry


def _parse_changed(value: Any, where: str) -> ChangedTensor:
    if (
        type(value) is not list
        or len(value) < 3
        or type(value[1]) is not str
        or not is_hexadecimal(value[1], 16)
        or any(type(n) is not int for n in (value[0], *value[2:]))
    ):
        raise FormatError(f"{where} is not [changed, digest, object, ...]")
    return ChangedTensor(value[0], int(value[1], 16), tuple(value[2:]))


def _validate(m: Manifest) -> None:
    _need(type(m.run) is str and 1 <= len(m.run) <= 128 and is_text(m.run), "run")
    _need(_int(m.epoch, 1, names.MAX_EPOCH), "epoch")
    _need(_int(m.version, 0, names.MAX_VERSION), "version")
    _need(m.kind in KINDS, "kind")
    _need(m.step is None or _int(m.step, 0), "step")
    try:
        check_meta(m.meta)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{_KIND}: meta: {error}") from None
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
    _need(_int(m.digest, 0, (1 << 64) - 1), "digest")
    specs = []
    for name, entry in m.tensors.items():
        try:
            check_tensor_name(name)
        except TreeError as error:
            raise FormatError(f"{_KIND}: {error}") from None
        where = f"tensor {name[:80]!r}"
        _need(_int(entry.digest, 0, (1 << 64) - 1), f"digest of {where}")
        last = len(m.objects) - 1
        if m.kind == "anchor" and isinstance(entry, WholeTensor):
            _need(entry.dtype in NAMES, f"dtype {str(entry.dtype)[:20]!r} of {where}")
            specs.append(TensorSpec(name, entry.dtype, entry.shape))
            _need(_fits(specs[-1]), f"shape of {where}")
            _need(_int(entry.object, 0, last), f"object of {where}")
        elif m.kind != "anchor" and isinstance(entry, ChangedTensor):
            _need(_int(entry.changed, 1, MAX_TENSOR_BYTES), f"changed of {where}")
            _need(
                len(entry.objects) >= 1
                and all(_int(n, 0, last) for n in entry.objects)
                and len(set(entry.objects)) == len(entry.objects),
                f"objects of {where}",
            )
        else:
            _need(False, where)
    if m.kind != "anchor":
        return
    _need(sum(spec.nbytes for spec in specs) <= MAX_TOTAL_BYTES, "tensors")
    found = version_digest((s, m.tensors[s.name].digest) for s in specs)
    if found != m.digest:
        raise FormatError(
            f"{_KIND}: the version's digest is {found:016x} by its tensors, the "
            f"document says {m.digest:016x}"
        )


def _int(value: Any, low: int, high: int = MAX_INT) -> bool:
    return type(value) is int and low <= value <= high


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(f"{_KIND}: {what} is missing, malformed or out of range")
