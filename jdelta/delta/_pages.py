"""A buffer of slots in three pages, so that the host copies only pages in use.

The pages hold 1/8, 3/8 and 1/2 of the slots. Each has slack behind its slots: a slice
may run past the end of the page in use, and a write that is meant for another page goes
there, which keeps the write a plain in-place update on every page.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def page_sizes(slots: int) -> tuple[int, int, int]:
    """Slots of each page."""
    first = -(-slots // 8)
    second = min(-(-3 * slots // 8), slots - first)
    return first, second, slots - first - second


def page_starts(slots: int) -> tuple[int, int, int]:
    """First slot of each page."""
    first, second, _ = page_sizes(slots)
    return 0, first, first + second


def page_end(slots: int, slot: jax.Array) -> jax.Array:
    """First slot (u32) behind the page that holds `slot`."""
    _, second, third = page_starts(slots)
    later = jnp.where(slot < third, np.uint32(third), np.uint32(slots))
    return jnp.where(slot < second, np.uint32(second), later)


@partial(jax.tree_util.register_dataclass, data_fields=["pages"], meta_fields=["slots"])
@dataclasses.dataclass(frozen=True)
class Pages:
    """One buffer.

    Attributes:
        pages: three vectors: a page's slots, then slack.
        slots: slots of all pages together.
    """

    pages: tuple[jax.Array, jax.Array, jax.Array]
    slots: int

    @classmethod
    def zeros(cls, slots: int, slack: int, dtype: np.dtype) -> Pages:
        """An empty buffer; a slice of at most `slack` slots can be read or written."""
        first, second, third = (
            jnp.zeros(size + slack, dtype) for size in page_sizes(slots)
        )
        return cls((first, second, third), slots)

    @property
    def slack(self) -> int:
        """Most values that one `read` or `write` moves."""
        return self.pages[0].size - page_sizes(self.slots)[0]

    def write(self, slot: jax.Array, values: jax.Array) -> Pages:
        """Write `values` from `slot` on: right up to the end of the slot's page."""
        first, second, third = (
            lax.dynamic_update_slice(page, values.astype(page.dtype), (at,))
            for page, at in zip(self.pages, self._offsets(slot), strict=True)
        )
        return Pages((first, second, third), self.slots)

    def read(self, slot: jax.Array, size: int) -> jax.Array:
        """The `size` values from `slot` on: right up to the end of the slot's page."""
        _, second, third = page_starts(self.slots)
        first_part, second_part, third_part = (
            lax.dynamic_slice(page, (at,), (size,))
            for page, at in zip(self.pages, self._offsets(slot), strict=True)
        )
        later = jnp.where(slot < third, second_part, third_part)
        return jnp.where(slot < second, first_part, later)

    def take(self, slot: jax.Array) -> jax.Array:
        """The values at `slot` (u32[n], each below `slots`)."""
        _, second, third = page_starts(self.slots)
        parts = [
            page.at[jnp.minimum(slot - np.uint32(start), np.uint32(page.size - 1))].get(
                mode="promise_in_bounds"
            )
            for page, start in zip(self.pages, page_starts(self.slots), strict=True)
        ]
        later = jnp.where(slot < third, parts[1], parts[2])
        return jnp.where(slot < second, parts[0], later)

    def _offsets(self, slot: jax.Array) -> list[jax.Array]:
        offsets = []
        for start, size in zip(
            page_starts(self.slots), page_sizes(self.slots), strict=True
        ):
            inside = (slot >= start) & (slot < start + size)
            offsets.append(jnp.where(inside, slot - np.uint32(start), np.uint32(size)))
        return offsets
