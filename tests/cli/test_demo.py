"""`jdelta demo` as a whole: its processes, its figures, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from jdelta.cli import app

pytest.importorskip("jax")


class Demo:
    """A demo in a process group of its own, its temporary files under `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.errors = folder.parent / "stderr.txt"
        folder.mkdir()
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jdelta.cli", "demo", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
            )

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not ready():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.1)

    def finish(self, timeout: float) -> tuple[int, str, str]:
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, self.errors.read_text()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Demo]]:
    demos = []

    def make(*options: str) -> Demo:
        demos.append(Demo(tmp_path / "temporary", *options))
        return demos[-1]

    yield make
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait()
        assert demo.process.stdout is not None
        demo.process.stdout.close()


@pytest.mark.slow
def test_every_follower_ends_bit_equal_and_the_bytes_are_counted(start, tmp_path):
    url = str(tmp_path / "bucket")
    demo = start("--steps", "12", "--pretrain-seconds", "2", "--json", "--bucket", url)
    status, out, errors = demo.finish(200)
    assert status == 0, errors
    (line,) = out.splitlines()
    report = json.loads(line)
    assert report["verified"] is True
    assert 2 <= report["versions"] <= 13
    assert [f["equal"] for f in report["followers"]] == [True, True]
    assert report["followers"][0]["kind"] == "jax"
    assert all(f["version"] == report["versions"] - 1 for f in report["followers"])
    stored = sum(p.stat().st_size for p in Path(url).rglob("*") if p.is_file())
    pointer = (Path(url) / "pointer.json").stat().st_size
    written = report["written"]
    # Every object is there once; only the pointer was written over and over.
    assert sum(written.values()) - written["pointer"] == stored - pointer
    whole = report["versions"] * report["full_bytes"]
    assert report["saved_fraction"] == pytest.approx(1 - sum(written.values()) / whole)
    assert 0 < report["density"]["last"] < report["density"]["first"] < 0.5
    assert list(demo.folder.iterdir()) == []

    assert CliRunner().invoke(app, ["verify", url]).exit_code == 0
    again = CliRunner().invoke(app, ["demo", "--bucket", url])
    assert again.exit_code == 1 and "already holds a run" in again.stderr


def buckets(demo: Demo) -> list[Path]:
    return list(demo.folder.glob("jdelta-demo-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_children_and_removes_the_bucket(start, number):
    demo = start("--pretrain-seconds", "1", "--steps", "5000")
    # In the midst of the stream: the bucket holds a version.
    demo.wait_until(lambda: any([*b.glob("manifests/*/*.json")] for b in buckets(demo)))
    children = demo.children()
    assert len(children) == 3
    demo.process.send_signal(number)
    status, _, errors = demo.finish(30)
    assert status == 130, errors
    assert "Traceback" not in errors
    assert not any(child.is_running() for child in children)
    assert list(demo.folder.iterdir()) == []


@pytest.mark.slow
def test_a_dead_child_ends_the_demo_with_its_name(start):
    demo = start("--pretrain-seconds", "600")
    demo.wait_until(lambda: len(demo.children()) == 3)
    children = demo.children()
    (follower,) = [c for c in children if c.cmdline()[-2] == "jax"]
    follower.kill()
    status, _, errors = demo.finish(60)
    assert status == 1
    assert "jax process was killed by signal 9" in errors
    assert not any(child.is_running() for child in children)
    assert list(demo.folder.iterdir()) == []


def test_a_bucket_in_memory_is_refused():
    result = CliRunner().invoke(app, ["demo", "--bucket", "memory://x"])
    assert result.exit_code == 1 and "share memory" in result.stderr


@pytest.mark.slow
def test_the_example_proves_equality():
    example = Path(__file__).parents[2] / "examples" / "optax_loop.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["hidden equal", "out equal"]
