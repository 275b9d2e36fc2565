"""Meshes of eight virtual devices, with automatic and with explicit axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from jdelta.delta import apply, change_words, diff, extract, merge, published, wrap
from jdelta.errors import TreeError

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.fixture(params=AXES)
def mesh(request):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AXES[request.param],) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def pair(mesh, spec):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, (64, 32)).astype(np.uint16)
    new = np.where(rng.random(old.shape) < 0.1, old ^ 1, old)
    sharding = NamedSharding(mesh, spec)
    return tuple(
        {"w": jax.device_put(x.view(jnp.bfloat16), sharding)} for x in (old, new)
    )


def check(old, new):
    delta = jax.jit(diff)(old, new)
    before, after = (np.asarray(x["w"]).view(np.uint16).ravel() for x in (old, new))
    where = np.flatnonzero(before != after)
    positions, was, now = delta.to_host()["w"]
    np.testing.assert_array_equal(positions, where)
    np.testing.assert_array_equal(was, before[where])
    np.testing.assert_array_equal(now, after[where])
    got = np.asarray(jax.jit(apply)(old, delta)["w"]).view(np.uint16).ravel()
    np.testing.assert_array_equal(got, after)
    back = jax.jit(merge)(delta, jax.jit(diff)(new, old))
    assert back.to_host() == {}
    assert jax.jit(change_words)(old, new).shape == (64,)


def test_replicated_arrays(mesh):
    check(*pair(mesh, jax.P()))


def test_sharded_arrays_work_or_are_refused(mesh):
    old, new = pair(mesh, jax.P("x", "y"))
    if AxisType.Auto in mesh.axis_types:
        check(old, new)
        return
    for call in (diff, jax.jit(diff), change_words):
        with pytest.raises(TreeError, match=r"'w' is sharded.*jax\.reshard"):
            call(old, new)
    resharded = [{"w": jax.reshard(x["w"], jax.P())} for x in (old, new)]
    check(*resharded)


def test_snapshot_keeps_the_sharding_of_the_parameters(mesh):
    _, params = pair(mesh, jax.P("x", "y"))
    state = wrap(optax.identity()).init(params)
    bits = state.jdelta_snapshot.bits["bfloat16"]["w"]
    assert bits.sharding.is_equivalent_to(params["w"].sharding, 2)


def test_extract_of_replicated_parameters(mesh):
    old, new = pair(mesh, jax.P())
    state = wrap(optax.identity()).init(old)
    replica = published(state, old)
    delta, state = jax.jit(extract, donate_argnums=0)(state, new)
    got = apply(replica, delta)
    for x in (got, published(state, new)):
        np.testing.assert_array_equal(
            np.asarray(x["w"]).view(np.uint16), np.asarray(new["w"]).view(np.uint16)
        )
