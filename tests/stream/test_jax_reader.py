"""JAX at both ends: device deltas in, sharded arrays out, bit for bit."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
import jdelta.wire
from jdelta.bucket import open_bucket
from jdelta.errors import DeltaOverflowError, StateMismatchError, TreeError
from jdelta.testing import FaultyBucket
from jdelta.wire.anchor import check_storable
from jdelta.wire.bits import to_bits
from jdelta.wire.changes import Changes
from jdelta.wire.dtypes import NAMES, TensorSpec, numpy_dtype

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit

SHAPES = {
    "embed": ((64, 32), jnp.bfloat16),
    "block": {
        "kernel": ((16, 8, 24), jnp.bfloat16),
        "bias": ((24,), jnp.float32),
        "gate": ((), jnp.float32),
        "empty": ((0, 4), jnp.bfloat16),
        "codes": ((40,), jnp.int8),
        "mask": ((16, 2), jnp.bool_),
        "half": ((32,), jnp.float16),
        "f8": ((64,), jnp.float8_e4m3fn),
    },
}


def random_tree(seed):
    """Any bit pattern: NaN payloads, -0.0, subnormals and all."""
    rng = np.random.default_rng(seed)

    def leaf(shape, dtype):
        dtype = np.dtype(dtype)
        if dtype == np.bool_:
            return jnp.asarray(rng.random(shape) < 0.5)
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
        bits = jnp.asarray(raw.view(f"u{dtype.itemsize}").reshape(shape))
        return jax.lax.bitcast_convert_type(bits, dtype)

    return jax.tree.map(
        lambda s: leaf(*s), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


@functools.partial(jax.jit, static_argnums=2)
def mixed(old, new, share):
    """Takes a share of the elements from `new`, on integer bits."""

    def leaf(i, a, b):
        take = jax.random.bernoulli(jax.random.key(i), share, a.shape)
        if a.dtype == jnp.bool_:
            return jnp.where(take, b, a)
        uint = jnp.dtype(f"u{a.dtype.itemsize}")
        bits = [jax.lax.bitcast_convert_type(x, uint) for x in (a, b)]
        return jax.lax.bitcast_convert_type(jnp.where(take, bits[1], bits[0]), a.dtype)

    leaves, treedef = jax.tree.flatten(old)
    pairs = zip(leaves, jax.tree.leaves(new), strict=True)
    return jax.tree.unflatten(
        treedef, [leaf(i, a, b) for i, (a, b) in enumerate(pairs)]
    )


def raw(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def shardings(axis_type):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    specs = {
        3: jax.P("x", "y", None),
        2: jax.P("y", None),
        1: jax.P("x"),
        0: jax.P(),
    }

    def one(shape):
        spec = specs[len(shape)] if shape != (0, 4) else jax.P()
        return jax.sharding.NamedSharding(mesh, spec)

    return one


def like(tree, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=None if sharding is None else sharding(x.shape)
        ),
        tree,
    )


@pytest.fixture
def bucket(tmp_path):
    return str(tmp_path / "run")


@pytest.mark.parametrize("axis_type", [None, AUTO, EXPLICIT], ids=str)
def test_followers_in_any_sharding_hold_the_trainers_bits(bucket, axis_type):
    params = random_tree(0)
    diff = jax.jit(functools.partial(jdelta.diff, capacity=1.0))
    sharding = None if axis_type is None else shardings(axis_type)
    with (
        jdelta.Publisher(bucket, params) as pub,
        jdelta.Subscriber(bucket) as sub,
    ):
        held = sub.restore(like=like(params, sharding))
        assert raw(held) == raw(params)
        updates = sub.updates(timeout=30)
        for step in range(6):
            new = mixed(params, random_tree(step + 1), 0.3 if step else 0.0)
            pub.publish(diff(params, new), step=step, params=new)
            version = pub.flush()
            while sub.version != version:
                before, donate = held, step % 2 == 0
                held = next(updates).apply(held, donate=donate)
                if not donate:
                    assert raw(before) == raw(params)
            params = new
            assert raw(held) == raw(params)
        if sharding is not None:
            for leaf in jax.tree.leaves(held):
                assert leaf.sharding == sharding(leaf.shape)


def test_a_donated_step_can_be_published(bucket):
    """The delta is an output of the step that donates the weights it came from."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, i):
        new = jax.tree.map(lambda w: w.at[i, i].add(1), params)
        return new, jdelta.diff(params, new)

    params = {"w": jnp.zeros((64, 64), jnp.bfloat16)}
    with jdelta.Publisher(bucket, params) as pub:
        for i in range(8):
            params, delta = step(params, i)
            pub.publish(delta, step=i)
        pub.flush()
        weights, manifest = jdelta.load(bucket)
        assert weights["w"].tobytes() == np.asarray(params["w"]).tobytes()
        assert manifest.step == 7


def test_an_overflow_becomes_a_whole_version(bucket):
    params = {"w": jnp.zeros((100, 100), jnp.bfloat16)}
    diff = jax.jit(functools.partial(jdelta.diff, capacity=0.1))
    with jdelta.Publisher(bucket, params) as pub, jdelta.Subscriber(bucket) as sub:
        held = sub.restore(like=params)
        updates = sub.updates(timeout=30)
        new = jax.tree.map(lambda w: w + 1, params)
        pub.publish(diff(params, new), step=1, params=new)
        assert pub.flush() == 1  # flush takes the last params by itself
        update = next(updates)
        assert (update.kind, update.version) == ("anchor", 1)
        held = update.apply(held)
        assert raw(held) == raw(new)
        assert pub.stats().overflowed == 1
        # and deltas go on from there
        newer = jax.tree.map(lambda w: w.at[3].add(2), new)
        pub.publish(diff(new, newer), step=2)
        pub.flush()
        assert raw(next(updates).apply(held)) == raw(newer)


def test_an_overflow_without_params_is_said_and_healed(bucket):
    params = {"w": jnp.zeros((100, 100), jnp.bfloat16)}
    diff = jax.jit(functools.partial(jdelta.diff, capacity=0.1))
    new = jax.tree.map(lambda w: w + 1, params)
    with jdelta.Publisher(bucket, params) as pub:
        pub.publish(diff(params, new), step=1)
        with pytest.raises(DeltaOverflowError, match="params="):
            pub.flush()
        with pytest.raises(DeltaOverflowError, match="10000 of 10000"):
            pub.publish(diff(new, new), step=2)
        assert jdelta.load(bucket)[1].version == 0
        pub.publish(diff(new, new), step=2, params=new)
        pub.flush()
    weights, manifest = jdelta.load(bucket)
    assert (manifest.kind, manifest.step) == ("anchor", 2)
    assert weights["w"].tobytes() == np.asarray(new["w"]).tobytes()


def test_donated_params_are_not_mistaken_for_weights(bucket):
    params = {"w": jnp.zeros((100, 100), jnp.bfloat16)}
    diff = jax.jit(functools.partial(jdelta.diff, capacity=0.1))
    new = jax.tree.map(lambda w: w + 1, params)
    pub = jdelta.Publisher(bucket, params)
    pub.publish(diff(params, new), step=1, params=new)
    new["w"].delete()
    with pytest.raises(DeltaOverflowError, match="donated"):
        pub.close()


def test_the_published_dtype_is_asked_for(bucket):
    master = {"w": jnp.zeros((8, 8), jnp.float32)}
    half = {"w": jnp.zeros((8, 8), jnp.bfloat16)}
    with jdelta.Publisher(bucket, master) as pub:
        with pytest.raises(TreeError, match="published"):
            pub.publish(jdelta.diff(half, half))
        pub.publish(jdelta.diff(master, master), params=master)


def test_weights_of_another_version_are_refused_untouched(bucket):
    params = {"w": jnp.arange(4096, dtype=jnp.float32).astype(jnp.bfloat16)}
    with jdelta.Publisher(bucket, params) as pub, jdelta.Subscriber(bucket) as sub:
        sub.restore()
        new = jax.tree.map(lambda w: w.at[::50].add(1024), params)
        pub.publish(jdelta.diff(params, new))
        pub.flush()
        update = next(sub.updates(timeout=30))
        wrong = {"w": jnp.zeros_like(params["w"])}
        before = raw(wrong)
        with pytest.raises(StateMismatchError):
            update.apply(wrong)
        assert raw(wrong) == before
        assert sub.version == 0
        assert raw(update.apply(params)) == raw(new)


@pytest.mark.parametrize(
    "bad",
    [
        {"v": jax.ShapeDtypeStruct((4,), jnp.bfloat16)},
        {"w": jax.ShapeDtypeStruct((5,), jnp.bfloat16)},
        {"w": jax.ShapeDtypeStruct((4,), jnp.float32)},
    ],
)
def test_restore_like_another_tree_is_refused(bucket, bad):
    with jdelta.Publisher(bucket, {"w": jnp.zeros(4, jnp.bfloat16)}) as pub:
        pub.flush()
        with pytest.raises(TreeError):
            jdelta.Subscriber(bucket).restore(like=bad)


@pytest.mark.parametrize("kind", ["another tree", "64-bit types off"])
def test_a_wrong_tree_is_refused_before_weights_are_fetched(bucket, kind):
    weights = {"w": np.zeros(4, np.float64 if kind != "another tree" else np.float32)}
    with jdelta.Publisher(bucket, weights) as pub:
        pub.flush()
    watched = FaultyBucket(open_bucket(bucket), count_reads=True)
    like = {"w": jax.ShapeDtypeStruct((4,), np.float64)}
    with pytest.raises(TreeError, match="'w'"):
        jdelta.Subscriber(watched).restore(like=like)
    names = [operation.name for operation in watched.operations]
    assert names and not [name for name in names if name.startswith("anchors/")]


@pytest.fixture
def set_x64():
    before = jax.config.jax_enable_x64
    yield lambda on: jax.config.update("jax_enable_x64", on)
    jax.config.update("jax_enable_x64", before)


def documented():
    text = (Path(jdelta.wire.__file__).parent / "FORMAT.md").read_text()
    return re.findall(r"^\| `(\w+)` \| (\d) \| (.*?) \| (.*?) \|$", text, re.M)


def test_the_documented_dtypes_are_all_that_can_be_published():
    rows = documented()
    assert sorted(name for name, *_ in rows) == sorted(NAMES)
    assert all(int(size) == numpy_dtype(name).itemsize for name, size, *_ in rows)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("row", documented(), ids=lambda row: row[0])
def test_each_dtype_is_taken_by_whom_the_format_says(row, x64, bucket, set_x64):
    """What JAX cannot hold bit for bit is refused by name; NumPy takes all."""
    name, size, in_jax, _ = row
    dtype = numpy_dtype(name)
    try:
        check_storable([TensorSpec("w", name, (1,))])
    except TreeError as error:
        with pytest.raises(TreeError, match="'w'"):  # before anything is claimed
            jdelta.Publisher(bucket, {"w": np.zeros(1, dtype)})
        assert jdelta.Subscriber(bucket).latest() is None
        pytest.skip(str(error))
    bits = np.arange(48, dtype=np.uint8) % (2 if name == "BOOL" else 251)
    old = bits.view(dtype)
    new = np.roll(old, 1)
    can = in_jax == "yes" or (in_jax == "with `jax_enable_x64`" and x64)
    set_x64(x64)
    # No anchor of such deltas, which are larger than these weights.
    with jdelta.Publisher(bucket, {"w": old}, anchor_share=1e9) as pub:
        pub.flush()
        with jdelta.Subscriber(bucket) as sub:
            held = sub.restore()
            assert raw(held) == raw({"w": old})
            like = {"w": jax.ShapeDtypeStruct(old.shape, dtype)}
            if not can:
                with pytest.raises(TreeError, match="'w'"):
                    sub.restore(like=like)
                with pytest.raises(TreeError, match="'w'"):
                    jdelta.diff({"w": old}, {"w": new})
                change = Changes.between(to_bits(old), to_bits(new))
                pub.publish({"w": change})
            else:
                held = sub.restore(like=like)
                assert held["w"].dtype == dtype and raw(held) == raw({"w": old})
                pub.publish(jdelta.diff(held, {"w": jnp.asarray(new)}))
            pub.flush()
            update = next(sub.updates(timeout=30))
            assert update.kind == "delta"
            assert raw(update.apply(held)) == raw({"w": new})
