"""Dtypes and bits: what can be published, and steps in the order of the values."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdelta.errors import TreeError
from jdelta.wire import bits, dtypes


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_names_and_numpy_dtypes_are_a_bijection(name):
    dtype = dtypes.numpy_dtype(name)
    assert dtypes.dtype_name(dtype) == name
    assert dtypes.dtype_name(dtype.name) == name
    assert dtypes.bits_dtype(name).itemsize == dtype.itemsize
    assert dtypes.bits_dtype(name).kind == "u"


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.int4,
        ml_dtypes.float8_e4m3,
        ml_dtypes.float4_e2m1fn,
        np.complex128,
        np.object_,
        np.dtype("U3"),
        np.dtype(">f4"),
        np.dtype([("a", "f4")]),
        "bfloat17",
    ],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(dtype):
    with pytest.raises(TreeError, match="cannot be stored in safetensors"):
        dtypes.dtype_name(dtype)


def test_tensor_spec_names_the_leaf_it_refuses():
    with pytest.raises(TreeError, match="'layers.0.w'.*int4"):
        dtypes.tensor_spec("layers.0.w", np.zeros(3, ml_dtypes.int4))
    with pytest.raises(TreeError, match="no dtype 'F4'"):
        dtypes.numpy_dtype("F4")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (7,), (2, 3, 4)])
def test_tensor_spec_counts(shape):
    array = np.zeros(shape, ml_dtypes.bfloat16)
    spec = dtypes.tensor_spec("w", array)
    assert spec == ("w", "BF16", shape)
    assert (spec.size, spec.itemsize, spec.nbytes) == (array.size, 2, array.nbytes)


def test_a_tensor_past_64_bits_of_bytes_is_counted_exactly():
    spec = dtypes.TensorSpec("w", "F64", (1 << 40, 1 << 40))
    assert spec.nbytes == 1 << 83


def test_to_bits_shares_contiguous_memory_and_copies_the_rest():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    flat = bits.to_bits(array)
    flat[0] = 7
    assert array.view(np.uint32)[0, 0] == 7
    expected = [array[i, j].view(np.uint32) for j in range(4) for i in range(3)]
    assert bits.to_bits(array.T).tolist() == expected
    assert bits.to_bits(np.float32(1.5)[...]).tolist() == [0x3FC00000]
    assert bits.to_bits(np.zeros((2, 0), np.uint8)).shape == (0,)


@pytest.mark.parametrize("name", [n for n in dtypes.NAMES if dtypes.is_float(n)])
def test_order_sorts_as_the_values_do(name):
    dtype = dtypes.numpy_dtype(name)
    width = dtype.itemsize * 8
    if width <= 16:
        every = np.arange(1 << width, dtype=np.uint64).astype(f"u{dtype.itemsize}")
    else:
        rng = np.random.default_rng(1)
        every = rng.integers(0, 1 << min(width, 63), 20_000, np.uint64)
        every = (every * 2 + 1).astype(f"u{dtype.itemsize}")
    ordered = bits.order(every, name)
    np.testing.assert_array_equal(bits.order(ordered, name), every)
    with np.errstate(invalid="ignore"):
        values = every.view(dtype).astype(np.float64)
    finite = ~np.isnan(values)
    ranks = np.argsort(ordered.view(f"i{dtype.itemsize}")[finite], kind="stable")
    assert (
        np.diff(values[finite][ranks][np.isfinite(values[finite][ranks])]) >= 0
    ).all()


def test_the_zeros_are_one_step_apart():
    plus, minus = np.array([0x0000], np.uint16), np.array([0x8000], np.uint16)
    assert bits.step(plus, minus, "BF16").view(np.int16).tolist() == [-1]
    assert bits.step(minus, plus, "BF16").tolist() == [1]


@pytest.mark.parametrize("name", dtypes.NAMES)
@given(data=st.data())
def test_advance_is_the_inverse_of_step(name, data):
    dtype = dtypes.bits_dtype(name)
    element = st.integers(0, (1 << dtype.itemsize * 8) - 1)
    pairs = data.draw(st.lists(st.tuples(element, element), max_size=8))
    old = np.array([a for a, _ in pairs], dtype)
    new = np.array([b for _, b in pairs], dtype)
    steps = bits.step(old, new, name)
    assert steps.dtype == dtype
    np.testing.assert_array_equal(bits.advance(old, steps, name), new)
    np.testing.assert_array_equal(steps == 0, old == new)


def test_nothing_in_wire_imports_jax_or_torch():
    code = (
        "import pkgutil, importlib, sys, jdelta.wire as w\n"
        "for m in pkgutil.iter_modules(w.__path__):\n"
        "    importlib.import_module('jdelta.wire.' + m.name)\n"
        "bad = {'jax', 'jaxlib', 'torch', 'flax', 'optax'} & set(sys.modules)\n"
        "sys.exit(' '.join(bad) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
