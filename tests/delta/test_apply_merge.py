"""`apply` under jit and donation, and the algebra of `merge`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta.delta import apply, diff, merge
from jdelta.delta._layout import Limits

TINY = Limits(
    small=64, block=256, batch=3, piece=300, group=1000, sweep=6, slots=64, slot_floor=1
)


def bits(x) -> np.ndarray:
    x = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return x.view(f"u{x.itemsize}")


def trees(seed: int, count: int, densities=(0.05, 0.3), values=4) -> list[dict]:
    """Trees of few values, so that elements often come back to where they were."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (20, 30), "b": (), "c": (33,), "d": (2, 3, 7), "e": (1000,)}
    dtypes = {"a": "u2", "b": "u4", "c": "u4", "d": "u1", "e": "u2"}
    tree = {k: rng.integers(0, values, s).astype(dtypes[k]) for k, s in shapes.items()}
    out = [tree]
    for _ in range(count - 1):
        p = rng.choice(densities)
        tree = {
            k: np.where(
                rng.random(v.shape) < p, rng.integers(0, values, v.shape), v
            ).astype(v.dtype)
            for k, v in tree.items()
        }
        out.append(tree)
    floats = {"u1": "float8_e5m2", "u2": "bfloat16", "u4": "float32"}
    return [
        {k: jnp.asarray(v.view(floats[dtypes[k]])) for k, v in t.items()} for t in out
    ]


def assert_same(got, want) -> None:
    for k in want:
        np.testing.assert_array_equal(bits(got[k]), bits(want[k]), k)


def assert_same_host(got, want) -> None:
    got, want = got.to_host(), want.to_host()
    assert got.keys() == want.keys()
    for k in want:
        for mine, theirs in zip(got[k], want[k], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([Limits(), TINY]))
def test_merge_is_diff_of_the_ends(seed, limits):
    a, b, c = trees(seed, 3)
    full = partial(diff, capacity=1.0, _limits=limits)
    both = merge(full(a, b), full(b, c), _limits=limits)
    assert_same_host(both, full(a, c))
    assert_same(apply(a, both, _limits=limits), c)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_merge_is_associative(seed):
    a, b, c, d = trees(seed, 4)
    one, two, three = diff(a, b), diff(b, c), diff(c, d)
    assert_same_host(merge(merge(one, two), three), merge(one, merge(two, three)))


def test_merge_with_the_way_back_is_empty():
    a, b = trees(1, 2)
    assert merge(diff(a, b), diff(b, a)).to_host() == {}


def test_merge_with_nothing():
    a, b = trees(2, 2)
    assert_same_host(merge(diff(a, b), diff(b, b)), diff(a, b))
    assert_same_host(merge(diff(a, a), diff(a, b)), diff(a, b))


def test_merge_capacity():
    x = [{"w": jnp.zeros(4000, jnp.int8).at[i * 1000].set(1)} for i in range(2)]
    y = {"w": jnp.ones(4000, jnp.int8)}
    small = diff(x[0], x[1], capacity=0.25)
    large = diff(x[1], y, capacity=1.0)
    assert merge(small, large).groups[0].slots == 4000
    assert merge(large, small).groups[0].slots == 4000
    cut = merge(small, large, capacity=0.5)
    assert cut.groups[0].slots == 2000
    assert int(cut.groups[0].count) == 3999
    assert bool(cut.overflowed)
    with pytest.raises(ValueError, match="capacity"):
        merge(small, large, capacity=2.0)


def test_overflow_of_a_part_marks_the_whole():
    a = {"w": jnp.zeros(4000, jnp.int8)}
    b = {"w": jnp.ones(4000, jnp.int8)}
    over = diff(a, b, capacity=0.5)
    none = diff(b, b, capacity=0.5)
    assert bool(merge(over, none).overflowed)
    assert bool(merge(none, over).overflowed)


def test_donated_chain_in_one_jit():
    """Trainer and replica both donated, ten steps; nothing is left behind."""
    steps = trees(9, 11)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(trainer, replica, target):
        delta = diff(trainer, target, capacity=1.0)
        new = jax.tree.map(jnp.copy, target)
        return new, apply(replica, delta), delta

    trainer = jax.tree.map(jnp.copy, steps[0])
    replica = jax.tree.map(jnp.copy, steps[0])
    for target in steps[1:]:
        before = trainer, replica
        trainer, replica, delta = step(trainer, replica, target)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert_same(replica, target)
        assert not bool(delta.overflowed)


def test_apply_donates_large_leaves_in_place():
    n = 2**20
    old = {"w": jnp.zeros(n, jnp.uint16)}
    new = {"w": old["w"].at[::100].set(1)}
    delta = diff(old, new)
    donating = jax.jit(apply, donate_argnums=0)
    memory = donating.lower(old, delta).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * n
    assert memory.temp_size_in_bytes < 2 * n // 4
    place = old["w"].unsafe_buffer_pointer()
    out = donating(old, delta)
    assert out["w"].unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(np.asarray(out["w"]), np.asarray(new["w"]))


def test_a_delta_passes_through_scan():
    a, b = trees(3, 2)
    delta = diff(a, b, capacity=1.0)

    def body(params, _):
        return apply(params, delta), diff(params, b, capacity=1.0)

    params, deltas = jax.lax.scan(body, a, length=2)
    assert_same(params, b)
    counts = np.array([np.asarray(g.count) for g in deltas.groups])
    assert counts[:, 0].sum() > 0
    assert counts[:, 1].sum() == 0


def test_apply_keeps_the_structure():
    a = {"x": [jnp.zeros(3)], "y": (jnp.ones(2),)}
    b = jax.tree.map(lambda x: x + 1, a)
    out = apply(a, diff(a, b))
    assert jax.tree.structure(out) == jax.tree.structure(a)
    np.testing.assert_array_equal(out["x"][0], [1, 1, 1])


def test_results_share_no_buffer_with_arguments():
    a = {"w": jnp.zeros(4, jnp.uint8), "e": jnp.zeros((0,), jnp.uint8)}
    out = apply(a, diff(a, a))
    both = jax.jit(lambda x, y: (x, y), donate_argnums=(0, 1))
    jax.block_until_ready(both(a, out))
