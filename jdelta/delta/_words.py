"""Change masks as 32-bit words: one pass at memory speed, static shape, no overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdelta.delta._bits import to_bits
from jdelta.delta._spec import check_same, specs_of


def change_words(old: Any, new: Any) -> jax.Array:
    """Which elements changed, as a bitmap.

    Jittable. Collective: no.

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
    words = [array_words(a, b) for a, b in zip(olds, news, strict=True)]
    return jnp.concatenate(words) if words else jnp.zeros(0, np.uint32)


def array_words(old: Any, new: Any) -> jax.Array:
    """The bitmap of one pair of arrays, u32[ceil(size / 32)]."""
    old, new = to_bits(old), to_bits(new)
    if old.size % 32 == 0:
        return pack(old, new)
    # The ragged end apart: padding the whole array would copy it.
    old, new = old.reshape(-1), new.reshape(-1)
    whole = old.size - old.size % 32
    pad = (0, 32 - old.size % 32)
    tail = pack(jnp.pad(old[whole:], pad), jnp.pad(new[whole:], pad))
    if not whole:
        return tail
    return jnp.concatenate([pack(old[:whole], new[:whole]), tail])


def pack(old: jax.Array, new: jax.Array) -> jax.Array:
    """The bitmap of two equal-size arrays of bits whose size is a multiple of 32."""
    # A sum over the minor axis of shifted bits: XLA fuses it into one pass.
    changed = (old.reshape(-1, 32) != new.reshape(-1, 32)).astype(np.uint32)
    return jnp.sum(changed << jnp.arange(32, dtype=np.uint32), axis=1, dtype=np.uint32)
