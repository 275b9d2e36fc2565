"""Safetensors headers, delta objects and anchors: strict on the way in."""

from __future__ import annotations

import hashlib
import io
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jdelta.errors import CorruptError, FormatError, TreeError
from jdelta.wire import anchor, delta_object, dtypes, safetensors
from jdelta.wire.bits import to_bits
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import ObjectRef
from jdelta.wire.tensor import EncodedTensor


def _file(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _entry(start=0, end=4, dtype="BF16", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


# --- headers


def test_a_header_the_library_wrote():
    data = save(
        {
            "b": np.ones((2, 3), ml_dtypes.bfloat16),
            "a": np.zeros((), np.float32),
            "empty": np.zeros((0, 5), np.uint8),
        },
        {"format": "pt"},
    )
    header = safetensors.parse(data, ["a", "b", "empty"])
    assert header.metadata == {"format": "pt"}
    found = {tensor.spec.name: tensor for tensor in header.tensors}
    assert found["b"].spec == TensorSpec("b", "BF16", (2, 3))
    assert found["a"].spec.shape == ()
    assert found["empty"].start == found["empty"].end
    assert data[found["b"].start : found["b"].end] == b"\x80\x3f" * 6


_BAD_FILES = {
    "empty": (b"", "no safetensors file"),
    "short": (b"\1\0\0", "no safetensors file"),
    "header past the file": (struct.pack("<Q", 50) + b"{}", "no safetensors file"),
    "negative length": (b"\xff" * 8 + b"{}", "no safetensors file"),
    "huge header": (_file(b"{" + b" " * 80_000 + b"}"), "no safetensors file"),
    "no JSON": (_file(b"{nope}"), "not JSON"),
    "no object": (_file(b"[1]"), "not a JSON object"),
    "duplicate": (_file(b'{"w":1,"w":2}'), "twice"),
    "metadata": (_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (_file({"__metadata__": []}), "__metadata__"),
    "entry": (_file({"w": [1]}), "not a dtype"),
    "extra key": (_file({"w": {**_entry(), "x": 1}}, b"\0" * 4), "not a dtype"),
    "dtype": (_file({"w": _entry(dtype="F4")}, b"\0" * 4), "unknown dtype"),
    "dtype type": (_file({"w": _entry(dtype=["BF16"])}, b"\0" * 4), "unknown dtype"),
    "shape": (_file({"w": _entry(shape=(-2,))}, b"\0" * 4), "shape"),
    "shape type": (_file({"w": _entry(shape=(2.0,))}, b"\0" * 4), "shape"),
    "dimensions": (_file({"w": _entry(shape=(2,) + (1,) * 40)}, b"\0" * 4), "shape"),
    "bool": (_file({"w": _entry(shape=(True, 2))}, b"\0" * 4), "shape"),
    "offsets": (_file({"w": _entry(4, 0)}, b"\0" * 4), "data_offsets"),
    "negative": (_file({"w": _entry(-4, 0)}, b"\0" * 4), "data_offsets"),
    "size": (_file({"w": _entry(0, 3)}, b"\0" * 3), "3 bytes for"),
    "overflow": (
        _file({"w": _entry(0, 0, shape=(1 << 62, 1 << 62))}),
        "0 bytes for",
    ),
    "hole": (_file({"w": _entry(4, 8)}, b"\0" * 8), "leave holes"),
    "overlap": (
        _file({"w": _entry(0, 4), "v": _entry(2, 6)}, b"\0" * 6),
        "overlap",
    ),
    "truncated": (_file({"w": _entry()}, b"\0" * 3), "end at byte"),
    "trailing": (_file({"w": _entry()}, b"\0" * 5), "end at byte"),
    "missing": (_file({}), "other tensors"),
    "unlisted": (
        _file({"w": _entry(), "v": _entry(4, 8)}, b"\0" * 8),
        "other tensors than its manifest lists: .'v'.",
    ),
}


@pytest.mark.parametrize(("data", "message"), _BAD_FILES.values(), ids=_BAD_FILES)
def test_files_that_break_the_rules_are_refused(data, message):
    with pytest.raises(FormatError, match=message):
        safetensors.parse(data, ["w"])


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_files_are_refused(data):
    for junk in (data, struct.pack("<Q", max(0, len(data) - 3)) + data):
        with pytest.raises(FormatError):
            safetensors.parse(junk, ["w"])


# --- delta objects


def _encoded():
    return {
        "layers.1.w": EncodedTensor(b"payload", 3, 0),
        "layers.0.ünï[0]": EncodedTensor(b"x" * 1000, 500, 0),
    }


def test_a_delta_object_is_a_safetensors_file_that_tools_can_list(tmp_path):
    data = delta_object.pack(_encoded(), {"version": 17, "base": 16, "codec": "fast"})
    assert delta_object.unpack(data, _encoded()) == {
        name: tensor.payload for name, tensor in _encoded().items()
    }
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert set(file.keys()) == set(_encoded())
        assert json.loads(file.metadata()["jdelta"]) == {
            "version": 17,
            "base": 16,
            "codec": "fast",
            "changed": {"layers.0.ünï[0]": 500, "layers.1.w": 3},
        }
        assert file.get_tensor("layers.1.w").tobytes() == b"payload"


def test_a_delta_object_has_the_same_bytes_each_time():
    first = delta_object.pack(_encoded(), {"version": 1})
    backwards = dict(reversed(_encoded().items()))
    assert delta_object.pack(backwards, {"version": 1}) == first


def test_a_delta_object_of_nothing():
    assert delta_object.unpack(delta_object.pack({}, {}), []) == {}


def test_a_delta_object_holds_exactly_what_is_expected():
    data = delta_object.pack(_encoded(), {})
    for expected in ([], ["layers.1.w"], [*_encoded(), "more"]):
        with pytest.raises(FormatError, match="other tensors"):
            delta_object.unpack(data, expected)
    for wrong in (np.zeros(2, np.uint16), np.zeros((2, 2), np.uint8)):
        with pytest.raises(FormatError, match="'w' is not a run of bytes"):
            delta_object.unpack(save({"w": wrong}), ["w"])


def test_names_safetensors_keeps_for_itself_are_refused():
    with pytest.raises(TreeError, match="__metadata__"):
        delta_object.pack({"__metadata__": EncodedTensor(b"x", 1, 0)}, {})


# --- anchors


def _written_by_the_library(name):
    """Older releases of safetensors know fewer dtypes than they can read."""
    try:
        save({"w": np.zeros(1, dtypes.numpy_dtype(name))})
    except SafetensorError:
        return False
    return True


WRITTEN = [name for name in dtypes.NAMES if _written_by_the_library(name)]


def test_a_dtype_the_library_cannot_write_is_refused_by_name(tmp_path, monkeypatch):
    """Simulated: which releases lack which dtype is theirs to say."""

    def refuse(*_):
        raise SafetensorError("dtype float8_e8m0fnu is not covered")

    monkeypatch.setattr(anchor, "save", refuse)
    spec = TensorSpec("w", "U8", (1,))
    with pytest.raises(TreeError, match="'w'.*float8_e8m0fnu"):
        anchor.write_anchor([(spec, np.zeros(1, np.uint8))], tmp_path / "a")


def _tensors():
    rng = np.random.default_rng(0)
    for i, name in enumerate(WRITTEN):
        spec = TensorSpec(f"model.{i}.w", name, (3, 5) if i else ())
        raw = rng.integers(0, 2 if name == "BOOL" else 256, spec.nbytes, np.uint8)
        yield spec, raw.view(dtypes.bits_dtype(name))
    yield TensorSpec("empty", "BF16", (0, 7)), np.zeros(0, np.uint16)


def _ref(path):
    data = path.read_bytes()
    return ObjectRef(path.name, len(data), hashlib.sha256(data).hexdigest())


def _read(files, specs, refs=None):
    weights = {
        n: np.empty(s.size, dtypes.bits_dtype(s.dtype)) for n, s in specs.items()
    }
    for i, file in enumerate(files[:-1]):
        with file.path.open("rb") as stream:
            anchor.read_anchor_object(
                stream,
                refs[i] if refs else _ref(file.path),
                {name: specs[name] for name in file.tensors},
                weights.__getitem__,
            )
    return weights


@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 20])
def test_an_anchor_is_read_back_bit_for_bit(tmp_path, shard_bytes):
    specs = {spec.name: spec for spec, _ in _tensors()}
    files = anchor.write_anchor(_tensors(), tmp_path / "a", shard_bytes=shard_bytes)
    weights = _read(files, specs)
    for spec, bits in _tensors():
        np.testing.assert_array_equal(weights[spec.name], bits)
    held = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert held == sorted(file.path.name for file in files)
    shards = files[:-1]
    for number, file in enumerate(shards, 1):
        assert file.path.name == (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        sizes = [specs[name].nbytes for name in file.tensors]
        assert sum(sizes) <= shard_bytes or len([s for s in sizes if s]) == 1
    # Whoever may read the index may read the weights.
    assert len({file.path.stat().st_mode for file in files}) == 1
    index = json.loads(files[-1].path.read_text())
    assert files[-1].path.name == "model.safetensors.index.json"
    assert index["metadata"] == {"total_size": sum(s.nbytes for s in specs.values())}
    assert index["weight_map"] == {
        name: file.path.name for file in shards for name in sorted(file.tensors)
    }


def test_the_same_weights_give_the_same_files(tmp_path):
    first = anchor.write_anchor(_tensors(), tmp_path / "a", shard_bytes=100)
    second = anchor.write_anchor(_tensors(), tmp_path / "b", shard_bytes=100)
    for a, b in zip(first, second, strict=True):
        assert a.path.read_bytes() == b.path.read_bytes()


def test_strided_bits_are_written_as_what_they_are(tmp_path):
    bits = np.arange(24, dtype=np.uint16)[::-2]
    spec = TensorSpec("w", "BF16", (12,))
    files = anchor.write_anchor([(spec, bits)], tmp_path)
    np.testing.assert_array_equal(_read(files, {"w": spec})["w"], bits)


def test_an_anchor_of_nothing(tmp_path):
    files = anchor.write_anchor([], tmp_path)
    assert len(files) == 2
    assert _read(files, {}) == {}


def test_what_an_anchor_cannot_hold_is_refused(tmp_path):
    spec = TensorSpec("w", "BF16", (2,))
    good = np.zeros(2, np.uint16)
    for tensors, message in [
        ([(spec, good), (spec, good)], "two tensors are published as 'w'"),
        ([(spec, good.view(np.int16))], "are not the bits of"),
        ([(spec, good[:1])], "1 elements of uint16"),
        ([(spec._replace(dtype="F4"), good)], "no dtype 'F4'"),
        ([(spec._replace(name="__metadata__"), good)], "__metadata__"),
    ]:
        with pytest.raises(TreeError, match=message):
            anchor.write_anchor(tensors, tmp_path)


class _Slow(io.RawIOBase):
    """A stream that gives a few bytes at a time, as sockets do."""

    def __init__(self, data):
        self._stream = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._stream.readinto(memoryview(buffer)[:1000])


def test_streams_that_give_less_than_asked_are_read_whole(tmp_path):
    spec = TensorSpec("w", "F32", (5000,))
    bits = np.arange(5000, dtype=np.uint32)
    file, _ = anchor.write_anchor([(spec, bits)], tmp_path)
    found = np.empty_like(bits)
    anchor.read_anchor_object(
        _Slow(file.path.read_bytes()), _ref(file.path), {"w": spec}, lambda _: found
    )
    np.testing.assert_array_equal(found, bits)


def test_damaged_anchors_are_refused(tmp_path):
    spec = TensorSpec("w", "BF16", (100,))
    bits = np.arange(100, dtype=np.uint16)
    file, _ = anchor.write_anchor([(spec, bits)], tmp_path)
    data, ref = file.path.read_bytes(), _ref(file.path)

    def read(data, ref=ref, specs=None):
        specs = {"w": spec} if specs is None else specs
        stream = io.BytesIO(data)
        anchor.read_anchor_object(stream, ref, specs, lambda _: np.empty_like(bits))

    read(data)
    for at in range(0, len(data), 7):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(FormatError):
                read(bytes(damaged))
    with pytest.raises(CorruptError, match="SHA-256"):
        read(data[:-1] + b"\xff")
    with pytest.raises(CorruptError, match="ends early"):
        read(data[:-1])
    with pytest.raises(CorruptError, match="longer than"):
        read(data + b"\0")
    with pytest.raises(FormatError, match="no safetensors file"):
        read(data[:100], ref._replace(size=100))
    for specs, message in [
        ({}, "other tensors"),
        ({"w": spec, "v": spec._replace(name="v")}, "other tensors"),
        ({"w": spec._replace(dtype="F16")}, "its manifest lists"),
        ({"w": spec._replace(shape=(10, 10))}, "its manifest lists"),
    ]:
        with pytest.raises(FormatError, match=message):
            read(data, specs=specs)


def test_arrays_to_read_into_must_fit(tmp_path):
    spec = TensorSpec("w", "BF16", (100,))
    file, _ = anchor.write_anchor([(spec, np.zeros(100, np.uint16))], tmp_path)
    for target in (np.empty(99, np.uint16), np.empty(200, np.uint16)[::2]):
        with file.path.open("rb") as stream, pytest.raises(TreeError, match="'w'"):
            anchor.read_anchor_object(
                stream, _ref(file.path), {"w": spec}, lambda _, t=target: t
            )


def test_bits_of_floats_are_stored_untouched(tmp_path):
    """NaN payloads, signalling NaNs, both zeros, subnormals: as they are."""
    every = np.arange(1 << 16, dtype=np.uint16)
    spec = TensorSpec("w", "BF16", (256, 256))
    files = anchor.write_anchor([(spec, every)], tmp_path)
    with safe_open(files[0].path, "np") as file:
        np.testing.assert_array_equal(to_bits(file.get_tensor("w")), every)
