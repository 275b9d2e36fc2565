"""The trainer's side of the hand-over: trees and deltas become host bytes.

The NumPy forms work without JAX: a tree is then a dict of arrays, a delta a dict of
`jdelta.wire.Changes`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jdelta.errors import MissingExtraError, TreeError
from jdelta.stream.update import is_jax_tree
from jdelta.wire.anchor import check_storable
from jdelta.wire.bits import to_bits
from jdelta.wire.changes import Changes
from jdelta.wire.dtypes import TensorSpec, bits_dtype, tensor_spec
from jdelta.wire.manifest import check_tree


def named_leaves(tree: Any) -> dict[str, Any]:
    """A tree's leaves by published name.

    Raises:
        TreeError: two leaves have one name.
        MissingExtraError: not a dict of NumPy arrays, and JAX is not installed.
    """
    if isinstance(tree, Mapping) and all(
        isinstance(k, str) and isinstance(v, np.ndarray) for k, v in tree.items()
    ):
        return dict(tree)
    try:
        import jax

        from jdelta.delta import leaf_names
    except ImportError as error:
        raise MissingExtraError(
            "a tree of other than NumPy arrays needs JAX: pip install 'jdelta[jax]', "
            "or give a dict of NumPy arrays by name"
        ) from error

    leaves = jax.tree.leaves(tree)
    return dict(zip(leaf_names(tree), leaves, strict=True))


def specs_of(leaves: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Name, dtype and shape of every leaf; all that a version needs of them holds.

    Raises:
        TreeError: a leaf is not an array whose bits this process has, is not of a dtype
            safetensors can hold, or has a name or size that cannot be published.
    """
    if not leaves:
        raise TreeError("nothing to publish: the tree has no arrays")
    for name, leaf in leaves.items():
        _check_leaf(name, leaf)
    specs = {name: tensor_spec(name, leaf) for name, leaf in leaves.items()}
    check_tree(specs.values())
    check_storable(specs.values())
    return specs


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, np.ndarray):
        return
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(leaf, jax.Array):
        raise TreeError(
            f"{name!r} is a {type(leaf).__name__}; expected a JAX or NumPy array"
        )
    if isinstance(leaf, jax.core.Tracer):
        raise TreeError(
            f"{name!r} is traced: return the weights from the jitted function and "
            "publish them outside of it"
        )
    if leaf.is_deleted():
        raise TreeError(
            f"{name!r} was donated or deleted: give the weights the last step returned"
        )
    if not leaf.is_fully_addressable:
        raise TreeError(
            f"{name!r} is spread over processes ({leaf.sharding}); a Publisher needs "
            "arrays that its process holds whole"
        )


def device_copy(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that a later donation cannot reach; JAX arrays are copied on the device.

    Dispatches and returns: the copies are ready when the device gets there.
    """
    if is_jax_tree(list(leaves.values())):
        import jax.numpy as jnp

        return {name: jnp.array(leaf, copy=True) for name, leaf in leaves.items()}
    return {name: np.array(leaf, order="C") for name, leaf in leaves.items()}


def host_bits(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    """Leaves as flat bits in host memory; empties `leaves` as it goes.

    Blocks until the leaves are computed. Where JAX lends its own memory (CPU), the
    bits are a view of the copy made by `device_copy`, which nobody donates.
    """
    bits = {}
    for name in list(leaves):
        bits[name] = to_bits(_to_host(leaves.pop(name)))
    return bits


def snapshot(leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Leaves as flat bits in host memory of our own, leaf by leaf. Blocks."""
    return {
        name: to_bits(np.array(_to_host(leaf), order="C"))
        for name, leaf in leaves.items()
    }


def _to_host(leaf: Any) -> np.ndarray:
    # Explicit, so that it passes JAX's transfer guards.
    return leaf if isinstance(leaf, np.ndarray) else sys.modules["jax"].device_get(leaf)


def refuse_traced(delta: Any) -> None:
    """Raises TreeError for a delta of a jitted function that is still being traced."""
    jax = sys.modules.get("jax")
    if jax is not None and any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(delta)
    ):
        raise TreeError(
            "publish was called inside a jitted function: return the delta from it and "
            "publish it outside"
        )


def own_delta(delta: Any) -> Any:
    """A delta that the caller's later writes cannot change; starts a device's copy."""
    if isinstance(delta, Mapping):
        return {
            name: Changes(*(array.copy() for array in changes))
            for name, changes in delta.items()
            if len(changes.positions)
        }
    delta.start_copy()
    return delta


def marks_of(delta: Any) -> np.ndarray | None:
    """Which snapshots a delta leads from and to, u32[2, 2]. Blocks; None for none."""
    marks = getattr(delta, "marks", None)
    return None if marks is None else _to_host(marks)


def check_delta(delta: Any, specs: Mapping[str, TensorSpec]) -> None:
    """Raises TreeError unless `delta` is a delta of the published tree."""
    if isinstance(delta, Mapping):
        for name, changes in delta.items():
            if name not in specs or not isinstance(changes, Changes):
                raise TreeError(
                    f"{name!r}: expected Changes of a published tensor, got "
                    f"{type(changes).__name__}"
                )
            _check_changes(specs[name], changes)
        return
    if not hasattr(delta, "spec"):
        raise TreeError(
            f"publish expects a Delta, or a dict of jdelta.wire.changes.Changes by "
            f"name, got a {type(delta).__name__}; whole weights go into params="
        )
    tree = {leaf.name: tensor_spec(leaf.name, leaf) for leaf in delta.spec}
    for name in tree.keys() | specs.keys():
        if tree.get(name) != specs.get(name):
            raise TreeError(
                f"{name!r}: the delta has {tree.get(name) or 'no such tensor'}, the "
                f"publisher was opened with {specs.get(name) or 'no such tensor'}: "
                "open it with the published tree (jdelta.published(opt_state, params) "
                "for a wrapped optimizer)"
            )


def to_changes(delta: Any) -> dict[str, Changes]:
    """A delta's changes on the host. Blocks until they are computed.

    Raises:
        DeltaOverflowError: the delta's capacity did not hold them.
    """
    if isinstance(delta, Mapping):
        return dict(delta)
    return {name: Changes(*arrays) for name, arrays in delta.to_host().items()}


def _check_changes(spec: TensorSpec, changes: Changes) -> None:
    at, old, new = changes
    width = bits_dtype(spec.dtype)
    if not (
        all(isinstance(a, np.ndarray) and a.ndim == 1 for a in changes)
        and at.size == old.size == new.size
        and at.dtype.kind in "ui"
        and old.dtype == new.dtype == width
        and (not at.size or (0 <= at[0] and at[-1] < spec.size))
        and (at[1:] > at[:-1]).all()
        and (old != new).all()
    ):
        raise TreeError(
            f"{spec.name!r}: not changes of {spec}: give flat "
            f"positions below {spec.size}, strictly increasing, with the bits before "
            f"and after as {width}, everywhere different (Changes.between makes them)"
        )
