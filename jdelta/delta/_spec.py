"""Names, shapes and dtypes of a tree's leaves, and the checks on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdelta.delta._bits import width_of
from jdelta.errors import TreeError


class LeafSpec(NamedTuple):
    """One published leaf.

    Attributes:
        name: unique dotted path in the tree.
        shape: shape of the whole array.
        dtype: numpy (or ml_dtypes) name of the published dtype, such as "bfloat16".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize


def path_name(path: Sequence[Any]) -> str:
    """A leaf's published name: its path joined by dots, without a trailing `.value`.

    The trailing `.value` is the variable that Flax NNX wraps around an array.
    """
    name = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return name.removesuffix(".value")


def leaf_names(tree: Any) -> tuple[str, ...]:
    """The published names of a tree's leaves, in the order of `jax.tree.leaves`.

    Collective: no. Runs no device code.

    Args:
        tree: any tree; leaves may be arrays or abstract.

    Returns:
        One name a leaf, such as `"layers.0.kernel"`.

    Raises:
        TreeError: two leaves have the same name (`{"a.b": x, "a": {"b": y}}`).

    Example:
        >>> leaf_names({"layers": [{"kernel": 1.0}]})
        ('layers.0.kernel',)
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(path_name(path) for path, _ in paths)
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in seen:
            first, second = (jax.tree_util.keystr(paths[j][0]) for j in (seen[name], i))
            raise TreeError(
                f"two leaves have the name {name!r}: {first} and {second}; rename one"
            )
        seen[name] = i
    return names


def specs_of(tree: Any) -> tuple[tuple[LeafSpec, ...], list[Any]]:
    """The specs and the leaves of a tree of arrays, checked.

    Raises:
        TreeError: a leaf is not an array, its dtype has no whole-byte bits, or two
            leaves have one name.
    """
    names, leaves = leaf_names(tree), jax.tree.leaves(tree)
    return tuple(_spec(n, x) for n, x in zip(names, leaves, strict=True)), leaves


def refuse_sharded(specs: tuple[LeafSpec, ...], leaves: list[Any]) -> None:
    """Raise TreeError naming a leaf that is sharded over an explicit mesh axis."""
    for spec, x in zip(specs, leaves, strict=True):
        if not isinstance(x, jax.Array):
            continue
        axes = getattr(getattr(jax.typeof(x), "sharding", None), "spec", None)
        if axes is not None and any(axis is not None for axis in axes):
            raise TreeError(
                f"leaf {spec.name!r} is sharded as {axes} over explicit mesh axes; "
                "expected a replicated array: jax.reshard(x, jax.P()) first"
            )


def _spec(name: str, x: Any) -> LeafSpec:
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TreeError(
            f"leaf {name!r} is a {type(x).__name__}; expected a JAX or NumPy array"
        )
    width_of(name, x.dtype)
    return LeafSpec(name, tuple(map(int, x.shape)), np.dtype(x.dtype).name)


def check_same(
    expected: tuple[LeafSpec, ...], got: tuple[LeafSpec, ...], where: str
) -> None:
    """Raise TreeError naming the first leaf that differs between two specs."""
    if expected == got:
        return
    mine, theirs = ({s.name: s for s in specs} for specs in (expected, got))
    for name in [*mine, *theirs]:
        want, have = mine.get(name), theirs.get(name)
        if want is None or have is None:
            side = "is missing" if have is None else "was not expected"
            raise TreeError(f"{where}: leaf {name!r} {side}{_near(want or have)}")
        for field in ("shape", "dtype"):
            a, b = getattr(want, field), getattr(have, field)
            if a != b:
                raise TreeError(
                    f"{where}: leaf {name!r}: expected {field} {a}, got {b}"
                )
    raise TreeError(
        f"{where}: the leaves are in another order: expected "
        f"{[s.name for s in expected][:5]}..., got {[s.name for s in got][:5]}..."
    )


def _near(spec: LeafSpec | None) -> str:
    return "" if spec is None else f" ({spec.dtype}{list(spec.shape)})"
