"""The JAX half of the reader: placing, gathering and scattering per shard.

Each shard is patched where it lies by single-device programs, so any sharding works and
nothing here is collective. Weights move as unsigned integers: bf16 scatter and gather
rewrite NaN payloads.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jdelta.delta import leaf_names
from jdelta.delta._bits import width_of
from jdelta.errors import TreeError
from jdelta.stream.update import check_leaf, check_names
from jdelta.wire.dtypes import TensorSpec, dtype_name, numpy_dtype
from jdelta.wire.tensor import prove_steps

if TYPE_CHECKING:
    from jdelta.stream.update import Update

_MIN_SLOTS = 256


def check(like: Any, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """The leaves of a tree by name, if they are the published tensors.

    Raises:
        TreeError: `like` has other names, dtypes or shapes, or JAX, as it is set, holds
            no array with the bits of a leaf.
    """
    named = dict(zip(leaf_names(like), jax.tree.leaves(like), strict=True))
    check_names(named, specs)
    for name, leaf in named.items():
        check_leaf(name, specs[name], leaf.shape, dtype_name(np.dtype(leaf.dtype)))
        width_of(name, leaf.dtype)
    return named


def place(
    weights: dict[str, np.ndarray], specs: Mapping[str, TensorSpec], like: Any
) -> Any:
    """Flat bits as a tree of `jax.Array` like `like`; empties `weights` as it goes.

    Raises:
        TreeError: as `check`.
    """
    check(like, specs)
    leaves, treedef = jax.tree.flatten(like)
    placed = []
    for name, leaf in zip(leaf_names(like), leaves, strict=True):
        spec = specs[name]
        host = weights.pop(name).view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        placed.append(_put(host, getattr(leaf, "sharding", None)))
    return jax.tree.unflatten(treedef, placed)


def apply(update: Update, tree: Any, *, donate: bool) -> Any:
    """`Update.apply` for a tree of JAX arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    names = leaf_names(tree)
    specs = update.specs
    named = check(tree, specs)
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            raise TreeError(
                f"{name!r}: expected a jax.Array whose shards are all on this "
                f"process's devices, got {type(leaf).__name__}"
            )
    start = time.perf_counter()
    if update.patch is None:
        new = {
            name: _put(host, named[name].sharding)
            for name, host in update.shaped_weights().items()
        }
        jax.block_until_ready(new)
        with update.writing():
            if donate:
                for leaf in leaves:
                    leaf.delete()
            update.times["apply"] = time.perf_counter() - start
        return jax.tree.unflatten(treedef, [new[name] for name in names])
    # Gather and prove everything before the first write.
    gathered = {
        name: _gather(named[name], steps.positions)
        for name, steps in update.patch.items()
    }
    patches = {}
    for name, steps in update.patch.items():
        old = _collect(gathered[name], len(steps.positions), specs[name])
        patches[name] = prove_steps(old, steps, specs[name])
    staged = time.perf_counter()
    update.times["stage"] = update.times.get("stage", 0.0) + staged - start
    with update.writing():
        for name, bits in patches.items():
            named[name] = _scatter(named[name], gathered[name], bits, donate)
        jax.block_until_ready(list(named.values()))
        update.times["apply"] = time.perf_counter() - staged
    return jax.tree.unflatten(treedef, [named[name] for name in names])


def _put(host: np.ndarray, sharding: Any) -> jax.Array:
    # A copy of our own: JAX on the CPU may alias a NumPy buffer, and donate it later.
    if sharding is None:
        return jnp.array(host, copy=True)
    if host.dtype == np.bool_ or not host.size:
        return jax.device_put(host, sharding, may_alias=False)
    bits = jax.device_put(host.view(f"u{host.itemsize}"), sharding, may_alias=False)
    return _as_dtype(bits, jnp.dtype(host.dtype))


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _as_dtype(bits: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype)


class _Piece:
    """The part of a tensor's changes that lies in one shard."""

    def __init__(self, shard: Any, which: np.ndarray, slots: jax.Array):
        self.shard, self.which, self.slots = shard, which, slots
        self.old = _take(shard.data, slots)


def _gather(array: jax.Array, positions: np.ndarray) -> list[_Piece]:
    """Dispatches the reads of every shard's changed elements."""
    pieces = []
    for shard in array.addressable_shards:
        which, local = _within(array.shape, shard.index, positions)
        slots = max(_MIN_SLOTS, 1 << max(0, len(local) - 1).bit_length())
        padded = np.full(slots, shard.data.size, np.int32)  # out of bounds: dropped
        padded[: len(local)] = local
        pieces.append(_Piece(shard, which, jax.device_put(padded, shard.data.sharding)))
    return pieces


def _collect(pieces: list[_Piece], count: int, spec: TensorSpec) -> np.ndarray:
    """The old bits in the order of the positions, from whichever shard has them."""
    old = np.empty(count, f"u{numpy_dtype(spec.dtype).itemsize}")
    for piece in pieces:
        old[piece.which] = np.asarray(piece.old)[: len(piece.which)]
    return old


def _scatter(
    array: jax.Array, pieces: list[_Piece], bits: np.ndarray, donate: bool
) -> jax.Array:
    write = _write_donated if donate else _write
    shards = []
    for piece in pieces:
        values = np.zeros(piece.slots.shape, bits.dtype)
        values[: len(piece.which)] = bits[piece.which]
        shards.append(write(piece.shard.data, piece.slots, values))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _within(
    shape: tuple[int, ...], index: tuple[slice, ...], positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which positions lie in the box `index`, and where in the box's own order."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    if all(b == (0, n) for b, n in zip(bounds, shape, strict=True)):
        return np.arange(len(positions)), positions
    coordinates = np.unravel_index(positions.astype(np.int64), shape)
    inside = np.ones(len(positions), bool)
    for c, (low, high) in zip(coordinates, bounds, strict=True):
        inside &= (c >= low) & (c < high)
    which = np.flatnonzero(inside)
    local = np.ravel_multi_index(
        tuple(c[which] - low for c, (low, _) in zip(coordinates, bounds, strict=True)),
        tuple(high - low for low, high in bounds),
    )
    return which, local


def _bits(x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    if x.dtype == jnp.bool_:
        return flat.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(flat, jnp.dtype(f"u{x.dtype.itemsize}"))


@jax.jit
def _take(x: jax.Array, slots: jax.Array) -> jax.Array:
    return _bits(x).at[slots].get(mode="clip")


def _set(x: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    bits = _bits(x).at[slots].set(values, mode="drop")
    if x.dtype == jnp.bool_:
        return bits.astype(jnp.bool_).reshape(x.shape)
    return jax.lax.bitcast_convert_type(bits, x.dtype).reshape(x.shape)


_write = jax.jit(_set)
_write_donated = jax.jit(_set, donate_argnums=0)
