"""PyTorch receivers: real tensors, a real run in a directory, bit for bit."""

import copy
import re
import subprocess
import sys
import tracemalloc
import uuid
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jdelta  # noqa: E402
import jdelta.torch  # noqa: E402
from jdelta.bucket import MemoryBucket  # noqa: E402
from jdelta.errors import StateMismatchError, TreeError  # noqa: E402
from jdelta.testing import FaultyBucket  # noqa: E402
from jdelta.torch import _writes  # noqa: E402
from jdelta.torch._leaves import find_leaves  # noqa: E402
from jdelta.wire import dtypes  # noqa: E402
from jdelta.wire.changes import Changes  # noqa: E402

pytestmark = pytest.mark.interop

BF16 = ml_dtypes.bfloat16
MIXED = {
    "norm": ((7,), np.float32),  # first, so that a receiver could take it for all
    "embed": ((64, 32), BF16),
    "layers.0.kernel": ((16, 8, 24), BF16),
    "layers.0.half": ((33,), np.float16),
    "layers.0.double": ((5, 3), np.float64),
    "layers.0.e4m3": ((65,), ml_dtypes.float8_e4m3fn),
    "layers.0.e5m2": ((4, 9), ml_dtypes.float8_e5m2),
    "layers.0.e8m0": ((9,), ml_dtypes.float8_e8m0fnu),
    "mask": ((6, 6), np.bool_),
    "scale": ((), np.float32),
    "empty": ((0, 4), BF16),
    "complex": ((6,), np.complex64),
    **{f"i{w}": ((17,), f"i{w}") for w in (1, 2, 4, 8)},
    **{f"u{w}": ((17,), f"u{w}") for w in (1, 2, 4, 8)},
}
NAMES = {
    "norm": torch.float32,
    "embed": torch.bfloat16,
    "layers.0.half": torch.float16,
    "layers.0.double": torch.float64,
    "layers.0.e4m3": torch.float8_e4m3fn,
    "layers.0.e5m2": torch.float8_e5m2,
    "mask": torch.bool,
    "complex": torch.complex64,
    "i8": torch.int64,
    "u2": torch.uint16,
}


def random_array(rng, shape, dtype):
    """Any bit pattern: NaN payloads, -0.0, subnormals and all."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


def flat(array):
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


class Trainer:
    """A publisher of NumPy weights, and the truth about them."""

    def __init__(self, path, shapes, seed=0, **options):
        self.rng = np.random.default_rng(seed)
        self.params = {
            name: random_array(self.rng, *what) for name, what in shapes.items()
        }
        self.pub = jdelta.Publisher(str(path), self.params, **options)
        self.pub.flush()

    def step(self, share=0.05, only=None):
        """Publishes random changes and returns their version."""
        delta = {}
        for name, old in self.params.items():
            if only is not None and name not in only:
                continue
            new = old.copy()
            where = self.rng.random(old.shape) < share
            new[where] = random_array(self.rng, old.shape, old.dtype)[where]
            delta[name] = Changes.between(flat(old), flat(new))
            self.params[name] = new
        return self.publish(delta)

    def publish(self, delta):
        self.pub.publish(delta)
        return self.pub.flush()

    def put(self, name, positions, bits):
        """Publishes given bits at given positions of one tensor."""
        new = self.params[name].copy()
        flat(new)[positions] = bits
        changes = Changes.between(flat(self.params[name]), flat(new))
        self.params[name] = new
        return self.publish({name: changes})


@pytest.fixture
def trainer(tmp_path):
    made = []

    def make(shapes=MIXED, **options):
        made.append(Trainer(tmp_path / "run", shapes, **options))
        return made[-1]

    yield make
    for one in made:
        one.pub.close()


@pytest.fixture
def subscribe(tmp_path):
    opened = []

    def make(**options):
        opened.append(jdelta.Subscriber(str(tmp_path / "run"), poll=0.01, **options))
        return opened[-1]

    yield make
    for sub in opened:
        sub.close()


def bits_of(tensor):
    tensor = tensor.detach().contiguous().reshape(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize]).cpu().numpy().tobytes()


def same(tensors, params):
    assert set(tensors) == set(params)
    for name, array in params.items():
        assert tuple(tensors[name].shape) == array.shape, name
        assert bits_of(tensors[name]) == array.tobytes(), name


def snapshot(tensors):
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def follow(sub, **options):
    return sub.updates(timeout=20, **options)


class Tied(torch.nn.Module):
    """An embedding that is its own head, a layer, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16, dtype=torch.bfloat16)
        self.layer = torch.nn.Linear(16, 8)
        self.head = torch.nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.full((4,), 7.0), persistent=False)


TIED = {
    "embed.weight": ((32, 16), BF16),
    "layer.weight": ((8, 16), np.float32),
    "layer.bias": ((8,), np.float32),
    "seen": ((3,), np.int64),
}

# -- restoring


def test_restore_equals_the_trainer_in_every_dtype(trainer, subscribe):
    run, sub = trainer(), subscribe()
    run.step()
    tensors = jdelta.torch.restore(sub)
    same(tensors, run.params)
    for name, dtype in NAMES.items():
        assert tensors[name].dtype == dtype
    assert sub.version == 1
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_restore_takes_an_older_version(trainer, subscribe):
    run, sub = trainer(), subscribe()
    first = dict(run.params)
    run.step()
    same(jdelta.torch.restore(sub, version=0), first)
    assert sub.version == 0


def test_restore_refuses_a_dtype_torch_lacks(trainer, subscribe, monkeypatch):
    trainer({"w": ((4,), ml_dtypes.float8_e8m0fnu)})
    sub = subscribe()
    monkeypatch.delitem(jdelta.torch._dtypes._DTYPES, "F8_E8M0")  # an older torch
    with pytest.raises(TreeError, match="F8_E8M0"):
        jdelta.torch.restore(sub)
    assert sub.version is None


# -- following


def test_twenty_deltas_bit_for_bit(trainer, subscribe):
    run, sub = trainer(), subscribe()
    tensors = jdelta.torch.restore(sub)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    updates = follow(sub)
    for _ in range(20):
        run.step(share=run.rng.choice([0.001, 0.05, 0.9]))
        update = next(updates)
        assert update.kind == "delta"
        assert jdelta.torch.apply(update, tensors) is tensors
        same(tensors, run.params)
        assert sub.version == update.version
        assert {"fetch", "decode", "stage", "apply"} <= set(update.times)
    assert addresses == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert sub.stats().times["apply"] > 0


def test_nan_payloads_and_signed_zeros_survive(trainer, subscribe):
    run, sub = trainer({"w": ((8,), BF16)}), subscribe()
    tensors = jdelta.torch.restore(sub)
    patterns = np.array(
        [0x7FC1, 0xFF81, 0x8000, 0x0000, 0x7F80, 0x0001, 0xFFFF, 0x8001]
    )
    for shift in range(3):
        run.put("w", np.arange(8), np.roll(patterns, shift).astype(np.uint16))
        jdelta.torch.apply(next(follow(sub)), tensors)
        same(tensors, run.params)


def test_deltas_not_applied_are_part_of_the_next(trainer, subscribe):
    run, sub = trainer(), subscribe()
    tensors = jdelta.torch.restore(sub)
    updates = follow(sub, every=True)
    before = dict(run.params)
    run.step()
    first = next(updates)
    run.step()
    second = next(updates)
    same(tensors, before)
    jdelta.torch.apply(second, tensors)
    same(tensors, run.params)
    with pytest.raises(StateMismatchError, match="made against"):
        jdelta.torch.apply(first, tensors)
    same(tensors, run.params)
    assert sub.version == 2


def test_anchor_update_replaces_everything(trainer, subscribe):
    run, sub = trainer(), subscribe()
    run.step()
    tensors = {n: t.zero_() for n, t in jdelta.torch.restore(subscribe()).items()}
    tensors["embed"] = torch.zeros(32, 64, dtype=torch.bfloat16).T
    update = next(follow(sub))
    assert update.kind == "anchor"
    jdelta.torch.apply(update, tensors)
    same(tensors, run.params)
    run.step()
    jdelta.torch.apply(next(follow(sub)), tensors)
    same(tensors, run.params)


# -- modules


def test_module_in_training_follows(trainer, subscribe):
    run, sub = trainer(TIED), subscribe()
    model = Tied().train()
    head = model.head.weight
    assert jdelta.torch.load_into(sub, model) == 0
    updates = follow(sub)
    for _ in range(3):
        run.step(share=0.2)
        assert jdelta.torch.apply(next(updates), model) is model
        state = model.state_dict()
        same({name: state[name] for name in TIED}, run.params)
    # One copy was published; both users see it, through the memory they share.
    assert bits_of(model.head.weight) == run.params["embed.weight"].tobytes()
    assert model.head.weight is head is model.embed.weight
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert torch.equal(model.cache, torch.full((4,), 7.0))


def test_state_dict_of_a_tied_module(trainer, subscribe):
    run, sub = trainer(TIED), subscribe()
    model = Tied()
    state = model.state_dict()
    assert "head.weight" in state
    jdelta.torch.load_into(sub, state)
    run.step()
    jdelta.torch.apply(next(follow(sub)), state)
    assert bits_of(model.head.weight) == run.params["embed.weight"].tobytes()


def test_untied_head_is_not_passed_over(trainer, subscribe):
    trainer(TIED)
    sub, model = subscribe(), Tied()
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    before = snapshot(model.state_dict())
    with pytest.raises(TreeError, match="unexpected.*head.weight"):
        jdelta.torch.load_into(sub, model)
    assert snapshot(model.state_dict()) == before
    assert sub.version is None


def test_two_published_tensors_may_not_be_one_here(trainer, subscribe):
    trainer({"embed.weight": ((32, 16), BF16), "head.weight": ((32, 16), BF16)})
    shared = torch.zeros(32, 16, dtype=torch.bfloat16)
    with pytest.raises(TreeError, match="share memory"):
        jdelta.torch.load_into(
            subscribe(), {"embed.weight": shared, "head.weight": shared}
        )
    assert not shared.any()


def test_parts_of_one_buffer_are_fine(trainer, subscribe):
    run, sub = trainer({"q": ((8, 16), BF16), "k": ((4, 16), BF16)}), subscribe()
    fused = torch.zeros(12, 16, dtype=torch.bfloat16)
    target = {"q": fused[:8], "k": fused[8:]}
    jdelta.torch.load_into(sub, target)
    run.step(share=0.3)
    jdelta.torch.apply(next(follow(sub)), target)
    expected = np.concatenate([run.params["q"], run.params["k"]])
    assert bits_of(fused) == expected.tobytes()


def test_backward_through_an_older_graph_is_refused(trainer, subscribe):
    run, sub = trainer(TIED), subscribe()
    model = Tied()
    jdelta.torch.load_into(sub, model)
    with torch.no_grad():
        model.layer.weight.fill_(0.5)  # finite
    jdelta.torch.load_into(sub, model)
    x = torch.ones(2, 16, requires_grad=True)
    loss = model.layer(x).sum()
    run.step(share=0.5)
    jdelta.torch.apply(next(follow(sub)), model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.layer(x).sum().backward()  # a new graph is fine
    assert model.layer.weight.grad is not None


def test_parameters_from_inference_mode(trainer, subscribe):
    run, sub = trainer({"weight": ((6, 5), np.float32)}), subscribe()
    with torch.inference_mode():
        target = {"weight": torch.zeros(5, 6).T}
    jdelta.torch.load_into(sub, target)
    run.step(share=0.5)
    jdelta.torch.apply(next(follow(sub)), target)
    same(target, run.params)
    normal = torch.nn.Linear(5, 6, bias=False)
    version = normal.weight._version
    with torch.inference_mode():
        jdelta.torch.load_into(sub, normal)
    same(normal.state_dict(), run.params)
    assert normal.weight._version > version


def test_parameter_subclasses_and_extra_state(trainer, subscribe):
    class Weight(torch.nn.Parameter):
        pass

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Weight(torch.zeros(3, 4))

        def get_extra_state(self):
            return {"scale": 1}

        def set_extra_state(self, state):
            pass

    run, sub, layer = trainer({"weight": ((3, 4), np.float32)}), subscribe(), Layer()
    jdelta.torch.load_into(sub, layer)
    assert bits_of(layer.weight) == run.params["weight"].tobytes()
    assert type(layer.weight) is Weight


# -- names


@pytest.mark.parametrize("kind", ["mapping", "function"])
def test_names_lead_to_the_targets_own(trainer, subscribe, kind):
    run, sub = trainer({"a.kernel": ((4, 6), BF16), "b": ((3,), BF16)}), subscribe()
    names = {"a.kernel": "model.a.weight", "b": "model.b"}
    names = names if kind == "mapping" else names.__getitem__
    target = {
        "model.a.weight": torch.zeros(4, 6, dtype=torch.bfloat16),
        "model.b": torch.zeros(3, dtype=torch.bfloat16),
    }
    jdelta.torch.load_into(sub, target, names=names)
    run.step(share=0.5)
    jdelta.torch.apply(next(follow(sub)), target, names=names)
    renamed = {
        "model.a.weight": run.params["a.kernel"],
        "model.b": run.params["b"],
    }
    same(target, renamed)
    with pytest.raises(TreeError, match="missing.*a.kernel"):
        jdelta.torch.load_into(sub, target)


def test_two_names_to_one_are_refused(trainer, subscribe):
    trainer({"a": ((4,), BF16), "b": ((4,), BF16)})
    target = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.raises(TreeError, match="'a' and 'b' to 'w'"):
        jdelta.torch.load_into(subscribe(), target, names=lambda name: "w")


# -- refusals before any write


def spoil(target, case):
    """Makes the last tensor of a good target one that must be refused."""
    good = target["z"]
    if case == "missing":
        del target["z"]
    elif case == "unexpected":
        target["lora"] = good.clone()
    elif case == "shape":
        target["z"] = good.reshape(6, 4)
    elif case == "dtype":
        target["z"] = good.half()
    elif case == "not a tensor":
        target["z"] = np.zeros((4, 6), np.float32)
    elif case == "meta":
        target["z"] = torch.zeros(4, 6, dtype=torch.bfloat16, device="meta")
    elif case == "expanded":
        target["z"] = good[:1].expand(4, 6)
    elif case == "sparse":
        target["z"] = good.to_sparse()
    elif case == "released":
        target["z"] = good.clone()  # torch's own memory, unlike what restore gives
        target["z"].untyped_storage().resize_(0)
    elif case == "lazy":
        target["z"] = torch.nn.UninitializedParameter()
    elif case == "interleaved":
        both = torch.zeros(4, 12, dtype=torch.bfloat16)
        target["y"], target["z"] = both[:, :6], both[:, 6:]
    elif case == "subclass":
        target["z"] = good.as_subclass(type("Wrapper", (torch.Tensor,), {}))


@pytest.mark.parametrize("kind", ["delta", "anchor"])
@pytest.mark.parametrize(
    "case, match",
    [
        ("missing", "missing"),
        ("unexpected", "unexpected.*lora"),
        ("shape", r"bf16\[4, 6\], got bf16\[6, 4\]"),
        ("dtype", "got f16"),
        ("not a tensor", "got ndarray"),
        ("meta", "meta device"),
        ("expanded", "expanded"),
        ("sparse", "sparse"),
        ("released", "memory is not there"),
        ("lazy", "not initialised"),
        ("interleaved", "interleave"),
        ("subclass", "Wrapper"),
    ],
)
def test_refused_before_any_write(trainer, subscribe, kind, case, match):
    run = trainer({n: ((4, 6), BF16) for n in ("x", "y", "z")})
    sub = subscribe()
    target = jdelta.torch.restore(sub)
    run.step(share=0.9)
    update = next(follow(sub)) if kind == "delta" else sub.whole()
    assert update.kind == kind
    spoil(target, case)
    before = bits_of(target["x"]), sub.version
    with pytest.raises(TreeError, match=match):
        jdelta.torch.apply(update, target)
    assert (bits_of(target["x"]), sub.version) == before


def test_a_copy_made_by_a_state_dict_hook_is_refused(trainer, subscribe):
    trainer({"weight": ((3, 4), np.float32)})
    layer = torch.nn.Linear(4, 3, bias=False)

    def widen(module, state, prefix, metadata):
        state["weight"] = state["weight"].detach().clone()

    layer.register_state_dict_post_hook(widen)
    with pytest.raises(TreeError, match="gives a copy"):
        jdelta.torch.load_into(subscribe(), layer)


def test_neither_module_nor_dict(trainer, subscribe):
    trainer({"weight": ((3, 4), np.float32)})
    with pytest.raises(TreeError, match="got list"):
        jdelta.torch.load_into(subscribe(), [torch.zeros(3, 4)])


# -- wrong states


def test_wrong_base_is_refused_and_nothing_written(trainer, subscribe):
    """A receiver that missed version 1 refuses version 2 until it is brought up."""
    run = trainer()
    ahead, behind = subscribe(), subscribe()
    current, stale = jdelta.torch.restore(ahead), jdelta.torch.restore(behind)
    run.step(share=0.3)
    updates = follow(ahead)
    jdelta.torch.apply(next(updates), current)
    run.step(share=0.3)
    update = next(updates)
    before = snapshot(stale)
    with pytest.raises(StateMismatchError, match="nothing was written"):
        jdelta.torch.apply(update, stale)
    assert snapshot(stale) == before
    assert ahead.version == 1
    jdelta.torch.apply(update, current)
    for late in follow(behind):
        jdelta.torch.apply(late, stale)
        if late.version == ahead.version:
            break
    same(current, run.params)
    same(stale, run.params)


def test_twice_is_refused(trainer, subscribe):
    run, sub = trainer(), subscribe()
    tensors = jdelta.torch.restore(sub)
    run.step()
    update = next(follow(sub))
    jdelta.torch.apply(update, tensors)
    with pytest.raises(StateMismatchError):
        jdelta.torch.apply(update, tensors)
    same(tensors, run.params)


def test_a_second_copy_takes_the_same_update(trainer, subscribe):
    run, sub = trainer(), subscribe()
    one = jdelta.torch.restore(sub)
    two = copy.deepcopy(one)
    run.step()
    update = next(follow(sub))
    for tensors in (one, two):
        jdelta.torch.apply(update, tensors)
        same(tensors, run.params)


@pytest.mark.parametrize("name", ["norm", "embed", "u8", "mask", "layers.0.e5m2"])
def test_one_flipped_bit_at_a_touched_element(trainer, subscribe, name):
    run, sub = trainer(), subscribe()
    tensors = jdelta.torch.restore(sub)
    run.step(share=0.2)
    update = next(follow(sub))
    position = int(update.patch[name].positions[-1])
    word = tensors[name].view(-1)[position : position + 1].view(torch.uint8)
    word[0] ^= 1
    before = snapshot(tensors)
    with pytest.raises(StateMismatchError, match=repr(name)):
        jdelta.torch.apply(update, tensors)
    assert snapshot(tensors) == before
    word[0] ^= 1
    jdelta.torch.apply(update, tensors)
    same(tensors, run.params)


class Cut(Exception):
    pass


def test_torn_write_is_known_and_heals_with_an_anchor(trainer, subscribe):
    run, sub = trainer(), subscribe()
    tensors = jdelta.torch.restore(sub)
    run.step(share=0.3)
    updates = follow(sub)
    update = next(updates)
    with pytest.raises(Cut), update.writing():
        tensors["embed"][:8] = 0  # what a write cut short leaves behind
        raise Cut
    assert sub.version is None
    with pytest.raises(StateMismatchError):
        jdelta.torch.apply(update, tensors)
    run.step()
    update = next(updates)
    assert update.kind == "anchor"
    jdelta.torch.apply(update, tensors)
    same(tensors, run.params)
    assert sub.version == 2


def test_load_into_cut_short_is_torn(trainer, subscribe, monkeypatch):
    run, sub = trainer({"x": ((64,), BF16), "y": ((64,), BF16)}), subscribe()
    tensors = jdelta.torch.restore(sub)
    run.step(share=0.5)

    def fail(devices):  # after the writes
        if sub.version is None:
            raise Cut

    monkeypatch.setattr(jdelta.torch._receive, "synchronize", fail)
    with pytest.raises(Cut):
        jdelta.torch.load_into(sub, tensors)
    assert sub.version is None
    monkeypatch.undo()
    jdelta.torch.load_into(sub, tensors)
    same(tensors, run.params)
    run.step()
    jdelta.torch.apply(next(follow(sub)), tensors)
    same(tensors, run.params)


# -- memory layouts and devices


@pytest.mark.parametrize("layout", ["transposed", "permuted", "sliced", "offset"])
def test_layouts(trainer, subscribe, layout):
    run, sub = trainer({"w": ((6, 5, 8), BF16), "e": ((0, 3), BF16)}), subscribe()
    memory = torch.zeros(4000, dtype=torch.bfloat16)
    view = {
        "transposed": memory[:240].view(5, 6, 8).transpose(0, 1),
        "permuted": memory[:240].view(8, 6, 5).permute(1, 2, 0),
        "sliced": memory[:2160].view(12, 15, 12)[::2, 3:13:2, 1:9],
        "offset": memory[7:247].view(6, 5, 8),
    }[layout]
    target = {"w": view, "e": torch.zeros(3, 0, dtype=torch.bfloat16).T}
    untouched = memory.clone()
    jdelta.torch.load_into(sub, target)
    same(target, run.params)
    for _ in range(3):
        run.step(share=0.1)
        jdelta.torch.apply(next(follow(sub)), target)
        same(target, run.params)
    view.copy_(torch.zeros_like(view))  # what remains is what was never ours
    assert torch.equal(memory, untouched)


def check_device(run, sub, device, monkeypatch):
    tensors = jdelta.torch.restore(sub, device=device)
    tensors["embed"] = tensors["embed"].T.contiguous().T
    same(tensors, run.params)
    run.step(share=0.2)
    update = next(follow(sub))
    monkeypatch.setattr(_writes, "_BATCH", 100)
    leaves = find_leaves(tensors, update.specs, None)
    groups = {}
    for name in update.patch:
        groups.setdefault(leaves[name].spec.itemsize, []).append(name)
    before = snapshot(tensors)
    writes = [
        _writes._stage_device([leaves[n] for n in g], [update.patch[n] for n in g])
        for g in groups.values()
    ]
    assert snapshot(tensors) == before
    with update.writing():
        for write in writes:
            _writes.run(write)
    same(tensors, run.params)
    with pytest.raises(StateMismatchError):
        g = groups[2]
        _writes._stage_device([leaves[n] for n in g], [update.patch[n] for n in g])
    same(tensors, run.params)


def test_the_device_path_in_small_batches(trainer, subscribe, monkeypatch):
    """The gather and scatter that devices get, on host tensors."""
    check_device(trainer(), subscribe(), "cpu", monkeypatch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(trainer, subscribe, monkeypatch):
    run, sub = trainer(), subscribe()
    tensors = jdelta.torch.restore(sub, device="cuda")
    for _ in range(3):
        run.step(share=0.2)
        jdelta.torch.apply(next(follow(sub)), tensors)
        same(tensors, run.params)
    jdelta.torch.load_into(sub, tensors, version=0)
    jdelta.torch.apply(next(follow(sub)), tensors)
    same(tensors, run.params)
    check_device(run, subscribe(), "cuda", monkeypatch)


def test_apply_allocates_in_proportion_to_what_changed(trainer, subscribe):
    n = 1 << 23
    run, sub = trainer({"w": ((n,), BF16)}), subscribe()
    tensors = jdelta.torch.restore(sub)
    jdelta.torch.load_into(sub, tensors)  # warm
    positions = np.arange(0, n, 1000)
    bits = flat(run.params["w"])[positions] ^ 1
    run.put("w", positions, bits)
    update = next(follow(sub))
    tracemalloc.start()
    try:
        jdelta.torch.apply(update, tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * len(positions)
    assert 200 * len(positions) < tensors["w"].nbytes / 8
    same(tensors, run.params)


# -- imports


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )


def test_without_torch_the_error_says_what_to_install():
    done = python(
        "import sys; sys.modules['torch'] = None\n"
        "import jdelta.errors\n"
        "try:\n    import jdelta.torch\n"
        "except jdelta.errors.MissingExtraError as error:\n    print(error)\n"
    )
    assert "pip install 'jdelta[torch]'" in done.stdout, done.stderr


def test_jax_is_not_imported():
    done = python("import sys, jdelta.torch; print('jax' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_each_dtype_is_taken_as_the_format_says():
    text = (Path(dtypes.__file__).parent / "FORMAT.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \d \| .*? \| (.*?) \|$", text, re.M)
    assert sorted(name for name, _ in rows) == sorted(dtypes.NAMES)
    for name, word in rows:
        optional = word == "where it has the dtype"
        assert optional or word == "yes"
        assert optional or name in jdelta.torch._dtypes._DTYPES


def test_another_module_is_refused_before_weights_are_fetched():
    bucket = MemoryBucket(uuid.uuid4().hex)
    with jdelta.Publisher(bucket, {"w": np.zeros(4, np.float32)}) as pub:
        pub.flush()
    watched = FaultyBucket(bucket, count_reads=True)
    with pytest.raises(TreeError, match="missing"):
        jdelta.torch.load_into(jdelta.Subscriber(watched), {"v": torch.zeros(4)})
    names = [operation.name for operation in watched.operations]
    assert names and not [name for name in names if name.startswith("anchors/")]
