"""The package as a whole: what importing loads, what it exports, what it says."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import jdelta
import jdelta.errors

ROOT = Path(__file__).parents[1]
HEAVY = {
    "flax",
    "huggingface_hub",
    "jax",
    "jaxlib",
    "optax",
    "orbax",
    "rich",
    "torch",
    "typer",
}
# Rooms that work beside NumPy alone, and the modules they are entered by.
READER = ("errors", "wire", "bucket", "stream", "testing", "cli")

# Makes the heavy libraries as absent as if they were not installed.
BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python(code: str, *, blocked: tuple[str, ...] = ()) -> str:
    """What a new interpreter prints when it runs `code` without some libraries."""
    text = BLOCK.format(blocked=set(blocked)) + code if blocked else code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(code: str) -> set[str]:
    """The modules that a new interpreter holds after `code`."""
    return set(
        json.loads(
            python(f"{code}\nimport json, sys\nprint(json.dumps([*sys.modules]))")
        )
    )


# -- what importing loads


def test_importing_jdelta_loads_one_module_of_its_own_and_nothing_heavy():
    modules = loaded("import jdelta") - loaded("")
    assert {name for name in modules if name.startswith("jdelta")} == {"jdelta"}
    assert not HEAVY & {name.partition(".")[0] for name in modules}
    assert "numpy" not in modules


def test_the_reader_loads_nothing_heavy():
    modules = loaded(
        "import jdelta\njdelta.Subscriber, jdelta.load, jdelta.open_bucket"
    )
    assert not HEAVY & {name.partition(".")[0] for name in modules}


def test_the_command_starts_without_jax_or_torch():
    modules = loaded("import jdelta.cli")
    assert not (HEAVY - {"typer", "rich"}) & {n.partition(".")[0] for n in modules}


def test_the_trainer_end_does_not_load_torch_orbax_or_the_hub():
    pytest.importorskip("jax")
    modules = loaded("import jdelta\njdelta.wrap, jdelta.Publisher")
    heavy = {"torch", "huggingface_hub", "typer"}
    assert not heavy & {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("room", READER)
def test_a_room_of_the_reader_imports_where_jax_and_torch_are_absent(room):
    absent = ("jax", "jaxlib", "flax", "optax", "orbax", "torch")
    python(f"import jdelta.{room}", blocked=absent)


# -- what it exports


def test_every_public_name_resolves_and_is_listed():
    pytest.importorskip("jax")
    for name in jdelta.__all__:
        assert getattr(jdelta, name) is not None, name
        assert name in dir(jdelta)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'wrapp'"):
        jdelta.wrapp  # noqa: B018


def test_type_checkers_see_the_same_names():
    source = inspect.getsource(jdelta)
    declared = set(
        re.findall(r"^    from jdelta\.\w+ import \w+ as (\w+)$", source, re.M)
    )
    assert declared == set(jdelta.__all__) - {"__version__"}


def test_every_error_is_a_jdelta_error():
    errors = [e for _, e in inspect.getmembers(jdelta.errors, inspect.isclass)]
    assert len(errors) > 10
    assert all(issubclass(error, jdelta.errors.JDeltaError) for error in errors)


@pytest.mark.parametrize(
    ("code", "library", "extra"),
    [
        ("import jdelta.torch", "torch", "torch"),
        ("import jdelta\njdelta.wrap", "jax", "jax"),
        ("import jdelta\njdelta.diff", "jax", "jax"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(code, library, extra):
    said = python(
        "from jdelta.errors import MissingExtraError\n"
        f"try:\n    {code.replace(chr(10), chr(10) + '    ')}\n"
        "except MissingExtraError as error:\n    print(error)",
        blocked=(library,),
    )
    assert f"pip install 'jdelta[{extra}]'" in said


# -- what it says


def public_objects():
    """Every public function, class and method, by its dotted name."""
    pytest.importorskip("jax")
    homes = [jdelta]
    if importlib.util.find_spec("torch"):
        homes.append(importlib.import_module("jdelta.torch"))
    for home in homes:
        for name in home.__all__:
            value = getattr(home, name)
            if not callable(value):
                continue
            yield f"{home.__name__}.{name}", value
            if inspect.isclass(value):
                for inner, method in vars(value).items():
                    if not inner.startswith("_") and inspect.isfunction(method):
                        yield f"{home.__name__}.{name}.{inner}", method


def test_every_public_name_has_a_docstring_that_stands_alone():
    for name, value in public_objects():
        doc = inspect.getdoc(value) or ""
        first = doc.partition("\n")[0]
        assert first.endswith((".", ":")), f"{name}: {first!r}"


@pytest.mark.parametrize(
    "name", sorted(set(jdelta.__all__) - {"__version__", "Delta", "Update"})
)
def test_what_can_be_called_says_what_it_raises(name):
    pytest.importorskip("jax")
    value = getattr(jdelta, name)
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        text += "".join(inspect.getdoc(m) or "" for m in vars(value).values())
    assert "Raises:" in text


# -- what is shipped


def test_it_is_typed():
    assert (files("jdelta") / "py.typed").is_file()


def test_the_format_is_shipped_beside_its_code():
    assert (files("jdelta") / "wire" / "FORMAT.md").is_file()


def test_the_version_is_the_same_everywhere():
    assert project()["version"] == jdelta.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changes, re.MULTILINE)
    assert newest is not None
    assert newest[1] == jdelta.__version__


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> dict[str, str]:
    """Every requirement of ours with what it demands of the version."""
    found = {}
    extras = project()["optional-dependencies"].values()
    for group in (project()["dependencies"], *extras):
        for line in group:
            name, _, demand = re.fullmatch(r"([\w-]+)(\[.*\])?(.*)", line).groups()
            found[name] = demand
    return found


def test_floors_are_the_lowest_releases_that_ci_runs():
    lines = (ROOT / ".ci" / "lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and line[0] != "#")
    assert {n: f">={v}" for n, v in pinned.items()} == {
        name: demand for name, demand in requirements().items() if demand
    }


def test_no_requirement_has_an_upper_bound():
    for name, demand in requirements().items():
        assert not re.search(r"<|==|~", demand), f"{name}{demand}"
