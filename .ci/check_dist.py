"""Looks into the wheel and the sdist: what must be there, and what must not."""

import sys
import tarfile
import zipfile

WHEEL = ("jdelta/py.typed", "jdelta/wire/FORMAT.md", "jdelta/cli/__main__.py")
SDIST = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/conftest.py")

for path in sys.argv[1:]:
    if path.endswith(".whl"):
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
        needed = WHEEL
        roots = {name.split("/")[0] for name in names}
        strange = {root for root in roots if not root.startswith("jdelta")}
    else:
        with tarfile.open(path) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        needed = SDIST
        strange = set()
    missing = [name for name in needed if name not in names]
    strange |= {name for name in names if "__pycache__" in name or ".ipynb_" in name}
    print(f"{path.rsplit('/', 1)[-1]}: {len(names)} entries")
    if missing or strange:
        sys.exit(f"{path}: missing {missing}, not wanted {sorted(strange)[:5]}")
