"""`jdelta bench restore`: a chain of deltas against its anchor alone."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jdelta.cli._shared import Debug, Json, command, human_bytes
from jdelta.cli.bench._report import Bar, Quick, Report, Row, progress
from jdelta.errors import JDeltaError

_BAR = 2.5


@command
def restore(
    params: Annotated[
        int | None, typer.Option(min=1000, help="Weights. [default: 64 M]")
    ] = None,
    tensors: Annotated[int, typer.Option(min=1, help="Tensors they are in.")] = 8,
    deltas: Annotated[int, typer.Option(min=1, help="Length of the chain.")] = 16,
    density: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Changed share, each delta.")
    ] = 0.005,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds that are timed. [default: 9]")
    ] = None,
    quick: Quick = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time Subscriber.restore of an anchor and deltas against the anchor alone.

    Both read the same directory with the same checks (hashes of every object, digests
    of the whole weights at the end); the files are in the page cache.
    """
    from jdelta.cli.bench import _timing

    params = params or (500_000 if quick else 64_000_000)
    rounds = rounds or (3 if quick else 9)
    report = Report(
        name="restore",
        settings={
            "params": params,
            "tensors": tensors,
            "deltas": deltas,
            "density": density,
            "rounds": rounds,
        },
        quick=quick,
    )
    with tempfile.TemporaryDirectory(prefix="jdelta-bench-") as folder:
        progress("publishing the chain")
        chain_bytes = _publish(folder, params, tensors, deltas, density)
        parts: dict[int, dict[str, list[float]]] = {0: {}, deltas: {}}
        progress("restoring")
        seconds = _timing.rounds(
            {
                "anchor": _restorer(folder, 0, parts[0]),
                "chain": _restorer(folder, deltas, parts[deltas]),
            },
            rounds,
        )
    ratios = [b / a for a, b in zip(seconds["anchor"], seconds["chain"], strict=True)]
    ratio = _timing.median(ratios)

    def split(version: int) -> str:
        return ", ".join(
            f"{stage} {_timing.median(times) * 1e3:.0f}"
            for stage, times in parts[version].items()
        )

    anchor, chain = (_timing.median(seconds[name]) for name in ("anchor", "chain"))
    report.finish(
        {
            "ratio": ratio,
            "anchor_s": anchor,
            "chain_s": chain,
            "anchor_bytes": chain_bytes["anchor"],
            "delta_bytes": chain_bytes["delta"],
        },
        [
            Row("anchor alone", f"{anchor * 1e3:.0f} ms", f"{split(0)} (thread ms)"),
            Row(
                f"anchor and {deltas} deltas",
                f"{chain * 1e3:.0f} ms",
                f"{split(deltas)} (thread ms)",
            ),
            Row(
                "ratio",
                f"{ratio:.2f}",
                f"median of {rounds} rounds, middle half "
                + _timing.spread(ratios, ".2f"),
            ),
            Row("anchor", human_bytes(chain_bytes["anchor"])),
            Row("deltas", human_bytes(chain_bytes["delta"]), f"all {deltas}"),
        ],
        [
            Bar(
                f"a chain restores within {_BAR}x of its anchor",
                f"{ratio:.2f}x",
                ratio <= _BAR,
            )
        ],
        as_json=as_json,
    )


def _publish(
    folder: str, params: int, tensors: int, deltas: int, density: float
) -> dict[str, int]:
    """Write the chain, and prove once that it restores to what was published."""
    import numpy as np

    import jdelta
    from jdelta.cli.bench import _data

    weights = _data.weights(params, tensors)
    flat = {name: array.reshape(-1).view(np.uint16) for name, array in weights.items()}
    rng = np.random.default_rng(1)
    with jdelta.Publisher(folder, weights, anchor_share=math.inf) as publisher:
        for step in range(1, deltas + 1):
            changes = {name: _data.move(x, density, rng) for name, x in flat.items()}
            publisher.publish(changes, step=step)
            for name, moved in changes.items():
                flat[name][moved.positions] = moved.new
            publisher.flush(600.0)  # or it would be merged with the next one
        if publisher.version != deltas:
            raise JDeltaError(
                f"the chain has version {publisher.version}, expected {deltas}"
            )
        written = publisher.stats().bytes_written
    restored = jdelta.Subscriber(folder).restore()
    for name, array in weights.items():
        if not np.array_equal(restored[name].view(np.uint16), array.view(np.uint16)):
            raise JDeltaError(f"{name!r} was restored to other bits than published")
    return written


def _restorer(
    folder: str, version: int, parts: dict[str, list[float]]
) -> Callable[[], Any]:
    import jdelta

    def action() -> Any:
        with jdelta.Subscriber(folder) as subscriber:
            weights = subscriber.restore(version)
            for stage, seconds in subscriber.stats().times.items():
                parts.setdefault(stage, []).append(seconds)
            return weights

    return action
