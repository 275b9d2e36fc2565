"""An anchor is a checkpoint to other projects: opened by their own readers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from jdelta.wire import anchor, dtypes
from jdelta.wire.dtypes import TensorSpec

pytestmark = pytest.mark.interop

_SPECS = (
    TensorSpec("layers.0.kernel", "BF16", (16, 16)),
    TensorSpec("layers.0.bias", "F32", (16,)),
    TensorSpec("layers.0.f16", "F16", (4, 2)),
    TensorSpec("layers.0.f8", "F8_E4M3", (8,)),
    TensorSpec("steps", "I64", ()),
    TensorSpec("mask", "BOOL", (3,)),
)


def _bits(spec):
    size = spec.size
    if spec.name == "mask":
        return np.array([1, 0, 1], np.uint8)
    rng = np.random.default_rng(len(spec.name))
    return rng.integers(0, 256, size * spec.itemsize, np.uint8).view(
        dtypes.bits_dtype(spec.dtype)
    )


@pytest.fixture
def folder(tmp_path):
    anchor.write_anchor(
        ((spec, _bits(spec)) for spec in _SPECS), tmp_path, shard_bytes=600
    )
    return tmp_path


def test_torch_opens_it_bit_for_bit(folder):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    index = json.loads((folder / anchor.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    weights = {}
    for name in files:
        weights.update(load_file(folder / name))
    assert weights.keys() == index["weight_map"].keys()
    assert weights["layers.0.kernel"].dtype == torch.bfloat16
    assert weights["layers.0.f8"].dtype == torch.float8_e4m3fn
    for spec in _SPECS:
        tensor = weights[spec.name]
        assert tuple(tensor.shape) == spec.shape
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(raw, _bits(spec).view(np.uint8))


_ORBAX = """
import sys
import numpy as np
from orbax.checkpoint import v1 as ocp
context = ocp.Context(
    checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS
)
with context:
    tree = ocp.load(sys.argv[1])
np.savez(sys.argv[2], **{
    name: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    for name, leaf in tree.items()
})
"""


def test_orbax_opens_it_bit_for_bit(folder, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    out = tmp_path / "out.npz"
    # In a process of its own: Orbax imports JAX.
    done = subprocess.run(
        [sys.executable, "-c", _ORBAX, str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as found:
        assert set(found.files) == {spec.name for spec in _SPECS}
        for spec in _SPECS:
            np.testing.assert_array_equal(found[spec.name], _bits(spec).view(np.uint8))
