"""A staged update: fetched, checked and decoded; applying it is all that is left."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jdelta.errors import TreeError
from jdelta.stream.fetch import Meter, parallel
from jdelta.stream.rebuild import shaped
from jdelta.wire.changes import Steps
from jdelta.wire.dtypes import TensorSpec, dtype_name
from jdelta.wire.state import State
from jdelta.wire.tensor import stage


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """What leads from the version held to a newer one.

    Attributes:
        state: The version it leads to: its tensors and their digests.
        base: The version it must be applied to; None for an anchor, which replaces
            whatever is held.
        patch: For a delta: changed positions and signed steps by tensor.
        weights: For an anchor: every tensor's flat bits, proved.
        nbytes: Bytes that were fetched for it.
        times: Seconds by stage (fetch, verify, decode, stage; apply once applied).

    Apply it with `apply`, or with the receiver's own function (`jdelta.torch.apply`).
    """

    state: State
    base: int | None
    patch: Mapping[str, Steps] | None
    weights: Mapping[str, np.ndarray] | None
    nbytes: int
    times: dict[str, float]
    _writing: Callable[[Update], AbstractContextManager[None]]

    @property
    def version(self) -> int:
        """The version held once this is applied."""
        return self.state.version

    @property
    def step(self) -> int | None:
        """The trainer's step of that version."""
        return self.state.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the publisher said of that version."""
        return self.state.meta

    @property
    def kind(self) -> str:
        """What it is: "delta", or "anchor" for one that replaces every weight."""
        return "anchor" if self.patch is None else "delta"

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name, dtype and shape of every published tensor."""
        return self.state.specs

    @property
    def changed(self) -> int:
        """Elements that change (all of them, for an anchor)."""
        if self.patch is None:
            return sum(spec.size for spec in self.specs.values())
        return sum(len(steps.positions) for steps in self.patch.values())

    def apply(self, params: Any, *, donate: bool = True) -> Any:
        """Brings weights from the base version to `version`, all or nothing.

        Every touched weight is read and proved to be the base version's before the
        first one is written.

        Args:
            params: What the last `restore` or `apply` returned: a dict of NumPy arrays
                by published name (changed in place), or a tree of `jax.Array` with
                those names, each fully addressable, in any sharding.
            donate: For a JAX tree: reuse its buffers; the tree passed in is gone
                afterwards. NumPy arrays are always changed in place.

        Returns:
            The updated weights: the same dict, or a new tree with the same shardings.

        Raises:
            StateMismatchError: `params` is not the base version; nothing was written.
            TreeError: other names, shapes or dtypes; nothing was written.

        Collective: no. Runs on the calling thread; for a JAX tree it dispatches one
        gather and one scatter per changed shard, without collectives.
        """
        if is_jax_tree(params):
            from jdelta.stream import _jax

            return _jax.apply(self, params, donate=donate)
        arrays = check_arrays(params, self.specs)
        with self.writing():
            write_numpy(self, arrays)
        return params

    def writing(self) -> AbstractContextManager[None]:
        """Brackets a receiver's writes: until it ends, what is held counts as torn."""
        return self._writing(self)

    def shaped_weights(self) -> dict[str, np.ndarray]:
        """An anchor's weights in their dtypes and shapes."""
        if self.weights is None:
            raise TreeError(f"the update to version {self.version} is a delta")
        return shaped(self.weights, self.state)


def is_jax_tree(tree: Any) -> bool:
    """Whether `tree` holds JAX arrays (without importing JAX to find out)."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    return any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(tree))


def check_arrays(
    params: Mapping[str, np.ndarray], specs: Mapping[str, TensorSpec]
) -> dict[str, np.ndarray]:
    """The arrays as flat bits sharing their memory, checked against `specs`.

    Raises:
        TreeError: a name, dtype or shape differs, or memory cannot be written in place.
    """
    if not isinstance(params, Mapping):
        raise TreeError(
            "expected a dict of NumPy arrays by published name or a tree of "
            f"jax.Array, got {type(params).__name__}"
        )
    check_names(params, specs)
    flat = {}
    for name, spec in specs.items():
        array = params[name]
        if not isinstance(array, np.ndarray):
            raise TreeError(f"{name!r}: expected a NumPy array, got {type(array)}")
        check_leaf(name, spec, array.shape, dtype_name(array.dtype))
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise TreeError(
                f"{name!r}: a C-contiguous, writeable array is needed to update it in "
                "place; pass np.array(x, order='C')"
            )
        flat[name] = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    return flat


def check_names(names: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Raises TreeError unless `names` are exactly the published ones."""
    missing = [name for name in specs if name not in names]
    extra = [name for name in names if name not in specs]
    if missing or extra:
        raise TreeError(
            f"the weights do not have the published names: missing {missing[:5]}, "
            f"unexpected {extra[:5]} ({len(missing)} and {len(extra)} in all)"
        )


def check_leaf(name: str, spec: TensorSpec, shape: Any, dtype: str) -> None:
    """Raises TreeError unless a leaf has the published shape and dtype."""
    if tuple(shape) != spec.shape or dtype != spec.dtype:
        raise TreeError(
            f"{name!r}: the stream publishes {spec}, got "
            f"{TensorSpec(name, dtype, tuple(shape))}"
        )


def write_numpy(update: Update, flat: Mapping[str, np.ndarray]) -> None:
    """Writes an update into flat bits: everything is proved before the first write.

    Raises:
        StateMismatchError: the bits are not the base version's; nothing was written.
    """
    start = time.perf_counter()
    meter = Meter()
    if update.patch is None:
        for name, bits in (update.weights or {}).items():
            np.copyto(flat[name], bits)
    else:
        steps, specs = update.patch, update.specs
        new = parallel(lambda name: stage(flat[name], steps[name], specs[name]), steps)
        start = meter.lap("stage", start)
        for name, bits in zip(steps, new, strict=True):
            flat[name][steps[name].positions] = bits
    meter.lap("apply", start)
    for key, value in meter.times.items():
        update.times[key] = update.times.get(key, 0.0) + value
