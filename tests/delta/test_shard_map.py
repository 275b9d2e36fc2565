"""Inside `jax.shard_map` with its checks on: each device works on its own shard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jdelta.delta import apply, change_words, diff, merge

P = jax.P


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_diff_apply_and_merge_per_shard(axis):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis, axis))
    rng = np.random.default_rng(0)
    # A large leaf, small ones, one sharded over another axis and one over none.
    shapes = {"a": (64, 2**14), "b": (64, 32), "c": (8, 6), "d": (5,), "e": (0, 8)}
    specs = {"a": P("x", "y"), "b": P("x"), "c": P("y"), "d": P(), "e": P()}

    def step(tree):
        out = {}
        for name, x in tree.items():
            hit = rng.random(x.shape) < 0.03
            out[name] = np.where(hit, x ^ 5, x).astype(np.uint16)
        return out

    one = {n: rng.integers(0, 2**16, s).astype(np.uint16) for n, s in shapes.items()}
    two = step(one)
    three = step(two)

    def put(tree):
        return {
            n: jax.device_put(
                x.view(jnp.bfloat16), jax.sharding.NamedSharding(mesh, specs[n])
            )
            for n, x in tree.items()
        }

    def work(one, two, three):
        first, second = diff(one, two), diff(two, three)
        words = change_words(one, two)
        both = merge(first, second)
        stepped = apply(apply(one, first), second)
        count = sum(group.count for group in both.groups)
        return stepped, apply(one, both), count[None], words

    every = P(("x", "y"))
    # What a loop made of sharded and replicated leaves varies over both axes.
    outs = {name: every if name != "a" else P("x", "y") for name in specs}
    run = jax.shard_map(
        lambda *trees: _stack(work(*trees), outs),
        mesh=mesh,
        in_specs=(specs, specs, specs),
        out_specs=(outs, outs, every, every),
    )
    with jax.set_mesh(mesh):
        stepped, merged, counts, _ = jax.jit(run)(put(one), put(two), put(three))
    for got in (stepped, merged):
        np.testing.assert_array_equal(np.asarray(got["a"]).view(np.uint16), three["a"])
        for name in ("b", "c", "d"):
            shards = np.asarray(got[name]).view(np.uint16)
            for i, shard in enumerate(shards):
                at = {"b": i // 2, "c": i % 2, "d": 0}[name]
                size = shard.shape[0]
                want = three[name][at * size : (at + 1) * size]
                np.testing.assert_array_equal(shard, want)
    assert counts.shape == (8,) and (np.asarray(counts) > 0).all()


def _stack(results, outs):
    stepped, merged, count, words = results

    def lift(tree):
        return {n: x if outs[n] == P("x", "y") else x[None] for n, x in tree.items()}

    return lift(stepped), lift(merged), count, words
