"""Restoring into new tensors, and writing into tensors already there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from jdelta.stream.fetch import parallel
from jdelta.torch._dtypes import as_integers, torch_dtype
from jdelta.torch._leaves import Names, find_leaves
from jdelta.torch._writes import Writes, run, stage, synchronize
from jdelta.wire.dtypes import TensorSpec

if TYPE_CHECKING:
    from jdelta.stream.subscriber import Subscriber
    from jdelta.stream.update import Update

_Target = TypeVar("_Target", bound="torch.nn.Module | Mapping[str, torch.Tensor]")


def restore(
    sub: Subscriber,
    *,
    version: int | None = None,
    device: torch.device | str = "cpu",
    timeout: float = 60.0,
) -> dict[str, torch.Tensor]:
    """Rebuilds and proves a version as new tensors; `sub` holds it afterwards.

    Args:
        sub: The run's subscriber.
        version: The version wanted; None for the newest that sound objects lead to.
        device: Where to put the tensors. On the CPU nothing is copied.
        timeout: Seconds to wait for the version to be committed.

    Returns:
        Contiguous tensors without gradients by published name, of the published dtypes
        and shapes.

    Raises:
        TreeError: torch has no such dtype.
        JDeltaError: as `jdelta.Subscriber.restore`.

    Collective: no. Runs on the calling thread.
    """
    update = sub.whole(version, check=_dtypes, timeout=timeout)
    weights, specs = dict(update.weights or {}), update.specs
    dtypes = _dtypes(specs)
    start = time.perf_counter()
    tensors = {}
    for name, spec in specs.items():
        integers = as_integers(weights.pop(name)).to(device)
        tensors[name] = integers.view(dtypes[name]).view(spec.shape)
    with update.writing():
        _spend(update, "apply", start)
    return tensors


def load_into(
    sub: Subscriber,
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    version: int | None = None,
    names: Names | None = None,
    timeout: float = 60.0,
) -> int:
    """Rebuilds and proves a version and writes it into weights already there.

    Args:
        sub: The run's subscriber; it holds the version afterwards.
        target: What to fill, in place, as for `apply`.
        version: The version wanted; None for the newest that sound objects lead to.
        names: As for `apply`.
        timeout: Seconds to wait for the version to be committed.

    Returns:
        The version.

    Raises:
        TreeError: other names, shapes, dtypes or memory; nothing was written.
        JDeltaError: as `jdelta.Subscriber.restore`.

    Collective: no. Runs on the calling thread.
    """
    check = partial(find_leaves, target, names=names)
    update = sub.whole(version, check=check, timeout=timeout)
    apply(update, target, names=names)
    return update.version


def apply(update: Update, target: _Target, *, names: Names | None = None) -> _Target:
    """Brings weights from an update's base version to its version, all or nothing.

    Every touched element is read and proved to be the base version's before the first
    one is written. A delta costs time and memory in proportion to what changed (on a
    device, a bounded part of that memory at a time).

    Args:
        update: From `jdelta.Subscriber.updates`.
        target: A module, or a dict of tensors by name such as its `state_dict()`.
            It has exactly the published tensors, on any mix of devices, trainable or
            not, contiguous or not (the transpose of a JAX kernel, say). Further names
            are fine if each is the very memory of a published tensor: the other user
            of a tied weight. Modules are changed in place: optimizer states, hooks and
            captured CUDA graphs stay valid; a backward pass through a graph built
            before the update raises, as after any change in place.
        names: Published name to the target's name, a mapping (a name it lacks stays as
            it is) or a function. None: the same.

    Returns:
        `target`.

    Raises:
        StateMismatchError: the weights are not the base version's; nothing was written.
        TreeError: other names, shapes or dtypes, published tensors that share memory,
            or memory that cannot be written; nothing was written.

    Collective: no. Runs on the calling thread.
    """
    leaves = find_leaves(target, update.specs, names)
    steps = update.patch
    touched = leaves if steps is None else {name: leaves[name] for name in steps}
    devices = {leaf.run.device for leaf in touched.values() if not leaf.on_host}
    synchronize(devices)
    start = time.perf_counter()
    if steps is None:
        bits = update.weights or {}
        writes = Writes(
            [partial(f.fill, bits[n]) for n, f in leaves.items() if f.on_host],
            [partial(f.fill, bits[n]) for n, f in leaves.items() if not f.on_host],
        )
    else:
        writes = stage(touched, steps)
        start = _spend(update, "stage", start)
    with update.writing():
        torch.autograd.graph.increment_version(
            [f.tensor for f in touched.values() if not f.tensor.is_inference()]
        )
        parallel(run, writes.host)
        for left in writes.device:  # on this thread: streams belong to threads
            run(left)
        synchronize(devices)
        _spend(update, "apply", start)
    return target


def _dtypes(specs: Mapping[str, TensorSpec]) -> dict[str, torch.dtype]:
    return {name: torch_dtype(spec) for name, spec in specs.items()}


def _spend(update: Update, stage: str, start: float) -> float:
    """Adds the time since `start` to a stage of the update; returns the time now."""
    now = time.perf_counter()
    update.times[stage] = update.times.get(stage, 0.0) + now - start
    return now
