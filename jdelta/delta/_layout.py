"""Where each leaf lies in its group's flat space, and how the work is cut up.

Leaves of one element width form a group with one flat space of u32 positions, or
several groups where one would be too large. Small leaves come first, so that they can
be worked on many at once, copied together; large leaves are read in place, a block at
a time, in pieces that XLA's 32-bit indices can address.
"""

from __future__ import annotations

from typing import NamedTuple

from jdelta.delta._bits import WIDTHS
from jdelta.delta._spec import LeafSpec

RANK_WORDS = 8  # words a rank block: few enough to look through one by one
RANK_ELEMENTS = 32 * RANK_WORDS


class Limits(NamedTuple):
    """Sizes that shape the work, in elements unless said; tests shrink them.

    Attributes:
        small: leaves below this size are copied together before the work.
        batch: most leaves copied together: compiling takes time in its square.
        block: most elements worked on at once, a multiple of 256, not below `small`:
            few enough to stay in a CPU's cache.
        piece: leaves above this size are worked on in pieces of it, because XLA's
            indices are 32-bit; not below `block`.
        group: most elements of a group; not below `piece`.
        sweep: most leaves one loop goes over, for the same reason.
        slots: most slots filled by one turn of the fill loop, a power of two.
        slot_floor: slots a group has whatever its capacity.
    """

    small: int = 2**18
    batch: int = 32
    block: int = 2**20
    piece: int = 2**30
    group: int = 2**31
    sweep: int = 256
    slots: int = 2**12
    slot_floor: int = 1024


DEFAULT = Limits()


class Segment(NamedTuple):
    """A leaf, or a part of one, in a group's flat space.

    Attributes:
        leaf: index into the tree's leaves.
        offset: the leaf's flat element at which the part begins.
        start: its first position in the group's flat space.
        size: elements.
    """

    leaf: int
    offset: int
    start: int
    size: int


class GroupLayout(NamedTuple):
    """A flat space of leaves of one width.

    Attributes:
        width: bytes an element.
        size: elements.
        batches: small leaves, each batch copied together, from position 0 on.
        pieces: the others, behind them.
    """

    width: int
    size: int
    batches: tuple[tuple[Segment, ...], ...]
    pieces: tuple[Segment, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All of the group, in flat order."""
        return (*(segment for batch in self.batches for segment in batch), *self.pieces)


def group_layouts(
    specs: tuple[LeafSpec, ...], limits: Limits = DEFAULT
) -> tuple[GroupLayout, ...]:
    """The groups of a tree, by rising width; widths without elements are left out."""
    layouts: list[GroupLayout] = []
    for width in WIDTHS:
        mine = [i for i, s in enumerate(specs) if s.width == width and s.size]
        small = [i for i in mine if specs[i].size < limits.small]
        large = [i for i in mine if specs[i].size >= limits.small]
        cuts = [(i, 0, specs[i].size) for i in small]
        for i in large:
            for offset in range(0, specs[i].size, limits.piece):
                cuts.append((i, offset, min(limits.piece, specs[i].size - offset)))
        group: list[Segment] = []
        for leaf, offset, size in cuts:
            start = group[-1].start + group[-1].size if group else 0
            if start + size > limits.group:
                layouts.append(_layout(width, group, limits, specs))
                group, start = [], 0
            group.append(Segment(leaf, offset, start, size))
        if group:
            layouts.append(_layout(width, group, limits, specs))
    return tuple(layouts)


def _layout(
    width: int, group: list[Segment], limits: Limits, specs: tuple[LeafSpec, ...]
) -> GroupLayout:
    batches: list[list[Segment]] = []
    pieces = []
    room = 0
    for segment in group:
        if specs[segment.leaf].size >= limits.small:
            pieces.append(segment)
            continue
        if segment.size > room or len(batches[-1]) == limits.batch:
            batches.append([])
            room = limits.block
        batches[-1].append(segment)
        room -= segment.size
    return GroupLayout(
        width,
        group[-1].start + group[-1].size,
        tuple(map(tuple, batches)),
        tuple(pieces),
    )
