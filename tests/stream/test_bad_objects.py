"""Nothing a bucket can hold crashes, fools or stops a reader for good."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading

import numpy as np
import pytest

from jdelta.errors import (
    CorruptError,
    FencedError,
    FormatError,
    JDeltaError,
    PublishError,
    RunError,
    TreeError,
    VersionNotFoundError,
    WaitTimeoutError,
)
from jdelta.stream import Subscriber, load
from jdelta.stream.chain import Chain
from jdelta.stream.encode import encode_anchor, full_digests
from jdelta.stream.fetch import parallel
from jdelta.testing import FaultyBucket
from jdelta.wire import names
from jdelta.wire.control import EpochClaim, Pointer
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.state import State

CLEAR = (FormatError, VersionNotFoundError, RunError, TreeError)


class Run:
    """A closed run of versions 0 to 5 and a reader that holds version 2."""

    def __init__(self, trainer, tools, bucket, last=5, **options):
        self.trainer, self.tools, self.bucket = trainer, tools, bucket
        options.setdefault("anchor_share", 1e9)  # the deltas are larger than these
        pub = trainer.open(bucket, **options)
        for _ in range(last):
            trainer.publish(pub)
            pub.flush()
        pub.close(ended=False)
        self.last = last
        self.sub = Subscriber(bucket, poll=0.002)
        self.params = self.sub.restore(2)
        self.held = tools.blob(self.params)

    def delta(self, version, epoch=1):
        return names.delta_name(epoch, version, 0)

    def manifest(self, version, epoch=1):
        return names.manifest_name(epoch, version)

    def edit(self, version, change, epoch=1):
        """Changes a manifest's JSON and keeps it valid where it can be."""
        name = self.manifest(version, epoch)
        fields = json.loads(self.bucket.get(name))
        change(fields)
        self.bucket.put(name, json.dumps(fields).encode())

    def reader_is_stopped(self, timeout=0.15):
        """Following stops with a clear error, the weights untouched."""
        with pytest.raises(JDeltaError) as caught:
            for update in self.sub.updates(timeout=timeout):
                update.apply(self.params)
                self.trainer.check(self.params, update.state)
        return caught

    def reader_reaches(self, version):
        """The newest sound version is reached, and then nothing more comes."""
        self.reader_is_stopped()
        assert self.sub.version == version
        self.trainer.check(self.params, load(self.bucket, version)[1])

    def heals(self):
        """A later anchor brings the same reader, and a new one, to the newest."""
        pub = self.trainer.open(self.bucket)
        self.trainer.publish(pub)
        pub._copier.ask_whole(PublishError("the test wants an anchor"))
        self.trainer.publish(pub, params=self.trainer.weights)
        self.trainer.publish(pub)
        pub.close()
        newest = pub.version
        self.params, _ = self.tools.follow(self.sub, self.params, newest)
        assert self.tools.blob(self.params) == self.trainer.now
        assert self.tools.blob(load(self.bucket)[0]) == self.trainer.now
        with Subscriber(self.bucket) as fresh:
            assert self.tools.blob(fresh.restore()) == self.trainer.now


@pytest.fixture
def run(trainer, tools, bucket):
    made = Run(trainer, tools, bucket)
    yield made
    made.sub.close()


def damaged(data, how):
    """One kind of damage of an object's bytes."""
    kind, where = how
    at = int(where * (len(data) - 1))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "grow":
        return data + b"\0"
    return b""


DAMAGES = [
    *(("flip", where) for where in (0.0, 0.003, 0.05, 0.3, 0.6, 0.9, 1.0)),
    *(("cut", where) for where in (0.05, 0.5, 1.0)),
    ("grow", 0),
    ("empty", 0),
]


@pytest.mark.parametrize("how", DAMAGES, ids=str)
def test_damaged_delta(how, run):
    name = run.delta(4)
    sound = run.bucket.get(name)
    run.bucket.put(name, damaged(sound, how))
    with pytest.raises(CorruptError, match="e000001-v0000000004"):
        load(run.bucket)
    with pytest.raises(CorruptError):
        run.sub.restore(5)
    assert run.tools.blob(run.params) == run.held
    run.reader_reaches(3)
    # The newest that sound objects lead to.
    with Subscriber(run.bucket) as fresh:
        weights = fresh.restore()
        assert fresh.version == 3
        run.trainer.check(weights, load(run.bucket, 3)[1])
    run.bucket.put(name, sound)
    run.params, _ = run.tools.follow(run.sub, run.params, 5)
    assert run.tools.blob(run.params) == run.trainer.now


@pytest.mark.parametrize("how", DAMAGES, ids=str)
@pytest.mark.parametrize("version", [4, 5])
def test_damaged_manifest(how, version, run):
    name = run.manifest(version)
    sound = run.bucket.get(name)
    bad = damaged(sound, how)
    try:
        json.loads(bad)
        readable = True
    except ValueError:
        readable = False
    run.bucket.put(name, bad)
    try:
        weights, manifest = load(run.bucket)
        # What a flip left readable and consistent in itself says no more than it did.
        assert readable
        run.trainer.check(weights, manifest)
        return
    except CLEAR:
        pass
    with Subscriber(run.bucket) as fresh:
        weights = fresh.restore()
        assert fresh.version == version - 1
        run.trainer.check(weights, load(run.bucket, version - 1)[1])
    run.reader_is_stopped()
    assert run.sub.version in (2, version - 1)
    run.trainer.check(run.params, load(run.bucket, run.sub.version)[1])


@pytest.mark.parametrize("how", DAMAGES, ids=str)
@pytest.mark.parametrize("file", ["model-00001-of-00001.safetensors", "index"])
def test_damaged_anchor(how, file, run):
    file = "model.safetensors.index.json" if file == "index" else file
    name = f"{names.anchor_folder(1, 0)}/{file}"
    run.bucket.put(name, damaged(run.bucket.get(name), how))
    for version in (None, 0, 5):
        with pytest.raises(CorruptError):
            load(run.bucket, version)
    with Subscriber(run.bucket) as fresh, pytest.raises(CorruptError):
        fresh.restore()
    # Who has weights already does not need it.
    run.params, _ = run.tools.follow(run.sub, run.params, 5)
    assert run.tools.blob(run.params) == run.trainer.now
    run.heals()


@pytest.mark.parametrize("how", DAMAGES, ids=str)
@pytest.mark.parametrize("name", [names.POINTER, names.RUN, names.epoch_name(1)])
def test_damaged_control_object(how, name, run):
    run.bucket.put(name, damaged(run.bucket.get(name), how))
    try:
        weights, manifest = load(run.bucket)
    except CLEAR:
        assert name != names.POINTER
        run.reader_is_stopped()
        assert run.tools.blob(run.params) == run.held
        return
    assert manifest.version == 5
    run.trainer.check(weights, manifest)
    run.params, _ = run.tools.follow(run.sub, run.params, 5)
    assert run.tools.blob(run.params) == run.trainer.now


def test_every_single_byte_of_a_small_version(tools, fresh):
    """Each byte of each object flipped: right weights, or a clear error."""
    trainer = tools.Trainer(shapes={"w": ((3, 5), np.float32)})
    inner = fresh()
    with trainer.open(inner, anchor_every=1) as pub:
        trainer.publish(pub, share=0.3)
    objects = {info.name: inner.get(info.name) for info in inner.list()}
    assert len(objects) == 11
    sampled = 0
    for name, data in objects.items():
        for at in range(0, len(data), 1 + len(data) // 150):
            changed = bytearray(data)
            changed[at] ^= 1 << (at % 8)
            inner.put(name, bytes(changed))
            for version in (0, 1):
                try:
                    weights, manifest = load(inner, version)
                except CLEAR:
                    continue
                assert tools.blob(weights) in (trainer.opened[0], trainer.now)
                assert manifest.version == version
                expected = trainer.now if version else trainer.opened[0]
                assert tools.blob(weights) == expected, (name, at)
            sampled += 1
        inner.put(name, data)
    assert sampled > 800


def test_swapped_deltas(run):
    third, fourth = run.bucket.get(run.delta(3)), run.bucket.get(run.delta(4))
    run.bucket.put(run.delta(3), fourth)
    run.bucket.put(run.delta(4), third)
    with pytest.raises(CorruptError):
        load(run.bucket)
    run.reader_reaches(2)
    assert run.tools.blob(run.params) == run.held
    run.heals()


def test_swapped_manifests(run):
    third, fourth = run.bucket.get(run.manifest(3)), run.bucket.get(run.manifest(4))
    run.bucket.put(run.manifest(3), fourth)
    run.bucket.put(run.manifest(4), third)
    with pytest.raises(FormatError, match="swapped or replayed"):
        load(run.bucket)
    run.reader_reaches(2)
    assert run.tools.blob(run.params) == run.held
    run.heals()


def test_an_older_manifest_replayed_under_a_newer_name(run):
    run.bucket.put(run.manifest(6), run.bucket.get(run.manifest(5)))
    with pytest.raises(FormatError, match="swapped or replayed"):
        load(run.bucket)
    run.reader_is_stopped()
    assert run.sub.version in (2, 5)
    with Subscriber(run.bucket) as fresh:
        assert run.tools.blob(fresh.restore()) == run.trainer.now


def test_an_older_delta_replayed_with_a_manifest_that_agrees(run):
    """Hash and size are right; the digests of both ends do not meet."""
    old = run.bucket.get(run.delta(2))
    run.bucket.put(run.delta(4), old)

    def change(fields):
        earlier = json.loads(run.bucket.get(run.manifest(2)))
        fields["objects"][0]["size"] = len(old)
        fields["objects"][0]["sha256"] = hashlib.sha256(old).hexdigest()
        for name, entry in fields["tensors"].items():
            entry[0] = earlier["tensors"][name][0]

    run.edit(4, change)
    with pytest.raises(CorruptError, match="leads to digest"):
        load(run.bucket)
    run.reader_reaches(3)


@pytest.mark.parametrize("what", ["delta", "manifest"])
@pytest.mark.parametrize("pointer", [True, False])
def test_missing_in_the_middle(what, pointer, run):
    run.bucket.delete(getattr(run, what)(4))
    if not pointer:
        run.bucket.delete(names.POINTER)
    if what == "delta":
        with pytest.raises(CorruptError, match="is missing"):
            load(run.bucket)
    elif pointer:
        with pytest.raises(VersionNotFoundError, match="v0000000004"):
            load(run.bucket)
    with Subscriber(run.bucket) as fresh:
        fresh.restore()
        assert fresh.version == 3
    run.reader_is_stopped()
    assert run.sub.version in (2, 3)
    run.trainer.check(run.params, load(run.bucket, run.sub.version)[1])
    run.heals()


@pytest.mark.parametrize("every", [False, True])
def test_missing_in_the_middle_with_an_anchor_after_it(every, trainer, tools, bucket):
    run = Run(trainer, tools, bucket, last=8, anchor_every=6)
    for name in (run.delta(4), run.manifest(4), run.manifest(5)):
        saved = bucket.get(name)
        bucket.delete(name)
        params = run.sub.restore(2)
        params, seen = tools.follow(run.sub, params, 8, every=every)
        assert tools.blob(params) == trainer.now
        assert seen[-1].version == 8
        if every:
            assert [u.version for u in seen][-2:] == [7, 8]
        bucket.put(name, saved)
    assert run.sub.stats().healed >= 2
    run.sub.close()


def test_a_manifest_of_another_run(run, tools, fresh):
    other = fresh()
    foreign = tools.Trainer(seed=9)
    with foreign.open(other) as pub:
        for _ in range(5):
            foreign.publish(pub)
            pub.flush()
    run.bucket.put(run.manifest(4), other.get(run.manifest(4)))
    with pytest.raises(RunError, match="belongs to run"):
        load(run.bucket)
    with Subscriber(run.bucket) as fresh_sub:
        fresh_sub.restore()
        assert fresh_sub.version == 3
    run.reader_is_stopped()
    assert run.tools.blob(run.params) == run.held or run.sub.version == 3
    run.heals()


def test_every_object_of_another_run(run, tools, fresh):
    other = fresh()
    foreign = tools.Trainer(seed=9)
    with foreign.open(other) as pub:
        for _ in range(6):
            foreign.publish(pub)
            pub.flush()
    for info in other.list():
        run.bucket.put(info.name, other.get(info.name))
    with pytest.raises(RunError):
        for update in run.sub.updates(timeout=10):
            update.apply(run.params)
    assert run.tools.blob(run.params) == run.held
    with pytest.raises(RunError):
        run.trainer.open(run.bucket, run="mine")


def put(fields, at, value):
    fields["tensors"]["codes"][at] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(format_version=2),
        lambda f: f.update(format="other"),
        lambda f: f.update(version=1 << 70),
        lambda f: f.update(version=-1),
        lambda f: f.update(codec="small"),
        lambda f: f.update(shards=1),
        lambda f: f.update(surprise=1),
        lambda f: f.pop("tensors"),
        lambda f: f["objects"][0].update(size=-1),
        lambda f: f["objects"][0].update(size=1 << 62),
        lambda f: f["objects"][0].update(sha256="00"),
        lambda f: f["objects"][0].update(name="../../etc/passwd"),
        lambda f: f["objects"][0].update(name="/etc/passwd"),
        lambda f: f["objects"][0].update(name="a\\b"),
        lambda f: f["objects"].append(f["objects"][0]),
        lambda f: put(f, 0, -1),
        lambda f: put(f, 0, 0),
        lambda f: put(f, 0, 1 << 60),
        lambda f: put(f, 0, 1 << 50),
        lambda f: put(f, 0, 51),
        lambda f: put(f, 0, 1),
        lambda f: put(f, 0, True),
        lambda f: put(f, 1, "0" * 16),
        lambda f: put(f, 1, 0),
        lambda f: put(f, 2, 7),
        lambda f: put(f, 2, -1),
        lambda f: put(f, 2, None),
        lambda f: f["tensors"]["codes"].append(0),
        lambda f: f["tensors"]["codes"].pop(),
        lambda f: f["tensors"].update(codes={}),
        lambda f: f.update(digest="0" * 16),
        lambda f: f["tensors"].pop("codes"),
        lambda f: f["tensors"].update(more=f["tensors"]["codes"]),
        lambda f: f.update(base=[1, 2]),
        lambda f: f.update(base=[1, f["version"]]),
        lambda f: f.update(base=[7, 3]),
        lambda f: f.update(base=None),
        lambda f: f.update(kind="fold"),
        lambda f: f.update(kind="anchor"),
        lambda f: f.update(step="4"),
        lambda f: f.update(created=float("1e400")),
    ],
)
@pytest.mark.parametrize("version", [4, 5])
def test_a_manifest_that_lies(change, version, run):
    run.edit(version, change)
    with pytest.raises(CLEAR):
        load(run.bucket)
    with Subscriber(run.bucket) as fresh:
        weights = fresh.restore()
        assert fresh.version == version - 1
        run.trainer.check(weights, load(run.bucket, version - 1)[1])
    run.reader_is_stopped(0.05)
    assert run.sub.version in (2, 3, 4)
    run.trainer.check(run.params, load(run.bucket, run.sub.version)[1])


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_an_object_larger_than_its_tensors_can_need_is_not_fetched(kind, run):
    """A manifest of some KiB cannot make a reader fetch what it likes."""
    version = 5 if kind == "delta" else 0
    manifest = Manifest.parse(run.bucket.get(run.manifest(version)))
    ref = manifest.objects[0]
    huge = run.bucket.get(ref.name) + bytes(4 << 20)
    run.bucket.put(ref.name, huge)
    objects = (
        ref._replace(size=len(huge), sha256=hashlib.sha256(huge).hexdigest()),
        *manifest.objects[1:],
    )
    rewritten(run.bucket, run.manifest(version), objects=objects)
    watched = FaultyBucket(run.bucket, count_reads=True)
    with pytest.raises(CLEAR, match="nothing was fetched"):
        load(watched, version)
    fetched = [o.name for o in watched.operations if o.op in ("get", "open")]
    assert ref.name not in fetched


def rewritten(bucket, name, **changes):
    manifest = Manifest.parse(bucket.get(name))
    fields = {**vars(manifest), **changes}
    bucket.put(name, Manifest(**fields).to_json())


def test_a_base_that_is_not_the_one_before(run):
    """Consistent in itself, but its digests are not reached from there."""
    rewritten(run.bucket, run.manifest(4), base=VersionId(1, 2))
    with pytest.raises(FormatError, match="not on the one before"):
        load(run.bucket)
    run.reader_is_stopped()
    run.trainer.check(run.params, load(run.bucket, run.sub.version)[1])
    run.heals()


def test_a_delta_of_a_tensor_that_its_base_does_not_have(run):
    def change(fields):
        fields["tensors"]["more"] = fields["tensors"].pop("codes")

    run.edit(4, change)
    with pytest.raises((TreeError, CorruptError)):
        load(run.bucket)
    run.reader_reaches(3)
    with Subscriber(run.bucket) as fresh:
        fresh.restore()
        assert fresh.version == 3
    run.heals()


def test_stray_files_are_not_looked_at(run):
    for name in (
        f"{names.anchor_folder(1, 0)}/model-00002-of-00002.safetensors",
        f"{names.anchor_folder(1, 0)}/pytorch_model.bin",
        "deltas/e000001-v0000000004/00001.safetensors",
        "manifests/e000001/notes.txt",
        "manifests/e000001/v0000000003.json.bak",
        "manifests/README",
        "epochs/README.md",
        "epochs/000000.json",
        "epochs/x.json",
        "readers/odd.json",
        "whatever",
    ):
        run.bucket.put(name, b"\x80\x04stray")
    assert run.tools.check_all(run.trainer, run.bucket) == 5
    run.params, _ = run.tools.follow(run.sub, run.params, 5)
    assert run.tools.blob(run.params) == run.trainer.now


POINTERS = {
    "ahead": lambda run, p: {**p, "version": 4000},
    "behind": lambda run, p: {**p, "version": 1},
    "behind and the last": lambda run, p: {**p, "version": 1, "closed": 1},
    "an end in another epoch": lambda run, p: {**p, "closed": 2},
    "other run": lambda run, p: {**p, "run": "else"},
    "other epoch": lambda run, p: {**p, "epoch": 7},
    "newer format": lambda run, p: {**p, "format_version": 9},
    "huge version": lambda run, p: {**p, "version": 10**30},
    "garbage": lambda run, p: b"\xff\xfe{",
    "empty": lambda run, p: b"",
    "large": lambda run, p: b"[" * 3_000_000,
    "missing": lambda run, p: None,
}


@pytest.mark.parametrize("kind", POINTERS)
def test_a_pointer_is_never_trusted(kind, run):
    made = POINTERS[kind](run, json.loads(run.bucket.get(names.POINTER)))
    if made is None:
        run.bucket.delete(names.POINTER)
    else:
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        run.bucket.put(names.POINTER, data)
    assert run.tools.check_all(run.trainer, run.bucket) == 5
    run.params, _ = run.tools.follow(run.sub, run.params, 5)
    assert run.tools.blob(run.params) == run.trainer.now
    with run.trainer.open(run.bucket) as pub:
        run.trainer.publish(pub)
        assert pub.flush() == 6
    assert Pointer.parse(run.bucket.get(names.POINTER)).version == 6


def claim(run, epoch, base):
    document = EpochClaim(
        run=Manifest.parse(run.bucket.get(run.manifest(0))).run,
        epoch=epoch,
        base=base,
        writer="test",
        created=1.0,
    )
    return {**json.loads(document.to_json())}


def test_a_hole_in_the_claims(run):
    run.bucket.put(names.epoch_name(3), json.dumps(claim(run, 3, [1, 4])).encode())
    with pytest.raises(FormatError, match="000002.json is missing"):
        load(run.bucket)
    with pytest.raises(FormatError, match="000002.json is missing"):
        run.trainer.open(run.bucket)
    with Subscriber(run.bucket) as fresh, pytest.raises(FormatError):
        fresh.restore()


@pytest.mark.parametrize("base", [[2, 3], [3, 3], [1, -1], [0, 1], "1", [1], [1, 2, 3]])
def test_a_claim_that_goes_in_a_circle_or_nowhere(base, run):
    made = claim(run, 2, VersionId(1, 3))
    made["base"] = base
    run.bucket.put(names.epoch_name(2), json.dumps(made).encode())
    with pytest.raises(FormatError):
        load(run.bucket)
    run.reader_is_stopped()
    assert run.tools.blob(run.params) == run.held


def test_claims_that_are_swapped_or_of_another_run(run):
    with run.trainer.open(run.bucket):
        pass
    first, second = (run.bucket.get(names.epoch_name(e)) for e in (1, 2))
    run.bucket.put(names.epoch_name(1), second)
    run.bucket.put(names.epoch_name(2), first)
    with pytest.raises(FormatError, match="swapped"):
        load(run.bucket)
    run.bucket.put(names.epoch_name(1), first)
    foreign = {**json.loads(second), "run": "else"}
    run.bucket.put(names.epoch_name(2), json.dumps(foreign).encode())
    with pytest.raises(RunError, match="belongs to run else"):
        load(run.bucket)


def test_a_claim_based_on_a_version_that_was_never_committed(run):
    made = claim(run, 2, VersionId(1, 9))
    run.bucket.put(names.epoch_name(2), json.dumps(made).encode())
    try:
        weights, manifest = load(run.bucket)
    except CLEAR:
        pass
    else:
        run.trainer.check(weights, manifest)
    with Subscriber(run.bucket) as fresh:
        run.trainer.check(fresh.restore(), load(run.bucket, 5)[1])
        assert fresh.version == 5


def test_an_alternate_anchor_of_other_weights(run, tmp_path):
    """A sound anchor, but not of the version whose name it bears: passed over."""
    weights, _ = load(run.bucket, 1)
    bits = {name: run.tools.raw(array) for name, array in weights.items()}
    chain = Chain(run.bucket)
    chain.latest()
    genuine = chain.state(VersionId(1, 3))
    for digests in (full_digests(bits), genuine.digests):
        state = State.new(genuine.run, genuine.id, 3, {}, genuine.specs, digests)
        with encode_anchor(bits, state, run.bucket, alternate=True) as attempt:
            for name, data in attempt.objects:
                run.bucket.put(name, data)
            run.bucket.put(attempt.name, attempt.document)
        assert run.tools.check_all(run.trainer, run.bucket) == 5


def test_a_damaged_anchor_made_later_is_passed_over(trainer, tools, bucket):
    run = Run(trainer, tools, bucket, last=9, anchor_every=3)
    anchors = [n for i in bucket.list("anchors/") if "-alt/" in (n := i.name)]
    assert anchors
    for name in anchors:
        bucket.put(name, damaged(bucket.get(name), ("flip", 0.5)))
    assert tools.check_all(trainer, bucket) == 9
    run.sub.close()


def test_a_reader_on_a_fenced_publishers_version_moves_over(
    make_trainer, tools, bucket
):
    """The zombie commits after the takeover; nobody stays on its branch."""
    zombie_side = make_trainer(5)
    gated = tools.GatedBucket(bucket, "manifests/e000001/v0000000003.json")
    zombie = zombie_side.open(gated)
    for _ in range(2):
        zombie_side.publish(zombie)
        zombie.flush()
    gated.open_gate.clear()
    zombie_side.publish(zombie, share=0.2)
    tools.wait_until(lambda: gated.waiting)

    # A copy of the trainer as it was at version 2 takes over.
    side = make_trainer(6)
    weights, _ = load(bucket)
    side.weights = {name: array.copy() for name, array in weights.items()}
    side.step, side.states = 2, dict(zombie_side.states)
    side.opened = [*zombie_side.opened]
    pub = side.open(bucket)
    gated.open_gate.set()
    tools.wait_until(lambda: zombie._ledger.fatal is not None)
    assert bucket.stat("manifests/e000001/v0000000003.json")

    # This reader took the zombie's version before anybody could know better.
    sub = Subscriber(bucket, poll=0.002)
    branch = zombie_side.weights
    params = {name: array.copy() for name, array in branch.items()}
    sub.latest()
    zombies = VersionId(1, 3)
    sub._held = State.of(
        Manifest.parse(bucket.get("manifests/e000001/v0000000000.json"))
    )
    sub._held = dataclasses.replace(sub._held, id=zombies)
    for _ in range(2):  # two versions, not one merged
        side.publish(pub)
        pub.flush()
    pub.close()
    for every in (False, True):
        params, seen = tools.follow(sub, params, pub.version, every=every)
        assert tools.blob(params) == side.now
        if not every:
            assert seen[0].kind == "anchor"
    tools.check_all(side, bucket)
    with pytest.raises(FencedError):
        zombie_side.publish(zombie)
    with pytest.raises(FencedError):
        zombie.close()
    sub.close()


@pytest.mark.parametrize("kind", ["conditional", "plain"])
@pytest.mark.parametrize("existing", [False, True])
def test_publishers_opened_at_the_same_moment(
    kind, existing, make_trainer, tools, fresh
):
    import threading

    from jdelta.bucket import MemoryBucket

    for _ in range(5):
        inner = fresh(MemoryBucket if kind == "conditional" else tools.PlainBucket)
        sides = [make_trainer(20) for _ in range(4)]
        if existing:
            with sides[0].open(inner) as pub:
                pub.flush()
        barrier = threading.Barrier(len(sides))
        outcomes = []

        def act(side, inner=inner, barrier=barrier, outcomes=outcomes):
            rng = np.random.default_rng(id(side))
            side.rng = rng
            barrier.wait()
            try:
                with side.open(inner) as pub:
                    for _ in range(3):
                        side.publish(pub)
                        pub.flush()
                outcomes.append((pub.epoch, side, None))
            except JDeltaError as error:
                outcomes.append((0, side, error))  # noqa: B023

        threads = [threading.Thread(target=act, args=(side,)) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == len(sides)
        won = [o for o in outcomes if o[2] is None]
        for _, _, error in outcomes:
            assert error is None or isinstance(error, (FencedError, PublishError)), (
                error
            )
        weights, manifest = load(inner)
        if kind == "conditional":
            assert won, [o[2] for o in outcomes]
        if won:
            # The newest epoch that finished is what everybody reads.
            last = max(won, key=lambda o: o[0])
            if manifest.epoch == last[0]:
                assert tools.blob(weights) == last[1].now
        if manifest.step is not None:
            assert any(
                tools.blob(weights) == s.states.get(manifest.step) for s in sides
            )


def test_a_wait_on_a_broken_run_says_what_is_wrong(run):
    run.bucket.put(run.manifest(3), b"{}")
    caught = run.reader_is_stopped()
    assert caught.type is WaitTimeoutError
    assert "manifest" in str(caught.value) or "damaged" in str(caught.value)


def test_each_item_is_worked_on_once_when_threads_run_out(monkeypatch):
    """A pool that refuses a thread has queued the work for the ones it has."""
    start, started = threading.Thread.start, []

    def refusing(thread):
        if len(started) >= 2 and thread.name.startswith("jdelta_"):
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for _ in range(20):
        started.clear()
        seen = []
        assert parallel(lambda i, seen=seen: seen.append(i) or -i, range(100)) == [
            -i for i in range(100)
        ]
        assert sorted(seen) == list(range(100))
    with pytest.raises(ZeroDivisionError):
        parallel(lambda i: 1 // (i - 50), range(100))
    assert parallel(abs, []) == []
