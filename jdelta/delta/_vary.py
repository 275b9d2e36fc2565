"""Arrays that vary over mesh axes as others do: what `jax.shard_map` checks of loops.

Inside of it, both branches of a conditional and both ends of a loop must vary over the
same axes. Adding a zero that varies as the inputs do says so, with no name of an axis.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jdelta.delta._bits import to_bits


def zero_of(*trees: Any) -> Any:
    """A u32 zero that varies as all arrays of `trees` together do."""
    zero: Any = np.uint32(0)
    if jax.sharding.get_abstract_mesh().manual_axes:
        for x in jax.tree.leaves(trees):
            if x.size:
                first = to_bits(x).reshape(-1)[0]
                zero = zero | (first.astype(np.uint32) & np.uint32(0))
    return zero


def vary(tree: Any, zero: Any) -> Any:
    """`tree` (unsigned integers), varying at least as `zero` does."""
    if isinstance(zero, np.generic):
        return tree
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)
