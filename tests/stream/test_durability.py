"""A crash, a lost answer, a failing store at any point: nothing lost or torn."""

from __future__ import annotations

import pytest

from jdelta.errors import (
    BucketDeniedError,
    BucketError,
    BucketFullError,
    BucketUnavailableError,
    FencedError,
    JDeltaError,
    PublishError,
    VersionNotFoundError,
    WaitTimeoutError,
)
from jdelta.stream import Subscriber, load
from jdelta.testing import Fault, FaultyBucket, at


class Session:
    """The scenario: a run, anchors in the background, an empty delta, a resume."""

    def __init__(self, trainer, tools, bucket):
        self.trainer, self.tools, self.bucket = trainer, tools, bucket
        self.acknowledged = []  # versions the publishers said are committed
        self.surfaced = 0
        self.pubs = []

    def open(self):
        # A trainer tries again when the store fails it at the start.
        for attempt in range(4):
            try:
                pub = self.trainer.open(
                    self.bucket,
                    anchor_every=2,
                    on_commit=lambda record: self.acknowledged.append(record.version),
                )
                break
            except BucketError:
                if attempt == 3 or self.bucket._cut:
                    raise
        self.pubs.append(pub)
        return pub

    def publish(self, pub, **options):
        try:
            self.trainer.publish(pub, **options)
        except PublishError:
            self.surfaced += 1

    def settle(self, pub):
        """Waits until all is committed, or the store is gone for good."""
        self.tools.wait_until(
            lambda: pub.stats().waiting == 0 or self.bucket._cut, what="committing"
        )
        if self.bucket._cut:
            raise BucketUnavailableError("the process died here")

    def close(self, pub):
        if self.bucket._cut:
            raise BucketUnavailableError("the process died here")
        try:
            pub.close(timeout=20 if not self.bucket._cut else 0)
        except PublishError:
            self.surfaced += 1

    def run(self):
        pub = self.open()
        self.settle(pub)
        for share in (0.05, 0.3, 0.0, 0.05):
            self.publish(pub, share=share)
            self.settle(pub)
        self.close(pub)
        pub = self.open()
        self.publish(pub)
        self.settle(pub)
        self.publish(pub)
        self.settle(pub)
        self.close(pub)

    def die(self):
        for pub in self.pubs:
            self.tools.abandon(pub)


def session_with(fault, k, tools, inner, count_reads=False):
    bucket = FaultyBucket(inner, at(k, fault), count_reads=count_reads)
    session = Session(tools.Trainer(seed=k), tools, bucket)
    crashed = False
    try:
        session.run()
    except JDeltaError:
        crashed = True
    finally:
        session.die()
    return session, bucket, crashed


def check_after_crash(session, tools, inner):
    """A fresh subscriber, two readers that go on, a restarted publisher."""
    trainer = session.trainer
    try:
        weights, manifest = load(inner)
    except VersionNotFoundError:
        assert not session.acknowledged, "an acknowledged version is gone"
        readers = []
    else:
        trainer.check(weights, manifest)
        assert manifest.version >= max(session.acknowledged, default=0)
        tools.check_all(trainer, inner)
        readers = []
        for version in (None, 0):
            sub = Subscriber(inner, poll=0.002)
            readers.append((sub, sub.restore(version)))
    with trainer.open(inner, anchor_every=3) as pub:
        for _ in range(3):
            trainer.publish(pub)
        newest = pub.flush()
    for sub, params in readers:
        params, _ = tools.follow(sub, params, newest)
        assert tools.blob(params) == trainer.now
        sub.close()
    weights, manifest = load(inner)
    assert (manifest.version, tools.blob(weights)) == (newest, trainer.now)
    tools.check_all(trainer, inner)


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
def test_crash_at_every_store_operation(fault, tools, fresh):
    k = 0
    while True:
        inner = fresh()
        session, bucket, crashed = session_with(fault, k, tools, inner)
        if not bucket.fired:
            break
        assert crashed or k >= len(bucket.operations) - 2  # in a background anchor
        check_after_crash(session, tools, inner)
        k += 1
    # 3 control, 8 versions of 2 to 4 writes, and the anchors made beside them.
    assert k >= 30


@pytest.mark.parametrize("fault", [Fault.RAISE_BEFORE, Fault.RAISE_AFTER])
def test_one_lost_answer_at_every_store_operation(fault, tools, fresh):
    k = 0
    while True:
        inner = fresh()
        session, bucket, crashed = session_with(fault, k, tools, inner)
        if not bucket.fired:
            break
        assert not crashed
        assert session.surfaced <= 1
        assert tools.check_all(session.trainer, inner) == 6
        assert tools.blob(load(inner)[0]) == session.trainer.now
        k += 1
    assert k >= 30


@pytest.mark.parametrize("fault", [Fault.RAISE_BEFORE, Fault.CUT_BEFORE])
def test_a_failing_read_at_every_store_operation(fault, tools, fresh):
    k, step = 0, 3
    while True:
        inner = fresh()
        session, bucket, crashed = session_with(
            fault, k, tools, inner, count_reads=True
        )
        if not bucket.fired:
            break
        if fault is Fault.RAISE_BEFORE:
            assert not crashed
            assert tools.check_all(session.trainer, inner) == 6
        else:
            check_after_crash(session, tools, inner)
        k += step
    assert k >= 60


@pytest.mark.parametrize("times", [2, 3])
def test_an_operation_that_fails_several_times(times, tools, fresh):
    for k in range(0, 30, 4):
        inner = fresh()
        plan = lambda i, op, k=k: (  # noqa: E731
            Fault.RAISE_BEFORE if k <= i < k + times else None
        )
        bucket = FaultyBucket(inner, plan)
        session = Session(tools.Trainer(seed=k), tools, bucket)
        try:
            session.run()
        finally:
            session.die()
        assert bucket.fired
        assert tools.check_all(session.trainer, inner) == 6


@pytest.mark.parametrize("error", [BucketUnavailableError, BucketDeniedError])
def test_a_bucket_that_is_down_for_long(error, trainer, tools, bucket):
    switch = tools.SwitchBucket(bucket, error=error)
    pub = trainer.open(switch)
    pub.flush()
    for episode in range(2):
        switch.down = True
        surfaced = 0
        for step in range(30):
            try:
                trainer.publish(pub)
            except PublishError as failure:
                surfaced += 1
                assert isinstance(failure.__cause__, error)
            if step < 3:  # it fails anew each time, which is not news
                before = switch.failed
                tools.wait_until(lambda b=before: switch.failed > b, what="a try")
        # What passes by itself is no news for the training loop.
        told = 1 if error is BucketDeniedError else 0
        assert surfaced == told, f"episode {episode} surfaced {surfaced} times"
        assert "failed" in pub.stats().trouble
        # One is being committed, everything else has become one.
        tools.wait_until(lambda: not pub._incoming and not pub._copying)
        assert len(pub._backlog) == 1
        before = switch.failed
        with pytest.raises(WaitTimeoutError, match="failed") as caught:
            pub.flush(timeout=0.3)
        assert bucket.url in str(caught.value)
        tools.wait_until(lambda b=before: switch.failed > b, what="another try")
        switch.down = False
        switch.failed = 0
        pub.flush()
        assert pub.stats().trouble is None
        weights, manifest = load(bucket)
        assert manifest.step == trainer.step
        trainer.check(weights, manifest)
    pub.close()
    tools.check_all(trainer, bucket)


def test_the_memory_of_a_backlog_is_bounded_by_what_changed(trainer, tools, bucket):
    switch = tools.SwitchBucket(bucket)
    pub = trainer.open(switch)
    pub.flush()
    switch.down = True
    sizes = []
    for _ in range(60):
        try:
            trainer.publish(pub, share=0.2)
        except PublishError:
            pass
        tools.wait_until(lambda: not pub._incoming and not pub._copying)
        items = [*pub._backlog._items]
        assert len(items) <= 1
        sizes.append(sum(item.nbytes for item in items))
    elements = sum(array.size for array in trainer.weights.values())
    assert max(sizes) <= elements * (8 + 8 + 8)
    switch.down = False
    pub.close()
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_close_with_a_dead_bucket_ends_in_time_and_says_why(trainer, tools, bucket):
    import time

    switch = tools.SwitchBucket(bucket)
    pub = trainer.open(switch)
    pub.flush()
    switch.down = True
    trainer.publish(pub)
    tools.wait_until(lambda: switch.failed)
    trainer.publish(pub)
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"2 deltas wait.*request"):
        pub.close(timeout=0.5)
    assert time.monotonic() - start < 4
    weights, manifest = load(bucket)
    assert manifest.version == 0
    trainer.check(weights, manifest)
    # The trainer goes on with a new publisher: nothing of the lost steps is missing.
    switch.down = False
    with trainer.open(bucket) as pub:
        assert pub.flush() == 1
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_a_full_disk_while_an_anchor_is_being_made(trainer, tools, bucket, tmp_path):
    """Scratch space can be full, too: the weights wait until there is room."""

    class NoScratch(FaultyBucket):
        failures = 3

        def scratch(self):
            if self.failures:
                self.failures -= 1
                raise BucketFullError("disk full")
            return tmp_path

    full = NoScratch(bucket)
    with trainer.open(full) as pub:
        tools.wait_until(lambda: pub.stats().failures)
        with pytest.raises(PublishError, match="disk full"):
            trainer.publish(pub)
        assert pub.flush() == 1
    assert tools.check_all(trainer, bucket) == 1
    assert not list(tmp_path.iterdir())


def test_a_read_only_directory(trainer, tools, tmp_path):
    import os

    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    with pytest.raises(BucketDeniedError):
        trainer.open(str(folder))


def test_a_directory_that_becomes_unusable_and_returns(trainer, tools, tmp_path):
    """Real errors of a real folder: a file stands where a folder is needed."""
    folder = tmp_path / "run"
    pub = trainer.open(str(folder))
    pub.flush()
    folder.rename(tmp_path / "away")
    folder.write_text("not a folder")
    trainer.publish(pub)
    tools.wait_until(lambda: pub.stats().failures)
    surfaced = 0
    for _ in range(10):
        try:
            trainer.publish(pub)
        except PublishError:
            surfaced += 1
        try:
            pub.flush(timeout=0.06)
        except WaitTimeoutError:
            pass
    assert surfaced == 1
    folder.unlink()
    (tmp_path / "away").rename(folder)
    pub.close()
    weights, manifest = load(str(folder))
    trainer.check(weights, manifest)
    assert manifest.step == trainer.step


def test_a_fenced_publisher_is_told_at_every_call(trainer, tools, bucket):
    old = trainer.open(bucket)
    old.flush()
    new = trainer.open(bucket)
    trainer.publish(new)
    new.flush()
    old.publish({}, step=1)
    tools.wait_until(lambda: old._ledger.fatal is not None)
    for _ in range(2):
        with pytest.raises(FencedError, match="epoch 2"):
            old.publish({}, step=99)
    with pytest.raises(FencedError):
        old.flush()
    with pytest.raises(FencedError):
        old.close()
    new.close()
