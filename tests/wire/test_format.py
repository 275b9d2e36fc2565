"""The format itself: the page that describes it, and a chain to be read for good."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

import jdelta.wire
from jdelta.wire import anchor, delta_object, digest, dtypes, names
from jdelta.wire.changes import Changes, compose
from jdelta.wire.control import EpochClaim, Pointer, ReaderStatus, RunInfo
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import Manifest, VersionId, version_digest
from jdelta.wire.state import State
from jdelta.wire.tensor import CHUNK_ELEMENTS, decode_tensor, encode_tensor, stage

_PAGE = (Path(jdelta.wire.__file__).parent / "FORMAT.md").read_text("utf-8")
_DATA = Path(__file__).parents[1] / "data"
_CHAIN = _DATA / "chain"


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("make_chain", _DATA / "make_chain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# --- the page


def test_the_worked_example_is_what_the_code_writes_and_reads():
    (block,) = re.findall(r"```hex\n(.*?)```", _PAGE, re.DOTALL)
    payload = bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines()))
    spec = TensorSpec("w", "BF16", (1000,))
    old = np.arange(0x3C00, 0x3FE8, dtype=np.uint16)
    new = old.copy()
    new[[3, 270]] += 1
    new[10] -= 1
    new[999] += 5
    encoded = encode_tensor(spec, Changes.between(old, new))
    assert encoded.payload == payload
    steps = decode_tensor(spec, [payload], 4)
    assert steps.positions.tolist() == [3, 10, 270, 999]
    assert steps.steps.view(np.int16).tolist() == [1, -1, 1, 5]
    np.testing.assert_array_equal(stage(old, steps, spec), new[steps.positions])
    for value in (
        digest.full(old),
        digest.full(new),
        steps.digest_delta,
        version_digest([(spec, digest.full(new))]),
    ):
        assert f"{value:016x}" in _PAGE


def test_the_page_names_every_dtype_and_limit():
    for name in dtypes.NAMES:
        assert re.search(rf"\b{name}\b", _PAGE)
    assert CHUNK_ELEMENTS == 1 << 22 and "(c mod q) * 2^22" in _PAGE


# --- the golden chain


def _manifest(vid, **alternate):
    return Manifest.parse(
        (_CHAIN / names.manifest_name(*vid, **alternate)).read_bytes()
    )


def _objects(manifest):
    for ref in manifest.objects:
        data = (_CHAIN / ref.name).read_bytes()
        assert len(data) == ref.size
        assert hashlib.sha256(data).hexdigest() == ref.sha256
        yield ref, data


def _read_anchor(manifest):
    specs = State.of(manifest).specs
    weights = {
        n: np.empty(s.size, dtypes.bits_dtype(s.dtype)) for n, s in specs.items()
    }
    for index, (ref, _) in enumerate(_objects(manifest)):
        listed = {n: specs[n] for n, e in manifest.whole.items() if e.object == index}
        if ref.name.endswith(".safetensors"):
            with (_CHAIN / ref.name).open("rb") as stream:
                anchor.read_anchor_object(stream, ref, listed, weights.__getitem__)
    return weights


def _read_delta(manifest, golden):
    found = {}
    for index, (_, data) in enumerate(_objects(manifest)):
        listed = [n for n, e in manifest.changes.items() if index in e.objects]
        for name, payload in delta_object.unpack(data, listed).items():
            changed = manifest.changes[name].changed
            found[name] = decode_tensor(golden.SPECS[name], [payload], changed)
    return found


def _apply(weights, steps, golden):
    for name, step in steps.items():
        weights[name][step.positions] = stage(weights[name], step, golden.SPECS[name])


def _is(weights, golden, state):
    expected = golden.weights(state.version)
    assert state.specs == golden.SPECS
    assert weights.keys() == expected.keys() == state.digests.keys()
    for name, bits in weights.items():
        np.testing.assert_array_equal(bits, expected[name])
        assert digest.full(bits) == state.digests[name]


def test_the_golden_chain_is_read_bit_for_bit(golden):
    first = _manifest(golden.IDS[0])
    weights, state = _read_anchor(first), State.of(first)
    _is(weights, golden, state)
    for base, vid in zip(golden.IDS, golden.IDS[1:], strict=False):
        manifest = _manifest(vid)
        assert (manifest.kind, manifest.base, manifest.id) == ("delta", base, vid)
        _apply(weights, _read_delta(manifest, golden), golden)
        state = state.after(manifest)
        _is(weights, golden, state)
    assert len(manifest.changes) < len(golden.SPECS) - 1


def test_the_golden_alternates_are_the_same_version(golden):
    last = _manifest(golden.IDS[3])
    other = _manifest(golden.IDS[3], alternate="anchor")
    assert other.same_weights(last)
    _is(_read_anchor(other), golden, State.of(other))
    fold = _manifest(golden.IDS[3], alternate="fold", base=0)
    assert fold.same_weights(last)
    assert fold.base == golden.IDS[0]
    first = _manifest(golden.IDS[0])
    weights = _read_anchor(first)
    _apply(weights, _read_delta(fold, golden), golden)
    _is(weights, golden, State.of(first).after(fold))


def test_the_golden_fold_is_its_deltas_composed(golden):
    composed = {}
    for vid in golden.IDS[1:]:
        for name, later in _read_delta(_manifest(vid), golden).items():
            first = composed.get(name)
            composed[name] = later if first is None else compose(first, later)
    manifest = _manifest(golden.IDS[3], alternate="fold", base=0)
    for name, steps in _read_delta(manifest, golden).items():
        for found, expected in zip(composed.pop(name), steps, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert all(not steps.positions.size for steps in composed.values())


def test_the_golden_control_documents():
    assert RunInfo.parse((_CHAIN / names.RUN).read_bytes()).run == "golden"
    claims = [
        EpochClaim.parse((_CHAIN / names.epoch_name(epoch)).read_bytes())
        for epoch in (1, 2)
    ]
    assert [claim.base for claim in claims] == [None, VersionId(1, 2)]
    pointer = Pointer.parse((_CHAIN / names.POINTER).read_bytes())
    assert (pointer.epoch, pointer.version) == (2, 3)
    assert pointer.closed == 2
    reader = (_CHAIN / names.reader_name("rollout-0")).read_bytes()
    assert ReaderStatus.parse(reader).version == 2


def _tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_encoding_again_gives_the_same_bytes(golden, tmp_path):
    if zstandard.ZSTD_VERSION != (1, 5, 7):
        pytest.skip("another zstd may choose other bytes for the same content")
    golden.make(tmp_path / "chain")
    made, kept = _tree(tmp_path / "chain"), _tree(_CHAIN)
    assert made.keys() == kept.keys()
    for name, data in kept.items():
        assert made[name] == data, name
    with pytest.raises(FileExistsError):
        golden.make(tmp_path / "chain")
