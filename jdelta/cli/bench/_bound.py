"""What the changes of a step must cost: the entropy bound that codecs are held to."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jdelta.wire import bits


class Bound(NamedTuple):
    """Bits a changed element.

    Attributes:
        positions: Which elements change, given the exponent of the old weight.
        values: By how many units in bf16 order, given the same.
    """

    positions: float
    values: float

    @property
    def total(self) -> float:
        """Both."""
        return self.positions + self.values


def bound(olds: list[np.ndarray], news: list[np.ndarray]) -> Bound:
    """The bound of a pair of bf16 checkpoints under the old exponent as context.

    Positions: the length of an adaptive code with the Krichevsky-Trofimov estimator
    (IEEE Trans. Inf. Theory 27(2), 1981) for each exponent's elements, so the cost of
    learning the rates is included. Values: the empirical entropy of the signed step
    given the exponent.

    Args:
        olds: Flat bf16 bits of each tensor.
        news: The same after the step.
    """
    sizes = np.zeros(256, np.int64)
    hits = np.zeros(256, np.int64)
    steps: list[np.ndarray] = []
    for old, new in zip(olds, news, strict=True):
        exponents = ((old >> 7) & 0xFF).astype(np.uint8)
        sizes += np.bincount(exponents, minlength=256)
        changed = np.flatnonzero(old != new)
        at = exponents[changed]
        hits += np.bincount(at, minlength=256)
        moved = bits.step(old[changed], new[changed], "BF16")
        steps.append(at.astype(np.uint32) << 16 | moved)
    count = int(hits.sum())
    if not count:
        return Bound(0.0, 0.0)
    positions = sum(
        _adaptive_bits(int(k), int(n)) for k, n in zip(hits, sizes, strict=True)
    )
    _, kinds = np.unique(np.concatenate(steps), return_counts=True)
    values = _plogp(hits) - _plogp(kinds)
    return Bound(positions / count, values / count)


def _adaptive_bits(ones: int, size: int) -> float:
    """Bits of an adaptive (Krichevsky-Trofimov) code of `size` flags, `ones` of them 1.

    -log2 of Gamma(k + 1/2) Gamma(n - k + 1/2) / (pi n!).
    """
    nats = (
        math.lgamma(size + 1)
        + math.log(math.pi)
        - math.lgamma(ones + 0.5)
        - math.lgamma(size - ones + 0.5)
    )
    return nats / math.log(2)


def _plogp(counts: np.ndarray) -> float:
    counts = counts[counts > 0].astype(np.float64)
    return float(np.sum(counts * np.log2(counts)))
