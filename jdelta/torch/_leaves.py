"""A target's tensors by published name, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jdelta.errors import TreeError
from jdelta.stream.update import check_leaf, check_names
from jdelta.torch._dtypes import INTEGERS, as_integers, published_dtype
from jdelta.wire.dtypes import TensorSpec

Names = Mapping[str, str] | Callable[[str], str]
"""Published name to the target's name; a name that a mapping lacks stays as it is."""


class Leaf:
    """One target tensor, checked; its memory as a run of integers, holes included.

    Attributes:
        spec: What the stream publishes for it.
        tensor: The tensor, detached: the same memory and version counter.
        run: One-dimensional integers from its first to its last element in memory.
        strides: Elements between neighbours in `run`, by dimension; None where flat
            C-order positions are positions in `run`.
        on_host: Whether `run` is host memory.
    """

    def __init__(self, name: str, spec: TensorSpec, tensor: torch.Tensor):
        """Raises TreeError unless the tensor is as published and can be written."""
        self.spec = spec
        self.tensor = _writable(name, tensor)
        check_leaf(name, spec, tensor.shape, published_dtype(tensor.dtype))
        size = _extent(name, self.tensor)
        offset = self.tensor.storage_offset()
        held = self.tensor.untyped_storage().nbytes()
        if size and held < (offset + size) * spec.itemsize:
            raise TreeError(
                f"{name!r}: its memory is not there ({held} bytes are, an offloaded or "
                "sleeping engine's weights); bring it back before updating"
            )
        flat = self.tensor.as_strided((size,), (1,), offset)
        self.run = flat.view(INTEGERS[spec.itemsize])
        self.on_host = self.run.device.type == "cpu"
        self.strides = None if self.tensor.is_contiguous() else self.tensor.stride()

    @property
    def memory(self) -> tuple[torch.device, int, int]:
        """Its device, its first byte and the byte after its last."""
        start = self.run.data_ptr()
        return self.run.device, start, start + self.run.nbytes

    def where(self, positions: np.ndarray) -> np.ndarray:
        """Flat C-order positions of the tensor as positions in `run`."""
        if self.strides is None:
            return positions
        at = np.zeros(len(positions), np.int64)
        for size, stride in zip(self.spec.shape[::-1], self.strides[::-1], strict=True):
            if size > 1:
                positions, along = np.divmod(positions, size)
                along *= stride
                at += along
        return at

    def fill(self, bits: np.ndarray) -> None:
        """Writes the whole tensor from flat C-order bits."""
        integers = self.tensor.view(INTEGERS[self.spec.itemsize])
        integers.copy_(as_integers(bits).view(self.spec.shape))


def find_leaves(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
    names: Names | None,
) -> dict[str, Leaf]:
    """The target's tensors by published name, checked against `specs`.

    Raises:
        TreeError: they are not the published ones, or cannot be written in place.
    """
    tensors = _tensors(target)
    homes = _homes(specs, names)
    wanted = {homes[name]: spec for name, spec in specs.items()}
    if len(tensors) > len(wanted):  # the other users of tied weights
        ours = {_identity(tensors[home]) for home in wanted if home in tensors}
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if name in wanted or _identity(tensor) not in ours
        }
    check_names(tensors, wanted)
    leaves = {
        name: Leaf(home, specs[name], tensors[home]) for name, home in homes.items()
    }
    _check_disjoint(leaves)
    return leaves


def _homes(specs: Mapping[str, TensorSpec], names: Names | None) -> dict[str, str]:
    """The target's name of each published tensor."""
    if names is None:
        return {name: name for name in specs}
    if isinstance(names, Mapping):
        homes = {name: names.get(name, name) for name in specs}
    else:
        homes = {name: names(name) for name in specs}
    users: dict[str, str] = {}
    for name, home in homes.items():
        if users.setdefault(home, name) != name:
            raise TreeError(
                f"names maps both {users[home]!r} and {name!r} to {home!r}: each "
                "published tensor needs a name of its own"
            )
    return homes


def _tensors(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A module's or a dict's tensors by name."""
    module = isinstance(target, torch.nn.Module)
    if not module and not isinstance(target, Mapping):
        raise TreeError(
            "expected a torch.nn.Module or a dict of tensors by name, got "
            f"{type(target).__name__}"
        )
    state: Mapping[str, Any] = target.state_dict(keep_vars=True) if module else target
    tensors = {}
    for name, value in state.items():
        if str(name).rpartition(".")[2] == "_extra_state":
            continue  # a module's own notes, not a weight
        if not isinstance(value, torch.Tensor):
            raise TreeError(f"{name!r}: expected a tensor, got {type(value).__name__}")
        tensors[name] = value
    if module:
        _check_owned(target, tensors)
    return tensors


def _check_owned(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses copies that a state-dict hook made: writing there changes nothing."""
    owned = [*module.parameters(), *module.buffers()]
    known = {id(tensor) for tensor in owned}
    strangers = [name for name, tensor in tensors.items() if id(tensor) not in known]
    if not strangers:
        return
    storages = {_storage(tensor) for tensor in owned}
    for name in strangers:
        if tensors[name].numel() and _storage(tensors[name]) not in storages:
            raise TreeError(
                f"{name!r}: the module's state_dict() gives a copy of it, so it cannot "
                "be updated in place; pass a dict of the tensors themselves"
            )


def _storage(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse, not initialised
        return (id(tensor),)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same elements in the same order."""
    try:
        place = (tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        return (*place, tensor.data_ptr())
    except RuntimeError:  # sparse, not initialised
        return (id(tensor),)


def _writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor detached, if its elements can be written where they lie."""
    why = None
    if torch.nn.parameter.is_lazy(tensor):
        why = "it is not initialised yet; run the module once"
    elif tensor.is_meta:
        why = "it is on the meta device, without memory; use to_empty() first"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        why = f"it is {tensor.layout}, quantized or sparse; only dense ones are updated"
    elif tensor.is_conj() or tensor.is_neg():
        why = "it is a lazy conjugate or negative view; use resolve_conj()"
    elif tensor.device.type != "cpu" and not _is_accelerator(tensor.device):
        why = f"device {tensor.device} is neither the CPU nor this torch's accelerator"
    if why is None:
        detached = tensor.detach()
        if type(detached) is torch.Tensor:
            return detached
        why = (
            f"a {type(detached).__name__} keeps its elements elsewhere; pass a dict of "
            "plain tensors (for a DTensor, to_local() where it is replicated)"
        )
    raise TreeError(f"{name!r}: cannot be updated in place: {why}")


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _extent(name: str, tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory, which are all distinct."""
    if not tensor.numel():
        return 0
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            raise TreeError(
                f"{name!r}: its elements share memory with each other (an expanded "
                "tensor); pass a clone"
            )
        reach += stride * (size - 1)
    return reach + 1


def _check_disjoint(leaves: Mapping[str, Leaf]) -> None:
    last: tuple[torch.device, int, int] | None = None
    user = ""
    memory = {name: leaf.memory for name, leaf in leaves.items() if leaf.run.numel()}
    for name in sorted(memory, key=lambda name: (str(memory[name][0]), memory[name])):
        device, start, end = memory[name]
        if last is not None and last[0] == device and start < last[2]:
            raise TreeError(
                f"the published tensors {user!r} and {name!r} share memory in the "
                "target: tie them in the trainer too (one published copy), untie them "
                "here, or clone tensors that interleave"
            )
        last, user = (device, start, end), name
