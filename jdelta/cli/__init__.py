"""The `jdelta` command.

Each command is a module of its own and imports what it needs when it runs: the command
line starts without JAX or torch, and `inspect`, `verify` and `export` never load them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

import jdelta
from jdelta.cli.demo import demo
from jdelta.cli.export import export
from jdelta.cli.inspect import inspect
from jdelta.cli.verify import verify

app = typer.Typer(
    name="jdelta",
    help="Delta weight sync for JAX: stream exactly what changed, bit for bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jdelta {jdelta.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it."),
    ] = False,
) -> None: ...


for _function in (demo, inspect, verify, export):
    # One line a paragraph: typer would keep the source's line breaks.
    _paragraphs = (_function.__doc__ or "").split("\n\n")
    _help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)
    app.command(help=_help)(_function)
if importlib.util.find_spec("jdelta.cli.bench") is not None:
    _bench = importlib.import_module("jdelta.cli.bench")
    app.add_typer(_bench.app, name="bench")


def main() -> None:
    """Run the command line; exits the process."""
    app()
