"""`jdelta inspect`, `verify` and `export` over small runs."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result

import jdelta
from jdelta.bucket import DirectoryBucket
from jdelta.cli import app
from jdelta.errors import JDeltaError
from jdelta.wire.changes import Changes

VERSIONS = 6


def jd(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def last_json(result: Result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


class Run:
    """A run in a directory, and what its versions really are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(7)
        weights = {
            "blocks.0.kernel": rng.normal(size=(64, 48)).astype(ml_dtypes.bfloat16),
            "head": rng.normal(size=700).astype(np.float32),
            "scale": np.array(1.5, ml_dtypes.bfloat16),
            "eight": rng.normal(size=(5, 7)).astype(ml_dtypes.float8_e4m3fn),
        }
        self.versions = [weights]
        with jdelta.Publisher(str(folder), weights) as publisher:
            for version in range(1, VERSIONS):
                new = {name: array.copy() for name, array in weights.items()}
                flat = bits(new["blocks.0.kernel"])
                flat[rng.integers(0, flat.size, 40)] ^= 1
                bits(new["head"])[version] ^= 1 << 31
                changes = {
                    name: Changes.between(bits(weights[name]), bits(new[name]))
                    for name in weights
                }
                publisher.publish(changes, step=10 * version)
                publisher.flush()
                weights = new
                self.versions.append(weights)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def run(tmp_path) -> Run:
    """One of its own, for a test that damages it."""
    return Run(tmp_path / "run")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# -- inspect


def test_inspect_tells_the_chain(sound):
    result = jd("inspect", sound.folder, "--json")
    assert result.exit_code == 0, result.output
    told = last_json(result)
    assert told["newest"] == VERSIONS - 1
    rows = told["versions"][::-1]  # newest first
    assert [row["version"] for row in rows] == list(range(VERSIONS))
    assert [row["kind"] for row in rows] == ["anchor"] + ["delta"] * (VERSIONS - 1)
    assert [row["step"] for row in rows[1:]] == [10, 20, 30, 40, 50]
    assert [row["base"] for row in rows[1:]] == [0, 1, 2, 3, 4]
    elements = sum(array.size for array in sound.versions[0].values())
    for before, after, row in zip(
        sound.versions, sound.versions[1:], rows[1:], strict=False
    ):
        changed = sum(
            int((bits(before[name]) != bits(after[name])).sum()) for name in before
        )
        assert row["changed"] == changed and row["elements"] == elements
        assert row["density"] == pytest.approx(changed / elements)
    stored = sum(p.stat().st_size for p in (sound.folder / "deltas").rglob("*.*"))
    assert sum(row["bytes"] for row in rows[1:]) == stored


def test_inspect_prints_a_row_a_version(sound):
    result = jd("inspect", sound.folder, "--tensors")
    assert result.exit_code == 0, result.output
    assert "blocks.0.kernel" in result.output and "64x48" in result.output
    assert result.output.count("delta") >= VERSIONS - 1


def test_inspect_of_one_version_is_its_chain_and_tensors(sound):
    told = last_json(jd("inspect", sound.folder, "--version", 2, "--tensors", "--json"))
    assert [row["version"] for row in told["versions"]] == [2, 1, 0]
    changed = {row["name"]: row["changed"] for row in told["tensors"]}
    assert changed["head"] == 1 and changed["scale"] == 0
    assert 30 <= changed["blocks.0.kernel"] <= 40


def test_inspect_shows_the_newest_ones_only(sound):
    told = last_json(jd("inspect", sound.folder, "--last", 2, "--json"))
    assert [row["version"] for row in told["versions"]] == [5, 4]
    assert f"2 of {VERSIONS}" in jd("inspect", sound.folder, "--last", 2).output


def test_inspect_of_many_versions_reads_the_newest_few(tmp_path, monkeypatch):
    url, versions = str(tmp_path / "run"), 200
    with jdelta.Publisher(url, {"w": np.zeros(4, np.float32)}, anchor_every=50) as pub:
        for _ in range(versions):
            pub.publish({})
            pub.flush()
    read, get = [], DirectoryBucket.get

    def counted(self, name, **options):
        read.append(name)
        return get(self, name, **options)

    monkeypatch.setattr(DirectoryBucket, "get", counted)
    told = last_json(jd("inspect", url, "--json"))
    assert [row["version"] for row in told["versions"]] == [*range(200, 180, -1)]
    assert len([name for name in read if name.startswith("manifests/")]) <= 2 * 51 + 20


def test_inspect_reads_manifests_only(run):
    for path in (run.folder / "deltas").rglob("*.safetensors"):
        path.unlink()
    assert jd("inspect", run.folder, "--tensors").exit_code == 0


def test_inspect_shows_an_anchor_made_later(tmp_path):
    weights = {"w": np.arange(64, dtype=np.float32)}
    url = str(tmp_path / "run")
    with jdelta.Publisher(url, weights, anchor_every=1) as publisher:
        new = {"w": weights["w"].copy()}
        new["w"][3] = 7.5
        between = Changes.between(bits(weights["w"]), bits(new["w"]))
        publisher.publish({"w": between})
    rows = last_json(jd("inspect", url, "--json"))["versions"]
    assert [row["later_anchor"] for row in rows] == [True, False]
    assert jd("inspect", url).output.count("anchor") >= 2


def test_inspect_names_a_broken_manifest_and_shows_the_rest(run):
    only(run.folder, "manifests/*/*3.json").write_text("{")
    result = jd("inspect", run.folder)
    assert result.exit_code == 1
    assert "unreadable" in result.output and "version 3" in result.output
    rows = last_json(jd("inspect", run.folder, "--json"))["versions"]
    assert [row["version"] for row in rows if "error" not in row] == [5, 4, 2, 1, 0]


# -- verify


@pytest.mark.parametrize("version", [None, 0, 3])
def test_verify_proves_a_version(sound, version):
    chosen = [] if version is None else ["--version", version]
    result = jd("verify", sound.folder, *chosen, "--json")
    assert result.exit_code == 0, result.output
    told = last_json(result)
    expected = VERSIONS - 1 if version is None else version
    assert told["ok"] and told["version"] == expected and told["tensors"] == 4
    assert told["bytes"] == sum(a.nbytes for a in sound.versions[0].values())


def test_verify_refuses_damage_with_one_line(run):
    flip(only(run.folder, "deltas/*-v0000000003/*.safetensors"))
    assert jd("verify", run.folder, "--version", 2).exit_code == 0
    result = jd("verify", run.folder)
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("jdelta: ") and "v0000000003" in line
    result = jd("verify", run.folder, "--json")
    assert result.exit_code == 1 and last_json(result)["ok"] is False


def test_debug_shows_the_traceback(run):
    flip(only(run.folder, "deltas/*-v0000000003/*.safetensors"))
    result = jd("verify", run.folder, "--debug")
    assert result.exit_code == 1 and isinstance(result.exception, JDeltaError)


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["export", "--to", "x"]])
def test_no_such_version_or_run_is_one_clear_line(
    sound, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for url, words in ((sound.folder, "no version 99"), ("empty", "no committed")):
        result = jd(command[0], url, *command[1:], "--version", 99)
        assert result.exit_code == 1, result.output
        (line,) = result.stderr.strip().splitlines()
        assert words in line
    assert not Path("x").exists()


def test_an_unknown_scheme_is_one_clear_line():
    result = jd("verify", "gopher://somewhere/run")
    assert result.exit_code == 1 and "gopher" in result.stderr


# -- export


@pytest.mark.parametrize("version", [0, 4])
def test_export_is_a_checkpoint_any_tool_opens(sound, tmp_path, version):
    to = tmp_path / "deep" / "checkpoint"
    result = jd("export", sound.folder, "--version", version, "--to", to, "--json")
    assert result.exit_code == 0, result.output
    assert last_json(result)["version"] == version
    expected = sound.versions[version]
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    found = load_file(only(to, "*.safetensors"))
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tuple(tensor.shape) == expected[name].shape
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(raw, expected[name].reshape(-1).view(np.uint8))
    assert [p.name for p in to.iterdir()] == ["model.safetensors"]
    assert [p.name for p in to.parent.iterdir()] == ["checkpoint"]


def test_export_in_shards_has_an_index(sound, tmp_path):
    to = tmp_path / "out"
    to.mkdir()  # an empty directory is fine
    done = jd("export", sound.folder, "--version", 1, "--to", to, "--shard-gb", 4e-6)
    assert done.exit_code == 0, done.output
    index = json.loads((to / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(sound.versions[1])
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(to / file, framework="numpy") as opened:
            assert name in opened.keys()
            assert opened.metadata() == {"format": "pt"}


def test_export_touches_no_directory_in_use(sound, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = jd("export", sound.folder, "--version", 1, "--to", tmp_path)
    assert result.exit_code == 1 and "not empty" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    file = tmp_path / "notes.txt"
    result = jd("export", sound.folder, "--version", 1, "--to", file)
    assert result.exit_code == 1 and file.read_text() == "mine"


@pytest.mark.parametrize("harm", ["full disk", "wrong bytes"])
def test_a_failed_export_leaves_nothing(sound, tmp_path, monkeypatch, harm):
    from jdelta.wire import anchor

    real = anchor.write_anchor

    def harmed(tensors, folder, **options):
        files = real(tensors, folder, **options)
        if harm == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        flip(files[0].path)
        return files

    monkeypatch.setattr(anchor, "write_anchor", harmed)
    to = tmp_path / "parent" / "out"
    result = jd("export", sound.folder, "--version", 2, "--to", to)
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(to.parent.iterdir()) == []


# -- the command itself


def test_the_reader_commands_need_neither_jax_nor_torch(sound, tmp_path):
    code = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'optax', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from jdelta.cli import app\n"
        "app(sys.argv[1:])\n"
    )
    url = str(sound.folder)
    for arguments in (
        ["--help"],
        ["inspect", url, "--tensors"],
        ["verify", url],
        ["export", url, "--version", "2", "--to", str(tmp_path / "out")],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_starting_the_command_loads_nothing_heavy():
    code = (
        "import sys, jdelta.cli\n"
        "heavy = {'jax', 'torch', 'numpy', 'flax', 'huggingface_hub', 'rich.live'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
