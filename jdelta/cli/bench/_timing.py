"""Rounds that are interleaved, and the medians of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def rounds(
    actions: Mapping[str, Callable[[], Any]],
    count: int,
    *,
    warm: int = 1,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each action in each of `count` rounds.

    Every round runs every action once; the one that begins moves on by one a round, so
    that no action always follows the same one. What an action returns is let go of
    before the next is timed.

    Args:
        actions: What to time, by name.
        count: Rounds that are timed.
        warm: Rounds before them that are not.
        before: What to do, untimed, before an action.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm, count):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if before is not None and name in before:
                before[name]()
            gc.collect()
            start = time.perf_counter()
            kept = actions[name]()
            elapsed = time.perf_counter() - start
            del kept
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def median(values: Sequence[float]) -> float:
    """The median; of the middle two, their mean."""
    return statistics.median(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)  # ceiling
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The quartiles of a figure, as text: `0.981 to 0.993`."""
    return f"{quantile(values, 0.25):{form}} to {quantile(values, 0.75):{form}}"
