from __future__ import annotations

import json
import sys

import ml_dtypes
import numpy as np
import pytest

from jdelta.errors import MissingExtraError
from jdelta.testing import synthetic, trace, traces


def steps(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """How many bf16 values each changed element moved, without sign."""

    def order(bits):
        return np.where(bits >> 15, bits ^ 0x7FFF, bits).view(np.int16).astype(int)

    moved = np.abs(order(new) - order(old))
    return moved[moved != 0]


@pytest.mark.parametrize("density", [0.001, 0.00957, 0.02417, 0.2, 0.9])
def test_synthetic_density(density):
    old, new = synthetic(1 << 20, density, seed=3)
    assert old.dtype == new.dtype == np.uint16
    assert old.shape == new.shape == (1 << 20,)
    assert np.mean(old != new) == pytest.approx(density, rel=0.06)


@pytest.mark.parametrize("density", [0.00957, 0.02417])
def test_synthetic_changes_look_like_training(density):
    old, new = synthetic(1 << 21, density, seed=1)
    moved = steps(old, new)
    assert 0.87 < np.mean(moved == 1) < 0.91
    assert 0.03 < np.mean(moved == 2) < 0.06
    assert 0.005 < np.mean(moved >= 16) < 0.02
    exponent = (old >> 7) & 0xFF
    rate = [np.mean((old != new)[exponent == 127 - k]) for k in (5, 6, 7, 8, 9, 10)]
    for larger, smaller in zip(rate, rate[1:], strict=False):
        assert 1.5 < smaller / larger < 2.7
    values = old.view(ml_dtypes.bfloat16).astype(np.float32)
    assert 0.02 < values.std() < 0.05


def test_synthetic_edges():
    old, new = synthetic(1000, 0.0)
    assert np.array_equal(old, new)
    assert [a.shape for a in synthetic(0, 0.5)] == [(0,), (0,)]
    for n, density in [(-1, 0.1), (10, -0.1), (10, 0.95), (10, float("nan"))]:
        with pytest.raises(ValueError):
            synthetic(n, density)


def test_synthetic_is_deterministic_and_chunked(monkeypatch):
    first = synthetic(10_000, 0.1, seed=7)
    again = synthetic(10_000, 0.1, seed=7)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], synthetic(10_000, 0.1, seed=8)[0])
    monkeypatch.setattr(traces, "_CHUNK", 4096)
    old, new = synthetic(10_000, 0.1, seed=7)
    assert old.shape == (10_000,)
    assert np.mean(old != new) == pytest.approx(0.1, rel=0.15)
    assert len(set(old[:4096].tolist()) & set(old[4096:8192].tolist())) < 4096


@pytest.fixture
def small(monkeypatch):
    """The recipe on matrices of a thousandth of the size: densities scatter more."""
    monkeypatch.setattr(traces, "SHAPE", (8, 128, 64))
    loose = {n: r._replace(tolerance=r.density / 4) for n, r in traces.RECIPES.items()}
    monkeypatch.setattr(traces, "RECIPES", loose)


def test_a_trace_is_made_once_and_kept(small, tmp_path, monkeypatch):
    pytest.importorskip("jax")
    old, new = trace("A", tmp_path)
    assert len(old) == len(new) == 8
    assert {(a.dtype, a.shape) for a in old + new} == {(np.dtype("u2"), (128, 64))}
    monkeypatch.setattr(traces, "_generate", None)
    again, _ = trace("A", tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(old, again, strict=True))
    monkeypatch.setenv("JDELTA_TRACES", str(tmp_path))
    lower, _ = trace("A1")
    assert not np.array_equal(lower[0], old[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}{end}"
        for name in ("A", "A1")
        for end in (".json", "-old.npy", "-new.npy")
    )


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "sums"])
def test_a_damaged_cache_is_not_used(small, tmp_path, monkeypatch, damage):
    old, new = (bits.reshape(8, 128, 64) for bits in synthetic(65536, 0.02417))
    made = []

    def generate():
        made.append(1)
        return {"A": (old, new)}

    monkeypatch.setattr(traces, "_generate", generate)
    trace("A", tmp_path)
    trace("A", tmp_path)
    assert len(made) == 1
    path = tmp_path / "A-new.npy"
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "remove":
        path.unlink()
    else:
        (tmp_path / "A.json").write_text(json.dumps({"old": "", "new": ""}))
    _, again = trace("A", tmp_path)
    assert len(made) == 2
    assert np.array_equal(np.stack(again), new)


def test_a_trace_of_the_wrong_density_is_refused(small, tmp_path, monkeypatch):
    pair = tuple(bits.reshape(8, 128, 64) for bits in synthetic(65536, 0.1))
    monkeypatch.setattr(traces, "_generate", lambda: {"A": pair})
    with pytest.raises(ValueError, match="density 1"):
        trace("A", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_trace(tmp_path):
    with pytest.raises(ValueError, match="A1"):
        trace("B", tmp_path)


def test_without_jax_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingExtraError, match=r"jdelta\[jax\]"):
        trace("A", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name, density", [("A", 0.02417), ("A1", 0.00957)])
def test_the_real_traces(name, density):
    pytest.importorskip("jax")
    old, new = (np.stack(bits).reshape(-1) for bits in trace(name))
    assert np.mean(old != new) == pytest.approx(density, rel=0.01)
    moved = steps(old, new)
    assert np.mean(moved == 1) == pytest.approx(0.893, abs=0.015)
