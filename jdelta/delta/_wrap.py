"""Any Optax optimizer, with the last published bits carried in its state.

`update` passes everything through; `extract` compares the bits carried with the actual
parameters. So a delta is right whatever happened in between: any number of steps,
skipped steps, later transforms, edits outside of Optax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
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
    leaf_names,
    path_name,
    refuse_sharded,
    specs_of,
)
from jdelta.errors import TreeError

Select = Callable[[Any], Any]


class Dtypes(tuple):
    """Published dtype names, in tree order. No names at all compare equal to any.

    `optax.tree_map_params` builds a state from a placeholder instead of parameters and
    maps it beside the real one: that state has no names, but the same structure.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether the names are the same, or one side has none."""
        return not self or not other or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        """The opposite of `==`."""
        return not self == other

    def __hash__(self) -> int:
        """The same for all, as no names equal any."""
        return hash(Dtypes)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bits"],
    meta_fields=["dtypes", "dtype", "select"],
)
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What was published last.

    Attributes:
        bits: the published tree as unsigned integers; same shapes and sharding.
        dtypes: published dtype of each leaf.
        dtype: published dtype of wider floating leaves, or None for their own.
        select: from parameters to the tree to publish, or None for all of them.
    """

    bits: Any
    dtypes: Dtypes
    dtype: str | None
    select: Select | None


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
    `optax.partition`. Collective: no.

    Args:
        inner: any Optax transformation, with or without extra arguments.
        dtype: what readers hold. Floating leaves that are wider are published in it;
            narrower ones, integers and bools as they are. None: all as they are.
        select: from the parameters to the tree of arrays to publish; by default all.
            Pass the same function object throughout: it is static in a jit.

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
        snapshot = Snapshot(
            jax.tree.unflatten(
                jax.tree.structure(tree), _published_bits(specs, leaves)
            ),
            Dtypes(spec.dtype for spec in specs),
            name,
            select,
        )
        return WrapState(extended.init(params), snapshot)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        updates, inner_state = extended.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, WrapState(inner_state, state.jdelta_snapshot)

    return optax.GradientTransformationExtraArgs(init, update)


def extract(opt_state: Any, params: Any, *, capacity: float = 0.1) -> tuple[Delta, Any]:
    """What changed since the last `extract` (or `init`), and the state that knows it.

    Jittable; call it inside the jitted step, after the parameters are updated, so that
    state and parameters may be donated. Collective: no.

    With Flax NNX, inside `nnx.jit`: `extract(optimizer, model)` reads the model's
    `optimizer.wrt` variables, and updates the optimizer's state in place. The plain
    form works too: `extract(optimizer.opt_state, nnx.state(model, nnx.Param))`.

    Args:
        opt_state: optimizer state that holds the state of one `wrap`, anywhere; or an
            `nnx.Optimizer`.
        params: the parameters as they are now (with an EMA or other weights of the same
            structure, those are published); or the model.
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
    if _is_nnx_optimizer(opt_state):
        return _extract_nnx(opt_state, params, capacity), opt_state
    delta, new_bits = _extract(opt_state, params, capacity)
    return delta, _replace(opt_state, new_bits, Dtypes(s.dtype for s in delta.spec))


def _extract(
    opt_state: Any, params: Any, capacity: float
) -> tuple[Delta, list[jax.Array]]:
    snapshot = _find(opt_state)
    tree = params if snapshot.select is None else snapshot.select(params)
    specs, leaves = _published_leaves(tree, snapshot.dtype)
    check_same(_snapshot_specs(snapshot, specs), specs, "extract(opt_state, params)")
    refuse_sharded(specs, leaves)
    # The leaves are narrowed again as they are read: the new bits can then be written
    # over the old ones, when the state is donated.
    delta = diff_leaves(jax.tree.leaves(snapshot.bits), leaves, specs, float(capacity))
    return delta, _published_bits(specs, leaves)


def _extract_nnx(optimizer: Any, model: Any, capacity: float) -> Delta:
    from flax import nnx

    params = nnx.state(model, optimizer.wrt)
    delta, new_bits = _extract(optimizer.opt_state, params, capacity)
    variables = jax.tree.leaves(
        _find(optimizer.opt_state).bits, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for variable, bits in zip(variables, new_bits, strict=True):
        variable[...] = bits
    return delta


def published(opt_state: Any) -> Any:
    """The tree of arrays that the state of `wrap` holds as published.

    Jittable. Collective: no.

    Args:
        opt_state: optimizer state that holds the state of one `wrap`, anywhere; or an
            `nnx.Optimizer`.

    Returns:
        The published tree, in the published dtypes: what a reader has that applied
        every delta extracted so far.

    Raises:
        TreeError: no state of `wrap`, or two.

    Example:
        >>> publisher = Publisher("runs/one", published(opt_state))
    """
    if _is_nnx_optimizer(opt_state):
        opt_state = opt_state.opt_state
    snapshot = _find(opt_state)
    bits, treedef = jax.tree.flatten(snapshot.bits)
    if len(snapshot.dtypes) != len(bits):
        raise TreeError(
            "the published snapshot has lost its dtypes (optax.tree_map_params drops "
            "them); call jdelta.extract once, which restores them"
        )
    # Copies: the state's own buffers may be donated later.
    arrays = [
        from_bits(own_bits(x), dtype)
        for x, dtype in zip(bits, snapshot.dtypes, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


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


def _snapshot_specs(
    snapshot: Snapshot, specs: tuple[LeafSpec, ...]
) -> tuple[LeafSpec, ...]:
    names, bits = leaf_names(snapshot.bits), jax.tree.leaves(snapshot.bits)
    dtypes = list[str](snapshot.dtypes)
    if len(dtypes) != len(bits):
        known = {spec.name: spec.dtype for spec in specs}
        own = [str(x.dtype) for x in bits]
        dtypes = [known.get(n, d) for n, d in zip(names, own, strict=True)]
    return tuple(
        LeafSpec(name, tuple(x.shape), dtype)
        for name, x, dtype in zip(names, bits, dtypes, strict=True)
    )


def _replace(opt_state: Any, new_bits: list[jax.Array], dtypes: Dtypes) -> Any:
    def put(x: Any) -> Any:
        if not _is_snapshot(x):
            return x
        bits = jax.tree.unflatten(jax.tree.structure(x.bits), new_bits)
        return dataclasses.replace(x, bits=bits, dtypes=dtypes)

    return jax.tree.map(put, opt_state, is_leaf=_is_snapshot)
