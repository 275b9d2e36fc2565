"""The `Delta` pytree and its way to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdelta.delta._layout import Segment
from jdelta.delta._pages import Pages, page_sizes
from jdelta.delta._spec import LeafSpec
from jdelta.errors import DeltaOverflowError

Changed = tuple[np.ndarray, np.ndarray, np.ndarray]
NO_MARK = 0xFFFFFFFF  # both words of a mark that no snapshot has


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["count", "positions", "old", "new"],
    meta_fields=["segments", "size"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The changes of all leaves with elements of one width.

    Attributes:
        count: u32 scalar: elements that changed, exact even when they do not fit.
        positions: u32 slots: positions in the group's flat space, rising.
        old: unsigned slots of the width: bits before.
        new: unsigned slots: bits after.
        segments: the leaves, or parts of large ones, in flat order.
        size: elements of the group.
    """

    count: jax.Array
    positions: Pages
    old: Pages
    new: Pages
    segments: tuple[Segment, ...]
    size: int

    @property
    def slots(self) -> int:
        """Changes that fit."""
        return self.positions.slots


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "marks"],
    meta_fields=["spec"],
)
@dataclasses.dataclass(frozen=True)
class Delta:
    """What changed between two trees of arrays, with the bits before and after.

    A pytree with a static layout: it passes through `jax.jit`, `jax.lax.scan` and
    donation like any tree of arrays. Made by `diff`, `merge` and `extract`.

    Attributes:
        groups: one group for each element width in use; more for huge trees.
        spec: name, shape and published dtype of every leaf, in tree order.
        marks: u32[2, 2], which snapshot it leads from and to (see `Snapshot`); None
            where no state of `wrap` was compared.
    """

    groups: tuple[Group, ...]
    spec: tuple[LeafSpec, ...]
    marks: Any = None

    @property
    def overflowed(self) -> jax.Array:
        """Bool scalar: more elements changed than the capacity holds."""
        full = [jnp.asarray(g.count) > np.uint32(g.slots) for g in self.groups]
        return jnp.any(jnp.stack(full)) if full else jnp.zeros((), np.bool_)

    def between(self, before: jax.Array, after: jax.Array) -> Delta:
        """The same delta with the marks of the snapshots it leads from and to."""
        return dataclasses.replace(self, marks=jnp.stack([before, after]))

    def check(self) -> None:
        """Raise DeltaOverflowError if the delta overflowed; in a jit, do nothing."""
        for group in self.groups:
            if isinstance(group.count, Tracer):
                return
            count = int(np.asarray(group.count))
            if count > group.slots:
                raise self._overflow(group, count)

    def start_copy(self) -> None:
        """Begin copying the counts and the first pages to the host; does not block.

        Call it in the thread that made the delta, right after the step was
        dispatched. Does nothing on CPU, where there is nothing to copy.
        Collective: no. Thread: any.
        """
        for group in self.groups:
            if all(d.platform == "cpu" for d in group.count.devices()):
                continue
            group.count.copy_to_host_async()
            if self.marks is not None:
                self.marks.copy_to_host_async()
            for pages in (group.positions, group.old, group.new):
                pages.pages[0].copy_to_host_async()

    def to_host(self) -> dict[str, Changed]:
        """The changes of each leaf as NumPy arrays that own their memory.

        Blocks until the delta is ready and runs no jitted code: made for a background
        thread. Only pages in use are copied. Collective: no.

        Returns:
            For each leaf with a change, by name: positions in the leaf's flat (C order)
            elements, rising, uint32 (uint64 where they do not fit); the bits before
            and after, unsigned of the element's width.

        Raises:
            DeltaOverflowError: more elements changed than fit.

        Example:
            >>> delta = diff({"w": jnp.zeros(4)}, {"w": jnp.zeros(4).at[2].set(1.0)})
            >>> delta.to_host()["w"][0]
            array([2], dtype=uint32)
        """
        self.check()
        found: dict[int, list[Changed]] = {}
        for group in self.groups:
            count = int(np.asarray(group.count))
            if count:
                for leaf, changed in _split(group, count):
                    found.setdefault(leaf, []).append(changed)
        return {self.spec[i].name: _joined(found[i]) for i in sorted(found)}

    def _overflow(self, group: Group, count: int) -> DeltaOverflowError:
        width = self.spec[group.segments[0].leaf].width
        return DeltaOverflowError(
            f"{count} of {group.size} elements of {width} bytes changed (density "
            f"{count / group.size:.2%}), but the delta has {group.slots} slots "
            f"({group.slots / group.size:.2%}); publish this version whole "
            "(publish with params=), or make deltas with a capacity of at least "
            f"{min(1.0, 1.2 * count / group.size):.2g}"
        )


def _split(group: Group, count: int) -> Iterator[tuple[int, Changed]]:
    positions, old, new = (
        _prefix(pages, count) for pages in (group.positions, group.old, group.new)
    )
    starts = [segment.start for segment in group.segments]
    cuts = np.searchsorted(positions, np.array([*starts, group.size], np.uint64))
    for segment, a, b in zip(group.segments, cuts[:-1], cuts[1:], strict=True):
        if a < b:
            local = positions[a:b]
            local -= np.uint32(segment.start)  # in place: `positions` is ours
            if segment.offset + segment.size > 2**32:
                local = local + np.uint64(segment.offset)
            else:
                local += np.uint32(segment.offset)
            yield segment.leaf, (local, old[a:b], new[a:b])


def _joined(parts: list[Changed]) -> Changed:
    if len(parts) == 1:
        return parts[0]
    positions, old, new = map(np.concatenate, zip(*parts, strict=True))
    return positions, old, new


def _prefix(pages: Pages, count: int) -> np.ndarray:
    """The first `count` slots, copied: on CPU `np.asarray` is a view of the buffer."""
    out = np.empty(count, pages.pages[0].dtype)
    done = 0
    for page, size in zip(pages.pages, page_sizes(pages.slots), strict=True):
        used = min(size, count - done)
        if used <= 0:
            break
        out[done : done + used] = np.asarray(page)[:used]
        done += used
    return out
