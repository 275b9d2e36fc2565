"""The manifest: one validator for what is written and what is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta.errors import FormatError, TreeError
from jdelta.wire import digest
from jdelta.wire.dtypes import NAMES, TensorSpec
from jdelta.wire.manifest import (
    Manifest,
    ObjectRef,
    TensorEntry,
    VersionId,
    check_tensor_name,
    version_digest,
)

_SHA = "0123456789abcdef" * 4


def _manifest(**changes):
    fields = {
        "run": "run-1",
        "epoch": 2,
        "version": 17,
        "kind": "delta",
        "base": VersionId(1, 16),
        "step": 340,
        "created": 1764547200.5,
        "objects": (
            ObjectRef("deltas/e000002-v0000000017/00000.safetensors", 300, _SHA),
        ),
        "tensors": {
            "layers.0.w": TensorEntry("BF16", (4, 8), 3, 0xDEADBEEF00000001, 0),
            "layers.0.ünï": TensorEntry("F32", (), 0, 7, None),
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
            "w": TensorEntry("BF16", (4, 8), 32, 5, 0),
            "empty": TensorEntry("U8", (0, 3), 0, 0, 0),
        },
    }
    return _manifest(**{**fields, **changes})


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


def test_specs_id_and_size():
    manifest = _manifest()
    assert manifest.id == VersionId(2, 17)
    assert manifest.nbytes == 300
    assert manifest.specs()["layers.0.w"] == TensorSpec("layers.0.w", "BF16", (4, 8))


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
    delta = _manifest()
    tensors = {
        name: entry._replace(changed=TensorSpec(name, *entry[:2]).size, object=0)
        for name, entry in delta.tensors.items()
    }
    anchor = _anchor(tensors=tensors, created=5.0)
    assert anchor.same_weights(delta)
    assert anchor.digest == delta.digest
    entry = tensors["layers.0.w"]
    for other in (
        {"layers.0.w": entry},
        {**tensors, "layers.0.w": entry._replace(digest=1)},
        {**tensors, "layers.0.w": entry._replace(dtype="F16")},
    ):
        assert not _anchor(tensors=other).same_weights(delta)
    assert not _anchor(tensors=tensors, epoch=3).same_weights(delta)
    assert not _anchor(tensors=tensors, run="run-2").same_weights(delta)


_W = TensorEntry("BF16", (4, 8), 3, 5, 0)
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
        ({"layout": "hf"}, "layout 'hf' is not known"),
        ({"shards": 8}, "shards 8 is not known"),
        ({"chunk_elements": 1 << 20}, "chunk_elements 1048576 is not known"),
        ({"objects": (_REF._replace(size=-1),)}, "size of"),
        ({"objects": (_REF._replace(sha256="0" * 63),)}, "sha256 of"),
        ({"objects": (_REF._replace(sha256="A" * 64),)}, "sha256 of"),
        ({"objects": (_REF, _REF)}, "objects"),
        ({"tensors": {"w": _W._replace(dtype="F4")}}, "dtype 'F4'"),
        ({"tensors": {"w": _W._replace(shape=(-4, 8))}}, "shape"),
        ({"tensors": {"w": _W._replace(shape=(1,) * 33)}}, "shape"),
        ({"tensors": {"w": _W._replace(shape=(1 << 50, 8))}}, "shape"),
        ({"tensors": {"w": _W._replace(shape=(0, 1 << 50, 8), changed=0)}}, "shape"),
        ({"tensors": {"w": _W._replace(shape=(4.0, 8))}}, "shape"),
        ({"tensors": {"w": _W._replace(digest=1 << 64)}}, "digest"),
        ({"tensors": {"w": _W._replace(changed=33)}}, "changed"),
        ({"tensors": {"w": _W._replace(changed=-1)}}, "changed"),
        ({"tensors": {"w": _W._replace(changed=0)}}, "changed"),
        ({"tensors": {"w": _W._replace(object=1)}}, "object"),
        ({"tensors": {"w": _W._replace(object=None)}}, "object"),
        ({"tensors": {"w": _W._replace(object=False)}}, "object"),
        ({"tensors": {"__metadata__": _W}}, "__metadata__"),
        ({"tensors": {"": _W}}, "published as ''"),
        ({"tensors": {"a\nb": _W}}, "published as"),
        (
            {
                "tensors": {
                    str(i): _W._replace(shape=(1 << 49,), changed=1) for i in range(9)
                }
            },
            "tensors",
        ),
    ],
)
def test_no_manifest_breaks_a_rule(changes, message):
    with pytest.raises(FormatError, match=message):
        _manifest(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"base": VersionId(1, 16)},
        {"codec": "fast"},
        {"tensors": {"w": _W}},
        {"tensors": {"w": _W._replace(changed=0, object=None)}},
    ],
)
def test_an_anchor_has_no_base_and_holds_everything(changes):
    with pytest.raises(FormatError):
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


def _edited(path, value):
    document = json.loads(_manifest().to_json())
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
    *(("tensors", "layers.0.w", key) for key in TensorEntry._fields),
    ("objects", 0),
    ("tensors", "layers.0.w"),
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
_VALID = {("run",): "x", ("created",): 1.5, ("objects", 0, "name"): "x"}


@pytest.mark.parametrize("path", _FIELDS, ids=str)
def test_every_field_is_needed_and_typed(path):
    for wrong in _WRONG:
        if wrong == _VALID.get(path):
            continue
        with pytest.raises(FormatError):
            Manifest.parse(_edited(path, wrong))
    if path not in (("base",), ("step",), ("tensors", "layers.0.w", "object")):
        with pytest.raises(FormatError):
            Manifest.parse(_edited(path, None))


@pytest.mark.parametrize(
    "path", [("new",), ("objects", 0, "new"), ("tensors", "layers.0.w", "new")]
)
def test_unknown_fields_are_refused(path):
    with pytest.raises(FormatError, match="'new' is an unknown field"):
        Manifest.parse(_edited(path, 1))


def test_a_newer_format_says_so():
    with pytest.raises(
        FormatError,
        match="made by a newer jdelta: format_version 2, this one reads 1",
    ):
        Manifest.parse(_edited(("format_version",), 2))


def test_a_tensor_digest_that_was_edited_shows_in_the_version_digest():
    with pytest.raises(FormatError, match="the version's digest is"):
        Manifest.parse(_edited(("tensors", "layers.0.w", "digest"), "0" * 16))


def test_a_manifest_too_large_to_be_read_is_not_written():
    name = "☃" * 1000  # escaped, six bytes each
    tensors = {
        f"{name}.{i}": TensorEntry("BF16", (4, 8), 0, 0, None) for i in range(5_600)
    }
    manifest = _manifest(objects=(), tensors=tensors)
    with pytest.raises(FormatError, match="at most 33554432 are read"):
        manifest.to_json()


def test_a_hundred_thousand_tensors_fit():
    tensors = {
        f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight": _W
        for i in range(100_000)
    }
    manifest = _manifest(tensors=tensors)
    assert len(manifest.to_json()) < 20 << 20


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
        name: TensorEntry(
            dtype, shape, TensorSpec(name, dtype, shape).size, tensor_digest, 0
        )
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
