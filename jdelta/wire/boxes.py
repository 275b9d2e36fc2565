"""A tensor cut into boxes, as its publisher's shards are; a tensor of one shard is one.

A grid says into how many equal parts each dimension is cut (the last ones may be
smaller, or empty). Boxes are counted in C order, and so are the elements in each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Grid = tuple[int, ...]
"""Parts by dimension; empty for one box that is the whole tensor."""


class Box(NamedTuple):
    """One box: its first element by dimension, and its size."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def largest(shape: tuple[int, ...], grid: Grid) -> int:
    """Elements of the largest box, which is the first."""
    return box(shape, grid, 0).size


def box(shape: tuple[int, ...], grid: Grid, index: int) -> Box:
    """The box with that number."""
    if not grid:
        return Box((0,) * len(shape), shape)
    start, size = [], []
    for n, parts in zip(reversed(shape), reversed(grid), strict=True):
        index, at = divmod(index, parts)
        part = -(-n // parts)
        start.append(min(n, at * part))
        size.append(min(n, (at + 1) * part) - min(n, at * part))
    return Box(tuple(reversed(start)), tuple(reversed(size)))


def locate(
    shape: tuple[int, ...], grid: Grid, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The box of each flat position of the tensor, and the flat position in it."""
    left = positions.astype(np.int64)
    boxes, inside = np.zeros_like(left), np.zeros_like(left)
    boxes_below = 1
    below: np.ndarray | int = 1
    for n, parts in zip(reversed(shape), reversed(grid), strict=True):
        left, along = np.divmod(left, n)
        part = -(-n // parts)
        at, within = np.divmod(along, part)
        boxes += at * boxes_below
        inside += within * below
        boxes_below *= parts
        below = below * (np.minimum(n, (at + 1) * part) - at * part)
    return boxes, inside


def outside(shape: tuple[int, ...], box: Box, inside: np.ndarray) -> np.ndarray:
    """The flat positions in the tensor of flat positions in a box."""
    left = inside.astype(np.int64)
    found = np.zeros_like(left)
    below = 1
    for n, start, size in zip(
        reversed(shape), reversed(box.start), reversed(box.shape), strict=True
    ):
        left, along = np.divmod(left, max(1, size))
        found += (along + start) * below
        below *= n
    return found
