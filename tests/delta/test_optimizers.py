"""Every transformation of optax and optax.contrib under `wrap`, found by looking."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jdelta.delta import apply, extract, published, wrap

STEPS = 20
SGD = optax.sgd(1e-2)


def loss(params):
    target = jnp.arange(12.0).reshape(4, 3) / 10
    return jnp.sum((params["w"] - target) ** 2) + jnp.sum(params["b"] ** 4)


def plain(params):
    return jax.tree.map(lambda _: True, params)


# What to give for parameters without a default, by name.
ARGUMENTS = {
    "learning_rate": 1e-2,
    "weight_decay": 1e-2,
    "fast_optimizer": SGD,
    "base_optimizer": SGD,
    "optimizer": SGD,
    "inner": SGD,
    "adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "sync_period": 3,
    "slow_step_size": 0.5,
    "max_delta": 1.0,
    "threshold": 1.0,
    "max_norm": 1.0,
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.01,
    "gamma": 0.55,
    "key": jax.random.key(0),
    "step_size": -1e-2,
    "step_size_fn": lambda count: -1e-2 / (1 + count),
    "max_consecutive_errors": 3,
    "should_transform_fn": lambda step, **_: step % 2 == 0,
    "mask": plain,
    "freeze_mask": {"w": True, "b": False},
    "seed": 0,
    "max_backtracking_steps": 5,
    "max_linesearch_steps": 5,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "measure_name": "norm",
    "measure": lambda updates, *_, **__: optax.tree.norm(updates),
    "measures": {},
    "alpha": 1.0,
}

# Made by hand: their arguments do not follow from a name.
BY_HAND = {
    "chain": lambda: optax.chain(optax.clip(1.0), SGD),
    "named_chain": lambda: optax.named_chain(("a", optax.clip(1.0)), ("b", SGD)),
    "partition": lambda: optax.partition(
        {"x": SGD, "y": optax.adam(1e-2)}, {"w": "x", "b": "y"}
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"x": SGD, "y": optax.adam(1e-2)}, {"w": "x", "b": "y"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
        optax.adam
    )(1e-2),
    "stateless": lambda: optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: -1e-2 * u, updates)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda u, _: -1e-2 * u
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(SGD),
    "keep_params_nonnegative": lambda: optax.chain(
        SGD, optax.keep_params_nonnegative()
    ),
    "freeze": lambda: optax.chain(optax.freeze({"w": True, "b": False}), SGD),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, 0.9),
    "mechanize": lambda: optax.contrib.mechanize(SGD, s_init=1e-1),
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=lambda updates: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(), updates
            )
        ),
        {"w": True, "b": False},
    ),
}

# Refuse extra arguments, or pass all on to a function of the user's.
NO_EXTRA = {"sam"}
MORE_EXTRA = {"sophia": {"obj_fn": loss}}

# Take gradients of each example of a batch, with a leading axis.
PER_EXAMPLE = {"dpsgd", "differentially_private_aggregate"}


def candidates() -> dict[str, object]:
    """Every public function that makes a transformation, by its annotation."""
    found = {}
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            factory = getattr(module, name)
            if name.startswith("_") or not inspect.isfunction(factory):
                continue
            made = str(inspect.signature(factory).return_annotation)
            if "GradientTransformation" in made:
                found[name] = factory
    return found


CANDIDATES = candidates()


def make(name: str) -> optax.GradientTransformation:
    if name in BY_HAND:
        return BY_HAND[name]()
    arguments = {}
    for parameter in inspect.signature(CANDIDATES[name]).parameters.values():
        required = parameter.default is inspect.Parameter.empty
        if (required or parameter.name == "key") and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            arguments[parameter.name] = ARGUMENTS[parameter.name]
    return CANDIDATES[name](**arguments)


def test_the_sweep_is_the_whole_of_optax():
    assert len(CANDIDATES) > 100
    assert {"adamw", "lbfgs", "muon", "sam", "schedule_free", "sophia"} <= {*CANDIDATES}


def weights(params):
    """Where the model's weights are: `lookahead` keeps them in pairs."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def slow_weights(params):
    return params.slow


# Deprecated ones are swept too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CANDIDATES)
def test_replica_equals_trainer_at_every_step(name):
    params = {"w": jnp.full((4, 3), 0.3), "b": jnp.ones((3,))}
    select = None
    if name == "lookahead":
        params, select = optax.LookaheadParams.init_synced(params), slow_weights
    tx = wrap(make(name), select=select)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(weights(params))
        extra = {"value": value, "grad": grads, "value_fn": loss}
        extra = {} if name in NO_EXTRA else extra | MORE_EXTRA.get(name, {})
        if name in PER_EXAMPLE:
            grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    pick = select or (lambda params: params)
    replica = published(state, pick(params))
    moved = 0
    for _ in range(STEPS):
        params, state = step(params, state)
        delta, state = extract(state, pick(params), capacity=1.0)
        replica = apply(replica, delta)
        for k, x in pick(params).items():
            want = np.asarray(x.astype(jnp.bfloat16)).view(np.uint16)
            np.testing.assert_array_equal(np.asarray(replica[k]).view(np.uint16), want)
        moved += sum(int(group.count) for group in delta.groups)
    assert (moved > 0) == (name != "set_to_zero")
