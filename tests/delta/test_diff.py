"""`diff`, `change_words` and `to_host` against numpy, in bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdelta.delta import Delta, apply, change_words, diff, merge
from jdelta.delta._layout import Limits
from jdelta.errors import DeltaOverflowError

# Forces many groups, batches and loops, pieces of leaves and ragged blocks.
TINY = Limits(
    small=64, block=256, batch=3, piece=300, group=1000, sweep=6, slots=64, slot_floor=1
)
LIMITS = [Limits(), TINY]
DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "float8_e4m3fn",
    "float8_e5m2",
]
SHAPES = [(), (1,), (3,), (31,), (33,), (0,), (2, 0, 3), (1025,), (7, 11, 13), (600,)]


def bits(x) -> np.ndarray:
    x = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return x.view(f"u{x.itemsize}")


def random_array(rng, shape, dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = int(np.prod(shape))
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    raw = rng.integers(0, 256, size * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def changed(rng, x: np.ndarray, density: float) -> np.ndarray:
    u = bits(x).copy()
    hit = rng.random(u.size) < density
    flip = 1 if x.dtype == np.bool_ else rng.integers(1, 256, u.size).astype(u.dtype)
    u = np.where(hit, u ^ flip, u).astype(u.dtype)
    return u.view(x.dtype).reshape(x.shape)


def assert_delta(delta: Delta, old: dict, new: dict) -> None:
    host = delta.to_host()
    for name in old:
        want = np.flatnonzero(bits(old[name]) != bits(new[name]))
        if not want.size:
            assert name not in host
            continue
        positions, before, after = host[name]
        assert positions.dtype == np.uint32
        np.testing.assert_array_equal(positions, want)
        np.testing.assert_array_equal(before, bits(old[name])[want])
        np.testing.assert_array_equal(after, bits(new[name])[want])
    assert set(host) <= set(old)


def assert_same(got: dict, want: dict) -> None:
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert got[name].shape == want[name].shape
        np.testing.assert_array_equal(bits(got[name]), bits(want[name]), name)


def to_jax(tree: dict) -> dict:
    return jax.tree.map(jnp.asarray, tree)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 40), max_size=3).filter(
                lambda s: int(np.prod(s)) < 3000
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from(LIMITS),
    st.integers(0, 2**32),
)
def test_any_tree_any_density(leaves, density, limits, seed):
    rng = np.random.default_rng(seed)
    a = {
        f"leaf{i}": random_array(rng, tuple(shape), dtype)
        for i, (dtype, shape) in enumerate(leaves)
    }
    b = {k: changed(rng, v, density) for k, v in a.items()}
    delta = diff(to_jax(a), to_jax(b), capacity=1.0, _limits=limits)
    assert_delta(delta, a, b)
    assert_same(apply(to_jax(a), delta, _limits=limits), b)


@pytest.mark.parametrize("limits", LIMITS, ids=["default", "tiny"])
@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_every_dtype_and_shape(limits, density):
    rng = np.random.default_rng(7)
    shapes = SHAPES if limits is LIMITS[0] else SHAPES[-3:]
    a = {
        f"{dtype}{i}": random_array(rng, shape, dtype)
        for i, shape in enumerate(shapes)
        for dtype in DTYPES
    }
    b = {k: changed(rng, v, density) for k, v in a.items()}
    delta = diff(to_jax(a), to_jax(b), capacity=1.0, _limits=limits)
    assert_delta(delta, a, b)
    assert_same(apply(to_jax(a), delta, _limits=limits), b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16"])
def test_all_65536_patterns(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    find, write = jax.jit(lambda a, b: diff(a, b, capacity=1.0)), jax.jit(apply)
    for other in (np.roll(every, 1), every[::-1].copy(), np.roll(every, 2**15)):
        a, b = {"w": every}, {"w": other}
        delta = find(to_jax(a), to_jax(b))
        assert_delta(delta, a, b)
        assert_same(write(to_jax(a), delta), b)
    assert not find(to_jax(a), to_jax(a)).to_host()


def test_special_values_are_told_apart():
    """Zeros of both signs, subnormals and NaN payloads: equal or odd as floats."""
    patterns = np.array(
        [0, 0x80000000, 1, 0x7F800001, 0x7FC00000, 0xFFC00001, 0x00400000], np.uint32
    ).view(np.float32)
    pairs = [(x, y) for x in patterns for y in patterns]
    a, b = ({"w": np.array(side, np.float32)} for side in zip(*pairs, strict=True))
    assert_delta(diff(to_jax(a), to_jax(b), capacity=1.0), a, b)


def test_64_bit_elements():
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        a = {d: random_array(rng, (700,), d) for d in ("float64", "int64", "uint64")}
        b = {k: changed(rng, v, 0.1) for k, v in a.items()}
        delta = diff(to_jax(a), to_jax(b), _limits=TINY, capacity=1.0)
        assert_delta(delta, a, b)
        assert_same(apply(to_jax(a), delta, _limits=TINY), b)


@pytest.mark.parametrize("limits", LIMITS, ids=["default", "tiny"])
@pytest.mark.parametrize("capacity", [1e-9, 0.01, 0.05, 0.2, 1.0])
def test_overflow_counts_exactly_and_keeps_a_right_prefix(limits, capacity):
    limits = limits._replace(slot_floor=1, group=2**31)
    rng = np.random.default_rng(5)
    a = {"w": random_array(rng, (5000,), "uint16")}
    b = {"w": changed(rng, a["w"], 0.1)}
    want = np.flatnonzero(a["w"] != b["w"])
    delta = diff(to_jax(a), to_jax(b), capacity=capacity, _limits=limits)
    (group,) = delta.groups
    assert int(group.count) == want.size
    assert group.slots == max(1, int(np.ceil(5000 * capacity)))
    assert bool(delta.overflowed) == (want.size > group.slots)
    kept = min(want.size, group.slots)
    pages = [
        np.asarray(page)[: page.size - group.positions.slack]
        for page in group.positions.pages
    ]
    np.testing.assert_array_equal(np.concatenate(pages)[:kept], want[:kept])
    if want.size > group.slots:
        with pytest.raises(DeltaOverflowError) as caught:
            delta.to_host()
        for part in (str(want.size), str(group.slots), "params=", "capacity", "%"):
            assert part in str(caught.value)
        with pytest.raises(DeltaOverflowError):
            apply(to_jax(a), delta)
        both = merge(delta, diff(to_jax(b), to_jax(b), _limits=limits), _limits=limits)
        assert bool(both.overflowed)
    else:
        assert_delta(delta, a, b)


def test_full_capacity_cannot_overflow():
    a = {"w": np.zeros(5000, np.uint8)}
    b = {"w": np.ones(5000, np.uint8)}
    delta = diff(to_jax(a), to_jax(b), capacity=1.0)
    assert not bool(delta.overflowed)
    assert_delta(delta, a, b)


def test_one_overflowed_group_marks_the_delta():
    rng = np.random.default_rng(5)
    a = {"w": np.zeros(5000, np.uint8), "v": random_array(rng, (9,), "float32")}
    b = {"w": np.ones(5000, np.uint8), "v": a["v"]}
    delta = diff(to_jax(a), to_jax(b), capacity=0.3)
    assert bool(delta.overflowed)
    assert [int(g.count) for g in delta.groups] == [5000, 0]


def test_host_arrays_own_their_memory():
    a, b = {"w": np.zeros(5000, np.uint16)}, {"w": np.ones(5000, np.uint16)}
    delta = diff(to_jax(a), to_jax(b), capacity=1.0)
    host = delta.to_host()
    pages = [
        np.asarray(page)
        for group in delta.groups
        for buffer in (group.positions, group.old, group.new)
        for page in buffer.pages
    ]
    for array in host["w"]:
        assert array.flags.writeable
        assert not any(np.shares_memory(array, page) for page in pages)


def test_delta_can_be_donated_after_to_host():
    a, b = {"w": jnp.zeros(5000)}, {"w": jnp.ones(5000)}
    delta = diff(a, b, capacity=1.0)
    host = delta.to_host()
    bump = jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d), donate_argnums=0)
    jax.block_until_ready(bump(delta))
    assert delta.groups[0].count.is_deleted()
    np.testing.assert_array_equal(host["w"][0], np.arange(5000))


def test_start_copy_then_to_host():
    a, b = {"w": jnp.zeros(50)}, {"w": jnp.ones(50)}
    delta = diff(a, b)
    delta.start_copy()
    assert delta.to_host()["w"][0].size == 50


def test_to_host_compiles_nothing():
    a, b = {"w": jnp.zeros(50), "v": jnp.zeros(9, jnp.int8)}, {}
    b = {"w": a["w"] + 1, "v": a["v"] + 1}
    delta = jax.block_until_ready(diff(a, b))
    with jax.log_compiles(), jax.transfer_guard_host_to_device("disallow"):
        jax.clear_caches()
        assert set(delta.to_host()) == {"w", "v"}
        events = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: events.append(name)
        )
        try:
            delta.to_host()
        finally:
            jax.monitoring.clear_event_listeners()
    assert not [e for e in events if "compile" in e]


def test_empty_tree_and_empty_leaves():
    assert diff({}, {}).to_host() == {}
    assert not bool(diff({}, {}).overflowed)
    empty = {"w": jnp.zeros((3, 0))}
    delta = diff(empty, empty)
    assert delta.to_host() == {}
    assert apply(empty, delta)["w"].shape == (3, 0)


def test_numpy_leaves():
    a, b = {"w": np.zeros(5, np.float32)}, {"w": np.ones(5, np.float32)}
    assert_delta(diff(a, b), a, b)
    assert_same(apply(a, diff(a, b)), b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 1023, 1024, 1025, 4096])
def test_change_words_are_packed_bits(dtype, size):
    rng = np.random.default_rng(size)
    a = random_array(rng, (size,), dtype)
    b = changed(rng, a, 0.2)
    words = np.asarray(change_words(jnp.asarray(a), jnp.asarray(b)))
    packed = np.packbits(bits(a) != bits(b), bitorder="little")
    assert words.dtype == np.uint32
    assert words.size == -(-size // 32)
    np.testing.assert_array_equal(words.view(np.uint8)[: packed.size], packed)
    assert not words.view(np.uint8)[packed.size :].any()


def test_change_words_of_a_tree():
    a = {"a": jnp.zeros(33), "b": jnp.zeros(4, jnp.int8)}
    b = {"a": a["a"].at[32].set(-0.0), "b": a["b"].at[1].set(3)}
    np.testing.assert_array_equal(np.asarray(change_words(a, b)), [0, 1, 2])


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_capacity_out_of_range(capacity):
    with pytest.raises(ValueError, match="capacity"):
        diff({"w": jnp.zeros(3)}, {"w": jnp.zeros(3)}, capacity=capacity)


def test_ml_dtypes_names_in_the_spec():
    x = {"w": jnp.zeros((2, 3), ml_dtypes.bfloat16)}
    (spec,) = diff(x, x).spec
    assert spec == ("w", (2, 3), "bfloat16")
