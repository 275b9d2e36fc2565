"""Change masks as 32-bit words: one pass at memory speed, static shape, no overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdelta.delta._bits import to_bits
from jdelta.delta._spec import check_same, refuse_sharded, specs_of

_TILE = 32 * 32


def change_words(old: Any, new: Any) -> jax.Array:
    """Which elements changed, as a bitmap.

    Jittable. Collective: as `diff`.

    Args:
        old: an array, or a tree of arrays.
        new: the same structure, shapes and dtypes.

    Returns:
        u32[...]: for each leaf in the order of `jax.tree.leaves`, ceil(size / 32)
        words; bit i of word w is set when flat element 32 w + i changed.

    Raises:
        TreeError: the trees differ, or a leaf's dtype has no whole-byte bits.

    Example:
        >>> change_words(jnp.zeros(40), jnp.zeros(40).at[33].set(-0.0))
        Array([0, 2], dtype=uint32)
    """
    old_specs, olds = specs_of(old)
    new_specs, news = specs_of(new)
    check_same(old_specs, new_specs, "change_words(old, new)")
    refuse_sharded(old_specs, olds)
    refuse_sharded(new_specs, news)
    words = [array_words(a, b) for a, b in zip(olds, news, strict=True)]
    return jnp.concatenate(words) if words else jnp.zeros(0, np.uint32)


def array_words(old: Any, new: Any) -> jax.Array:
    """The bitmap of one pair of arrays, u32[ceil(size / 32)]."""
    old, new = to_bits(old), to_bits(new)
    if old.size % _TILE == 0:
        return pack(old, new)
    # The ragged end apart: padding the whole array would copy it.
    old, new = old.reshape(-1), new.reshape(-1)
    whole = old.size - old.size % _TILE
    tail = _pack_rows(*(jnp.pad(x[whole:], (0, -x.size % 32)) for x in (old, new)))
    if not whole:
        return tail
    return jnp.concatenate([pack(old[:whole], new[:whole]), tail])


def pack(old: jax.Array, new: jax.Array) -> jax.Array:
    """The bitmap of two arrays of bits whose common size is a multiple of 32.

    Sums over the minor axis do not vectorise on CPU. So tiles of 32 x 32 elements are
    packed down their columns, and the tiles of bits, 1/16 of the data or less, are
    transposed.
    """
    if old.size % _TILE:
        return _pack_rows(old, new)
    shape, lane = (-1, 32, 32), jnp.arange(32, dtype=np.uint32)
    changed = (old.reshape(shape) != new.reshape(shape)).astype(np.uint32)
    down = jnp.sum(changed << lane[:, None], axis=1, dtype=np.uint32)
    bits = (down[:, None, :] >> lane[:, None]) & 1
    return jnp.sum(bits << lane, axis=2, dtype=np.uint32).reshape(-1)


def _pack_rows(old: jax.Array, new: jax.Array) -> jax.Array:
    changed = (old.reshape(-1, 32) != new.reshape(-1, 32)).astype(np.uint32)
    lane = jnp.arange(32, dtype=np.uint32)
    return jnp.sum(changed << lane, axis=1, dtype=np.uint32)
