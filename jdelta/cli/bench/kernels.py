"""`jdelta bench kernels`: finding changes in-graph, against NumPy and memory copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from jdelta.cli._shared import Debug, Json, command
from jdelta.cli.bench import _timing
from jdelta.cli.bench._pairs import CacheOption, Pair, Trace, TraceOption, load_pair
from jdelta.cli.bench._report import Bar, Quick, Report, Row, progress, require
from jdelta.errors import JDeltaError


@command
def kernels(
    trace: TraceOption = Trace.A1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds that are timed.")
    ] = 15,
    capacity: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Room of the delta, as a share.")
    ] = 0.1,
    cache: CacheOption = None,
    quick: Quick = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the mask words and the whole diff in jit against NumPy on the same arrays.

    Everything counts 4 bytes a weight: the old and the new one (for the memory copy:
    read and written). JAX uses the cores it finds, NumPy one.
    """
    require("jax")
    report = Report(
        name="kernels",
        settings={"trace": trace.value, "rounds": rounds, "capacity": capacity},
        quick=quick,
    )
    pair = load_pair(trace, cache, quick)
    progress("timing")
    actions = _actions(pair, capacity)
    times = _timing.rounds(actions, rounds, warm=2)
    seconds = {name: _timing.median(values) for name, values in times.items()}
    gbps = {name: 4 * pair.elements / 1e9 / t for name, t in seconds.items()}
    notes = {
        "memcpy": "np.copyto, read + written, one thread",
        "words": "change_words in jit: 32 flags a word",
        "positions": f"diff in jit, capacity {capacity}: positions, old and new bits",
        "flatnonzero": "np.flatnonzero(old != new)",
        "numpy_words": "np.packbits(np.not_equal(old, new))",
    }
    density = pair.changed / pair.elements
    report.finish(
        {
            "gbps": gbps,
            "trace": pair.name,
            "density": density,
            "elements": pair.elements,
            "seconds": seconds,
        },
        [
            Row("density", f"{density:.3%}", f"{pair.name}, {pair.elements:,} bf16"),
            *(
                Row(
                    name,
                    f"{gbps[name]:.2f} GB/s",
                    f"{notes[name]}; {seconds[name] * 1e3:.1f} ms, middle half "
                    + _timing.spread([1e3 * t for t in times[name]], ".1f"),
                )
                for name in gbps
            ),
            Row("rounds", str(rounds), "interleaved; medians"),
        ],
        [
            Bar(
                "mask words are as fast as numpy.not_equal + packbits",
                f"{gbps['words'] / gbps['numpy_words']:.2f}x",
                gbps["words"] >= gbps["numpy_words"],
            ),
            Bar(
                "whole detection is as fast as numpy.flatnonzero(old != new)",
                f"{gbps['positions'] / gbps['flatnonzero']:.2f}x",
                gbps["positions"] >= gbps["flatnonzero"],
            ),
        ],
        as_json=as_json,
    )


def _actions(pair: Pair, capacity: float) -> dict[str, Callable[[], Any]]:
    """What is timed, checked once to find the same changes."""
    import functools

    import jax
    import ml_dtypes

    import jdelta
    from jdelta.delta import change_words

    def on_device(arrays: list[np.ndarray]) -> list[jax.Array]:
        return [jax.device_put(a.view(ml_dtypes.bfloat16)) for a in arrays]

    old, new = on_device(pair.old), on_device(pair.new)
    words = jax.jit(change_words)
    diff = jax.jit(functools.partial(jdelta.diff, capacity=capacity))
    scratch = [np.zeros_like(array) for array in pair.old]
    pairs = list(zip(pair.old, pair.new, strict=True))

    def memcpy() -> None:
        for into, array in zip(scratch, pair.new, strict=True):
            np.copyto(into, array)

    def flatnonzero() -> list[np.ndarray]:
        return [np.flatnonzero(a != b) for a, b in pairs]

    def numpy_words() -> list[np.ndarray]:
        return [np.packbits(np.not_equal(a, b)) for a, b in pairs]

    found = list(diff(old, new).to_host().values())
    expected = flatnonzero()
    if len(found) != len(expected) or not all(
        np.array_equal(positions, want)
        for (positions, _, _), want in zip(found, expected, strict=True)
    ):
        raise JDeltaError("diff found other changes than numpy.flatnonzero")
    bits = int(np.bitwise_count(np.asarray(words(old, new))).sum())
    if bits != pair.changed:
        raise JDeltaError(f"change_words has {bits} bits set, expected {pair.changed}")
    return {
        "memcpy": memcpy,
        "words": lambda: jax.block_until_ready(words(old, new)),
        "positions": lambda: jax.block_until_ready(diff(old, new)),
        "flatnonzero": flatnonzero,
        "numpy_words": numpy_words,
    }
