"""A crash, a lost answer, a failing store at any point: nothing lost or torn."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref

import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

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


def test_a_bucket_that_is_down_for_long(trainer, tools, bucket):
    switch = tools.SwitchBucket(bucket)
    told = []
    pub = trainer.open(switch, on_failure=told.append)
    pub.flush()
    for episode in range(2):
        switch.down = True
        for step in range(30):
            trainer.publish(pub)  # what passes by itself is no news for the loop
            if step < 3:
                before = switch.failed
                tools.wait_until(lambda b=before: switch.failed > b, what="a try")
        assert len(told) == episode + 1  # it fails anew each time, which is not news
        assert isinstance(told[-1], BucketUnavailableError)
        assert "failed" in pub.stats().trouble and pub.stats().failures >= 3
        # One is being committed, everything else has become one.
        tools.wait_until(lambda: not pub._copier.waiting)
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


@pytest.mark.parametrize(
    "error, says",
    [
        (BucketDeniedError, "see that this process may write there"),
        (BucketFullError, "make room"),
        (ZeroDivisionError, "ZeroDivisionError"),
        (BucketUnavailableError, r"0\.2 s \(retry_seconds=\)"),
    ],
)
def test_what_does_not_pass_by_itself_stops_the_publisher(
    error, says, trainer, tools, bucket
):
    """Each later call says what to do; another publisher continues the run."""
    switch = tools.SwitchBucket(bucket, error=error)
    told = []
    pub = trainer.open(switch, retry_seconds=0.2, on_failure=told.append)
    pub.flush()
    switch.down = True
    trainer.publish(pub)
    tools.wait_until(lambda: pub._ledger.fatal is not None)
    for call in (lambda: trainer.publish(pub), pub.flush, pub.close):
        with pytest.raises(PublishError, match=says) as caught:
            call()
        for word in (bucket.url, "version 0", "new Publisher"):
            assert word in str(caught.value)
        cause = caught.value.__cause__
        assert isinstance(cause, error) or isinstance(cause.__cause__, error)
    tools.wait_until(lambda: len(told) == (2 if error is BucketUnavailableError else 1))
    switch.down = False
    with trainer.open(bucket) as pub:
        assert pub.flush() == 1
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_the_budget_is_one_without_a_success(trainer, tools, bucket):
    """A bucket that takes one object in ten is slow, not out of reach."""

    class Slow(FaultyBucket):
        calls = 0

        def _before(self, op, name):
            self.calls += 1
            if self.calls % 3:
                raise self._error(f"{op} of {name} failed")
            return super()._before(op, name)

    slow = Slow(bucket)
    slow.calls = -10
    pub = trainer.open(bucket)
    pub._epoch.bucket = slow
    pub._ledger._retry_seconds = 0.5
    for _ in range(6):
        trainer.publish(pub)
        pub.flush()
    pub.close()
    assert tools.check_all(trainer, bucket) >= 6


def test_an_on_failure_that_fails_is_logged(trainer, tools, bucket, caplog):
    switch = tools.SwitchBucket(bucket)
    with trainer.open(switch, on_failure=lambda error: 1 / 0) as pub:
        pub.flush()
        switch.down = True
        trainer.publish(pub)
        tools.wait_until(lambda: "on_failure failed" in caplog.text)
        switch.down = False
    assert tools.check_all(trainer, bucket) == 1


def test_a_dropped_publisher_commits_what_it_took_and_ends(trainer, tools, bucket):
    gated = tools.GatedBucket(bucket, "deltas/")
    pub = trainer.open(gated)
    pub.flush()
    gated.open_gate.clear()
    for _ in range(3):
        trainer.publish(pub, params=trainer.weights)
    gone = weakref.ref(pub)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del pub
        gc.collect()
    assert gone() is None
    gated.open_gate.set()
    tools.wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("jdelta-")]
    )
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_leaving_on_an_error_says_what_is_waited_for(trainer, tools, bucket, caplog):
    """An interrupt ends the wait; the error shown is the user's own."""
    switch = tools.SwitchBucket(bucket)

    def interrupt():
        tools.wait_until(lambda: "an interrupt ends it" in caplog.text)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the user's own"):
        with trainer.open(switch) as pub:
            pub.flush()
            switch.down = True
            trainer.publish(pub)
            thread.start()
            raise RuntimeError("the user's own")
    thread.join()
    assert time.monotonic() - start < 20
    assert "1 deltas wait" in caplog.text and "waiting 59 s more" in caplog.text
    assert "closed with work left: KeyboardInterrupt" in caplog.text


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
        tools.wait_until(lambda: not pub._copier.waiting)
        items = [*pub._backlog._items]
        assert len(items) <= 1
        sizes.append(sum(item.nbytes for item in items))
    elements = sum(array.size for array in trainer.weights.values())
    assert max(sizes) <= elements * (8 + 8 + 8)
    switch.down = False
    pub.close()
    assert tools.blob(load(bucket)[0]) == trainer.now


def test_close_with_a_dead_bucket_ends_in_time_and_says_why(trainer, tools, bucket):
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
    """Scratch space can be full, too; the next publisher finds room."""

    class NoScratch(FaultyBucket):
        full = True

        def scratch(self):
            if self.full:
                raise BucketFullError("disk full")
            return tmp_path

    full = NoScratch(bucket)
    pub = trainer.open(full)
    tools.wait_until(lambda: pub._ledger.fatal is not None)
    with pytest.raises(PublishError, match="disk full.*make room"):
        trainer.publish(pub)
    with pytest.raises(PublishError, match="disk full"):
        pub.close()
    full.full = False
    with trainer.open(full) as pub:
        pub.flush()
    assert tools.check_all(trainer, bucket) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_what_the_disk_says_of_an_anchor_is_sorted_as_a_buckets(
    code, trainer, tools, bucket, monkeypatch
):
    """Whoever writes the files, safetensors or we: errors of the disk have a kind."""

    def failing(*args):
        failing.calls += 1
        if failing.calls == 1:
            raise SafetensorError(f"I/O error: {os.strerror(code)} (os error {code})")
        save_file(*args)

    failing.calls = 0
    monkeypatch.setattr("jdelta.wire.anchor.save_file", failing)
    pub = trainer.open(bucket)
    if code == errno.EIO:  # may pass
        pub.close()
        assert pub.stats().failures == 1 and failing.calls == 2
        return
    with pytest.raises(PublishError, match="where an anchor is prepared"):
        pub.close()


def test_a_read_only_directory(trainer, tools, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    with pytest.raises(BucketDeniedError):
        trainer.open(str(folder))


def test_a_directory_that_becomes_unusable(trainer, tools, tmp_path):
    """Real errors of a real folder: a file stands where a folder is needed."""
    folder = tmp_path / "run"
    pub = trainer.open(str(folder))
    pub.flush()
    folder.rename(tmp_path / "away")
    folder.write_text("not a folder")
    trainer.publish(pub)
    tools.wait_until(lambda: pub._ledger.fatal is not None)
    for call in (lambda: trainer.publish(pub), pub.close):
        with pytest.raises(PublishError, match="a file is in the way"):
            call()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    with trainer.open(str(folder)):
        pass
    weights, manifest = load(str(folder))
    trainer.check(weights, manifest)
    assert tools.blob(weights) == trainer.now


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
