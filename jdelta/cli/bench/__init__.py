"""`jdelta bench`: what it costs, measured beside a bound or a peer in the same run.

Each benchmark is a module of its own and imports JAX, the stream and so on only when it
runs. Rounds are interleaved and medians are shown; every table names the command, the
machine and how busy the machine was with other work.
"""

from __future__ import annotations

import typer

from jdelta.cli.bench.codec import codec
from jdelta.cli.bench.kernels import kernels
from jdelta.cli.bench.memory import memory
from jdelta.cli.bench.restore import restore
from jdelta.cli.bench.stream import stream

app = typer.Typer(
    name="bench",
    help="Measure speed, size and memory against a bound or a peer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _function in (stream, restore, memory, codec, kernels):
    app.command()(_function)
