"""Small documents and names: strict, bounded, and no way out of the bucket."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdelta.errors import FormatError
from jdelta.wire import names
from jdelta.wire.control import EpochClaim, Pointer, ReaderStatus, RunInfo
from jdelta.wire.manifest import Manifest, VersionId

_POINTER = Pointer(run="r", epoch=1, version=17, closed=None)
_DOCUMENTS = [
    RunInfo(run="r", created=1.5),
    EpochClaim(run="r", epoch=1, base=None, writer="w", created=2.5),
    EpochClaim(run="r", epoch=3, base=VersionId(1, 17), writer="w", created=2.5),
    _POINTER,
    Pointer(run="r", epoch=1, version=17, closed=3),
    ReaderStatus(reader="rollout-0", run="r", epoch=1, version=17, time=3.5),
]


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda d: type(d).__name__)
def test_what_is_written_is_read_back(document):
    data = document.to_json()
    assert type(document).parse(data) == document
    assert type(document).parse(data).to_json() == data


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda d: type(d).__name__)
def test_every_field_is_needed_and_typed(document):
    fields = json.loads(document.to_json())
    for key in fields:
        for wrong in (..., [], {}, "", -1, 1 << 70, True, [1], [1, 2, 3], "\ud800"):
            edited = dict(fields)
            if wrong is ...:
                del edited[key]
            else:
                edited[key] = wrong
            with pytest.raises(FormatError):
                type(document).parse(json.dumps(edited).encode())
    with pytest.raises(FormatError, match="unknown field"):
        type(document).parse(json.dumps({**fields, "new": 1}).encode())


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda d: type(d).__name__)
def test_one_kind_is_not_read_as_another(document):
    for other in (RunInfo, EpochClaim, Pointer, ReaderStatus, Manifest):
        if other is not type(document):
            with pytest.raises(FormatError):
                other.parse(document.to_json())


@pytest.mark.parametrize("kind", [RunInfo, Manifest])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"null", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"{}", "'format' is missing"),
        (b'{"format":"other"}', "is not 'jdelta'"),
        (b'{"format":"jdelta"}', "'format_version' is missing"),
        (b'{"format":"jdelta","format_version":1.0}', "format_version"),
        (b'{"format":"jdelta","format_version":true}', "format_version"),
        (b'{"format":"jdelta","format":"jdelta"}', "a key appears twice"),
        (b'{"a":{"b":1,"b":1}}', "a key appears twice"),
        (b'{"a":NaN}', "NaN is no number"),
        (b'{"a":-Infinity}', "-Infinity is no number"),
        (b'{"a":1e999}', "a number is too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "a number has 5000 digits"),
        (b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}", "nested|more lists|'format'"),
        (b'{"a":' * 10_000, "nested too deeply|more lists"),
        (b"[" * 30_000, "more lists and objects|nested"),
        (b"{} trailing", "not JSON"),
    ],
)
def test_junk_is_refused_by_name(kind, data, message):
    with pytest.raises(FormatError, match=message):
        kind.parse(data)


def test_deep_nesting_within_every_other_bound_is_refused():
    depth = 1500
    deep = b'{"a' + b"x" * 16 * depth + b'":' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(FormatError, match="nested too deeply|'format' is missing"):
        RunInfo.parse(deep)
    deeper = b'{"a' + b"x" * 4_000_000 + b'":' + b"[" * 200_000 + b"}"
    with pytest.raises(FormatError, match="nested too deeply"):
        Manifest.parse(deeper)


def test_size_is_bounded_before_anything_is_parsed():
    with pytest.raises(FormatError, match="at most 65536 are read"):
        RunInfo.parse(b" " * 65_537)
    with pytest.raises(FormatError, match="at most 33554432 are read"):
        Manifest.parse(bytes((32 << 20) + 1))


def test_a_document_no_reader_would_take_is_not_written():
    for bad in (
        RunInfo(run="", created=1.0),
        RunInfo(run="r", created=-1.0),
        EpochClaim(run="r", epoch=2, base=VersionId(2, 5), writer="w", created=1.0),
        EpochClaim(run="r", epoch=0, base=None, writer="w", created=1.0),
        Pointer(run="r", epoch=2, version=17, closed=1),
        Pointer(run="r", epoch=1, version=17, closed=True),
        ReaderStatus(reader="r", run="r", epoch=1, version=-1, time=0.0),
    ):
        with pytest.raises(FormatError):
            bad.to_json()
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunInfo(run="r", created=float("nan")).to_json()


def test_a_newer_format_says_so():
    newer = _POINTER.to_json().replace(b'"format_version":1', b'"format_version":2')
    with pytest.raises(FormatError, match="made by a newer jdelta: format_version 2"):
        Pointer.parse(newer)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    for kind in (RunInfo, EpochClaim, Pointer, ReaderStatus, Manifest):
        with pytest.raises(FormatError):
            kind.parse(data)


# --- names


def test_the_names_are_the_format():
    assert names.epoch_name(1) == "epochs/000001.json"
    assert names.manifest_prefix(1) == "manifests/e000001/"
    assert names.manifest_name(1, 17) == "manifests/e000001/v0000000017.json"
    assert (
        names.manifest_name(1, 17, alternate="anchor")
        == "manifests/e000001/v0000000017.anchor.json"
    )
    assert (
        names.manifest_name(1, 17, alternate="fold", base=1)
        == "manifests/e000001/v0000000017.fold-0000000001.json"
    )
    assert names.delta_name(1, 17, 0) == "deltas/e000001-v0000000017/00000.safetensors"
    assert (
        names.delta_name(1, 17, 2, base=3)
        == "deltas/e000001-v0000000017-fold-0000000003/00002.safetensors"
    )
    assert names.anchor_folder(1, 17) == "anchors/e000001-v0000000017"
    assert (
        names.anchor_folder(1, 17, alternate=True) == "anchors/e000001-v0000000017-alt"
    )
    assert names.reader_name("rollout-0") == "readers/rollout-0.json"


@given(st.integers(1, names.MAX_EPOCH), st.integers(0, names.MAX_VERSION))
def test_manifest_names_round_trip_and_sort_by_version(epoch, version):
    name = names.manifest_name(epoch, version)
    assert names.parse_manifest_name(name) == (epoch, version, None, None)
    assert name.startswith(names.manifest_prefix(epoch))
    anchor = names.manifest_name(epoch, version, alternate="anchor")
    assert names.parse_manifest_name(anchor) == (epoch, version, "anchor", None)
    fold = names.manifest_name(epoch, version, alternate="fold", base=version // 2)
    assert names.parse_manifest_name(fold) == (epoch, version, "fold", version // 2)
    for each in (name, anchor, fold):
        assert names.check_object_name(each) == each
    if version < names.MAX_VERSION:
        assert name < names.manifest_name(epoch, version + 1)


@pytest.mark.parametrize(
    "name",
    [
        "manifests/e000001/v17.json",
        "manifests/e000000/v0000000017.json",
        "manifests/e000001/v0000000017.json.tmp",
        "manifests/e000001/v0000000017.fold.json",
        "manifests/e000001/v0000000017.fold-1.json",
        "manifests/e000001/v000000001７.json",
        "x/manifests/e000001/v0000000017.json",
        "",
    ],
)
def test_other_names_are_no_manifests(name):
    assert names.parse_manifest_name(name) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: names.epoch_name(0),
        lambda: names.epoch_name(1_000_000),
        lambda: names.manifest_name(1, -1),
        lambda: names.manifest_name(1, 10**10),
        lambda: names.manifest_name(1, 1, alternate="fold"),
        lambda: names.manifest_name(1, 1, base=0),
        lambda: names.manifest_name(1, 1, alternate="other"),
        lambda: names.delta_name(1, 1, 100_000),
        lambda: names.reader_name("../x"),
        lambda: names.reader_name(""),
        lambda: names.reader_name(".hidden"),
        lambda: names.reader_name("a/b"),
    ],
)
def test_names_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="not|no|beginning"):
        call()
