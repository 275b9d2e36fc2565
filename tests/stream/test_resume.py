"""A run taken up with other weights: what differs becomes a version, no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta.bucket import MemoryBucket
from jdelta.errors import BucketUnavailableError
from jdelta.stream import Publisher, Subscriber, load
from jdelta.testing import FaultyBucket
from jdelta.wire import names

LARGE = {
    "a": ((200, 1000), np.float32),
    "b": ((200, 1000), np.float32),
    "c": ((9,), np.int64),
}


def run_of(trainer, bucket, versions=4, **options):
    """A run that was killed: its publisher said nothing of an end."""
    pub = trainer.open(bucket, **{"anchor_share": 1e9, **options})
    for _ in range(versions):
        trainer.publish(pub, share=0.01)
        pub.flush()
    pub.close(ended=False)


def written(bucket, kind):
    return sum(info.size for info in bucket.list(kind))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05])
@pytest.mark.parametrize("back", [0, 3])
def test_what_differs_becomes_a_delta(share, back, make_trainer, tools, bucket):
    """A trainer back at an older checkpoint, or one that trained on."""
    trainer = make_trainer(shapes=LARGE)
    run_of(trainer, bucket)
    anchors = written(bucket, "anchors/")
    if back:
        for name, array in load(bucket, 4 - back)[0].items():
            trainer.weights[name][...] = array
    if share:
        trainer.train(share)
    before = written(bucket, "deltas/")
    with Subscriber(bucket, poll=0.002) as sub:
        params = sub.restore()
        step, meta = 100, {"policy": "p"}
        trainer.states[100] = trainer.now
        pub = trainer.open(bucket, step=step, meta=meta)
        pub.flush()
        if not (share or back):
            assert pub.version == 4
        else:
            assert pub.version == 5 and written(bucket, "anchors/") == anchors
            params, seen = tools.follow(sub, params, 5)
            assert seen[-1].kind == "delta"
            assert (seen[-1].step, seen[-1].meta) == (step, meta)
            changed = sum(e.changed for e in load(bucket)[1].changes.values())
            assert written(bucket, "deltas/") - before < 6 * changed + 2000
        assert tools.blob(params) == tools.blob(load(bucket)[0]) == trainer.now
        trainer.publish(pub)
        pub.close()
        params, _ = tools.follow(sub, params, pub.version)
        assert tools.blob(params) == trainer.now


def test_where_all_differs_whole_weights_are_written(make_trainer, tools, bucket):
    trainer = make_trainer(shapes=LARGE)
    run_of(trainer, bucket)
    trainer.train(1.0)
    with trainer.open(bucket, step=7) as pub:
        pub.flush()
    weights, manifest = load(bucket)
    assert (manifest.kind, manifest.step) == ("anchor", 7)
    assert tools.blob(weights) == trainer.now


def test_only_the_tensors_that_differ_are_read(make_trainer, bucket):
    trainer = make_trainer(shapes=LARGE)
    run_of(trainer, bucket, versions=0)
    trainer.weights["b"].view(np.uint32)[3, 7] ^= 1
    read = []

    class Watched(FaultyBucket):
        def get_range(self, name, start, length):
            read.append(length)
            return super().get_range(name, start, length)

    with trainer.open(Watched(bucket)) as pub:
        pub.flush()
    assert list(load(bucket)[1].changes) == ["b"]
    assert sum(read) < trainer.weights["b"].nbytes + 2000
    assert max(read) == trainer.weights["b"].nbytes


@pytest.mark.parametrize("what", ["delta", "anchor", "header", "missing", "manifest"])
def test_damage_on_the_way_makes_it_whole(what, make_trainer, tools, bucket):
    trainer = make_trainer(shapes=LARGE)
    run_of(trainer, bucket)
    name = {
        "delta": names.delta_name(1, 3, 0),
        "manifest": names.manifest_name(1, 2),
    }.get(what, f"{names.anchor_folder(1, 0)}/model-00001-of-00001.safetensors")
    data = bytearray(bucket.get(name))
    data[{"anchor": -5000, "header": 20}.get(what, len(data) // 2)] ^= 1
    if what == "missing":
        bucket.delete(name)
    else:
        bucket.put(name, bytes(data))
    for array in trainer.weights.values():
        array.reshape(-1).view(np.uint8)[-1] ^= 1
    trainer.states[9] = trainer.now
    sub = Subscriber(bucket, poll=0.002)
    with trainer.open(bucket, step=9) as pub:
        assert pub.flush() == 5
    weights, manifest = load(bucket)
    assert manifest.kind == "anchor" and tools.blob(weights) == trainer.now
    assert tools.blob(sub.restore()) == trainer.now


def test_a_bucket_that_fails_meanwhile_is_tried_again(make_trainer, tools, bucket):
    trainer = make_trainer(shapes=LARGE)
    run_of(trainer, bucket)
    trainer.train(0.001)

    class Flaky(FaultyBucket):
        failures = 3

        def get_range(self, name, start, length):
            self.failures -= 1
            if self.failures >= 0:
                raise BucketUnavailableError("not now")
            return super().get_range(name, start, length)

    with trainer.open(Flaky(bucket)) as pub:
        assert pub.flush() == 5
    assert load(bucket)[1].kind == "delta"
    assert tools.blob(load(bucket)[0]) == trainer.now


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_weights_can_take_up_any_run(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    specs = {"x": np.uint8, "y": np.uint16, "z": np.float64, "e": np.int32}
    sizes = {"x": 300, "y": 200, "z": 40, "e": 0}
    weights = {
        k: rng.integers(0, 255, (sizes[k], np.dtype(t).itemsize), np.uint8)
        .reshape(-1)
        .view(t)
        for k, t in specs.items()
    }
    bucket = MemoryBucket(f"resume-{rng.integers(1 << 60)}")
    every = data.draw(st.sampled_from([None, 1, 2]))
    for _ in range(data.draw(st.integers(1, 4))):
        for array in weights.values():
            flat = array.view(np.uint8)
            share = data.draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
            flat[rng.random(flat.size) < share] ^= 3
        with Publisher(bucket, weights, anchor_every=every, anchor_share=1e9):
            pass
        found, _ = load(bucket)
        assert {k: v.tobytes() for k, v in found.items()} == {
            k: v.tobytes() for k, v in weights.items()
        }
    bucket.drop()


@pytest.mark.parametrize("bad", [[], {"a": object()}, {"a": float("inf")}, "x", 3])
def test_meta_that_cannot_be_kept_is_refused_before_anything(bad, trainer, bucket):
    with pytest.raises((TypeError, ValueError)):
        Publisher(bucket, trainer.weights, meta=bad or [1])
    assert Subscriber(bucket).latest() is None
    with trainer.open(bucket) as pub:
        with pytest.raises((TypeError, ValueError)):
            pub.publish({}, meta=bad or [1])
        with pytest.raises(ValueError, match="at most 4096"):
            pub.publish({}, meta={"a": "x" * 5000})
        assert pub.stats().published == 0


@pytest.mark.parametrize("when_behind", ["merge", "spill"])
def test_meta_goes_with_its_version(when_behind, trainer, tools, bucket, tmp_path):
    gated = tools.GatedBucket(bucket, "deltas/")
    pub = trainer.open(
        gated, when_behind=when_behind, spool=tmp_path, meta={"first": [1, None]}
    )
    pub.flush()
    gated.open_gate.clear()
    for i in range(4):
        said = {"lr": 1e-6 * i, "name": "ü"}
        trainer.publish(pub, meta=said)
        said["name"] = "changed later"
    tools.wait_until(lambda: not pub._copier.waiting)
    gated.open_gate.set()
    pub.close()
    assert load(bucket, 0)[1].meta == {"first": [1, None]}
    last = load(bucket)[1]
    assert last.meta == {"lr": 3e-6, "name": "ü"} and last.step == 4
    if when_behind == "spill":
        assert [load(bucket, v)[1].meta["lr"] for v in range(1, 5)] == [
            0.0,
            1e-6,
            2e-6,
            3e-6,
        ]
