"""A bucket slower than training: waiting deltas merge, or are kept one by one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jdelta.errors import PublishError, StateMismatchError
from jdelta.stream import Subscriber, load
from jdelta.stream import backlog as backlog_module
from jdelta.stream.backlog import Backlog, Item, Runs, join
from jdelta.testing import FaultyBucket
from jdelta.wire.changes import Changes, merge
from jdelta.wire.dtypes import TensorSpec


def changes_of(item):
    return {
        name: [array.tolist() for array in changes]
        for name, changes in item.changes.items()
        if len(changes.positions)
    }


def spooled(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_merge_readers_only_ever_see_states_the_trainer_had(trainer, tools, bucket):
    slow = FaultyBucket(bucket, delay=0.004)
    sub = Subscriber(bucket, poll=0.002)
    with trainer.open(slow) as pub:
        pub.flush()
        params = sub.restore()
        updates = sub.updates(timeout=20)
        for step in range(60):
            trainer.publish(pub)
            if step % 7 == 0:
                params = next(updates).apply(params)
                trainer.check(params, load(bucket, sub.version)[1])
    stats = pub.stats()
    assert stats.published == 60 and stats.merged > 0
    assert stats.versions + stats.merged == 61
    params, _ = tools.follow(sub, params, pub.version)
    assert tools.blob(params) == trainer.now
    assert tools.check_all(trainer, bucket) == pub.version < 60
    updates.close()
    sub.close()


def test_merge_holds_one_item_and_counts_what_it_holds(trainer, tools, bucket):
    gated = tools.GatedBucket(bucket, "deltas/")
    records = []
    with trainer.open(gated, on_commit=records.append) as pub:
        pub.flush()
        gated.open_gate.clear()
        trainer.publish(pub)
        tools.wait_until(lambda: gated.waiting)
        for _ in range(20):
            trainer.publish(pub)
        tools.wait_until(lambda: not pub._copier.waiting)
        assert len(pub._backlog) == 1
        gated.open_gate.set()
    assert [(r.kind, r.merged, r.step) for r in records[1:]] == [
        ("delta", 1, 1),
        ("delta", 20, 21),
    ]
    assert records[0].kind == "anchor"
    assert tools.check_all(trainer, bucket) == 2


def test_changes_that_cancel_out_while_waiting_leave_nothing(trainer, tools, bucket):
    gated = tools.GatedBucket(bucket, "deltas/")
    with trainer.open(gated) as pub:
        pub.flush()
        gated.open_gate.clear()
        trainer.publish(pub)
        tools.wait_until(lambda: gated.waiting)
        delta = trainer.train()
        pub.publish(delta, step=trainer.step)
        back = {name: Changes(c.positions, c.new, c.old) for name, c in delta.items()}
        for name, c in back.items():
            tools.raw(trainer.weights[name])[c.positions] = c.new
        trainer.step += 1
        trainer.states[trainer.step] = trainer.now
        pub.publish(back, step=trainer.step)
        tools.wait_until(lambda: not pub._copier.waiting)
        gated.open_gate.set()
    weights, manifest = load(bucket)
    assert manifest.version == 2 and not manifest.objects
    trainer.check(weights, manifest)


@pytest.mark.parametrize("blocked", ["deltas/", "manifests/", "pointer"])
def test_spill_keeps_every_version_and_removes_the_spool(
    blocked, trainer, tools, bucket, tmp_path
):
    gated = tools.GatedBucket(bucket, blocked)
    with trainer.open(gated, when_behind="spill", spool=tmp_path / "a" / "b") as pub:
        pub.flush()
        gated.open_gate.clear()
        for share in (0.05, 0.0, 0.5, 1.0, *[0.05] * 16):
            trainer.publish(pub, share=share)
        tools.wait_until(lambda: not pub._copier.waiting)
        assert len(spooled(tmp_path)) >= len(pub._backlog) - 1 >= 18
        gated.open_gate.set()
    assert pub.stats().merged == 0
    assert not spooled(tmp_path)
    assert not [*(tmp_path / "a" / "b").iterdir()]
    assert tools.check_all(trainer, bucket) == 20
    for version in range(1, 21):
        assert load(bucket, version)[1].step == version


def test_spill_keeps_whole_weights_too(trainer, tools, bucket, tmp_path):
    gated = tools.GatedBucket(bucket, "deltas/")
    with trainer.open(gated, when_behind="spill", spool=tmp_path) as pub:
        pub.flush()
        gated.open_gate.clear()
        trainer.publish(pub)
        trainer.publish(pub)
        tools.wait_until(lambda: not pub._copier.waiting)
        pub._copier.ask_whole(PublishError("the test wants it"))
        trainer.publish(pub, params=trainer.weights)
        trainer.publish(pub)
        tools.wait_until(lambda: not pub._copier.waiting)
        gated.open_gate.set()
    assert [load(bucket, v)[1].kind for v in range(5)] == [
        "anchor",
        "delta",
        "delta",
        "anchor",
        "delta",
    ]
    assert tools.check_all(trainer, bucket) == 4


@pytest.mark.parametrize("items", [0, 1, 2.5, 6])
def test_past_the_spools_bound_versions_merge_and_memory_stays_bounded(
    items, trainer, tools, bucket, tmp_path
):
    one = sum(
        c.nbytes for delta in [trainer.train()] for t in delta.values() for c in t
    )
    bound = int(one * items)
    gated = tools.GatedBucket(bucket, "deltas/")
    with trainer.open(
        gated, when_behind="spill", spool=tmp_path, spool_bytes=bound
    ) as pub:
        pub.flush()
        gated.open_gate.clear()
        trainer.publish(pub)
        tools.wait_until(lambda: gated.waiting)
        for _ in range(40):
            trainer.publish(pub)
        tools.wait_until(lambda: not pub._copier.waiting)
        in_memory = [i for i in pub._backlog._items if isinstance(i, Runs)]
        assert len(in_memory) <= 2
        overhead = 8192 * (1 + int(items))  # of the files
        assert sum(p.stat().st_size for p in spooled(tmp_path)) <= bound + overhead
        gated.open_gate.set()
    stats = pub.stats()
    assert stats.merged >= 40 - 2 - items
    assert stats.versions + stats.merged == 42
    assert not spooled(tmp_path)
    tools.check_all(trainer, bucket)
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_the_spool_is_used_again_once_there_is_room(make_trainer, tmp_path):
    trainer = make_trainer(shapes={"w": ((64, 512), np.float32)})
    one = sum(c.nbytes for t in trainer.train().values() for c in t)
    specs = {"w": TensorSpec("w", "F32", (64, 512))}
    backlog = Backlog(specs, "spill", tmp_path, int(2.5 * one))
    pushed, steps = [], []

    def push():
        item = Item(changes=trainer.train(), whole=None, step=trainer.step)
        pushed.append(backlog.push(item))

    for _ in range(8):
        push()
    assert pushed == [False] * 4 + [True] * 4
    for _ in range(3):
        for _ in range(2):
            steps.append(backlog.pop().step)
        for _ in range(4):
            push()
        in_memory = [i for i in backlog._items if isinstance(i, Runs)]
        assert len(in_memory) <= 2
    while len(backlog):
        steps.append(backlog.pop().step)
    assert steps == sorted(steps) and steps[-1] == trainer.step
    backlog.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("parent_is_a_file", [True, False])
def test_an_unwritable_spool_merges_instead(
    parent_is_a_file, trainer, tools, bucket, tmp_path, monkeypatch
):
    spool = tmp_path / "spool"
    if parent_is_a_file:
        spool.write_text("in the way")
    else:

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", full)
    gated = tools.GatedBucket(bucket, "deltas/")
    with trainer.open(gated, when_behind="spill", spool=spool) as pub:
        pub.flush()
        gated.open_gate.clear()
        trainer.publish(pub)
        tools.wait_until(lambda: gated.waiting)
        for _ in range(10):
            trainer.publish(pub)
        tools.wait_until(lambda: not pub._copier.waiting)
        gated.open_gate.set()
    assert pub.stats().merged == 9
    assert tools.check_all(trainer, bucket) == 2
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_a_spooled_file_that_vanishes_is_said_and_the_run_goes_on(
    trainer, tools, bucket, tmp_path
):
    gated = tools.GatedBucket(bucket, "deltas/")
    pub = trainer.open(gated, when_behind="spill", spool=tmp_path)
    pub.flush()
    gated.open_gate.clear()
    for _ in range(4):
        trainer.publish(pub)
    tools.wait_until(lambda: len(spooled(tmp_path)) >= 2)
    for path in spooled(tmp_path):
        path.unlink()
    gated.open_gate.set()
    with pytest.raises(PublishError):
        pub.close()
    tools.check_all(trainer, bucket)
    with trainer.open(bucket):
        pass
    assert tools.blob(load(bucket)[0]) == trainer.now


def counting(changed, start, by=1):
    """A delta that adds `by` to the first `changed` of elements that are `start`."""
    bits = np.full(changed, start, np.uint16)
    return {"a": Changes.between(bits, bits + np.uint16(by))}


def test_a_delta_that_does_not_follow_is_lost_alone():
    """What waits before it is kept, and whole weights are asked for."""
    backlog = Backlog({"a": TensorSpec("a", "U16", (100,))}, "merge", None, 0)
    backlog.push(Item(changes=counting(100, 0), whole=None, step=0))
    with pytest.raises(StateMismatchError):
        backlog.push(Item(changes=counting(100, 0), whole=None, step=1))
    item = backlog.pop()
    assert item.step == 0 and len(item.changes["a"].positions) == 100
    # Found only when they are put together: then none of them is committed.
    backlog.push(Item(changes=counting(100, 0), whole=None, step=0))
    backlog.push(Item(changes=counting(10, 0), whole=None, step=1))
    with pytest.raises(StateMismatchError):
        backlog.pop()
    assert not len(backlog)


def test_merging_costs_what_is_new_however_much_waits(monkeypatch):
    moved = 0

    def counted(first, second):
        nonlocal moved
        moved += len(first.positions) + len(second.positions)
        return merge(first, second)

    monkeypatch.setattr(backlog_module, "merge", counted)
    size, changed, pushes = 1 << 20, 100, 512
    rng = np.random.default_rng(0)
    bits = np.zeros(size, np.uint16)
    backlog = Backlog({"a": TensorSpec("a", "U16", (size,))}, "merge", None, 0)
    for step in range(pushes):
        at = np.sort(rng.choice(size, changed, replace=False)).astype(np.uint32)
        new = bits[at] + np.uint16(1)
        backlog.push(
            Item(changes={"a": Changes(at, bits[at], new)}, whole=None, step=step)
        )
        bits[at] = new
    item = backlog.pop()
    # Once and again for each doubling, where one after the other takes half of all
    # pushes: 512 * 256 * 100.
    assert moved < 2 * changed * pushes * (np.log2(pushes) + 1)
    assert item.merged == pushes and item.step == pushes - 1
    found = np.zeros(size, np.uint16)
    assert not item.changes["a"].old.any()
    found[item.changes["a"].positions] = item.changes["a"].new
    assert np.array_equal(found, bits)


@pytest.mark.parametrize("given", [True, False])
def test_a_heavy_backlog_turns_into_whole_weights(given, trainer, tools, bucket):
    """Deltas never hold more than weights do, if there are weights to be had."""
    gated = tools.GatedBucket(bucket, "deltas/")
    whole = sum(array.nbytes for array in trainer.weights.values())
    with trainer.open(gated) as pub:
        pub.flush()
        gated.open_gate.clear()
        trainer.publish(pub, share=0.3)
        tools.wait_until(lambda: gated.waiting)
        for _ in range(40):
            params = (lambda: trainer.weights) if given else None
            trainer.publish(pub, share=0.3, params=params)
            tools.wait_until(lambda: not pub._copier.waiting)
        if given:
            assert sum(run.nbytes for run in pub._backlog._items) <= whole
        gated.open_gate.set()
    assert pub.stats().merged == 39 and tools.check_all(trainer, bucket) == 2
    assert load(bucket)[1].kind == ("anchor" if given else "delta")
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_join_equals_one_after_the_other(make_trainer):
    trainer = make_trainer()
    start = {k: v.copy() for k, v in trainer.weights.items()}
    items = [
        Item(changes=trainer.train(0.3), whole=None, step=i, merged=1) for i in range(5)
    ]
    whole = Item(
        changes=None,
        whole={k: v.reshape(-1).view(f"u{v.itemsize}") for k, v in start.items()},
        step=None,
        merged=0,
    )
    left = items[0]
    for item in items[1:]:
        left = join(left, item)
    assert left.step == 4 and left.merged == 5
    for name, array in start.items():
        bits = array.copy().reshape(-1).view(f"u{array.itemsize}")
        change = left.changes.get(name)
        if change is not None:
            assert (bits[change.positions] == change.old).all()
            bits[change.positions] = change.new
        end = trainer.weights[name]
        assert (bits == end.reshape(-1).view(f"u{end.itemsize}")).all()
    anchor = join(whole, left)
    for name, end in trainer.weights.items():
        assert (anchor.whole[name] == end.reshape(-1).view(f"u{end.itemsize}")).all()
    later = join(left, Item(changes=None, whole=anchor.whole, step=9, merged=1))
    assert later.changes is None and later.whole is anchor.whole and later.step == 9


def test_publish_does_not_wait_for_a_blocked_bucket(make_trainer, tools, bucket):
    trainer = make_trainer()
    gated = tools.GatedBucket(bucket, "")
    gated.open_gate.set()
    pub = trainer.open(gated)
    pub.flush()
    gated.open_gate.clear()
    worst = 0.0
    for _ in range(200):
        delta = trainer.train()
        start = time.perf_counter()
        pub.publish(delta, step=trainer.step)
        worst = max(worst, time.perf_counter() - start)
    # The bar is a millisecond; here only that it never waits for the gate.
    assert worst < 2
    gated.open_gate.set()
    pub.close()
    assert tools.blob(load(bucket)[0]) == trainer.now
