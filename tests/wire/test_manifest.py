"""The manifest: one validator for what is written and what is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta.errors import CorruptError, FormatError, TreeError
from jdelta.wire import digest
from jdelta.wire.dtypes import NAMES, TensorSpec
from jdelta.wire.manifest import (
    ChangedTensor,
    Manifest,
    ObjectRef,
    VersionId,
    WholeTensor,
    check_tensor_name,
    version_digest,
)
from jdelta.wire.state import State

_SHA = "0123456789abcdef" * 4


def _manifest(**changes):
    fields = {
        "run": "run-1",
        "epoch": 2,
        "version": 17,
        "kind": "delta",
        "base": VersionId(1, 16),
        "step": 340,
        "meta": {"lr": 3e-6, "ünï": [1, None, True]},
        "created": 1764547200.5,
        "objects": (
            ObjectRef("deltas/e000002-v0000000017/00000.safetensors", 300, _SHA),
        ),
        "digest": 0xABCDEF0123456789,
        "tensors": {
            "layers.0.w": ChangedTensor(3, 0xDEADBEEF00000001, (0,)),
            "layers.0.ünï": ChangedTensor(1, 7, (0,)),
        },
    }
    return Manifest(**{**fields, **changes})


def _anchor(**changes):
    fields = {
        "kind": "anchor",
        "base": None,
        "codec": "none",
        "values": "none",
        "tensors": {
            "w": WholeTensor("BF16", (4, 8), 5, 0),
            "empty": WholeTensor("U8", (0, 3), 0, 0),
        },
    }
    fields |= changes
    fields.setdefault("digest", _digest(fields["tensors"]))
    return _manifest(**fields)


def _digest(tensors):
    try:
        return version_digest(
            (TensorSpec(name, *entry[:2]), entry.digest)
            for name, entry in tensors.items()
        )
    except (TypeError, ValueError, AttributeError):
        return 0


@pytest.mark.parametrize(
    "manifest",
    [
        _manifest(),
        _anchor(),
        _manifest(kind="fold", base=VersionId(1, 3), step=None, created=0),
        _manifest(objects=(), tensors={}),
    ],
    ids=["delta", "anchor", "fold", "nothing changed"],
)
def test_what_is_written_is_read_back(manifest):
    data = manifest.to_json()
    assert data == manifest.to_json()
    assert data.isascii()
    assert b" " not in data
    read = Manifest.parse(data)
    assert read == manifest
    assert list(read.tensors) == list(manifest.tensors)
    assert read.to_json() == data
    assert Manifest.parse(memoryview(data)) == manifest


def test_id_size_and_tensors():
    manifest = _manifest()
    assert manifest.id == VersionId(2, 17)
    assert manifest.nbytes == 300
    assert list(manifest.changes) == ["layers.0.w", "layers.0.ünï"]
    assert not manifest.whole and not _anchor().changes
    assert list(_anchor().whole) == ["w", "empty"]


def test_the_version_digest_is_its_definition():
    tensors = [
        (TensorSpec("layers.0.ünï", "BF16", (4, 8)), 0xDEADBEEF00000001),
        (TensorSpec("s", "F32", ()), 7),
    ]
    lanes = [0, 0]
    for (name, dtype, shape), tensor_digest in tensors:
        key = f"{name}\0{dtype}\0{','.join(map(str, shape))}".encode()
        h = hashlib.sha256(key).digest()
        word = [int.from_bytes(h[4 * i : 4 * i + 4], "little") for i in range(4)]
        lanes[0] += (word[0] | 1) * (tensor_digest >> 32) + word[2]
        lanes[1] += (word[1] | 1) * (tensor_digest & 0xFFFFFFFF) + word[3]
    expected = digest.pack(*lanes)
    assert version_digest(tensors) == version_digest(tensors[::-1]) == expected


def test_the_version_digest_tells_names_shapes_and_digests_apart():
    def of(name="w", dtype="BF16", shape=(4, 8), value=5):
        return version_digest([(TensorSpec(name, dtype, shape), value)])

    different = {
        of(),
        of(name="v"),
        of(dtype="F16"),
        of(shape=(8, 4)),
        of(shape=(32,)),
        of(value=6),
        of(value=5 << 32),
        version_digest([]),
    }
    assert len(different) == 8


def test_same_weights_compares_what_counts():
    anchor = _anchor()
    delta = _manifest(digest=anchor.digest)
    assert _anchor(created=5.0).same_weights(delta)
    w = anchor.tensors["w"]
    for other in (
        {"w": w},
        {**anchor.tensors, "w": w._replace(digest=1)},
        {**anchor.tensors, "w": w._replace(dtype="F16")},
    ):
        assert not _anchor(tensors=other).same_weights(delta)
    assert not _anchor(epoch=3).same_weights(delta)
    assert not _anchor(run="run-2").same_weights(delta)
    assert not _anchor(step=1).same_weights(delta)


_W = ChangedTensor(3, 5, (0,))
_WHOLE = WholeTensor("BF16", (4, 8), 5, 0)
_REF = ObjectRef("a/b.safetensors", 300, _SHA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": ""}, "run"),
        ({"run": "x" * 129}, "run"),
        ({"run": "\ud800"}, "run"),
        ({"epoch": 0}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": 1_000_000}, "epoch"),
        ({"version": -1}, "version"),
        ({"version": 10**10}, "version"),
        ({"kind": "patch"}, "kind"),
        ({"step": -1}, "step"),
        ({"step": 1 << 64}, "step"),
        ({"step": 1.0}, "step"),
        ({"meta": None}, "meta"),
        ({"meta": []}, "meta"),
        ({"meta": {"a": "x" * 4096}}, "meta: .* at most 4096"),
        ({"meta": {"a": float("nan")}}, "meta"),
        ({"meta": {"a": object()}}, "meta"),
        ({"meta": {"\ud800": 1}}, "meta"),
        ({"meta": {"a": 10**20}}, "meta"),
        ({"created": float("nan")}, "created"),
        ({"created": float("inf")}, "created"),
        ({"created": -1.0}, "created"),
        ({"base": None}, "base"),
        ({"base": VersionId(1, 17)}, "base"),
        ({"base": VersionId(3, 16)}, "base"),
        ({"base": VersionId(0, 16)}, "base"),
        ({"base": (1, 16)}, "base"),
        ({"codec": "class8"}, "codec 'class8' is not known to this jdelta"),
        ({"values": "bits"}, "values 'bits' is not known"),
        ({"digest": -1}, "digest"),
        ({"digest": 1 << 64}, "digest"),
        ({"objects": (_REF._replace(size=-1),)}, "size of"),
        ({"objects": (_REF._replace(sha256="0" * 63),)}, "sha256 of"),
        ({"objects": (_REF._replace(sha256="A" * 64),)}, "sha256 of"),
        ({"objects": (_REF, _REF)}, "objects"),
        ({"tensors": {"w": _W._replace(digest=1 << 64)}}, "digest"),
        ({"tensors": {"w": _W._replace(changed=(1 << 50) + 1)}}, "changed"),
        ({"tensors": {"w": _W._replace(changed=-1)}}, "changed"),
        ({"tensors": {"w": _W._replace(changed=0)}}, "changed"),
        ({"tensors": {"w": _W._replace(objects=(1,))}}, "object"),
        ({"tensors": {"w": _W._replace(objects=())}}, "object"),
        ({"tensors": {"w": _W._replace(objects=(0, 0))}}, "object"),
        ({"tensors": {"w": _W._replace(objects=(False,))}}, "object"),
        ({"tensors": {"w": _WHOLE}}, "tensor 'w'"),
        ({"tensors": {"__metadata__": _W}}, "__metadata__"),
        ({"tensors": {"": _W}}, "published as ''"),
        ({"tensors": {"a\nb": _W}}, "published as"),
    ],
)
def test_no_manifest_breaks_a_rule(changes, message):
    with pytest.raises(FormatError, match=message):
        _manifest(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": VersionId(1, 16)}, "base"),
        ({"codec": "fast"}, "codec"),
        ({"digest": 1}, "the version's digest is"),
        ({"tensors": {"w": _W}}, "tensor 'w'"),
        ({"tensors": {"w": _WHOLE._replace(dtype="F4")}}, "dtype 'F4'"),
        ({"tensors": {"w": _WHOLE._replace(shape=(-4, 8))}}, "shape"),
        ({"tensors": {"w": _WHOLE._replace(shape=(1,) * 33)}}, "shape"),
        ({"tensors": {"w": _WHOLE._replace(shape=(1 << 50, 8))}}, "shape"),
        ({"tensors": {"w": _WHOLE._replace(shape=(0, 1 << 50, 8))}}, "shape"),
        ({"tensors": {"w": _WHOLE._replace(shape=(4.0, 8))}}, "shape"),
        ({"tensors": {"w": _WHOLE._replace(digest=-1)}}, "digest"),
        ({"tensors": {"w": _WHOLE._replace(object=1)}}, "object"),
        ({"tensors": {"w": _WHOLE._replace(object=None)}}, "object"),
        ({"tensors": {"w": _WHOLE._replace(object=False)}}, "object"),
        (
            {"tensors": {str(i): _WHOLE._replace(shape=(1 << 49,)) for i in range(9)}},
            "tensors",
        ),
    ],
)
def test_an_anchor_has_no_base_and_holds_everything(changes, message):
    with pytest.raises(FormatError, match=message):
        _anchor(**changes)


_ESCAPES = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a//b",
    "a/./b",
    "a/",
    "",
    "a\\b",
    "C:/x",
    "a\0b",
    "a\nb",
    "ä/b",
    "a b",
    "x" * 1025,
]


@pytest.mark.parametrize("name", _ESCAPES)
def test_no_object_lies_outside_its_bucket(name):
    with pytest.raises(FormatError):
        _manifest(objects=(_REF._replace(name=name),))
    document = json.loads(_manifest().to_json())
    document["objects"][0]["name"] = name
    with pytest.raises(FormatError):
        Manifest.parse(json.dumps(document).encode())


def _edited(path, value, manifest=None):
    document = json.loads((manifest or _manifest()).to_json())
    at = document
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(document).encode()


_FIELDS = [
    *((key,) for key in json.loads(_manifest().to_json())),
    *(("objects", 0, key) for key in ObjectRef._fields),
    *(("tensors", "layers.0.w", at) for at in range(3)),
    ("objects", 0),
    ("tensors", "layers.0.w"),
]
_FIELDS_OF_ANCHORS = [
    *(("tensors", "w", key) for key in WholeTensor._fields),
    ("tensors", "w"),
]
_WRONG = [
    ...,
    [],
    {},
    "",
    "x",
    -1,
    1.5,
    1e400,
    1 << 70,
    True,
    [[]],
    [1, 2, 3],
    "\ud800",
]


# Of the wrong ones, those that happen to be right.
_VALID = {
    ("run",): "x",
    ("created",): 1.5,
    ("objects", 0, "name"): "x",
    ("meta",): {},
    ("tensors",): {},  # nothing changed
    ("tensors", "layers.0.w"): ...,  # another does
}


@pytest.mark.parametrize("path", [*_FIELDS, *_FIELDS_OF_ANCHORS], ids=str)
def test_every_field_is_needed_and_typed(path):
    manifest = _anchor() if path in _FIELDS_OF_ANCHORS else _manifest()
    for wrong in _WRONG:
        if wrong == _VALID.get(path):
            continue
        with pytest.raises(FormatError):
            Manifest.parse(_edited(path, wrong, manifest))
    if path not in (("base",), ("step",)):
        with pytest.raises(FormatError):
            Manifest.parse(_edited(path, None, manifest))


@pytest.mark.parametrize(
    "path", [("new",), ("objects", 0, "new"), ("tensors", "w", "new")]
)
def test_unknown_fields_are_refused(path):
    with pytest.raises(FormatError, match="'new' is an unknown field"):
        Manifest.parse(_edited(path, 1, _anchor()))


def test_a_newer_format_says_so():
    with pytest.raises(
        FormatError,
        match="made by a newer jdelta: format_version 2, this one reads 1",
    ):
        Manifest.parse(_edited(("format_version",), 2))


def test_a_tensor_digest_that_was_edited_shows_in_the_version_digest():
    with pytest.raises(FormatError, match="the version's digest is"):
        Manifest.parse(_edited(("tensors", "w", "digest"), "0" * 16, _anchor()))


def test_a_manifest_too_large_to_be_read_is_not_written():
    name = "☃" * 1000  # escaped, six bytes each
    manifest = _manifest(tensors={f"{name}.{i}": _W for i in range(5_600)})
    with pytest.raises(FormatError, match="at most 33554432 are read"):
        manifest.to_json()


def test_a_hundred_thousand_tensors_fit():
    tensors = {
        f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight": _W
        for i in range(100_000)
    }
    manifest = _manifest(tensors=tensors)
    assert len(manifest.to_json()) < 10 << 20


def test_a_delta_costs_what_changed_not_what_there_is():
    """However many tensors a tree has: a manifest lists those that change."""
    specs = {
        f"layers.{i}.w": TensorSpec(f"layers.{i}.w", "BF16", (4,)) for i in range(9)
    }
    state = State.new("r", VersionId(1, 0), 0, {}, specs, dict.fromkeys(specs, 5))
    then = state.then(VersionId(1, 1), 1, {}, {"layers.3.w": 6})
    manifest = _manifest(
        run="r",
        epoch=1,
        version=1,
        base=state.id,
        digest=then.digest,
        tensors={"layers.3.w": ChangedTensor(1, 6, (0,))},
    )
    assert b"layers.4.w" not in manifest.to_json()
    found = state.after(Manifest.parse(manifest.to_json()))
    assert found.digests == then.digests == {**state.digests, "layers.3.w": 6}
    assert found.digest == version_digest(
        (s, found.digests[n]) for n, s in specs.items()
    )
    assert (found.nbytes, found.elements) == (72, 36)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base": VersionId(1, 1)}, FormatError),
        ({"digest": 1}, CorruptError),
        ({"tensors": {"v": ChangedTensor(1, 6, (0,))}}, TreeError),
        ({"tensors": {"w": ChangedTensor(5, 6, (0,))}}, CorruptError),
        ({"tensors": {"w": ChangedTensor(1, 7, (0,))}}, CorruptError),
    ],
)
def test_a_delta_that_does_not_lead_on_is_refused(changes, error):
    specs = {"w": TensorSpec("w", "BF16", (4,))}
    state = State.new("r", VersionId(1, 0), 0, {}, specs, {"w": 5})
    fields = {
        "run": "r",
        "epoch": 1,
        "version": 2,
        "base": state.id,
        "digest": state.then(VersionId(1, 2), 0, {}, {"w": 6}).digest,
        "tensors": {"w": ChangedTensor(1, 6, (0,))},
    }
    assert state.after(_manifest(**fields)).digests == {"w": 6}
    with pytest.raises(error):
        state.after(_manifest(**{**fields, **changes}))


_names = st.text(
    st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20
).filter(lambda name: name != "__metadata__" and "\x7f" not in name)


@given(
    st.dictionaries(
        _names,
        st.tuples(
            st.sampled_from(NAMES),
            st.lists(st.integers(0, 1 << 10), max_size=4).map(tuple),
            st.integers(0, (1 << 64) - 1),
        ),
        max_size=6,
    )
)
@settings(deadline=None)
def test_any_tensors_survive(tensors):
    entries = {
        name: WholeTensor(dtype, shape, tensor_digest, 0)
        for name, (dtype, shape, tensor_digest) in tensors.items()
    }
    manifest = _anchor(tensors=entries)
    assert Manifest.parse(manifest.to_json()) == manifest


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_documents_are_refused_or_whole(data):
    document = bytearray(_manifest().to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(document) - 1))
        document[at] = data.draw(st.integers(0, 255))
    try:
        found = Manifest.parse(bytes(document))
    except FormatError:
        return
    Manifest.parse(found.to_json())


@pytest.mark.parametrize(
    "name", ["", "__metadata__", "a\0b", "a\x7fb", "x" * 1025, "\udc80"]
)
def test_tensor_names_safetensors_cannot_hold(name):
    with pytest.raises(TreeError, match="no tensor can be published as"):
        check_tensor_name(name)


def test_a_manifest_cannot_be_edited():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _manifest().version = 3  # pyright: ignore[reportAttributeAccessIssue]
