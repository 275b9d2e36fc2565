"""A replica fed only by `extract` holds the trainer's published bits, always."""

from __future__ import annotations

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdelta.delta import apply, diff, extract, leaf_names, merge, published, wrap
from jdelta.delta._delta import NO_MARK
from jdelta.delta._wrap import Snapshot
from jdelta.errors import TreeError

nnx = pytest.importorskip("flax.nnx")


def bits(x) -> np.ndarray:
    x = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return x.view(f"u{x.itemsize}")


def assert_same(got, want) -> None:
    assert leaf_names(got) == leaf_names(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def to_bf16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def make_params(dtype=jnp.float32):
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (8, 5)).astype(dtype),
        "b": jnp.full((5,), 0.5, dtype),
        "s": jnp.ones((), dtype),
    }


def make_grads(params, i):
    keys = jax.random.split(jax.random.key(i), len(params))
    return {
        k: jax.random.normal(key, x.shape).astype(x.dtype)
        for (k, x), key in zip(params.items(), keys, strict=True)
    }


def run(
    tx,
    params,
    publish=to_bf16,
    steps=6,
    every=1,
    edit=None,
    grads=make_grads,
    select=lambda params: params,
):
    state = tx.init(params)
    replica = published(state, select(params))
    assert_same(replica, publish(params))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    @partial(jax.jit, donate_argnums=(0,))
    def sync(state, params):
        return extract(state, select(params), capacity=1.0)

    params = jax.tree.map(jnp.copy, params)
    sizes = []
    for i in range(steps):
        params, state = step(params, state, grads(params, i))
        if edit is not None:
            params = edit(params, i)
        if i % every:
            continue
        delta, state = sync(state, params)
        replica = apply(replica, delta)
        assert_same(replica, publish(params))
        assert_same(published(state, select(params)), publish(params))
        sizes.append(sum(int(g.count) for g in delta.groups))
    assert any(sizes)
    return sizes


NESTS = {
    "outermost": lambda: wrap(optax.adamw(1e-2)),
    "in chain, first": lambda: optax.chain(wrap(optax.adam(1e-1)), optax.scale(0.1)),
    "in chain, last": lambda: optax.chain(optax.clip(1.0), wrap(optax.sgd(1e-2))),
    "in named_chain": lambda: optax.named_chain(("a", wrap(optax.sgd(1e-2)))),
    "around MultiSteps": lambda: wrap(optax.MultiSteps(optax.adam(1e-2), 3)),
    "in MultiSteps": lambda: optax.MultiSteps(wrap(optax.adam(1e-2)), 3),
    "around apply_if_finite": lambda: wrap(optax.apply_if_finite(optax.sgd(1e-2), 5)),
    "in apply_if_finite": lambda: optax.apply_if_finite(wrap(optax.sgd(1e-2)), 5),
    "in inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: wrap(optax.adam(learning_rate))
    )(learning_rate=optax.linear_schedule(1e-2, 1e-3, 5)),
    "around masked": lambda: wrap(
        optax.masked(optax.adam(1e-2), {"w": True, "b": False, "s": True})
    ),
    "around partition": lambda: wrap(
        optax.partition(
            {"x": optax.adam(1e-2), "y": optax.sgd(1e-2)},
            {"w": "x", "b": "y", "s": "x"},
        )
    ),
    "in an all-true mask": lambda: optax.masked(wrap(optax.adam(1e-2)), True),
}


@pytest.mark.parametrize("nest", NESTS)
def test_nested_anywhere(nest):
    run(NESTS[nest](), make_params())


@pytest.mark.parametrize("where", ["in", "around"])
def test_a_skipped_step_is_an_empty_delta(where):
    def grads(params, i):
        g = make_grads(params, i)
        return jax.tree.map(lambda x: x * jnp.nan, g) if i % 2 else g

    sizes = run(NESTS[f"{where} apply_if_finite"](), make_params(), grads=grads)
    assert all(sizes[::2]) and not any(sizes[1::2])


def test_several_steps_between_deltas():
    run(wrap(optax.adamw(1e-2)), make_params(), steps=9, every=4)


def test_parameters_edited_outside_of_optax():
    def edit(params, i):
        return {**params, "w": params["w"].at[i].set(-0.0)}

    run(wrap(optax.adamw(1e-2)), make_params(), edit=edit)


def test_bf16_parameters_and_own_dtypes():
    bf16 = make_params(jnp.bfloat16)
    run(wrap(optax.sgd(0.1)), bf16, publish=lambda p: p)
    mixed = {**make_params(), "n": jnp.arange(4, dtype=jnp.float16)}
    run(wrap(optax.sgd(0.1), dtype=None), mixed, publish=lambda p: p)


def test_narrow_floats_ints_and_bools_stay_as_they_are():
    params = {
        "f32": jnp.ones(3),
        "f16": jnp.ones(3, jnp.float16),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
        "i": jnp.ones(3, jnp.int32),
        "u": jnp.ones(3, jnp.uint16),
        "t": jnp.ones(3, jnp.bool_),
    }
    state = wrap(optax.identity()).init(params)
    got = {k: x.dtype.name for k, x in published(state, params).items()}
    assert got == {
        "f32": "bfloat16",
        "f16": "float16",
        "f8": "float8_e4m3fn",
        "i": "int32",
        "u": "uint16",
        "t": "bool",
    }
    new = {**params, "t": params["t"].at[0].set(False), "u": params["u"] + 1}
    delta, state = extract(state, new)
    assert set(delta.to_host()) == {"t", "u"}
    assert_same(published(state, new), {**new, "f32": to_bf16(new["f32"])})


def test_select_publishes_a_part():
    def select(params):
        return {"only": params["w"].T}

    run(
        wrap(optax.adam(1e-2), select=select),
        make_params(),
        publish=lambda p: to_bf16(select(p)),
        select=select,
    )


def test_an_average_can_be_published():
    params = make_params()
    tx = wrap(optax.adam(1e-2))
    state = tx.init(params)
    replica, average = published(state, params), params
    for i in range(4):
        updates, state = tx.update(make_grads(params, i), state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        delta, state = extract(state, average)
        replica = apply(replica, delta)
        assert_same(replica, to_bf16(average))


def test_one_donated_step_with_extract_inside():
    tx = wrap(optax.adamw(1e-2))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        delta, state = extract(state, params, capacity=1.0)
        return params, state, delta

    params = make_params()
    state = tx.init(params)
    replica = published(state, params)
    for i in range(5):
        old = params, state
        params, state, delta = step(params, state, make_grads(params, i))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        replica = apply(replica, delta)
        assert_same(replica, to_bf16(params))


def test_state_params_and_published_share_no_buffer():
    """Unsigned leaves are their own bits: all three may still be donated together."""
    params = {"u": jnp.zeros(4, jnp.uint16), "w": jnp.zeros(3)}
    state = wrap(optax.identity()).init(params)
    read = published(state, params)
    keep = jax.jit(lambda *x: jax.tree.map(lambda y: y, x), donate_argnums=(0, 1, 2))
    params, state, read = jax.block_until_ready(keep(params, state, read))
    delta, state = jax.jit(extract)(state, params)
    jax.block_until_ready(keep(params, state, delta))


def test_overflow_loses_nothing_in_the_state():
    params = {"w": jnp.zeros(5000)}
    state = wrap(optax.identity()).init(params)
    new = {"w": params["w"] + 1}
    delta, state = extract(state, new)
    assert bool(delta.overflowed)
    assert_same(published(state, new), to_bf16(new))
    delta, _ = extract(state, new)
    assert delta.to_host() == {}


@pytest.mark.parametrize("wrapper", ["masked", "partition", "freeze"])
def test_inside_a_mask_is_refused(wrapper):
    inner = wrap(optax.sgd(0.1))
    mask = {"w": True, "b": False, "s": True}
    labels = {"w": "x", "b": "y", "s": "x"}
    tx = {
        "masked": lambda: optax.masked(inner, mask),
        "partition": lambda: optax.partition({"x": inner, "y": optax.sgd(0.1)}, labels),
        "freeze": lambda: optax.chain(
            optax.masked(inner, jax.tree.map(lambda x: not x, mask))
        ),
    }[wrapper]()
    with pytest.raises(TreeError, match="masked out.*outside of optax.masked"):
        tx.init(make_params())


def test_no_snapshot_or_two():
    params = make_params()
    plain = optax.adam(1e-2).init(params)
    for call in (lambda: extract(plain, params), lambda: published(plain, params)):
        with pytest.raises(TreeError, match=r"no published snapshot.*jdelta\.wrap"):
            call()
    twice = wrap(wrap(optax.adam(1e-2))).init(params)
    with pytest.raises(TreeError, match="2 published snapshots.*jdelta_snapshot"):
        extract(twice, params)


def test_other_parameters_are_refused():
    params = make_params()
    state = wrap(optax.adam(1e-2)).init(params)
    with pytest.raises(TreeError, match="'b' is missing"):
        extract(state, {"w": params["w"], "s": params["s"]})
    with pytest.raises(TreeError, match=r"'b': expected shape \(5,\), got \(6,\)"):
        extract(state, {**params, "b": jnp.zeros(6)})
    with pytest.raises(TreeError, match="'b': expected dtype uint16, got uint32"):
        extract(state, {**params, "b": jnp.zeros(5, jnp.int32)})


def mark_of(state):
    return tuple(np.asarray(state.jdelta_snapshot.mark).tolist())


def test_deltas_carry_marks_that_follow_each_other():
    params = make_params()
    tx = wrap(optax.adam(1e-2))
    first = tx.init(params)
    marks, state = [mark_of(first)], first
    for i in range(3):
        params = jax.tree.map(lambda x, i=i: x + i, params)
        delta, state = jax.jit(partial(extract, capacity=1.0))(state, params)
        assert np.asarray(delta.marks).tolist() == [[*marks[-1]], [*mark_of(state)]]
        marks.append(mark_of(state))
    assert [count for count, _ in marks] == [0, 1, 2, 3] and len(set(marks)) == 4
    # Another history of the same length has another mark.
    other, params = first, make_params()
    for i in range(3):
        params = jax.tree.map(lambda x, i=i: x + 2 * i + 1, params)
        delta, other = extract(other, params, capacity=1.0)
    assert mark_of(other)[0] == 3 and mark_of(other) != marks[-1]
    assert diff(params, params).marks is None


def test_merged_deltas_lead_from_the_first_to_the_last():
    params = make_params()
    state = wrap(optax.adam(1e-2)).init(params)
    deltas = []
    for i in range(3):
        params = jax.tree.map(lambda x, i=i: x + i, params)
        delta, state = extract(state, params, capacity=1.0)
        deltas.append(delta)
    both = merge(*deltas[:2])
    assert np.asarray(both.marks)[0].tolist() == [0, 0]
    np.testing.assert_array_equal(both.marks[1], deltas[1].marks[1])
    gap = merge(deltas[0], deltas[2])
    assert np.asarray(gap.marks)[0].tolist() == [NO_MARK, NO_MARK]
    bf16 = to_bf16(params)
    assert merge(deltas[0], diff(bf16, bf16)).marks is None


@pytest.mark.parametrize("serializer", ["flax", "pickle", "lists"])
def test_the_state_is_taken_by_serializers(serializer):
    params = make_params()
    tx = wrap(optax.adamw(1e-2))
    _, state = extract(tx.init(params), jax.tree.map(lambda x: x + 1, params))
    if serializer == "flax":
        serialization = pytest.importorskip("flax.serialization")
        back = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    elif serializer == "pickle":
        back = pickle.loads(pickle.dumps(state))
    else:  # knows dicts, lists and arrays only
        back = from_plain(tx.init(params), to_plain(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    delta, _ = extract(back, params)
    assert set(delta.to_host()) == {"w", "b", "s"}


def to_plain(x):
    if isinstance(x, dict):
        return {key: to_plain(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return [to_plain(value) for value in x]
    assert isinstance(x, jax.Array), type(x)
    return np.asarray(x)


def from_plain(like, x):
    if isinstance(like, dict):
        return {key: from_plain(value, x[key]) for key, value in like.items()}
    if isinstance(like, tuple):
        parts = [from_plain(a, b) for a, b in zip(like, x, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    return x


def test_a_run_comes_along_in_its_middle_and_goes_back():
    params = make_params()
    plain = optax.adamw(1e-2)
    old = plain.init(params)
    for i in range(3):
        updates, old = plain.update(make_grads(params, i), old, params)
        params = optax.apply_updates(params, updates)
    tx = wrap(plain)
    with pytest.raises(TreeError, match="is a tuple.*inner_state=state"):
        tx.update(make_grads(params, 3), old, params)
    state = tx.init(params)._replace(inner_state=old)
    got, state = tx.update(make_grads(params, 3), state, params)
    want, old = plain.update(make_grads(params, 3), old, params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    back = state.inner_state
    assert jax.tree.structure(back) == jax.tree.structure(old)


def test_keys_and_integers_as_dtype_are_refused():
    with pytest.raises(TreeError, match="'key'.*extended"):
        wrap(optax.identity()).init({"key": jax.random.key(0)})
    with pytest.raises(ValueError, match="floating"):
        wrap(optax.identity(), dtype=jnp.int8)


def test_extra_arguments_reach_the_inner_optimizer():
    tx = wrap(optax.contrib.reduce_on_plateau(patience=1))
    params = make_params()
    state = tx.init(params)
    for i in range(5):
        _, state = tx.update(make_grads(params, i), state, params, value=1.0)
    assert float(state.inner_state.scale) < 1


def test_tree_map_params_sees_the_snapshot():
    params = make_params()
    tx = wrap(optax.adam(1e-2))
    state = tx.init(params)
    marks = optax.tree_utils.tree_map_params(
        tx, lambda _: "param", state, transform_non_params=lambda _: "other"
    )
    assert jax.tree.leaves(marks).count("param") == 9
    names = {name: name for name in params}
    named = optax.tree_utils.tree_map_params(tx, lambda _, name: name, state, names)
    assert named.jdelta_snapshot.bits == {"bfloat16": names}
    copy = optax.tree_utils.tree_map_params(tx, jnp.copy, state)
    assert_same(published(copy, params), to_bf16(params))


def test_state_is_two_bytes_a_parameter():
    params = {"w": jnp.zeros((100, 100)), "b": jnp.zeros(100)}
    state = wrap(optax.identity()).init(params)
    (snapshot,) = (
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Snapshot))
        if isinstance(x, Snapshot)
    )
    assert sum(x.nbytes for x in jax.tree.leaves(snapshot.bits)) == 2 * 10100
    assert snapshot.mark.shape == (2,)
    assert snapshot.bits["bfloat16"]["w"].shape == (100, 100)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.norm(x)


@pytest.mark.parametrize("form", ["friendly", "plain"])
def test_nnx_optimizer(form):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, wrap(optax.adamw(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)
        if form == "friendly":
            delta, same = extract(optimizer, model, capacity=1.0)
            assert same is optimizer
        else:
            delta, optimizer.opt_state = extract(
                optimizer.opt_state, nnx.state(model, nnx.Param), capacity=1.0
            )
        return delta

    replica = published(optimizer, model)
    for i in range(4):
        delta = step(model, optimizer, jax.random.normal(jax.random.key(i), (3, 4)))
        assert {s.name for s in delta.spec} == {
            *(f"layers.{i}.{k}" for i in range(2) for k in ("kernel", "bias")),
            "norm.scale",
            "norm.bias",
        }
        assert delta.to_host()
        replica = apply(replica, delta)
        want = to_bf16(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        for a, b in zip(jax.tree.leaves(replica), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


def test_linen_train_state():
    linen = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    module = linen.Dense(3)
    x = jnp.ones((2, 4))
    state = train_state.TrainState.create(
        apply_fn=module.apply,
        params=module.init(jax.random.key(0), x)["params"],
        tx=wrap(optax.adam(1e-2)),
    )

    @partial(jax.jit, donate_argnums=0)
    def step(state):
        def loss(params):
            return jnp.sum(state.apply_fn({"params": params}, x) ** 2)

        state = state.apply_gradients(grads=jax.grad(loss)(state.params))
        delta, opt_state = extract(state.opt_state, state.params, capacity=1.0)
        return state.replace(opt_state=opt_state), delta

    replica = published(state.opt_state, state.params)
    for _ in range(4):
        state, delta = step(state)
        assert set(delta.to_host()) <= {"kernel", "bias"}
        replica = apply(replica, delta)
        assert_same(replica, to_bf16(state.params))
