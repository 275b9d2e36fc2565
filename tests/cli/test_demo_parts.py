"""The demo's parts, each alone: text, hash, board, children."""

from __future__ import annotations

import io
import json
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from jdelta.bucket import open_bucket
from jdelta.cli._demo.board import Board
from jdelta.cli._demo.channel import Settings
from jdelta.cli._demo.children import Children
from jdelta.cli._demo.counting import CountingBucket
from jdelta.cli._demo.text import batch, read_sources
from jdelta.cli._demo.truth import sha256
from jdelta.errors import JDeltaError, ObjectExistsError

SETTINGS = Settings(bucket="x", steps=25, learning_rate=3e-6, pretrain_seconds=1.0)


# -- text


def test_the_standard_library_is_split_by_file():
    train, evaluation = read_sources()
    assert train.dtype == evaluation.dtype == np.uint8
    assert 4 * evaluation.size < train.size
    again, _ = read_sources()
    assert np.array_equal(train, again)


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("pass\n")
    with pytest.raises(JDeltaError, match="Python sources"):
        read_sources(tmp_path)


def test_a_batch_is_windows_of_the_text():
    text = np.arange(200, dtype=np.uint8)
    windows = batch(text, np.random.default_rng(0), 50, 16)
    assert windows.shape == (50, 17)
    assert (np.diff(windows.astype(int), axis=1) == 1).all()
    assert batch(text[:18], np.random.default_rng(0), 5, 16).shape == (5, 17)


# -- the hash equality is judged by


def test_the_hash_does_not_depend_on_the_framework():
    jnp = pytest.importorskip("jax.numpy")
    weights = {
        "b": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "a": np.array(-0.0, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
    }
    expected = sha256(weights)
    assert sha256({k: jnp.asarray(v) for k, v in weights.items()}) == expected
    torch = pytest.importorskip("torch")
    tensors = {
        "a": torch.tensor(-0.0, dtype=torch.bfloat16),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "empty": torch.zeros((0, 4)),
    }
    assert sha256(tensors) == expected


@pytest.mark.parametrize("change", ["bit", "name", "shape", "dtype"])
def test_the_hash_sees_every_difference(change):
    array = np.zeros((2, 3), np.float16)
    before = sha256({"w": array})
    if change == "bit":
        after = sha256({"w": -array})  # -0.0 equals 0.0, its bits do not
    elif change == "name":
        after = sha256({"v": array})
    elif change == "shape":
        after = sha256({"w": array.reshape(3, 2)})
    else:
        after = sha256({"w": array.view(np.int16)})
    assert before != after


# -- the bucket that counts


def test_every_successful_write_is_counted_by_kind(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 300)
    inner = open_bucket(str(tmp_path / "bucket"))
    bucket = CountingBucket(inner)
    bucket.put("deltas/e000001-v0000000001/00000.safetensors", memoryview(b"12345"))
    bucket.put("anchors/e000001-v0000000000/model.safetensors", tmp_path / "file")
    bucket.put_if_absent("manifests/e000001/v0000000000.json", b"{}")
    with pytest.raises(ObjectExistsError):
        bucket.put_if_absent("manifests/e000001/v0000000000.json", b"{}")
    bucket.put_if_absent("epochs/000001.json", b"123")
    bucket.replace_if_unchanged("pointer.json", b"first", None)
    bucket.put("pointer.json", b"second")  # overwriting counts again
    assert bucket.written == {
        "deltas": 5,
        "anchors": 300,
        "manifests": 2,
        "control": 3,
        "pointer": 11,
    }
    assert bucket.newest_delta == 5
    assert [info.name for info in bucket.list()] == [i.name for i in inner.list()]
    assert bucket.get("pointer.json") == b"second" == inner.get("pointer.json")
    bucket.delete("pointer.json")
    assert bucket.written["pointer"] == 11


# -- the board


def filled(held: dict[int, str] | None = None) -> Board:
    board = Board(SETTINGS, ["jax", "numpy"])
    board.take("trainer", "start", {"parameters": 1000})
    for step in range(1, 26):
        fields = {
            "step": step,
            "loss": 2.0,
            "changed": 30,
            "delta_bytes": 40,
            "written": {"anchors": 2000, "deltas": 40 * step},
            "committed": step,
            "publish_ms": 0.1,
            "step_ms": 10.0,
            "time": float(step),
        }
        board.take("trainer", "step", fields)
    for step in (0, 10, 20, 25):
        board.take("trainer", "truth", {"step": step, "sha256": f"hash {step}"})
    end = {"version": 25, "written": {"anchors": 2000, "deltas": 1000}, "seconds": 1.0}
    board.take("trainer", "end", end | {"loss_before": 2.0, "loss_after": 1.9})
    if held is None:
        held = {0: "hash 0", 20: "hash 20", 25: "hash 25"}
    for kind in board.followers:
        board.take(kind, "restored", {"version": 0, "step": 0, "time": 0.0})
        fields = {"version": 25, "step": 25, "time": 25.5, "apply_ms": 1.0}
        board.take(kind, "update", fields)
        for step, digest in held.items():
            board.take(kind, "held", {"step": step, "sha256": digest})
        board.take(kind, "end", {"version": 25})
    return board


def test_the_report_has_the_promised_fields():
    board = filled()
    assert board.end is not None
    board.end["loss_after"] = float("nan")  # training may diverge; JSON has no NaN
    report = json.loads(json.dumps(board.report(), allow_nan=False))
    assert report["loss"] == {"pretrained": 2.0, "fine_tuned": None}
    assert report["versions"] == 26
    assert report["saved_fraction"] == pytest.approx(1 - 3000 / (26 * 2000))
    assert report["density"] == {"mean": 0.03, "first": 0.03, "last": 0.03}
    assert [f["kind"] for f in report["followers"]] == ["jax", "numpy"]
    assert all(f["equal"] and f["versions_compared"] == 3 for f in report["followers"])
    assert report["followers"][0]["behind_s"]["median"] == 0.5


@pytest.mark.parametrize(
    "held",
    [
        {25: "another"},  # unequal at the end
        {20: "another", 25: "hash 25"},  # unequal on the way
        {20: "hash 20"},  # the last version was never compared
        {},
    ],
)
def test_a_follower_is_equal_only_if_every_hash_is_and_the_last_was_compared(held):
    report = filled(held).report()
    assert [f["equal"] for f in report["followers"]] == [False, False]


def test_the_board_can_be_drawn_at_any_time_in_80_columns():
    from rich.console import Console

    large = filled()
    large.parameters = 6_426_880
    large.steps[-1] |= {"delta_bytes": 999_900, "publish_ms": 123.456, "step_ms": 12345}
    large.steps[-1]["written"] = {"deltas": 999_900_000}
    for board in (Board(SETTINGS, ["jax", "numpy"]), filled(), large):
        console = Console(width=80, file=io.StringIO())
        with console.capture() as capture:
            console.print(board.table())
        headings = [line.split() for line in capture.get().splitlines()]
        assert "step loss density delta written of full".split() == headings[2][:7]
        assert board.line()
    assert "999.9 MB" in capture.get() and "123.46 ms" in capture.get()


# -- settings and children


def test_settings_survive_the_command_line():
    assert Settings.parse(SETTINGS.to_json()) == SETTINGS


def gather(children: Children, name: str) -> list[str | None]:
    events = []
    while True:
        child, event, _ = children.events.get(timeout=30)
        assert child == name
        if event is None:
            return events
        events.append(event)


CHATTER = """
import sys, time
from jdelta.cli._demo.channel import Channel
channel = Channel()
channel.send("hello", value=1)
print("a library's noise")
sys.stdout.flush()
{end}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that children can run."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def make(name: str, end: str) -> str:
        (tmp_path / f"{name}.py").write_text(CHATTER.format(end=end))
        return name

    return make


def test_a_childs_events_arrive_without_its_noise(module):
    with Children() as children:
        children.start("one", module("child_good", "channel.send('bye')"), [])
        assert gather(children, "one") == ["hello", "bye"]
        children.check_exit("one")


def test_a_dead_child_is_told_with_its_last_words(module):
    with Children() as children:
        children.start("one", module("child_bad", "raise OSError('no luck')"), [])
        assert gather(children, "one") == ["hello"]
        with pytest.raises(JDeltaError, match=r"(?s)one process died.*no luck"):
            children.check_exit("one")


def test_a_killed_child_is_told_with_its_signal(module):
    code = "import os; os.kill(os.getpid(), 9)"
    with Children() as children:
        children.start("one", module("child_killed", code), [])
        gather(children, "one")
        with pytest.raises(JDeltaError, match="killed by signal 9"):
            children.check_exit("one")


def test_running_children_are_ended_on_leaving(module):
    with Children() as children:
        children.start("one", module("child_slow", "time.sleep(600)"), [])
        assert children.events.get(timeout=30).event == "hello"
        (process,) = children._processes.values()
        begin = time.monotonic()
    assert process.returncode is not None
    assert time.monotonic() - begin < 5


def test_a_child_that_will_not_end_is_killed(module, monkeypatch):
    from jdelta.cli._demo import children as children_module

    monkeypatch.setattr(children_module, "_GRACE", 0.3)
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "channel.send('deaf')\ntime.sleep(600)"
    )
    with Children() as children:
        children.start("one", module("child_stubborn", stubborn), [])
        assert children.events.get(timeout=30).event == "hello"
        assert children.events.get(timeout=30).event == "deaf"
        (process,) = children._processes.values()
    assert process.returncode == -9


def test_a_child_ends_when_its_parent_is_gone(module):
    with Children() as children:
        children.start("one", module("child_orphan", "time.sleep(600)"), [])
        assert children.events.get(timeout=30).event == "hello"
        (process,) = children._processes.values()
        assert process.stdin is not None
        process.stdin.close()  # what the parent's death does
        assert process.wait(10) == 1
