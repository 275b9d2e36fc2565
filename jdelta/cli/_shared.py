"""What the commands share: common options, how errors end them, how numbers look."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from jdelta.errors import JDeltaError

_P = ParamSpec("_P")
_R = TypeVar("_R")

INTERRUPTED = 130  # the shell's status for a command that Ctrl-C ended

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="The run's bucket: a path or a URL."),
]
Version = Annotated[
    int | None,
    typer.Option("--version", min=0, help="The version wanted; default: the newest."),
]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show an error's traceback.")]


def command(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a jdelta error one clear line on standard error, and exit status 1.

    The command's `debug` option, if it is set, lets the traceback through.
    """

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except JDeltaError as error:
            if kwargs.get("debug"):
                raise
            typer.echo(f"jdelta: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("jdelta: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return guarded


def print_json(value: dict[str, Any]) -> None:
    """Write one line of JSON to standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()


def human_bytes(size: float) -> str:
    """A size in decimal units: `human_bytes(12_853_760) == "12.9 MB"`."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
