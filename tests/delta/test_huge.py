"""A leaf whose positions do not fit 31 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdelta.delta import apply, diff
from jdelta.delta._layout import Limits

ROWS, COLUMNS = 2**16 + 8, 2**15  # 2^31 + 2^18 elements


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    places = np.array([0, 5, 2**30, 2**31 - 1, 2**31, 2**31 + 77, ROWS * COLUMNS - 1])

    @jax.jit
    def make():
        row, column = places // COLUMNS, places % COLUMNS
        old = jnp.zeros((ROWS, COLUMNS), jnp.uint8)
        return old, old.at[row, column].set(jnp.arange(1, 8, dtype=jnp.uint8))

    old, new = make()
    delta = jax.jit(lambda a, b: diff(a, b, capacity=1e-6))({"w": old}, {"w": new})
    positions, before, after = delta.to_host()["w"]
    np.testing.assert_array_equal(positions, places)
    np.testing.assert_array_equal(before, 0)
    np.testing.assert_array_equal(after, np.arange(1, 8))
    got = jax.jit(apply, donate_argnums=0)({"w": old}, delta)["w"]
    assert bool(jax.jit(lambda a, b: jnp.all(a == b))(got, new))


def test_the_same_path_in_small():
    """In pieces over several groups, in ragged blocks."""
    limits = Limits(
        small=10,
        block=256,
        batch=3,
        piece=300,
        group=1000,
        sweep=6,
        slots=16,
        slot_floor=1,
    )
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, (30, 41)).astype(np.uint8)
    new = np.where(rng.random(old.shape) < 0.2, old ^ 3, old)
    delta = diff({"w": old}, {"w": new}, capacity=1.0, _limits=limits)
    np.testing.assert_array_equal(
        delta.to_host()["w"][0], np.flatnonzero(old.ravel() != new.ravel())
    )
    got = apply({"w": old}, delta, _limits=limits)["w"]
    np.testing.assert_array_equal(np.asarray(got), new)
