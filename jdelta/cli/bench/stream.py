"""`jdelta bench stream`: training with the stream on against training without it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from jdelta.cli._shared import Debug, Json, command
from jdelta.cli.bench import _timing
from jdelta.cli.bench._report import Bar, Quick, Report, Row, progress, require


class Recipe(StrEnum):
    """How the trainer finds what changed."""

    wrap = "wrap"
    diff = "diff"
    fused = "fused"


@command
def stream(
    pairs: Annotated[
        int | None, typer.Option(min=1, help="On/off pairs. [default: 30]")
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Steps in each half. [default: 2]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step. [default: 8]")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Tokens a sequence. [default: 256]")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=16, help="Width of the model. [default: 512]")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Its layers. [default: 8: 25 M weights]")
    ] = None,
    lr: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of the AdamW.")
    ] = 3e-6,
    recipe: Annotated[
        Recipe,
        typer.Option(
            help="wrap: jdelta.wrap, with extract in a jit of its own; fused: with "
            "extract in the step's jit; diff: jdelta.diff over the published copies."
        ),
    ] = Recipe.wrap,
    publish_params: Annotated[
        int | None,
        typer.Option(min=1000, help="Weights for publish_ms. [default: 100 M]"),
    ] = None,
    publish_calls: Annotated[
        int | None, typer.Option(min=1, help="Calls of publish timed. [default: 300]")
    ] = None,
    quick: Quick = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what streaming every step costs a trainer.

    A real step (forward, backward, AdamW on f32 masters) of a transformer, in blocks of
    a few steps, alternately without jdelta and with it: diff, copies, encoding and the
    puts into a directory included. A block with it ends when its last version is
    committed, so no background work is left for the other half. publish_ms is the time
    publish() holds its caller, for deltas of a larger tree that are still being
    computed while earlier ones are encoded.
    """
    require("jax", "flax", "optax")
    from jdelta.cli.bench import _latency, _train

    pairs = pairs or (4 if quick else 30)
    setup = _train.Setup(
        pairs=pairs,
        block=block or (1 if quick else 2),
        batch=batch or (2 if quick else 8),
        sequence=sequence or (32 if quick else 256),
        width=width or (64 if quick else 512),
        layers=layers or (2 if quick else 8),
        learning_rate=lr,
        recipe=recipe.value,
    )
    publish_params = publish_params or (300_000 if quick else 100_000_000)
    publish_calls = publish_calls or (20 if quick else 300)
    report = Report(
        name="stream",
        settings={
            "pairs": setup.pairs,
            "block": setup.block,
            "batch": setup.batch,
            "sequence": setup.sequence,
            "width": setup.width,
            "layers": setup.layers,
            "lr": setup.learning_rate,
            "recipe": setup.recipe,
            "publish-params": publish_params,
            "publish-calls": publish_calls,
        },
        quick=quick,
    )
    progress("training, with the stream and without it")
    trained = _train.run(setup)
    progress("timing publish()")
    latency = _latency.run(publish_params, publish_calls)

    ratios, cores = trained.ratios(), trained.core_ms_per_mparam()
    ratio, core = _timing.median(ratios), _timing.median(cores)
    whole = sum(trained.off) / sum(trained.on)
    calls = [1e3 * s for s in latency.seconds]
    publish = {
        "median": _timing.median(calls),
        "p99": _timing.quantile(calls, 0.99),
        "max": max(calls),
    }
    step_ms = 1e3 * _timing.median(trained.off) / setup.block
    stages = ", ".join(
        f"{stage} {1e3 * seconds / trained.versions:.1f}"
        for stage, seconds in trained.stages.items()
    )
    report.finish(
        {
            "throughput_ratio": ratio,
            "publish_ms": publish,
            "core_ms_per_mparam": core,
            "throughput_ratio_total": whole,
            "throughput_ratio_quartiles": [
                _timing.quantile(ratios, 0.25),
                _timing.quantile(ratios, 0.75),
            ],
            "step_ms": step_ms,
            "parameters": trained.parameters,
            "density": trained.density,
            "versions": trained.versions,
            "publish_parameters": latency.parameters,
            "publish_density": latency.density,
        },
        [
            Row("model", f"{trained.parameters:,}", f"weights; step {step_ms:.0f} ms"),
            Row(
                "throughput, on / off",
                f"{ratio:.4f}",
                f"median of {pairs} pairs of {setup.block} steps; middle half "
                f"{_timing.spread(ratios, '.4f')}; all together {whole:.4f}",
            ),
            Row(
                "extra CPU time",
                f"{core:.2f} core-ms",
                "per million weights and version; middle half "
                + _timing.spread(cores, ".2f"),
            ),
            Row(
                "per version",
                f"{trained.extra_ms():.1f} ms",
                f"longer step; in threads (ms): {stages}",
            ),
            Row(
                "published",
                f"{trained.versions}",
                f"versions, density {trained.density:.2%}, {trained.merged} merged, "
                f"{trained.anchors} anchors rebuilt meanwhile",
            ),
            Row(
                "publish()",
                f"{publish['median']:.3f} ms",
                f"median of {len(calls)} calls; p99 {publish['p99']:.3f}, max "
                f"{publish['max']:.3f}",
            ),
            Row(
                "  its tree",
                f"{latency.parameters:,}",
                f"weights in {latency.leaves} arrays, density {latency.density:.2%}; "
                f"{latency.pending:.0%} of deltas not computed yet when published, "
                f"background busy at {latency.busy:.0%} of calls, {latency.merged} "
                "merged",
            ),
        ],
        [
            Bar(
                "training keeps at least 97 % of its throughput",
                f"{ratio:.2%}",
                ratio >= 0.97,
            ),
            Bar(
                "publish() holds its caller under 1 ms (median)",
                f"{publish['median']:.3f} ms",
                publish["median"] < 1,
            ),
            Bar(
                "publish() holds its caller under 5 ms (p99)",
                f"{publish['p99']:.3f} ms",
                publish["p99"] < 5,
            ),
        ],
        as_json=as_json,
    )
