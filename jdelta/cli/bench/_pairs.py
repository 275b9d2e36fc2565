"""The pair of checkpoints that `codec` and `kernels` work on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from jdelta.cli.bench._report import progress
from jdelta.testing import traces


class Trace(StrEnum):
    """A recorded step of fine-tuning."""

    A = "A"
    A1 = "A1"


TraceOption = Annotated[
    Trace,
    typer.Option(help="A: a step at 3e-6, 2.4 % changed; A1: one at 1e-6, 0.96 %."),
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where traces are kept once made. [default: ~/.cache/jdelta/traces]",
    ),
]


class Pair(NamedTuple):
    """Flat bf16 bits of each matrix, before and after."""

    old: list[np.ndarray]
    new: list[np.ndarray]
    name: str

    @property
    def elements(self) -> int:
        """Weights."""
        return sum(array.size for array in self.old)

    @property
    def changed(self) -> int:
        """Weights whose bits differ."""
        return sum(
            int(np.count_nonzero(a != b))
            for a, b in zip(self.old, self.new, strict=True)
        )


def load_pair(trace: Trace, cache: Path | None, quick: bool) -> Pair:
    """The trace asked for, or with `quick` a small synthetic stand-in."""
    if quick:
        old, new = traces.synthetic(1 << 19, 0.0242 if trace is Trace.A else 0.0096)
        return Pair(np.split(old, 8), np.split(new, 8), "synthetic")
    progress(f"trace {trace.value} (some minutes where it was never made)")
    old, new = traces.trace(trace.value, cache)
    return Pair(
        [np.ascontiguousarray(x).reshape(-1).view(np.uint16) for x in old],
        [np.ascontiguousarray(x).reshape(-1).view(np.uint16) for x in new],
        f"trace {trace.value}",
    )
