"""The reading end: what it yields is proved, whatever happens around it."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from jdelta.bucket import MemoryBucket
from jdelta.errors import (
    BucketDeniedError,
    RunError,
    StateMismatchError,
    TreeError,
    VersionNotFoundError,
    WaitTimeoutError,
)
from jdelta.stream import Subscriber, load
from jdelta.testing import FaultyBucket
from jdelta.wire import names
from jdelta.wire.control import ReaderStatus
from jdelta.wire.manifest import VersionId


@pytest.fixture
def reader(bucket):
    made = []

    def make(**options):
        made.append(Subscriber(bucket, poll=0.002, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def versions(trainer, bucket, count, share=0.05, **options):
    """A run of versions 0 to `count` that may go on."""
    pub = trainer.open(bucket, **options)
    for _ in range(count):
        trainer.publish(pub, share=share)
        pub.flush()
    pub.close(ended=False)
    return pub


def copied(weights):
    return {name: array.copy() for name, array in weights.items()}


def test_every_yields_each_version_in_order(trainer, tools, bucket, reader):
    versions(trainer, bucket, 12, anchor_every=4)
    sub = reader()
    params, seen = tools.follow(sub, sub.restore(0), 12, every=True)
    assert [update.version for update in seen] == list(range(1, 13))
    assert [update.base for update in seen] == list(range(12))
    assert [update.step for update in seen] == list(range(1, 13))
    assert tools.blob(params) == trainer.now


def test_every_yields_versions_before_an_anchor_kind_too(
    trainer, tools, bucket, reader
):
    versions(trainer, bucket, 3)
    trainer.train(1.0)  # not published, and much: the next starts with an anchor
    versions(trainer, bucket, 2)
    assert load(bucket, 4)[1].kind == "anchor"
    sub = reader()
    params, seen = tools.follow(sub, sub.restore(1), 6, every=True)
    assert [(u.version, u.kind) for u in seen] == [
        (2, "delta"),
        (3, "delta"),
        (4, "anchor"),
        (5, "delta"),
        (6, "delta"),
    ]
    assert tools.blob(params) == trainer.now


def test_newest_is_one_update(make_trainer, tools, bucket, reader):
    trainer = make_trainer(shapes={"w": ((100, 400), np.float32)})
    versions(trainer, bucket, 6, share=0.001)
    sub = reader()
    params = sub.restore(0)
    params, seen = tools.follow(sub, params, 6)
    assert tools.blob(params) == trainer.now
    assert seen[-1].version == 6 and seen[0].base == 0


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("restored", [False, True])
def test_skipped_updates_are_folded_into_the_next(
    every, restored, trainer, tools, bucket, reader
):
    pub = trainer.open(bucket)
    pub.flush()
    sub = reader()
    params = sub.restore() if restored else None
    updates = sub.updates(every=every, timeout=20)
    if not restored:
        assert next(updates).kind == "anchor"  # and skipped
    for skip in (1, 4, 2):
        for _ in range(skip):
            trainer.publish(pub)
            pub.flush()
            update = next(updates)
            assert update.version == pub.version
        if params is None:
            params = copied(update.shaped_weights())
        update.apply(params)
        assert tools.blob(params) == trainer.now
        assert sub.version == pub.version
    pub.close()


def test_an_anchor_skipped_and_applied_later_is_what_it_says(
    trainer, tools, bucket, reader
):
    """What was yielded does not change when newer versions arrive."""
    pub = trainer.open(bucket)
    pub.flush()
    first_state = trainer.now
    updates = reader().updates(timeout=20)
    first = next(updates)
    for _ in range(3):
        trainer.publish(pub, share=0.3)
        pub.flush()
        last = next(updates)
    assert tools.blob(first.shaped_weights()) == first_state
    assert first.version == 0
    assert tools.blob(last.shaped_weights()) == trainer.now
    pub.close()


def test_applying_twice_is_refused(trainer, tools, bucket, reader):
    versions(trainer, bucket, 2)
    sub = reader()
    params = sub.restore(1)
    update = next(sub.updates(timeout=20))
    update.apply(params)
    before = tools.blob(params)
    with pytest.raises(StateMismatchError):
        update.apply(params)
    assert tools.blob(params) == before == trainer.now
    assert sub.version == 2


def test_wrong_weights_are_refused_and_untouched(trainer, tools, bucket, reader):
    versions(trainer, bucket, 2)
    sub = reader()
    good = sub.restore(1)
    update = next(sub.updates(timeout=20))
    for damage in ("value", "older", "missing", "extra", "shape", "dtype", "frozen"):
        params = copied(good)
        if damage == "value":
            name, steps = next((n, s) for n, s in update.patch.items())
            tools.raw(params[name])[steps.positions[0]] ^= 1
        elif damage == "older":
            params = load(bucket, 0)[0]
        elif damage == "missing":
            del params["codes"]
        elif damage == "extra":
            params["more"] = np.zeros(3)
        elif damage == "shape":
            params["codes"] = params["codes"].reshape(5, 10)
        elif damage == "dtype":
            params["ids"] = params["ids"].view(np.uint64)
        else:
            params["ids"].flags.writeable = False
        before = tools.blob(params)
        error = StateMismatchError if damage in ("value", "older") else TreeError
        with pytest.raises(error):
            update.apply(params)
        assert tools.blob(params) == before, damage
        assert sub.version == 1, damage
    update.apply(good)
    assert tools.blob(good) == trainer.now


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_a_torn_write_is_healed_by_an_anchor_at_once(
    kind, trainer, tools, bucket, reader
):
    versions(trainer, bucket, 2)
    sub = reader()
    params = sub.restore(1) if kind == "delta" else None
    updates = sub.updates(timeout=20)
    update = next(updates)
    assert update.kind == kind
    if params is None:
        params = copied(update.shaped_weights())

    class PulledPlug(BaseException):
        pass

    with pytest.raises(PulledPlug), update.writing():
        tools.raw(params["codes"])[:] ^= 3
        raise PulledPlug
    assert sub.version is None
    # No newer version is needed for it.
    healed = next(updates)
    assert (healed.kind, healed.version) == ("anchor", 2)
    healed.apply(params)
    assert tools.blob(params) == trainer.now and sub.version == 2


def test_a_torn_write_refuses_the_delta_that_comes_after(
    trainer, tools, bucket, reader
):
    pub = trainer.open(bucket)
    pub.flush()
    sub = reader()
    params = sub.restore()
    updates = sub.updates(timeout=20, every=True)
    for _ in range(2):
        trainer.publish(pub)
    pub.flush()
    update = next(updates)
    with pytest.raises(ZeroDivisionError), update.writing():
        1 / 0  # noqa: B018
    with pytest.raises(StateMismatchError):
        update.apply(params)
    update = next(updates)
    assert update.kind == "anchor"
    update.apply(params)
    trainer.check(params, update.state)
    pub.close()


def test_timeouts_name_the_bucket_and_what_was_seen(trainer, bucket, reader):
    sub = reader()
    for act in (sub.wait_for, lambda v, timeout: sub.restore(v, timeout=timeout)):
        with pytest.raises(WaitTimeoutError, match=r"memory://.*version 0.*no version"):
            act(0, timeout=0.05)
    with pytest.raises(WaitTimeoutError, match="memory://.*none"):
        next(sub.updates(timeout=0.05))
    versions(trainer, bucket, 2)
    assert sub.wait_for(1, timeout=5) == 2
    with pytest.raises(WaitTimeoutError, match="memory://.*version 7.*version 2"):
        sub.wait_for(7, timeout=0.05)
    sub.restore()
    with pytest.raises(WaitTimeoutError, match="memory://.*version after 2"):
        next(sub.updates(timeout=0.05))
    with pytest.raises(VersionNotFoundError):
        sub.restore(-1)


def test_restore_of_every_version_and_in_the_middle_of_updates(
    trainer, tools, bucket, reader
):
    versions(trainer, bucket, 9, anchor_every=3)
    sub = reader()
    for version in range(10):
        trainer.check(sub.restore(version), load(bucket, version)[1])
        assert sub.version == version
    for every in (False, True):
        for start in (0, 4):
            for skipped in (0, 1, 3):
                sub.restore(start)
                updates = sub.updates(every=every, timeout=20)
                for _ in range(skipped if every else min(skipped, 1)):
                    next(updates)
                params = sub.restore(2)
                while sub.version != 9:
                    params = next(updates).apply(params)
                    trainer.check(params, load(bucket, sub.version)[1])
                assert tools.blob(params) == trainer.now
                updates.close()


def test_restore_after_a_skipped_anchor(trainer, tools, bucket, reader):
    versions(trainer, bucket, 5)
    sub = reader()
    updates = sub.updates(timeout=20, every=True)
    assert next(updates).kind == "anchor"  # skipped
    params = sub.restore(2)
    while sub.version != 5:
        params = next(updates).apply(params)
    assert tools.blob(params) == trainer.now


def test_reader_status(trainer, bucket, reader):
    pub = trainer.open(bucket)
    pub.flush()
    sub = reader(name="engine-7")
    params = sub.restore()
    status = ReaderStatus.parse(bucket.get(names.reader_name("engine-7")))
    assert (status.reader, status.run, status.epoch, status.version) == (
        "engine-7",
        pub.run,
        1,
        0,
    )
    trainer.publish(pub)
    pub.close()
    next(sub.updates(timeout=20)).apply(params)
    status = ReaderStatus.parse(bucket.get(names.reader_name("engine-7")))
    assert status.version == 1 and abs(status.time - time.time()) < 60
    with pytest.raises(ValueError):
        Subscriber(bucket, name="../escape")


def test_a_reader_that_may_not_write_goes_unseen(trainer, tools, bucket):
    versions(trainer, bucket, 1)
    readonly = tools.SwitchBucket(bucket, error=BucketDeniedError)
    readonly.down = True
    sub = Subscriber(readonly, name="quiet")
    assert tools.blob(sub.restore()) == trainer.now
    sub.close()


def test_closing_ends_a_blocked_iterator_in_another_thread(trainer, bucket, reader):
    versions(trainer, bucket, 1)
    sub = reader()
    sub.restore()
    ended = []
    thread = threading.Thread(target=lambda: ended.append([*sub.updates()]))
    thread.start()
    time.sleep(0.05)
    sub.close()
    thread.join(10)
    assert ended == [[]]


def test_a_dropped_iterator_leaves_no_thread(trainer, bucket, reader):
    versions(trainer, bucket, 2)
    sub = reader()
    sub.restore(0)
    for update in sub.updates(timeout=20):
        assert update.version
        break
    # The fixture of all tests looks for threads.


def test_a_reader_out_of_reach_of_its_bucket_goes_on_later(trainer, tools, bucket):
    from jdelta.errors import BucketUnavailableError

    class Away(FaultyBucket):
        away = False

        def _before(self, op, name):
            if self.away:
                raise BucketUnavailableError("no network")
            return super()._before(op, name)

    versions(trainer, bucket, 1)
    link = Away(bucket)
    sub = Subscriber(link, poll=0.002)
    params = sub.restore()
    updates = sub.updates(timeout=0.1)
    link.away = True
    with pytest.raises(WaitTimeoutError, match="no network"):
        next(updates)
    with pytest.raises(WaitTimeoutError, match="no network"):
        sub.wait_for(2, timeout=0.05)
    versions(trainer, bucket, 2)
    link.away = False
    params, _ = tools.follow(sub, params, 3)
    assert tools.blob(params) == trainer.now
    sub.close()


def test_a_bucket_that_is_wiped_and_reused_is_noticed(make_trainer, tools, bucket):
    """Even where the new run looks just like the old one from where it stands."""
    old, new = make_trainer(1), make_trainer(1)
    versions(old, bucket, 2)
    sub = Subscriber(bucket, poll=0.002)
    params = sub.restore()
    held = tools.blob(params)
    # One reader that follows already, and one that begins afterwards.
    other = Subscriber(bucket, poll=0.002)
    other.restore()
    updates = other.updates(timeout=10)
    with pytest.raises(WaitTimeoutError):
        next(other.updates(timeout=0.02))
    bucket.drop()
    new.rng = np.random.default_rng(7)
    versions(new, bucket, 4)
    for iterator in (sub.updates(timeout=10), updates):
        with pytest.raises(RunError, match="now holds|belongs to run"):
            while True:
                next(iterator).apply(params)
    assert tools.blob(params) == held
    with pytest.raises(RunError):
        sub.restore()
    sub.close()
    other.close()


def test_a_wiped_bucket_with_a_shorter_run_is_noticed(make_trainer, tools, bucket):
    versions(make_trainer(1), bucket, 5)
    sub = Subscriber(bucket, poll=0.002)
    sub.restore()
    updates = sub.updates(timeout=10)
    bucket.drop()
    versions(make_trainer(2), bucket, 1)
    with pytest.raises(RunError):
        next(updates)
    sub.close()


def test_an_update_of_another_lineage_is_refused(make_trainer, tools, fresh):
    """An old update object whose base only has the same number."""
    inner = fresh()
    zombie_side, new_side = make_trainer(3), make_trainer(3)
    zombie = zombie_side.open(inner)
    zombie.flush()
    new = new_side.open(inner)  # epoch 2, from version 0
    new_side.opened = zombie_side.opened
    for _ in range(2):
        new_side.publish(new)
        new.flush()
    sub = Subscriber(inner, poll=0.002)
    sub.restore(1)
    update = next(sub.updates(timeout=20))
    assert (update.base, update.version) == (1, 2)
    # Somebody holds "version 1" of the other branch.
    other = VersionId(1, 1)
    sub._held = dataclasses.replace(sub._held, id=other)
    with pytest.raises(StateMismatchError):
        update.apply(sub_weights := load(inner, 1)[0])
    assert tools.blob(sub_weights) == tools.blob(load(inner, 1)[0])
    sub.close()
    new.close()
    tools.abandon(zombie)


def test_restore_waits_for_the_first_version(trainer, tools, bucket, reader):
    sub = reader()
    found = []
    thread = threading.Thread(target=lambda: found.append(sub.restore(timeout=20)))
    thread.start()
    with trainer.open(bucket):
        pass
    thread.join(20)
    assert tools.blob(found[0]) == trainer.now


def test_two_readers_of_one_bucket_do_not_share_anything(trainer, tools, bucket):
    versions(trainer, bucket, 3)
    subs = [Subscriber(MemoryBucket(bucket.url.split("//")[1])) for _ in range(2)]
    a, b = (sub.restore(1) for sub in subs)
    a, _ = tools.follow(subs[0], a, 3)
    assert tools.blob(a) == trainer.now
    trainer.check(b, load(bucket, 1)[1])
    b, _ = tools.follow(subs[1], b, 3)
    assert tools.blob(b) == trainer.now
    for sub in subs:
        sub.close()
