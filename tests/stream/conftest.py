"""A trainer of plain NumPy arrays that remembers what it had, bit for bit."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid

import ml_dtypes
import numpy as np
import pytest

from jdelta.bucket import Capabilities, MemoryBucket
from jdelta.errors import JDeltaError
from jdelta.stream import Publisher, load
from jdelta.testing import FaultyBucket
from jdelta.wire.changes import Changes

SHAPES = {
    "block.kernel": ((24, 33), ml_dtypes.bfloat16),
    "block.bias": ((33,), np.float32),
    "block.scale": ((), np.float16),
    "block.empty": ((0, 3), ml_dtypes.bfloat16),
    "codes": ((50,), np.int8),
    "ids": ((5,), np.int64),
}


def raw(array):
    """An array's bits, flat, sharing its memory."""
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def blob(weights):
    """All bytes of a dict of arrays, names and dtypes among them."""
    return b"".join(
        f"{name}:{weights[name].dtype}:{weights[name].shape};".encode()
        + weights[name].tobytes()
        for name in sorted(weights)
    )


class Trainer:
    """Changes random bits of its weights at every step and keeps every state.

    Attributes:
        weights: The weights now, by name; any bit pattern, NaN payloads among them.
        step: Steps made.
        states: The bytes it had after each step.
        opened: The bytes it had when it opened publishers: what an anchor without a
            step must equal.
    """

    def __init__(self, seed=0, shapes=None):
        self.rng = np.random.default_rng(seed)
        self.weights = {}
        for name, (shape, dtype) in (shapes or SHAPES).items():
            width = np.dtype(dtype).itemsize
            bits = self.rng.integers(0, 256, (*shape, width), dtype=np.uint8)
            self.weights[name] = bits.reshape(-1).view(dtype).reshape(shape)
        self.step = 0
        self.states = {}
        self.opened = []

    def open(self, bucket, **options):
        """A publisher of the weights as they are now."""
        self.opened.append(blob(self.weights))
        return Publisher(bucket, self.weights, **options)

    def train(self, share=0.05):
        """Makes a step; returns its delta."""
        delta = {}
        for name, array in self.weights.items():
            bits = raw(array)
            old = bits.copy()
            count = int(np.ceil(bits.size * share)) if share else 0
            at = self.rng.choice(bits.size, count, replace=False) if count else []
            flips = self.rng.integers(1, 1 << 7, count).astype(bits.dtype)
            bits[at] ^= flips << self.rng.integers(0, 2, count).astype(bits.dtype)
            delta[name] = Changes.between(old, bits)
        self.step += 1
        self.states[self.step] = blob(self.weights)
        return delta

    def publish(self, pub, share=0.05, **options):
        """Makes a step and publishes it."""
        delta = self.train(share)
        pub.publish(delta, step=self.step, **options)

    def check(self, weights, manifest):
        """Asserts that weights are, bit for bit, what the trainer had there."""
        found = blob(weights)
        if manifest.step is None:
            assert found in self.opened, f"version {manifest.version} was never had"
        else:
            assert found == self.states[manifest.step], (
                f"version {manifest.version} is not the trainer's step {manifest.step}"
            )

    @property
    def now(self):
        """The bytes of the weights as they are."""
        return blob(self.weights)

    @property
    def sha256(self):
        """Of `now`."""
        return hashlib.sha256(self.now).hexdigest()


def check_all(trainer, bucket):
    """Every retained version of a bucket is the trainer's; returns the newest."""
    _, manifest = load(bucket)
    for version in range(manifest.version + 1):
        weights, found = load(bucket, version)
        trainer.check(weights, found)
    return manifest.version


def follow(sub, params, until, *, every=False, timeout=20.0):
    """Applies updates until `until` is held; returns the weights and the updates."""
    seen = []
    if sub.version == until:
        return params, seen
    for update in sub.updates(every=every, timeout=timeout):
        if params is None:
            params = {k: v.copy() for k, v in update.shaped_weights().items()}
        params = update.apply(params)
        seen.append(update)
        if sub.version == until:
            break
    assert sub.version == until
    return params, seen


def wait_until(condition, timeout=20.0, what="the condition"):
    """Polls; a test waits for what it needs, never for a while."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.002)


def abandon(pub):
    """What is left of a publisher in a process that died: no thread of it acts."""
    try:
        pub.close(timeout=0.0)
    except JDeltaError:
        pass


class GatedBucket(FaultyBucket):
    """A bucket whose writes of some objects wait until a gate opens."""

    def __init__(self, inner, prefix=""):
        super().__init__(inner)
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.prefix = prefix
        self.waiting = 0

    def _before(self, op, name):
        if op.startswith(("put", "replace")) and name.startswith(self.prefix):
            self.waiting += 1
            assert self.open_gate.wait(60), "the test never opened the gate"
            self.waiting -= 1
        return super()._before(op, name)


class SwitchBucket(FaultyBucket):
    """A bucket that can be down: every write then raises `error`."""

    def __init__(self, inner, **options):
        super().__init__(inner, **options)
        self.down = False
        self.failed = 0

    def _before(self, op, name):
        if self.down and op.startswith(("put", "replace", "delete")):
            self.failed += 1
            # As a real store: no two messages of one cause are the same text.
            raise self._error(f"{op} of {name} failed (request {uuid.uuid4().hex})")
        return super()._before(op, name)


class PlainBucket(MemoryBucket):
    """A store without conditional writes, as the Hub's."""

    capabilities = Capabilities(
        put_if_absent=False, replace_if_unchanged=False, watch=False
    )


@pytest.fixture
def make_trainer():
    return Trainer


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def bucket():
    """A fresh bucket in memory."""
    made = MemoryBucket(uuid.uuid4().hex)
    yield made
    made.drop()


@pytest.fixture
def fresh():
    """Makes fresh buckets in memory."""
    made = []

    def make(kind=MemoryBucket):
        made.append(kind(uuid.uuid4().hex))
        return made[-1]

    yield make
    for one in made:
        one.drop()


@pytest.fixture
def tools():
    """The helpers of this file, for tests (which cannot import it)."""
    return Tools


class Tools:
    Trainer = Trainer
    GatedBucket = GatedBucket
    SwitchBucket = SwitchBucket
    PlainBucket = PlainBucket
    blob = staticmethod(blob)
    raw = staticmethod(raw)
    check_all = staticmethod(check_all)
    follow = staticmethod(follow)
    wait_until = staticmethod(wait_until)
    abandon = staticmethod(abandon)


@pytest.fixture(autouse=True)
def no_thread_left():
    """Whatever a test does, the threads it started end with it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("jdelta-")
    ]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.01)
