"""A delta that does not start from what was published last is never written."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdelta
from jdelta.errors import DeltaOverflowError, GapError, PublishError, TreeError
from jdelta.stream import Publisher, load
from jdelta.stream.follow import Follower
from jdelta.wire.changes import Changes
from jdelta.wire.dtypes import TensorSpec


class Wrapped:
    """A trainer of two leaves under `wrap`; every step changes half of one of them."""

    def __init__(self, capacity=1.0, size=64):
        self.tx = jdelta.wrap(optax.sgd(1.0))
        self.params = {"a": jnp.zeros(size), "b": jnp.zeros((8, 8))}
        self.state = self.tx.init(self.params)
        self.step = 0

        @jax.jit
        def train(params, state, step):
            grads = jax.tree.map(lambda w: jnp.where(step % 2, -1.0, 0.0), params)
            grads = {**grads, "a": grads["a"] - 1.0}
            grads = jax.tree.map(
                jnp.broadcast_to, grads, {k: v.shape for k, v in params.items()}
            )
            updates, state = self.tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            delta, state = jdelta.extract(state, params, capacity=capacity)
            return params, state, delta

        self._train = train

    def train(self):
        self.params, self.state, delta = self._train(self.params, self.state, self.step)
        self.step += 1
        return delta

    @property
    def published(self):
        return jdelta.published(self.state, self.params)

    def equals(self, bucket):
        weights, manifest = load(bucket)
        assert manifest.step == self.step
        for name, leaf in self.published.items():
            assert weights[name].tobytes() == np.asarray(leaf).tobytes()
        return manifest


@pytest.fixture
def wrapped():
    return Wrapped()


def opened(wrapped, bucket, **options):
    pub = Publisher(bucket, wrapped.published, **options)
    pub.publish(wrapped.train(), step=wrapped.step)
    pub.flush()
    return pub


def test_every_second_delta_published_is_noticed(wrapped, bucket):
    pub = opened(wrapped, bucket)
    wrapped.train()
    pub.publish(wrapped.train(), step=wrapped.step)
    with pytest.raises(GapError, match="1 extracted in between were not published"):
        pub.flush()
    with pytest.raises(GapError, match="params="):
        pub.publish(wrapped.train(), step=wrapped.step)
    assert load(bucket)[1].step == 1
    pub.publish(wrapped.train(), step=wrapped.step, params=wrapped.published)
    pub.flush()
    assert wrapped.equals(bucket).kind == "anchor"
    pub.publish(wrapped.train(), step=wrapped.step)
    pub.close()
    assert wrapped.equals(bucket).kind == "delta"
    assert pub.stats().gaps == 1 and pub.stats().overflowed == 0


def test_a_gap_heals_by_itself_where_params_are_given(wrapped, bucket):
    with opened(wrapped, bucket) as pub:
        for _ in range(12):
            wrapped.train()
            params = functools.partial(jdelta.published, wrapped.state, wrapped.params)
            delta = wrapped.train()
            params = functools.partial(jdelta.published, wrapped.state, wrapped.params)
            pub.publish(delta, step=wrapped.step, params=params)
        pub.flush()
        wrapped.equals(bucket)
    assert pub.stats().gaps >= 1


def test_a_delta_published_twice_is_noticed(wrapped, bucket):
    pub = opened(wrapped, bucket)
    delta = wrapped.train()
    pub.publish(delta, step=2)
    pub.publish(delta, step=3)
    with pytest.raises(GapError, match="twice"):
        pub.close()
    assert wrapped.equals(bucket)


def test_an_older_state_under_the_same_publisher_is_noticed(wrapped, bucket):
    pub = opened(wrapped, bucket)
    kept = wrapped.params, wrapped.state, wrapped.step
    for _ in range(3):
        pub.publish(wrapped.train(), step=wrapped.step)
    pub.flush()
    wrapped.params, wrapped.state, wrapped.step = kept
    pub.publish(wrapped.train(), step=wrapped.step, params=wrapped.published)
    pub.flush()
    wrapped.equals(bucket)
    # A restored state that was trained on to the same age differs by its hash.
    wrapped.params, wrapped.state, wrapped.step = kept
    wrapped.params = jax.tree.map(lambda w: w - 3, wrapped.params)
    other = wrapped.train()
    pub.publish(other, step=wrapped.step)
    with pytest.raises(GapError):
        pub.flush()
    with pytest.raises(GapError):
        pub.close()


def test_merged_deltas_follow_and_others_do_not(wrapped, bucket):
    pub = opened(wrapped, bucket)
    merge = jax.jit(functools.partial(jdelta.merge, capacity=1.0))
    pub.publish(merge(wrapped.train(), wrapped.train()), step=wrapped.step)
    pub.flush()
    wrapped.equals(bucket)
    first = wrapped.train()
    wrapped.train()
    pub.publish(merge(first, wrapped.train()), step=wrapped.step)
    with pytest.raises((GapError, DeltaOverflowError)):
        pub.close()


@pytest.mark.parametrize("kind", ["diff", "changes"])
@pytest.mark.parametrize("lost", ["missing", "twice", "rolled back"])
def test_deltas_without_marks_are_compared_with_what_was_published(kind, lost, bucket):
    rng = np.random.default_rng(0)
    trees = [{"w": np.zeros((10, 30), np.uint16)}]
    for _ in range(5):
        trees.append({"w": trees[-1]["w"].copy()})
        trees[-1]["w"].reshape(-1)[rng.choice(300, 30)] += 1

    def delta(i, j):
        if kind == "diff":
            return jdelta.diff(*(jax.tree.map(jnp.array, trees[k]) for k in (i, j)))
        return {"w": Changes.between(*(trees[k]["w"].reshape(-1) for k in (i, j)))}

    pub = Publisher(bucket, trees[0])
    for i in range(3):
        pub.publish(delta(i, i + 1), step=i + 1)
    pub.flush()
    pair = {"missing": (4, 5), "twice": (2, 3), "rolled back": (1, 2)}[lost]
    pub.publish(delta(*pair), step=9)
    if lost == "missing":
        # What the missing delta touched and this one does not cannot show.
        touched = set(delta_positions(trees, 3, 4)) & set(delta_positions(trees, 4, 5))
        assert touched
    with pytest.raises(GapError, match=r"'w' \(u16\[10, 30\]\)"):
        pub.flush()
    pub.publish(delta(3, 4), step=4, params=trees[4])
    pub.publish(delta(4, 5), step=5)
    pub.close()
    weights, manifest = load(bucket)
    assert manifest.step == 5 and (weights["w"] == trees[5]["w"]).all()


def delta_positions(trees, i, j):
    return np.flatnonzero(trees[i]["w"] != trees[j]["w"]).tolist()


@pytest.mark.parametrize("positions", [np.uint8, np.uint32, np.int64, np.uint64])
def test_a_large_trees_sample_is_bounded_and_sees_what_it_holds(positions):
    specs = {"a": TensorSpec("a", "U16", (100,)), "b": TensorSpec("b", "U16", (7, 31))}
    bits = {name: np.arange(s.size, dtype=np.uint16) for name, s in specs.items()}
    follower = Follower(specs, sample=40)
    follower.reset(bits)
    kept = {name: held.size for name, held in follower._held.items()}
    assert sum(kept.values()) <= 42 and kept["b"] > 10
    seen = 0
    for at in range(200):
        wrong = {"b": Changes(*(np.array([x]) for x in (at, at + 1, at + 2)))}
        wrong["b"] = Changes(
            np.array([at], positions), *(x.astype(np.uint16) for x in wrong["b"][1:])
        )
        try:
            follower.check(wrong, None)
        except GapError as error:
            assert f"element {at} of 'b'" in str(error) and f"0x{at:04x}" in str(error)
            seen += 1
    assert seen == -(-200 // follower._stride)
    right = Changes.between(bits["b"], bits["b"] + np.uint16(5))
    follower.check({"b": right}, None)
    with pytest.raises(GapError):
        follower.check({"b": right}, None)


def test_the_whole_version_after_an_overflow_carries_its_step(bucket):
    """A follower that waits for a step is not left waiting."""
    trainer = Wrapped(capacity=0.01, size=1 << 16)
    pub = Publisher(bucket, trainer.published)
    for close in (pub.flush, pub.close):
        pub.publish(trainer.train(), step=trainer.step, params=trainer.published)
        close()
        assert trainer.equals(bucket).kind == "anchor"


def test_older_params_never_stand_in_for_a_later_delta(bucket):
    trainer = Wrapped(capacity=0.01, size=1 << 16)
    pub = Publisher(bucket, trainer.published)
    pub.publish(trainer.train(), step=1, params=trainer.published)
    try:
        pub.publish(trainer.train(), step=2)
    except DeltaOverflowError:
        pass
    with pytest.raises(DeltaOverflowError, match="params="):
        pub.flush()
    with pytest.raises(DeltaOverflowError):
        pub.close()
    assert load(bucket)[1].version == 0


def test_the_opening_version_carries_its_step(wrapped, bucket):
    with Publisher(bucket, wrapped.published, step=7):
        pass
    assert load(bucket)[1].step == 7
    for step in (-1, 1 << 64):
        with pytest.raises(ValueError, match="step"):
            Publisher(bucket, wrapped.published, step=step)
    with Publisher(bucket, wrapped.published) as pub:
        with pytest.raises(ValueError, match="step"):
            pub.publish({}, step=-1)
        with pytest.raises(TypeError):
            pub.publish({}, step=1.5)


def test_params_are_let_go_once_the_delta_is_on_the_host(trainer, bucket, tools):
    class State:
        def __call__(self):
            raise AssertionError("nobody needs it")

    held = State()
    gone = weakref.ref(held)
    with trainer.open(bucket) as pub:
        trainer.publish(pub, params=held)
        del held
        tools.wait_until(lambda: pub.stats().waiting == 0)
        gc.collect()
        assert gone() is None


def test_the_callers_later_writes_do_not_change_what_is_published(
    trainer, tools, bucket
):
    gated = tools.GatedBucket(bucket, "deltas/")
    with trainer.open(gated) as pub:
        pub.flush()
        gated.open_gate.clear()
        for _ in range(3):
            delta = trainer.train()
            pub.publish(delta, step=trainer.step)
            for changes in delta.values():
                for array in changes:
                    array[...] = 0
            delta.clear()
        gated.open_gate.set()
    assert tools.check_all(trainer, bucket) >= 1
    assert tools.blob(load(bucket)[0]) == trainer.now


@pytest.mark.parametrize("bad", ["params", "unsorted", "another tree", "name", "list"])
def test_a_wrong_argument_is_told_once_and_changes_nothing(bad, trainer, tools, bucket):
    at = np.array([3, 1])
    wrong = {
        "params": trainer.weights,
        "unsorted": {"codes": Changes(at, *np.zeros((2, 2), np.uint8))},
        "another tree": jdelta.diff({"x": jnp.zeros(3)}, {"x": jnp.ones(3)}),
        "name": {"nope": Changes(at[:0], at[:0], at[:0])},
        "list": [1, 2],
    }[bad]
    with trainer.open(bucket) as pub:
        trainer.publish(pub)
        with pytest.raises(TreeError):
            pub.publish(wrong, step=99)
        trainer.publish(pub)
    assert tools.check_all(trainer, bucket) >= 1
    assert tools.blob(load(bucket)[0]) == trainer.now
    assert pub.stats().published == 2


def test_publish_inside_a_jitted_function_says_what_to_do(bucket):
    params = {"w": jnp.zeros(8)}
    with Publisher(bucket, params) as pub:

        @jax.jit
        def step(params):
            pub.publish(jdelta.diff(params, params))
            return params

        with pytest.raises(TreeError, match="return the delta"):
            step(params)


def test_params_run_outside_of_the_publishers_locks(bucket):
    """Whoever is asked for weights may look at the publisher, from another thread."""
    import threading

    trainer = Wrapped(capacity=0.01, size=1 << 16)
    with Publisher(bucket, trainer.published) as pub:
        seen = []

        def params():
            thread = threading.Thread(target=lambda: seen.append(pub.stats()))
            thread.start()
            thread.join(20)
            return trainer.published

        pub.publish(trainer.train(), step=1, params=params)
        pub.flush()
        assert seen
    trainer.equals(bucket)


def test_damage_is_not_called_an_overflow(trainer, bucket):
    pub = trainer.open(bucket)
    pub.flush()
    pub._copier.ask_whole(PublishError("the chain in the bucket is damaged"))
    with pytest.raises(PublishError, match="damaged.*params="):
        trainer.publish(pub)
    trainer.publish(pub, params=trainer.weights)
    pub.close()
    trainer.check(*load(bucket))
