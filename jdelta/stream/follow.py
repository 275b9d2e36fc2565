"""Whether a delta starts from what was published last, as far as it can be told.

Deltas of `extract` carry marks: a missing, repeated or rolled back one is always seen.
Those of `diff`, and `Changes`, carry the bits before instead. These are compared with a
sample of what was published: with every element of a tree of up to `SAMPLE` elements,
with an even sample of that size of a larger one. A gap is then seen where the delta and
the missing one touch an element of the sample: soon for dense ones, never for certain.

Used by the copy thread only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jdelta.errors import GapError
from jdelta.wire.changes import Changes
from jdelta.wire.dtypes import TensorSpec, bits_dtype

SAMPLE = 1 << 22
"""Elements whose published bits are kept on the host."""

_NONE = np.uint32(0xFFFFFFFF)  # both words of `jdelta.delta`'s mark of no snapshot


class Follower:
    """Checks that each delta follows the one before it.

    Args:
        specs: The published tree.
        sample: About how many elements to keep.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], sample: int = SAMPLE):
        """Knows nothing before the first `reset`."""
        total = sum(spec.size for spec in specs.values())
        # Odd, so that it does not fall in step with rows of a power of two.
        self._stride = 1 if total <= sample else -(-total // sample) | 1
        self._specs = specs
        self._held: dict[str, np.ndarray] = {}
        self._mark: np.ndarray | None = None

    def reset(
        self, whole: Mapping[str, np.ndarray], marks: np.ndarray | None = None
    ) -> None:
        """Whole weights were published, together with a delta that has `marks`."""
        self._held = {
            name: bits[:: self._stride].copy() for name, bits in whole.items()
        }
        self._mark = None if marks is None else marks[1]

    def check(self, changes: Mapping[str, Changes], marks: np.ndarray | None) -> None:
        """Raises GapError unless changes follow; from then on they are published.

        Args:
            changes: By name.
            marks: u32[2, 2], of the delta they come from; None for one without.
        """
        if marks is not None:
            self._check_mark(marks[0])
        sampled = {name: self._sampled(c) for name, c in changes.items()}
        for name, (slots, chosen) in sampled.items():
            wrong = np.flatnonzero(self._held[name][slots] != changes[name].old[chosen])
            if wrong.size:
                spec, at = self._specs[name], int(slots[wrong[0]]) * self._stride
                digits = 2 * bits_dtype(spec.dtype).itemsize
                found = int(changes[name].old[chosen][wrong[0]])
                held = int(self._held[name][slots[wrong[0]]])
                raise GapError(
                    f"this delta does not start from what was published last: element "
                    f"{at} of {name!r} ({spec}) was published as 0x{held:0{digits}x}, "
                    f"the delta leads from 0x{found:0{digits}x} (a delta was not "
                    "published, or the trainer went back to older weights)"
                )
        for name, (slots, chosen) in sampled.items():
            self._held[name][slots] = changes[name].new[chosen]
        self._mark = None if marks is None else marks[1]

    def _sampled(self, changes: Changes) -> tuple[np.ndarray, np.ndarray | slice]:
        """Slots of the sample that changes touch, and which changes those are."""
        positions, stride = changes.positions, self._stride
        if stride == 1:
            return positions, slice(None)
        if positions.dtype.itemsize < 4:
            positions = positions.astype(np.uint32)
        slots = positions // positions.dtype.type(stride)
        chosen = np.flatnonzero(slots * positions.dtype.type(stride) == positions)
        return slots[chosen], chosen

    def _check_mark(self, before: np.ndarray) -> None:
        if (before == _NONE).all():
            raise GapError(
                "this delta was merged from deltas that do not follow each other"
            )
        if self._mark is None or np.array_equal(before, self._mark):
            return
        # Modulo 2^32, as the count in a mark is.
        ahead = int((before[:1] - self._mark[:1]).view(np.int32)[0])
        if ahead > 0:
            what = f"{ahead} extracted in between were not published"
        elif ahead < 0:
            what = (
                f"it leads from {-ahead} before: a delta was published twice, or the "
                "trainer went back to an older opt_state"
            )
        else:
            what = "it comes from another opt_state of the same age"
        raise GapError(f"this delta does not follow the last one published: {what}")
