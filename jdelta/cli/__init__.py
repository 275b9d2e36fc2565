"""The `jdelta` command.

Each command is a module of its own and imports what it needs when it runs: the command
line starts without JAX or torch, and `inspect`, `verify` and `export` never load them.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import jdelta
from jdelta.cli.demo import demo
from jdelta.cli.export import export
from jdelta.cli.inspect import inspect
from jdelta.cli.verify import verify

_LATE = {"bench": "jdelta.cli.bench"}  # groups whose module is imported when asked for


class _Root(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_LATE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _LATE:
            return get_command(importlib.import_module(_LATE[cmd_name]).app)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="jdelta",
    cls=_Root,
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


def main() -> None:
    """Run the command line; exits the process."""
    app()
