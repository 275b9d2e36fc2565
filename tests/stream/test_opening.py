"""What opens a run, and what is refused before an earlier publisher is stopped."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jdelta
from jdelta.errors import BucketError, JDeltaError, RunError, TreeError
from jdelta.stream import Publisher, Subscriber, load
from jdelta.stream.chain import Chain
from jdelta.wire.dtypes import TensorSpec

W = {"w": np.arange(8, dtype=np.float32)}


def deleted():
    array = jnp.ones(4)
    array.delete()
    return array


UNPUBLISHABLE = {
    "an empty tree": lambda: {},
    "an empty name": lambda: {"": W["w"]},
    "safetensors' own name": lambda: {"__metadata__": W["w"]},
    "a control character": lambda: {"a\nb": W["w"]},
    "a long name": lambda: {"a" * 1025: W["w"]},
    "int4": lambda: {"w": np.zeros(4, ml_dtypes.int4)},
    "JAX int4": lambda: {"w": jnp.zeros(4, jnp.int4)},
    "a PRNG key": lambda: {"w": jax.random.key(0)},
    "big-endian": lambda: {"w": np.zeros(4, ">f4")},
    "objects": lambda: {"w": np.array([None])},
    "a float": lambda: {"lr": 0.1, **W},
    "a string": lambda: {"name": "llama", **W},
    "a NumPy scalar": lambda: {"lr": np.float32(3), **W},
    "a shape": lambda: {"w": jax.ShapeDtypeStruct((4,), jnp.float32)},
    "donated": lambda: {"w": deleted()},
    "33 dimensions": lambda: {"w": np.zeros((1,) * 33, np.float32)},
    "a huge empty one": lambda: {"w": np.zeros((0, 1 << 55), np.int8)},
}


@pytest.mark.parametrize("what", UNPUBLISHABLE)
def test_what_cannot_be_published_stops_no_other_publisher(what, trainer, bucket):
    with trainer.open(bucket) as healthy:
        healthy.flush()
        with pytest.raises(TreeError) as caught:
            Publisher(bucket, UNPUBLISHABLE[what]())
        assert "TensorSpec" not in str(caught.value)
        trainer.publish(healthy)
    assert load(bucket)[1].step == 1
    assert not Chain(bucket).read_claim(2)


def test_a_traced_tree_is_refused(bucket):
    with pytest.raises(TreeError, match="outside"):
        jax.jit(lambda w: Publisher(bucket, {"w": w}) and w)(jnp.ones(3))
    assert not [*bucket.list("")]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"anchor_every": 0}, ValueError),
        ({"anchor_share": 0.0}, ValueError),
        ({"anchor_share": float("nan")}, ValueError),
        ({"when_behind": "drop"}, ValueError),
    ],
)
def test_options_are_checked_before_the_claim(options, error, bucket):
    with pytest.raises(error):
        Publisher(bucket, W, **options)
    assert not [*bucket.list("")]


def test_a_path_is_taken_wherever_a_url_is(tmp_path):
    class Path:
        def __fspath__(self):
            return str(tmp_path / "run")

    for url in (tmp_path / "run", Path(), pathlib.PurePath(tmp_path / "run")):
        with Publisher(url, W) as pub, Subscriber(url) as sub:
            pub.flush()
            assert sub.restore()["w"].tobytes() == W["w"].tobytes()
        assert jdelta.load(url)[1].version == 0
        assert Chain(url).read_run()


@pytest.mark.parametrize("url", [3, None, b"runs/a", "", "a\0b", "ftp://x/y"])
def test_what_is_no_url_is_refused(url):
    for use in (lambda: Publisher(url, W), lambda: Subscriber(url), lambda: load(url)):
        with pytest.raises(BucketError):
            use()


def test_another_run_in_the_bucket(trainer, bucket):
    with trainer.open(bucket, run="monday"):
        pass
    with pytest.raises(RunError, match="'monday'.*'tuesday' was asked for"):
        trainer.open(bucket, run="tuesday")
    assert not Chain(bucket).read_claim(2)
    with trainer.open(bucket, run="monday") as pub:
        assert pub.epoch == 2


def test_another_tree_is_refused_and_printed_as_jax_prints_arrays(trainer, bucket):
    with trainer.open(bucket):
        pass
    other = {**trainer.weights, "codes": np.zeros((40, 50), ml_dtypes.bfloat16)}
    with pytest.raises(JDeltaError, match=r"i8\[50\].*bf16\[40, 50\]"):
        Publisher(bucket, other)
    assert str(TensorSpec("v", "F8_E4M3", ())) == "f8_e4m3[]"
