"""Reading leaves a block at a time, by a table of where each block lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdelta.delta._bits import narrow_bits, to_bits
from jdelta.delta._layout import RANK_ELEMENTS, Segment
from jdelta.delta._vary import vary

_FAN = 32  # branches of one conditional: compiling takes time in their square


class Table(NamedTuple):
    """Where each block lies; a row for each block, or one block's scalars.

    Attributes:
        piece: number of the piece.
        at: first element of the block in it; the last block of a piece starts early
            so that it ends with the piece.
        skip: elements at the block's start that the block before it covers.
        start: flat position of the block's first element in its group.
    """

    piece: Any
    at: Any
    skip: Any
    start: Any

    @classmethod
    def of(cls, pieces: Sequence[Segment], block: int) -> Table:
        """The blocks of all pieces, in flat order."""
        rows = []
        for number, piece in enumerate(pieces):
            for wanted in range(0, piece.size, block):
                at = max(0, min(wanted, piece.size - block))
                rows.append((number, at, wanted - at, piece.start + at))
        return cls(*np.array(rows, np.uint32).T)

    def row(self, unit: jax.Array) -> Table:
        """One block's scalars."""
        place = Table(*(jnp.asarray(column)[unit] for column in self))
        # Plus 0, which XLA cannot tell: see `choose`.
        return place._replace(piece=place.piece + (unit >> 31))


def round_up(size: int) -> int:
    """`size` elements in whole rank blocks."""
    return -(-size // RANK_ELEMENTS) * RANK_ELEMENTS


def choose(which: jax.Array, branches: Sequence[Any], zero: Any, *args: Any) -> Any:
    """`branches[which](*args)`, for a `which` that XLA cannot tell beforehand.

    The results vary as `zero` does; see `jdelta.delta._vary`.

    Always a conditional, of one branch too: the reads of leaves are kept inside it.
    Outside, XLA would make a copy of each whole leaf as integers.
    """
    if len(branches) == 1:
        return maybe(which == 0, branches[0], zero, *args)
    if len(branches) <= _FAN:
        varying = [lambda *a, f=branch: vary(f(*a), zero) for branch in branches]
        return lax.switch(which.astype(np.int32), varying, *args)
    fans = [branches[i : i + _FAN] for i in range(0, len(branches), _FAN)]
    nested = [lambda w, *a, fan=fan: choose(w, fan, zero, *a) for fan in fans]
    return choose(which // _FAN, nested, zero, which % _FAN, *args)


def maybe(condition: Any, function: Callable[..., Any], zero: Any, *args: Any) -> Any:
    """`function(*args)` if the condition holds, else zeros; varying as `zero` does."""

    def zeros(*args: Any) -> Any:
        shapes = jax.eval_shape(function, *args)
        made = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return vary(made, zero)

    return lax.cond(condition, lambda *a: vary(function(*a), zero), zeros, *args)


def batch_bits(leaves: Sequence[Any], dtypes: Sequence[str], size: int) -> jax.Array:
    """The published bits of several leaves end to end, with zeros up to `size`."""
    parts = [
        narrow_bits(to_bits(x).reshape(-1), x.dtype, dtype)
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    missing = size - sum(part.size for part in parts)
    return jnp.concatenate([*parts, jnp.zeros(missing, parts[0].dtype)])


def block_bits(
    x: Any, dtype: str, piece: Segment, at: jax.Array, block: int
) -> jax.Array:
    """The published bits of one block of a piece, with zeros up to `block`."""
    view = piece_of(to_bits(x), piece)
    bits = lax.dynamic_slice(view, (at,), (min(block, piece.size),))
    return jnp.pad(narrow_bits(bits, x.dtype, dtype), (0, block - bits.size))


def piece_of(bits: jax.Array, piece: Segment) -> jax.Array:
    """The flat elements of a leaf that are `piece`; all of them are no copy."""
    flat = bits.reshape(-1)
    if piece.size == flat.size:
        return flat
    return lax.slice(flat, (piece.offset,), (piece.offset + piece.size,))


def drop_first(words: jax.Array, skip: jax.Array) -> jax.Array:
    """`words` without the first `skip` bits."""
    first = jnp.arange(words.size, dtype=np.uint32) * np.uint32(32)
    hidden = jnp.minimum(jnp.maximum(skip, first) - first, np.uint32(32))
    # Two shifts: a shift by all 32 bits is not defined.
    half = hidden >> 1
    return words & ((np.uint32(0xFFFFFFFF) << half) << (hidden - half))
