"""Any Optax optimizer, with the last published bits carried in its state.

`update` passes everything through; `extract` compares the bits carried with the actual
parameters. So a delta is right whatever happened in between: any number of steps,
skipped steps, later transforms, edits outside of Optax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdelta.delta._bits import from_bits, own_bits, to_bits
from jdelta.delta._delta import Delta
from jdelta.delta._diff import check_capacity, diff_leaves
from jdelta.delta._spec import (
    LeafSpec,
    check_same,
    path_name,
    refuse_sharded,
    specs_of,
)
from jdelta.errors import TreeError

Select = Callable[[Any], Any]
_OWN = "own"  # where every leaf is published in its own dtype


class Snapshot(NamedTuple):
    """What was published last: arrays alone, so any serializer of trees takes it.

    Attributes:
        bits: one entry. Its key is the dtype that wider floating leaves are published
            in, or "own"; its value the published tree as unsigned integers, with the
            parameters' structure, shapes and sharding.
        mark: u32[2], which snapshot this is: the deltas extracted so far, and a hash of
            them. A delta carries the mark before and after it, so that a publisher
            notices one that is missing, repeated or rolled back.
    """

    bits: dict[str, Any]
    mark: jax.Array


class WrapState(NamedTuple):
    """State of `wrap`: the inner optimizer's, and the snapshot."""

    inner_state: Any
    jdelta_snapshot: Snapshot


def wrap(
    inner: optax.GradientTransformation,
    *,
    dtype: Any = jnp.bfloat16,
    select: Select | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Let an optimizer's state carry what was published last, for `extract`.

    Updates are untouched. The state grows by the published bits: 2 bytes a parameter
    for bfloat16, with the parameters' shapes and sharding. Goes anywhere in an
    optimizer that sees all parameters: outermost, in `optax.chain`, `optax.MultiSteps`,
    `optax.apply_if_finite`, `optax.inject_hyperparams`; not inside `optax.masked` or
    `optax.partition`. Collective: no; each shard keeps its own published bits.

    To wrap the optimizer of a run that has begun, take its state along:
    `tx.init(params)._replace(inner_state=old_state)`. The way back to the plain
    optimizer is `opt_state.inner_state`.

    Args:
        inner: any Optax transformation, with or without extra arguments.
        dtype: what readers hold. Floating leaves that are wider are published in it;
            narrower ones, integers and bools as they are. None: all as they are.
        select: from the parameters given to `init` to the tree of arrays to publish;
            by default all. `extract` and `published` are given that tree.

    Returns:
        The transformation. The parameters given to its `init` count as published.

    Raises:
        TreeError: (from `init`) a leaf cannot be published, or is masked out.
        ValueError: `dtype` is not a floating dtype.

    Example:
        >>> tx = wrap(optax.adamw(3e-6))
        >>> opt_state = tx.init(params)
        >>> delta, opt_state = extract(opt_state, params)  # after the step
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating dtype or None, got {dtype!r}")
    name = None if dtype is None else np.dtype(dtype).name
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        tree = params if select is None else select(params)
        _refuse_holes(tree)
        specs, leaves = _published_leaves(tree, name)
        bits = jax.tree.unflatten(
            jax.tree.structure(tree), _published_bits(specs, leaves)
        )
        snapshot = Snapshot({name or _OWN: bits}, jnp.zeros(2, np.uint32))
        return WrapState(extended.init(params), snapshot)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if not isinstance(state, WrapState):
            raise TreeError(
                f"the state is a {type(state).__name__}, not one of jdelta.wrap: make "
                "it with tx.init(params), or take a plain optimizer's state along: "
                "tx.init(params)._replace(inner_state=state)"
            )
        updates, inner_state = extended.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, WrapState(inner_state, state.jdelta_snapshot)

    return optax.GradientTransformationExtraArgs(init, update)


def extract(opt_state: Any, params: Any, *, capacity: float = 0.1) -> tuple[Delta, Any]:
    """What changed since the last `extract` (or `init`), and the state that knows it.

    Jittable; call it inside the jitted step, after the parameters are updated, so that
    state and parameters may be donated. Collective: as `diff`.

    With Flax NNX, inside `nnx.jit`: `extract(optimizer, model)` reads the model's
    `optimizer.wrt` variables, and updates the optimizer's state in place. The plain
    form works too: `extract(optimizer.opt_state, nnx.state(model, nnx.Param))`.

    Args:
        opt_state: optimizer state that holds the state of one `wrap`, anywhere; or an
            `nnx.Optimizer`.
        params: the parameters as they are now (with an EMA or other weights of the same
            structure, those are published); or the model. Where `wrap` was given
            `select`, what that returns.
        capacity: as for `diff`.

    Returns:
        The delta, over the published tree in the published dtype, and the new state (or
        the same optimizer).

    Raises:
        TreeError: no state of `wrap`, or two; or the parameters are not those of
            `init` (the message names the leaf).
        ValueError: a capacity out of range.

    Example:
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> delta, opt_state = extract(opt_state, params)
    """
    check_capacity(capacity)
    if not _is_nnx_optimizer(opt_state):
        held = _find(opt_state)
        delta, new = _extract(held, params, capacity)
        snapshot = jax.tree.unflatten(jax.tree.structure(held), new)
        return delta, jax.tree.map(
            lambda x: snapshot if _is_snapshot(x) else x,
            opt_state,
            is_leaf=_is_snapshot,
        )
    from flax import nnx

    held = _find(opt_state.opt_state)
    delta, new = _extract(held, nnx.state(params, opt_state.wrt), capacity)
    variables = jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, value in zip(variables, new, strict=True):
        variable[...] = value
    return delta, opt_state


def _extract(
    held: Snapshot, tree: Any, capacity: float
) -> tuple[Delta, list[jax.Array]]:
    """The delta, and the leaves of the new snapshot."""
    specs, leaves = _check_published(held, tree, "extract(opt_state, params)")
    refuse_sharded(specs, leaves)
    *bits, mark = jax.tree.leaves(held)
    # The leaves are narrowed again as they are read: the new bits can then be written
    # over the old ones, when the state is donated.
    delta = diff_leaves(bits, leaves, specs, float(capacity))
    after = _next_mark(mark, delta)
    return delta.between(mark, after), [*_published_bits(specs, leaves), after]


def _next_mark(mark: jax.Array, delta: Delta) -> jax.Array:
    """One delta more, and a hash over it: MurmurHash3's mixing of 32-bit words."""
    hashed = mark[1]
    for group in delta.groups:
        first = jnp.sum(group.new.pages[0].astype(np.uint32), dtype=np.uint32)
        for word in (group.count, first):
            hashed = (hashed ^ word * np.uint32(0xCC9E2D51)) * np.uint32(0x85EBCA6B)
            hashed = (hashed ^ hashed >> 13) + np.uint32(0xE6546B64)
    return jnp.stack([mark[0] + np.uint32(1), hashed])


def published(opt_state: Any, params: Any) -> Any:
    """The tree of arrays that the state of `wrap` holds as published.

    Jittable. Collective: no, in any sharding.

    Args:
        opt_state: optimizer state that holds the state of one `wrap`, anywhere; or an
            `nnx.Optimizer`.
        params: as for `extract`. Only their names, shapes and dtypes are looked at;
            they may have been donated.

    Returns:
        The published tree, in the published dtypes: what a reader has that applied
        every delta extracted so far. Copies: the state may be donated afterwards.

    Raises:
        TreeError: no state of `wrap`, or two; or the parameters are not its.

    Example:
        >>> publisher = Publisher("runs/one", published(opt_state, params))
    """
    if _is_nnx_optimizer(opt_state):
        from flax import nnx

        params = nnx.state(params, opt_state.wrt)
        opt_state = opt_state.opt_state
    held = _find(opt_state)
    specs, _ = _check_published(held, params, "published(opt_state, params)")
    (bits,) = held.bits.values()
    arrays = [
        from_bits(own_bits(x), spec.dtype)
        for x, spec in zip(jax.tree.leaves(bits), specs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(bits), arrays)


def _check_published(
    held: Snapshot, tree: Any, where: str
) -> tuple[tuple[LeafSpec, ...], list[Any]]:
    """`_published_leaves` of a tree that must be the snapshot's."""
    ((name, bits),) = held.bits.items()
    specs, leaves = _published_leaves(tree, None if name == _OWN else name)
    # Bits have no dtype to compare, but a width.
    as_bits = [spec._replace(dtype=f"uint{8 * spec.width}") for spec in specs]
    check_same(specs_of(bits)[0], tuple(as_bits), where)
    return specs, leaves


def _published_leaves(
    tree: Any, dtype: str | None
) -> tuple[tuple[LeafSpec, ...], list[Any]]:
    """The leaves as they are, with specs in the published dtypes."""
    specs, leaves = specs_of(tree)

    def narrow(spec: LeafSpec) -> LeafSpec:
        if dtype is None or not jnp.issubdtype(np.dtype(spec.dtype), jnp.floating):
            return spec
        wider = spec.width > np.dtype(dtype).itemsize
        return spec._replace(dtype=dtype) if wider else spec

    return tuple(narrow(spec) for spec in specs), leaves


def _published_bits(specs: tuple[LeafSpec, ...], leaves: list[Any]) -> list[jax.Array]:
    return [
        own_bits(x) if spec.dtype == x.dtype.name else to_bits(x.astype(spec.dtype))
        for spec, x in zip(specs, leaves, strict=True)
    ]


def _refuse_holes(tree: Any) -> None:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_hole)
    for path, leaf in paths:
        if _is_hole(leaf):
            raise TreeError(
                f"leaf {path_name(path)!r} is masked out, so wrap cannot carry it; put "
                "jdelta.wrap outside of optax.masked or optax.partition"
            )


def _is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _is_snapshot(x: Any) -> bool:
    return isinstance(x, Snapshot)


def _is_nnx_optimizer(x: Any) -> bool:
    return hasattr(x, "opt_state") and hasattr(x, "wrt")


def _find(opt_state: Any) -> Snapshot:
    paths, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_snapshot)
    found = [(path, x) for path, x in paths if _is_snapshot(x)]
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise TreeError(
            "the optimizer state holds no published snapshot; make the optimizer with "
            "jdelta.wrap(...) and pass its state"
        )
    places = ", ".join(jax.tree_util.keystr(path) for path, _ in found)
    raise TreeError(
        f"the optimizer state holds {len(found)} published snapshots ({places}); wrap "
        "one optimizer, once"
    )
