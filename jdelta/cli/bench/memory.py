"""`jdelta bench memory`: what a publisher and a subscriber add to a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from enum import StrEnum
from typing import Annotated, Any

import typer

from jdelta.cli._shared import Debug, Json, command, human_bytes
from jdelta.cli.bench import _peak
from jdelta.cli.bench._report import Bar, Quick, Report, Row, progress, require
from jdelta.errors import JDeltaError

_ALLOWANCE_MIB = 256
# glibc keeps freed blocks below a threshold that it raises by itself to 32 MiB. At a
# fixed one larger blocks go back at once: what is resident is what is held.
_RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


class Allocator(StrEnum):
    """How the measured processes allocate."""

    returning = "returning"
    default = "default"


@command
def memory(
    params: Annotated[
        int | None, typer.Option(min=1000, help="Weights. [default: 500 M]")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps that are measured in each phase.")
    ] = 4,
    lr: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of the AdamW.")
    ] = 1e-6,
    capacity: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Room of the delta, as a share.")
    ] = 0.1,
    allocator: Annotated[
        Allocator,
        typer.Option(
            help="returning: all processes run with MALLOC_MMAP_THRESHOLD_ = 1 MiB, so "
            "that freed memory does not count; default: as the C library has it."
        ),
    ] = Allocator.returning,
    quick: Quick = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure peak memory beside the same process without jdelta.

    Each runs in a process of its own. The trainer holds f32 masters, AdamW's moments
    and the bf16 weights it computes with, and publishes those by jdelta.diff; on the
    CPU the arrays of JAX are host memory, so what is found in-graph counts in full. The
    publisher is measured while the first anchor is written, while deltas follow each
    other, and while an anchor is rebuilt in the background; training goes on meanwhile.
    The subscriber is measured while it restores an anchor, a chain, and follows.
    """
    require("jax", "flax", "optax")
    params = params or (2_000_000 if quick else 500_000_000)
    settings = {
        "params": params,
        "steps": steps,
        "lr": lr,
        "capacity": capacity,
        "allocator": allocator.value,
    }
    report = Report(
        name="memory",
        settings=settings,
        quick=quick,
    )
    _peak.reset()  # fails early where it cannot be measured
    trainer, reader = "_memory_trainer", "_memory_reader"
    progress("training without jdelta")
    off = _child(trainer, settings)
    with tempfile.TemporaryDirectory(prefix="jdelta-bench-") as folder:
        progress("training with a publisher")
        on = _child(trainer, {**settings, "folder": folder})
        whole = 2 * on["parameters"]
        progress("reading")
        last = on["version"]
        follow = {
            "folder": folder,
            "chain": max(1, last // 2),
            "last": last,
            "allocator": allocator.value,
        }
        read = _child(reader, follow)
        read_jax = _child(reader, {**follow, "jax": True})

    def extra(phase: str) -> int:
        return on[phase] - off["peak"]

    first, second, deltas = (
        extra(phase) for phase in ("first_anchor", "second_anchor", "deltas")
    )
    subscriber = max(read[key] - whole for key in ("anchor", "chain", "updates"))
    subscriber_jax = max(read_jax[key] - whole for key in ("chain", "updates"))
    anchor_x = max(first, second) / whole
    publisher_x, subscriber_x = deltas / whole, subscriber / whole
    delta = max(on["sizes"])
    allowance = _ALLOWANCE_MIB << 20

    def row(what: str, size: int, note: str = "") -> Row:
        return Row(what, f"{size / whole:.3f}x", f"{human_bytes(size)} {note}".strip())

    report.finish(
        {
            "publisher_anchor_x": anchor_x,
            "publisher_x": publisher_x,
            "subscriber_x": subscriber_x,
            "allowance_mib": _ALLOWANCE_MIB,
            "parameters": on["parameters"],
            "weights_bytes": whole,
            "delta_bytes": delta,
            "density": max(on["changed"]) / on["parameters"],
            "subscriber_jax_x": subscriber_jax / whole,
            "raw": {"off": off, "on": on, "read": read, "read_jax": read_jax},
        },
        [
            row("published weights", whole, f"({on['parameters']:,} bf16)"),
            row("trainer without jdelta", off["peak"], "at its peak"),
            row("first anchor", first, "more than that"),
            row("deltas", deltas, f"more; {max(on['changed']):,} changes at most"),
            row("rebuilt anchor", second, "more"),
            row("largest delta", delta, "as stored"),
            *(
                row(f"subscriber, {key}", read[key] - whole, "beyond its weights")
                for key in ("anchor", "chain", "updates")
            ),
            row("subscriber, JAX arrays", subscriber_jax, "beyond its weights"),
        ],
        [
            Bar(
                f"publisher, an anchor made: 1.0x + {_ALLOWANCE_MIB} MiB",
                f"{anchor_x:.3f}x",
                max(first, second) <= whole + allowance,
            ),
            Bar(
                f"publisher otherwise: 0.3x + {_ALLOWANCE_MIB} MiB",
                f"{publisher_x:.3f}x",
                deltas <= 0.3 * whole + allowance,
            ),
            Bar(
                f"subscriber: the delta + {_ALLOWANCE_MIB} MiB beyond its weights",
                f"{human_bytes(subscriber)} ({subscriber_x:.3f}x)",
                subscriber <= delta + allowance,
            ),
        ],
        as_json=as_json,
    )


def _child(module: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a child process measured.

    Raises:
        JDeltaError: it failed; the message holds its last words.
    """
    allocator = _RETURNING if options["allocator"] == Allocator.returning else {}
    # The child must find the very modules that this process would.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"jdelta.cli.bench.{module}", json.dumps(options)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **allocator, "PYTHONPATH": path},
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise JDeltaError(
            f"the measured process ended with status {done.returncode}:\n{tail}"
        )
    return json.loads(done.stdout.splitlines()[-1])
