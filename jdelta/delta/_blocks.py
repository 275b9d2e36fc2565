"""Reading leaves a block at a time, by a table of where each block lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._bits import narrow_bits, to_bits
from jdelta.delta._layout import RANK_ELEMENTS, Large


class Table(NamedTuple):
    """Where each block lies; a row for each block, or one block's scalars.

    Attributes:
        leaf: number of the large leaf.
        row: row in it.
        column: first column of the block; the last block of a row starts early so
            that it ends with the row.
        skip: elements at the block's start that the block before it covers.
        start: flat position of the block's first element in its group.
    """

    leaf: Any
    row: Any
    column: Any
    skip: Any
    start: Any

    @classmethod
    def of(cls, large: Sequence[Large], block: int) -> Table:
        """The blocks of all large leaves, in flat order."""
        rows = []
        for number, leaf in enumerate(large):
            for row in range(leaf.rows):
                for wanted in range(0, leaf.columns, block):
                    column = max(0, min(wanted, leaf.columns - block))
                    start = leaf.start + row * leaf.columns + column
                    rows.append((number, row, column, wanted - column, start))
        return cls(*np.array(rows, np.uint32).T)

    def at(self, unit: jax.Array) -> Table:
        """One block's scalars."""
        place = Table(*(jnp.asarray(column)[unit] for column in self))
        # Plus 0, which XLA cannot tell: see `choose`.
        return place._replace(leaf=place.leaf + (unit >> 31))


def round_up(size: int) -> int:
    """`size` elements in whole rank blocks."""
    return -(-size // RANK_ELEMENTS) * RANK_ELEMENTS


def choose(which: jax.Array, branches: Sequence[Any], *args: Any) -> Any:
    """`branches[which](*args)`, for a `which` that XLA cannot tell beforehand.

    Always a conditional, of one branch too: the reads of leaves are kept inside it.
    Outside, XLA would make a copy of each whole leaf as integers.
    """
    if len(branches) == 1:
        return lax.cond(which == 0, branches[0], zeros_of(branches[0]), *args)
    return lax.switch(which.astype(np.int32), branches, *args)


def zeros_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns zeros like the results of `function`."""

    def zeros(*args: Any) -> Any:
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    return zeros


def gather_batch(leaves: Sequence[Any], dtypes: Sequence[str], size: int) -> jax.Array:
    """The published bits of several leaves end to end, with zeros up to `size`."""
    parts = [
        narrow_bits(to_bits(x).reshape(-1), x.dtype, dtype)
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    missing = size - sum(part.size for part in parts)
    return jnp.concatenate([*parts, jnp.zeros(missing, parts[0].dtype)])


def block_bits(
    x: Any, dtype: str, large: Large, row: jax.Array, column: jax.Array, block: int
) -> jax.Array:
    """The published bits of one block of a leaf, or of a whole, shorter row."""
    size = (1, min(block, large.columns))
    view = to_bits(x).reshape(large.rows, large.columns)
    bits = lax.dynamic_slice(view, (row, column), size).reshape(-1)
    return narrow_bits(bits, x.dtype, dtype)


def pick_bits(
    x: Any, dtype: str, large: Large, row: jax.Array, column: jax.Array
) -> jax.Array:
    """The published bits of a leaf's elements at one row and several columns."""
    view = to_bits(x).reshape(large.rows, large.columns)
    column = jnp.minimum(column, np.uint32(large.columns - 1))
    bits = view.at[row, column].get(mode="promise_in_bounds")
    return narrow_bits(bits, x.dtype, dtype)


def drop_first(words: jax.Array, skip: jax.Array, size: int) -> jax.Array:
    """`words` without the first `skip` bits, with zeros up to `size` words."""
    first = jnp.arange(words.size, dtype=np.uint32) * np.uint32(32)
    hidden = jnp.minimum(jnp.maximum(skip, first) - first, np.uint32(32))
    # Two shifts: a shift by all 32 bits is not defined.
    half = hidden >> 1
    keep = (np.uint32(0xFFFFFFFF) << half) << (hidden - half)
    return jnp.pad(words & keep, (0, size - words.size))
