"""The two halves of applying a delta: reading and proving, then writing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from jdelta.stream.fetch import parallel
from jdelta.torch._dtypes import signed
from jdelta.torch._leaves import Leaf
from jdelta.wire.changes import Steps
from jdelta.wire.tensor import prove_steps

# Elements per transfer to and from a device: bounds what an update takes of its memory.
_BATCH = 1 << 24


class Writes(NamedTuple):
    """What is left to do, once everything is proved: host and device tensors'."""

    host: list[Callable[[], object]]
    device: list[Callable[[], object]]


def run(write: Callable[[], object]) -> None:
    """Writes without autograd (whose mode belongs to the thread)."""
    # Not merely no_grad: inference tensors may be written in this mode alone.
    with torch.inference_mode():
        write()


def stage(leaves: Mapping[str, Leaf], steps: Mapping[str, Steps]) -> Writes:
    """Reads and proves every touched element. Writes nothing.

    Raises:
        StateMismatchError: a tensor is not the base version's.
    """

    def on_host(name: str) -> Callable[[], object]:
        leaf = leaves[name]
        memory = leaf.run.numpy().view(f"u{leaf.spec.itemsize}")
        at = leaf.where(steps[name].positions)
        new = prove_steps(memory[at], steps[name], leaf.spec)
        return partial(memory.__setitem__, at, new)

    groups: dict[tuple[torch.device, int], list[str]] = {}
    for name, leaf in leaves.items():
        if not leaf.on_host:
            group = (leaf.run.device, leaf.spec.itemsize)
            groups.setdefault(group, []).append(name)
    return Writes(
        parallel(on_host, [name for name, leaf in leaves.items() if leaf.on_host]),
        [
            _stage_device([leaves[n] for n in names], [steps[n] for n in names])
            for names in groups.values()
        ],
    )


def _stage_device(
    leaves: Sequence[Leaf], steps: Sequence[Steps]
) -> Callable[[], object]:
    """`stage` for the tensors of one device and width: few transfers for them all."""
    device = leaves[0].run.device
    where = [f.where(s.positions) for f, s in zip(leaves, steps, strict=True)]
    old = [np.empty(len(at), f"u{leaves[0].spec.itemsize}") for at in where]
    for batch in _batches(where):
        at = _upload(where, batch, device)
        read = [
            leaves[i].run.index_select(0, a)
            for (i, _), a in zip(batch, at, strict=True)
        ]
        found = torch.cat(read).cpu().numpy().view(old[0].dtype)
        start = 0
        for i, cut in batch:
            end = start + cut.stop - cut.start
            old[i][cut] = found[start:end]
            start = end
    new = [
        signed(prove_steps(bits, s, f.spec))
        for bits, s, f in zip(old, steps, leaves, strict=True)
    ]

    def write() -> None:
        for batch in _batches(where):
            at, bits = _upload(where, batch, device), _upload(new, batch, device)
            for (i, _), a, b in zip(batch, at, bits, strict=True):
                leaves[i].run.index_copy_(0, a, b)

    return write


def _batches(arrays: Sequence[np.ndarray]) -> Iterator[list[tuple[int, slice]]]:
    """Cuts arrays into batches of at most `_BATCH` elements: which, and its part."""
    batch: list[tuple[int, slice]] = []
    room = _BATCH
    for i, array in enumerate(arrays):
        start = 0
        while start < len(array):
            cut = slice(start, min(len(array), start + room))
            batch.append((i, cut))
            room -= cut.stop - start
            start = cut.stop
            if not room:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


def _upload(
    arrays: Sequence[np.ndarray], batch: list[tuple[int, slice]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """A batch's parts on the device, in one transfer."""
    host = np.concatenate([arrays[i][cut] for i, cut in batch])
    sizes = [cut.stop - cut.start for _, cut in batch]
    return torch.from_numpy(host).to(device).split(sizes)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits for every stream of the devices."""
    for device in devices:
        torch.accelerator.synchronize(device)
