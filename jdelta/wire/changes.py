"""What changed in one tensor: as old and new bits, or as steps between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jdelta.errors import StateMismatchError
from jdelta.wire import digest


class Changes(NamedTuple):
    """The changed elements of one tensor.

    Attributes:
        positions: Flat C-order positions, strictly increasing, unsigned or int64.
        old: Their bits before, unsigned integers of the element's width.
        new: Their bits after; nowhere equal to `old`.
    """

    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray

    @classmethod
    def between(cls, old_bits: np.ndarray, new_bits: np.ndarray) -> Changes:
        """The changes from one tensor's flat bits to another's."""
        positions = np.flatnonzero(old_bits != new_bits)
        return cls(positions, old_bits[positions], new_bits[positions])


class Steps(NamedTuple):
    """The changed elements of one tensor, relative to the base version's bits.

    Attributes:
        positions: Flat C-order positions, strictly increasing, int64.
        steps: Nonzero steps modulo 2^w, unsigned integers of the element's width.
        digest_delta: What the changes add to the tensor's digest.
    """

    positions: np.ndarray
    steps: np.ndarray
    digest_delta: int


def merge(first: Changes, second: Changes) -> Changes:
    """One change equal to `first` followed by `second`.

    Elements that came back to their old bits are left out.

    Raises:
        StateMismatchError: `second` does not start from what `first` left.
    """
    at, earlier, later = _merged(first.positions, second.positions)
    if not np.array_equal(first.new[earlier.both], second.old[later.both]):
        raise StateMismatchError(
            "two changes do not follow each other: where both change an element, the "
            "second must start from the bits the first left there"
        )
    old = np.empty(at.size, first.old.dtype)
    new = np.empty(at.size, first.new.dtype)
    old[later.slots] = second.old
    old[earlier.slots] = first.old
    new[earlier.slots] = first.new
    new[later.slots] = second.new
    keep = np.flatnonzero(old != new)
    if keep.size == at.size:
        return Changes(at, old, new)
    return Changes(at[keep], old[keep], new[keep])


def compose(first: Steps, second: Steps) -> Steps:
    """One set of steps equal to `first` followed by `second`; zero steps left out."""
    at, earlier, later = _merged(first.positions, second.positions)
    steps = np.zeros(at.size, first.steps.dtype)
    steps[earlier.slots] = first.steps
    steps[later.slots] += second.steps
    moved = digest.add(first.digest_delta, second.digest_delta)
    keep = np.flatnonzero(steps)
    if keep.size == at.size:
        return Steps(at, steps, moved)
    return Steps(at[keep], steps[keep], moved)


class _Side(NamedTuple):
    slots: np.ndarray  # where each element of this side lands in the union
    both: np.ndarray  # the elements of this side that the other has too


def _merged(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, _Side, _Side]:
    """The sorted union of two strictly increasing sequences of positions."""
    narrow = all(p.dtype.kind == "u" and p.dtype.itemsize <= 4 for p in (a, b))
    dtype = np.uint32 if narrow else np.int64
    joined = np.concatenate([a, b], dtype=dtype, casting="unsafe")
    # Stable sorting of two sorted runs is one merge, and keeps `a` before `b`.
    ranks = np.argsort(joined, kind="stable")
    ordered = joined[ranks]
    fresh = np.empty(ordered.size, np.bool_)
    fresh[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    slots = np.empty(ordered.size, np.int64)
    slots[ranks] = np.cumsum(fresh) - 1
    twice = np.flatnonzero(~fresh)
    return (
        ordered[fresh],
        _Side(slots[: a.size], ranks[twice - 1]),
        _Side(slots[a.size :], ranks[twice] - a.size),
    )
