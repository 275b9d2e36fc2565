"""Merging changes and composing steps, against a dictionary of elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdelta.errors import StateMismatchError
from jdelta.wire import bits, digest
from jdelta.wire.changes import Changes, Steps, compose, merge

_weights = st.lists(st.integers(0, 3), min_size=12, max_size=12)


def _bits(values):
    return np.array(values, np.uint16)


@given(_weights, _weights)
def test_between_finds_exactly_the_differences(a, b):
    found = Changes.between(_bits(a), _bits(b))
    assert found.positions.tolist() == [i for i in range(12) if a[i] != b[i]]
    assert found.old.tolist() == [a[i] for i in found.positions]
    assert found.new.tolist() == [b[i] for i in found.positions]


@given(_weights, _weights, _weights)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
def test_merge_equals_the_direct_change(dtype, a, b, c):
    first = Changes.between(_bits(a), _bits(b))
    second = Changes.between(_bits(b), _bits(c))
    merged = merge(
        first._replace(positions=first.positions.astype(dtype)),
        second._replace(positions=second.positions.astype(dtype)),
    )
    for found, expected in zip(
        merged, Changes.between(_bits(a), _bits(c)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_merge_refuses_changes_that_do_not_follow_each_other():
    first = Changes(np.array([3]), _bits([1]), _bits([2]))
    second = Changes(np.array([3]), _bits([7]), _bits([8]))
    with pytest.raises(StateMismatchError, match="do not follow each other"):
        merge(first, second)


@given(_weights, _weights, _weights)
def test_compose_equals_the_direct_steps(a, b, c):
    def steps(old, new):
        change = Changes.between(_bits(old), _bits(new))
        return Steps(
            change.positions,
            bits.step(change.old, change.new, "BF16"),
            digest.difference(*change),
        )

    for found, expected in zip(
        compose(steps(a, b), steps(b, c)), steps(a, c), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_positions_past_32_bits_survive_a_merge():
    first = Changes(np.array([5, 1 << 40], np.uint64), _bits([0, 0]), _bits([1, 1]))
    second = Changes(np.array([6, 1 << 40], np.uint64), _bits([0, 1]), _bits([1, 2]))
    merged = merge(first, second)
    assert merged.positions.tolist() == [5, 6, 1 << 40]
    assert merged.new.tolist() == [1, 1, 2]
