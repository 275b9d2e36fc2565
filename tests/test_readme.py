"""The README's snippets run as they stand, one after the other, as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def snippet(words: str) -> str:
    found = [code for code in SNIPPETS if words in code]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder in which the trainer's snippet was run."""
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("readme")
    run(snippet("jdelta.Publisher("), folder)
    return folder


# What the follower's snippets must end with: the version rebuilt from cold.
PROOF = """
whole, manifest = jdelta.load("runs/first")
assert manifest.step == 20, manifest.step
"""


def test_the_numpy_follower_holds_the_last_version(trained):
    equal = "assert all(whole[n].tobytes() == weights[n].tobytes() for n in whole)"
    said = run(snippet("a dict of NumPy arrays") + PROOF + equal, trained)
    # Steps that the bucket was too slow for were merged: at most 20 versions.
    versions = [int(number) for number in re.findall(r"version (\d+): ", said)]
    assert versions == list(range(1, len(versions) + 1))
    assert 1 <= len(versions) <= 20


def test_the_jax_follower_holds_the_last_version(trained):
    equal = (
        "import numpy as np\n"
        "params = {name: np.asarray(array) for name, array in params.items()}\n"
        "assert all(whole[n].tobytes() == params[n].tobytes() for n in whole)"
    )
    run(snippet("like=like") + PROOF + equal, trained)


@pytest.mark.interop
def test_the_pytorch_module_holds_the_last_version(trained):
    pytest.importorskip("torch")
    equal = (
        "params = dict(model.named_parameters())\n"
        "bits = {n: p.detach().view(torch.int16) for n, p in params.items()}\n"
        "assert all(whole[n].tobytes() == bits[n].numpy().tobytes() for n in whole)"
    )
    run(snippet("import jdelta.torch") + PROOF + equal, trained)


def test_every_snippet_is_run_here():
    assert len(SNIPPETS) == 4


def test_links_lead_somewhere():
    root = Path(__file__).parents[1]
    if not (root / "jdelta").is_dir():
        pytest.skip("no checkout")
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / target).exists(), target
