"""Where each leaf lies in its group's flat space, and how the work is cut up.

Leaves of one element width form a group with one flat space of u32 positions. Small
leaves come first, so that they can be worked on many at once, copied together; each
large leaf is read in place, a block at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from jdelta.delta._bits import WIDTHS
from jdelta.delta._spec import LeafSpec
from jdelta.errors import TreeError

RANK_WORDS = 8  # words a rank block: few enough to look through one by one
RANK_ELEMENTS = 32 * RANK_WORDS
MAX_GROUP = 2**32 - 1  # elements: positions are u32, and one value is kept free


class Limits(NamedTuple):
    """Sizes that shape the work, in elements unless said; tests shrink them.

    Attributes:
        small: leaves below this size are copied together before the work.
        block: most elements worked on at once, a multiple of 256, not below `small`.
        columns: leaves above this size are addressed by (row, column), because XLA's
            indices are 32-bit; not below `block`.
        slots: most slots filled by one turn of the fill loop, a power of two.
        slot_floor: slots a group has whatever its capacity.
    """

    small: int = 2**18
    block: int = 2**22
    columns: int = 2**30
    slots: int = 2**14
    slot_floor: int = 1024


DEFAULT = Limits()


class Batch(NamedTuple):
    """Consecutive small leaves of a group's flat space, copied together.

    Attributes:
        leaves: indices into the tree's leaves.
        start: first position in the group's flat space.
        size: elements.
    """

    leaves: tuple[int, ...]
    start: int
    size: int


class Large(NamedTuple):
    """A leaf that is read in place.

    Attributes:
        leaf: index into the tree's leaves.
        start: first position in the group's flat space.
        rows: the leaf is addressed as (rows, columns).
        columns: see rows.
    """

    leaf: int
    start: int
    rows: int
    columns: int


class GroupLayout(NamedTuple):
    """The flat space of all leaves of one width.

    Attributes:
        width: bytes an element.
        leaves: indices into the tree's leaves, in flat order, empty leaves left out.
        starts: first flat position of each of `leaves`.
        size: elements.
        batches: the small leaves.
        large: the others.
    """

    width: int
    leaves: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    batches: tuple[Batch, ...]
    large: tuple[Large, ...]


def group_layouts(
    specs: tuple[LeafSpec, ...], limits: Limits = DEFAULT
) -> tuple[GroupLayout, ...]:
    """The groups of a tree, by rising width; widths without elements are left out.

    Raises:
        TreeError: a group or a leaf is too large to address.
    """
    layouts = (_group_layout(specs, width, limits) for width in WIDTHS)
    return tuple(layout for layout in layouts if layout.size)


def _group_layout(
    specs: tuple[LeafSpec, ...], width: int, limits: Limits
) -> GroupLayout:
    mine = [i for i, s in enumerate(specs) if s.width == width and s.size]
    small = [i for i in mine if specs[i].size < limits.small]
    big = [i for i in mine if specs[i].size >= limits.small]
    starts, size = [], 0
    for i in (*small, *big):
        starts.append(size)
        size += specs[i].size
    if size > MAX_GROUP:
        largest = max((specs[i] for i in mine), key=lambda s: s.size)
        raise TreeError(
            f"the leaves of {width} bytes an element have {size} elements together "
            f"(the largest, {largest.name!r}, {largest.size}); at most {MAX_GROUP} fit "
            "one delta: shard them or split the tree"
        )
    large = tuple(
        Large(i, start, *_address(specs[i], limits.columns))
        for i, start in zip(big, starts[len(small) :], strict=True)
    )
    batches = _batches(specs, small, limits.block)
    return GroupLayout(width, (*small, *big), tuple(starts), size, batches, large)


def _batches(
    specs: tuple[LeafSpec, ...], small: list[int], most: int
) -> tuple[Batch, ...]:
    batches: list[Batch] = []
    for i in small:
        if batches and batches[-1].size + specs[i].size <= most:
            last = batches.pop()
            leaves, start, size = (*last.leaves, i), last.start, last.size
        else:
            end = batches[-1].start + batches[-1].size if batches else 0
            leaves, start, size = (i,), end, 0
        batches.append(Batch(leaves, start, size + specs[i].size))
    return tuple(batches)


def _address(spec: LeafSpec, most: int) -> tuple[int, int]:
    """The (rows, columns) with fewest rows that `most` columns allow."""
    for rows in range(max(1, -(-spec.size // most)), 2**16):
        if spec.size % rows == 0:
            return rows, spec.size // rows
    raise TreeError(
        f"leaf {spec.name!r} has {spec.size} elements, more than {most}, and no factor "
        "to cut it by; reshape or split it"
    )
