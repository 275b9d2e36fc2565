"""Memory and compile time, as the compiler reports them."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdelta.delta import apply, change_words, diff, extract, wrap


def abstract(leaves: int, shape=(1024, 2048), dtype=jnp.bfloat16):
    return {f"w{i}": jax.ShapeDtypeStruct(shape, dtype) for i in range(leaves)}


def size(tree) -> int:
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))


def memory(function, *args, **kwargs):
    jitted = jax.jit(function, **kwargs)
    return jitted.lower(*args).compile().memory_analysis()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
@pytest.mark.parametrize("leaves", [1, 2, 8])
def test_diff_needs_little_more_than_its_buffers(leaves, dtype):
    tree = abstract(leaves, (2**27 // leaves // 2048, 2048), dtype)
    report = memory(diff, tree, tree)
    # The bar is 2 bytes a parameter beside the words and the buffers.
    assert report.temp_size_in_bytes < size(tree) // 8
    buffers = size(tree) * 0.1 * (4 + 2 * dtype.dtype.itemsize)
    assert report.output_size_in_bytes < 1.05 * buffers + 2**20


def test_diff_of_many_small_leaves_copies_a_batch_at_a_time():
    tree = abstract(160, (256, 512))  # 20 Mi elements, none large
    assert memory(diff, tree, tree).temp_size_in_bytes < size(tree) * 2


def test_words_need_an_eighth_of_a_byte():
    tree = abstract(8)
    report = memory(change_words, tree, tree)
    assert report.output_size_in_bytes == size(tree) // 8
    assert report.temp_size_in_bytes <= size(tree) // 4


def test_apply_in_place():
    tree = abstract(4)
    delta = jax.eval_shape(diff, tree, tree)
    report = memory(apply, tree, delta, donate_argnums=0)
    assert report.alias_size_in_bytes == 2 * size(tree)
    assert report.temp_size_in_bytes <= 2 * size(tree)


def test_extract_needs_two_bytes_a_parameter():
    tree = abstract(8, dtype=jnp.float32)
    state = jax.eval_shape(wrap(optax.identity()).init, tree)
    assert (
        sum(
            x.nbytes if hasattr(x, "nbytes") else x.size * x.dtype.itemsize
            for x in jax.tree.leaves(state)
        )
        == 2 * size(tree) + 8
    )  # and the mark
    report = memory(extract, state, tree, donate_argnums=0)
    assert report.alias_size_in_bytes >= 2 * size(tree)
    # XLA:CPU keeps a copy of the old bits while a loop reads them and they are donated.
    delta, _ = jax.eval_shape(extract, state, tree)
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(delta))
    assert report.temp_size_in_bytes <= 2 * size(tree) + own + size(tree) // 4


def compiling(leaves, shape):
    tree = abstract(leaves, shape)
    lowered = jax.jit(diff).lower(tree, tree)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(512, 1024), (64, 64)], ids=["large", "small"])
def test_compiling_takes_time_in_proportion_to_the_leaves(shape):
    few, many = compiling(250, shape), compiling(1000, shape)
    assert many < 8 * few + 1  # in its square it would be 16


@pytest.mark.slow
def test_seventy_billion_parameters():
    layer = {"q": (8192, 8192), "kv": (8192, 2048), "o": (8192, 8192), "norm": (8192,)}
    layer |= {"gate_up": (8192, 57344), "down": (28672, 8192)}
    shapes = {f"{i}.{name}": shape for i in range(80) for name, shape in layer.items()}
    shapes |= {"embed": (128256, 8192), "head": (8192, 128256)}
    tree = {k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in shapes.items()}
    assert size(tree) > 70e9
    report = memory(diff, tree, tree)
    assert report.temp_size_in_bytes < size(tree) // 32
