"""What every benchmark prints: the table, the bars and the JSON line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from jdelta.cli._shared import print_json
from jdelta.errors import MissingExtraError

Quick = Annotated[
    bool,
    typer.Option("--quick", help="Small sizes, to try it out; bars are not judged."),
]

_PACKAGES = ("jdelta", "numpy", "ml_dtypes", "zstandard", "jax", "jaxlib")


class Row(NamedTuple):
    """One line of a table."""

    what: str
    value: str
    note: str = ""


class Bar(NamedTuple):
    """A promise, and whether the measured figure keeps it."""

    promise: str
    measured: str
    met: bool


class Load:
    """How busy the machine is with the work of others, from now on.

    Cores, averaged over the time since it was made. Linux only.
    """

    def __init__(self) -> None:
        """Starts to count."""
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        ticks = [float(field) for field in fields]
        # user nice system idle iowait irq softirq steal
        busy = sum(ticks[:3]) + sum(ticks[5:8])
        own = os.times()
        used = own.user + own.system + own.children_user + own.children_system
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), used

    def others(self) -> float | None:
        """Cores that other processes kept busy; None where it cannot be known."""
        now = self._read()
        if self._start is None or now is None or now[0] == self._start[0]:
            return None
        seconds, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return max(0.0, busy - own) / seconds


def machine() -> dict[str, Any]:
    """The machine and the versions that figures were measured on."""
    info: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            info[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    info["load_average"] = round(os.getloadavg()[0], 2)
    return info


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def require(*modules: str) -> None:
    """Raise MissingExtraError unless the trainer's packages are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"this benchmark needs {', '.join(missing)}: pip install 'jdelta[jax]'"
        )


@dataclasses.dataclass(kw_only=True)
class Report:
    """One benchmark's run; made before it starts.

    Attributes:
        name: The subcommand.
        settings: Its options as they were used, by name.
        quick: Whether sizes were shrunk: then no bar is judged.
    """

    name: str
    settings: Mapping[str, Any]
    quick: bool = False
    machine: dict[str, Any] = dataclasses.field(default_factory=machine)
    load: Load = dataclasses.field(default_factory=Load)

    @property
    def command(self) -> str:
        """The command line that repeats this run, every option spelled out."""
        words = ["jdelta", "bench", self.name]
        for option, value in self.settings.items():
            words += [f"--{option.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--quick"] if self.quick else words)

    def finish(
        self,
        figures: Mapping[str, Any],
        rows: Sequence[Row],
        bars: Sequence[Bar],
        *,
        as_json: bool,
    ) -> None:
        """Print the table, the verdicts and, with `as_json`, the JSON line.

        Args:
            figures: The benchmark's results; the keys of the JSON line.
            rows: The same for people, with more detail.
            bars: The promises these figures stand for.
            as_json: Whether to end with the JSON line on standard output; the table
                then goes to standard error.
        """
        from rich.console import Console
        from rich.table import Table

        others = self.load.others()
        console = Console(stderr=as_json, highlight=False)
        table = Table(title=f"jdelta bench {self.name}", title_justify="left")
        table.add_column("what")
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("how")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for bar in bars:
            verdict = "[green]met[/green]" if bar.met else "[red]MISSED[/red]"
            if self.quick:
                verdict = "not judged at these sizes"
            console.print(f"{bar.promise}: {bar.measured}, {verdict}")
        console.print(f"command: {self.command}", soft_wrap=True)
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        console.print(f"machine: {facts}", soft_wrap=True)
        if others is not None:
            console.print(f"other processes kept {others:.2f} cores busy meanwhile")
        if as_json:
            print_json(
                {
                    **figures,
                    "bars": [
                        {"promise": b.promise, "measured": b.measured, "met": b.met}
                        for b in bars
                        if not self.quick
                    ],
                    "command": self.command,
                    "machine": self.machine,
                    "others_cores": None if others is None else round(others, 3),
                }
            )


def progress(message: str) -> None:
    """Tell on standard error what is being done."""
    typer.echo(f"… {message}", err=True)
