"""The benchmarks at tiny sizes: that they run and what they say, never how fast."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jdelta.cli import app
from jdelta.cli.bench import _data, _timing
from jdelta.cli.bench._bound import bound
from jdelta.cli.bench._report import Bar, Report, Row


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["bench", *arguments, "--quick", "--json"])
    assert result.exit_code == 0, result.output
    last = result.stdout.splitlines()[-1]
    assert result.stdout.strip() == last, "more than the JSON line on standard output"
    report = json.loads(last)
    assert report["command"].startswith(f"jdelta bench {arguments[0]} ")
    assert report["machine"]["cores"] >= 1
    assert report["bars"] == [], "small sizes must not be judged"
    return report


def test_restore():
    report = run("restore", "--params", "20000", "--deltas", "3", "--rounds", "2")
    assert report["ratio"] > 0
    assert report["anchor_bytes"] > 2 * 19000
    assert 0 < report["delta_bytes"] < report["anchor_bytes"]


def test_codec():
    report = run("codec", "--rounds", "1")
    bits = report["bits_per_changed"]
    assert 0 < bits["bound"] < bits["fast"] < 16
    assert report["gbps"].keys() == {"memcpy", "fast_encode", "fast_apply"}
    assert min(report["gbps"].values()) > 0
    assert 0.02 < report["density"] < 0.03


def test_codec_of_the_other_trace():
    assert run("codec", "--trace", "A1", "--rounds", "1")["density"] < 0.012


def test_kernels():
    report = run("kernels", "--rounds", "1")
    assert report["gbps"].keys() == {
        "memcpy",
        "words",
        "positions",
        "flatnonzero",
        "numpy_words",
    }
    assert min(report["gbps"].values()) > 0


@pytest.mark.parametrize(
    "recipe",
    ["wrap", *(pytest.param(r, marks=pytest.mark.slow) for r in ("fused", "diff"))],
)
def test_stream(recipe):
    report = run(
        *("stream", "--recipe", recipe, "--pairs", "2", "--batch", "1"),
        *("--sequence", "16", "--width", "64", "--layers", "1"),
        *("--publish-params", "20000", "--publish-calls", "5"),
    )
    assert report["throughput_ratio"] > 0
    assert 0 <= report["publish_ms"]["median"] <= report["publish_ms"]["p99"]
    assert math.isfinite(report["core_ms_per_mparam"])
    assert report["versions"] == 2
    assert 0 < report["density"] < 1


@pytest.mark.slow
def test_memory():
    report = run("memory", "--params", "300000", "--steps", "2")
    for key in ("publisher_anchor_x", "publisher_x", "subscriber_x"):
        assert math.isfinite(report[key])
    assert report["allowance_mib"] == 256
    assert report["subscriber_x"] > 0
    assert 0 < report["delta_bytes"] < report["weights_bytes"]


def test_command_line_starts_without_jax():
    code = "import jdelta.cli, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bound_of_one_exponent_is_the_adaptive_code():
    old = np.full(1000, 0x3F80, np.uint16)
    new = old.copy()
    new[::10] += 1  # always by one unit: the values cost nothing
    found = bound([old], [new])
    entropy = -(0.1 * math.log2(0.1) + 0.9 * math.log2(0.9)) * 10
    assert found.values == pytest.approx(0.0)
    # The adaptive code pays for learning the rate: about half a log of the length.
    learned = 0.5 * math.log2(1000) / 100
    assert entropy < found.positions < entropy + 2 * learned


def test_bound_uses_the_exponent():
    old = np.repeat(np.array([0x3F80, 0x3C00], np.uint16), 5000)
    new = old.copy()
    new[5000::2] += 1  # only the small ones change
    together = bound([old], [new])
    apart = bound([old], [np.where(np.arange(10000) % 4 == 0, old + 1, old)])
    assert together.positions < apart.positions


def test_bound_of_nothing():
    old = np.zeros(10, np.uint16)
    assert bound([old], [old]).total == 0


def test_moves_are_changes():
    flat = _data.weights(4000, 2)["layers.0.kernel"].reshape(-1).view(np.uint16)
    moved = _data.move(flat, 0.05, np.random.default_rng(0))
    assert 0.04 < moved.positions.size / flat.size < 0.06
    assert (np.diff(moved.positions.astype(np.int64)) > 0).all()
    assert np.array_equal(moved.old, flat[moved.positions])
    assert (moved.old != moved.new).all()


def test_rounds_are_interleaved_and_prepared():
    calls: list[str] = []
    times = _timing.rounds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        2,
        warm=0,
        before={"b": lambda: calls.append("before b")},
    )
    assert calls == ["a", "before b", "b", "before b", "b", "a"]
    assert [len(values) for values in times.values()] == [2, 2]


def test_quantiles():
    values = [float(v) for v in range(1, 101)]
    assert _timing.quantile(values, 0.99) == 99
    assert _timing.quantile(values, 1.0) == 100
    assert _timing.quantile([5.0], 0.01) == 5


def test_missed_bars_are_told(capsys):
    report = Report(name="x", settings={"rounds": 3})
    bar = Bar("it is fast", "2.0x", met=False)
    report.finish({"ratio": 2.0}, [Row("ratio", "2.0")], [bar], as_json=True)
    out, err = capsys.readouterr()
    assert "MISSED" in err
    assert json.loads(out)["bars"] == [
        {"promise": "it is fast", "measured": "2.0x", "met": False}
    ]
    assert json.loads(out)["command"] == "jdelta bench x --rounds 3"
