"""How a follower learns of a new version, and that there will be no more."""

from __future__ import annotations

import threading
import time

import pytest

from jdelta.errors import WaitTimeoutError
from jdelta.stream import Subscriber, load
from jdelta.stream.pace import Pace
from jdelta.testing import Fault, FaultyBucket


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kind", ["memory", "plain", "directory"])
def test_following_ends_where_the_run_ends(
    kind, every, trainer, tools, fresh, bucket, tmp_path
):
    source = {
        "memory": bucket,
        "plain": fresh(tools.PlainBucket),
        "directory": str(tmp_path / "run"),
    }[kind]
    pub = trainer.open(source)
    seen = []

    def follow():
        with Subscriber(source) as sub:
            params = sub.restore(0)
            for update in sub.updates(every=every):
                params = update.apply(params)
                seen.append(update.version)
            seen.append(tools.blob(params) == trainer.now)

    thread = threading.Thread(target=follow)
    thread.start()
    for _ in range(3):
        trainer.publish(pub)
        pub.flush()
    pub.close()
    thread.join(20)
    assert not thread.is_alive()
    assert seen[-2:] == [3, True]
    assert not every or seen == [1, 2, 3, True]


def test_a_reader_of_a_run_that_ended_gets_all_and_is_done(trainer, tools, bucket):
    with trainer.open(bucket) as pub:
        for _ in range(3):
            trainer.publish(pub)
            pub.flush()
    with Subscriber(bucket) as sub:
        params, seen = {}, []
        for update in sub.updates(timeout=10):
            params = update.shaped_weights()
            params = {k: v.copy() for k, v in params.items()}
            update.apply(params)
            seen.append(update.version)
        assert seen == [3] and tools.blob(params) == trainer.now
        assert list(sub.updates(timeout=10)) == []
        # Going back is possible, and leads to the end again.
        params = sub.restore(1)
        for update in sub.updates(every=True, timeout=10):
            params = update.apply(params)
        assert sub.version == 3 and tools.blob(params) == trainer.now


@pytest.mark.parametrize("how", ["not ended", "error", "taken up", "taken up in vain"])
def test_a_run_that_goes_on_has_no_end(how, trainer, tools, bucket):
    pub = trainer.open(bucket)
    trainer.publish(pub)
    pub.flush()
    if how == "error":
        with pytest.raises(ZeroDivisionError), pub:
            raise ZeroDivisionError
    else:
        pub.close(ended=how != "not ended")
    sub = Subscriber(bucket, poll=0.002)
    params = sub.restore()
    with_new = None
    if how == "taken up":
        with_new = trainer.open(bucket)
        trainer.publish(with_new)
        with_new.flush()
        params, _ = tools.follow(sub, params, 2)
    if how == "taken up in vain":
        with_new = trainer.open(bucket)
        with_new.flush()
    with pytest.raises(WaitTimeoutError):
        next(sub.updates(timeout=0.2))
    if with_new is not None:
        with_new.close()
        assert list(sub.updates(timeout=20)) == []
    sub.close()


def test_an_end_that_cannot_be_told_is_no_error(trainer, tools, bucket, caplog):
    switch = tools.SwitchBucket(bucket)
    pub = trainer.open(switch)
    pub.flush()
    switch.down = True
    pub.close()
    assert "followers are not told" in caplog.text
    assert load(bucket)[1].version == 0


def test_a_fenced_publisher_does_not_end_the_run_of_another(trainer, tools, bucket):
    old = trainer.open(bucket)
    old.flush()
    new = trainer.open(bucket)
    trainer.publish(new)
    new.flush()
    old.close()
    with Subscriber(bucket, poll=0.002) as sub:
        sub.restore()
        with pytest.raises(WaitTimeoutError):
            next(sub.updates(timeout=0.2))
    new.close()


def test_a_look_at_nothing_new_is_three_requests(trainer, tools, fresh):
    """And there are few of them: an idle reader of a distant store is cheap."""
    inner = fresh(tools.PlainBucket)
    with trainer.open(inner) as pub:
        pub.flush()
        watched = FaultyBucket(inner, count_reads=True)
        with Subscriber(watched) as sub:
            sub.restore()
            thread = threading.Thread(target=lambda: list(sub.updates()))
            thread.start()
            tools.wait_until(lambda: len(watched.operations) > 20)
            before = len(watched.operations)
            begin = time.monotonic()
            tools.wait_until(lambda: len(watched.operations) >= before + 9)
            looks = watched.operations[before : before + 9]
            assert sum(o.name.startswith("epochs/") for o in looks) == 3
            assert time.monotonic() - begin > 0.15
            pub.close()
            thread.join(20)
            assert not thread.is_alive()


def test_an_idle_reader_of_a_directory_asks_for_the_pointer_alone(
    trainer, tools, tmp_path
):
    from jdelta.bucket import open_bucket

    with trainer.open(str(tmp_path / "run")) as pub:
        pub.flush()
        watched = FaultyBucket(open_bucket(str(tmp_path / "run")), count_reads=True)
        with Subscriber(watched) as sub:
            sub.restore()
            thread = threading.Thread(target=lambda: list(sub.updates()))
            thread.start()
            tools.wait_until(
                lambda: watched.operations and watched.operations[-1].op == "watch"
            )
            before = len(watched.operations)
            tools.wait_until(lambda: len(watched.operations) > before + 3)
            assert {o.op for o in watched.operations[before:]} == {"watch"}
            pub.close()
            thread.join(20)
            assert not thread.is_alive()


def test_a_watch_that_fails_falls_back_to_looking(trainer, tools, bucket):
    def plan(index, operation):
        return Fault.RAISE_BEFORE if operation.op == "watch" else None

    broken = FaultyBucket(bucket, plan, count_reads=True)
    pub = trainer.open(bucket)
    pub.flush()
    with Subscriber(broken) as sub:
        params = sub.restore()
        trainer.publish(pub)
        pub.close()
        for update in sub.updates(timeout=20):
            params = update.apply(params)
        assert tools.blob(params) == trainer.now
    assert len(broken.operations) < 200


def test_the_pace_follows_the_cadence(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace = Pace()
    assert pace.wait() == 0.1
    for _ in range(7):
        now += 60.0
        pace.came()
    assert pace.wait() == pytest.approx(3.0)
    now += 120.0
    assert pace.wait() == pytest.approx(6.0)
    now += 1e6
    assert pace.wait() == 30.0
    for _ in range(5):
        now += 10.0
        pace.came(10)  # ten at once: one a second
    assert pace.wait() == 0.1
    assert Pace(0.5).wait() == 0.5
