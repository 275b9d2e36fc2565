"""Synthetic weights and changes, for benchmarks that need no trained model."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jdelta.wire import bits
from jdelta.wire.changes import Changes

# How far changed weights move, in units of the last place, and how often: the shares
# measured on fine-tuning traces at a density of 1 to 2 %.
_DISTANCES = np.array([1, 2, 3, 6, 12, 60])
_SHARES = np.array([0.89, 0.045, 0.02, 0.02, 0.015, 0.01])


def weights(params: int, tensors: int, seed: int = 0) -> dict[str, np.ndarray]:
    """About `params` bf16 weights in square-ish matrices, normal with std 0.02.

    Returns:
        `{"layers.0.kernel": bfloat16[rows, columns], ...}`.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, int((params / tensors / 2) ** 0.5))
    columns = max(1, params // tensors // rows)
    made = {}
    for index in range(tensors):
        values = rng.standard_normal((rows, columns), np.float32)
        values *= np.float32(0.02)
        made[f"layers.{index}.kernel"] = values.astype(ml_dtypes.bfloat16)
    return made


def move(flat: np.ndarray, density: float, rng: np.random.Generator) -> Changes:
    """Changes of a share `density` of a bf16 tensor's flat bits; writes nothing.

    The positions are uniform (nothing about them compresses), most steps one unit.
    """
    count = max(1, round(density * flat.size))
    # Drawn with replacement, topped up for the doubles that are dropped.
    drawn = rng.integers(0, flat.size, round(count * (1 + density)) + 1)
    positions = np.unique(drawn).astype(np.uint32)
    old = flat[positions]
    steps = rng.choice(_DISTANCES, positions.size, p=_SHARES).astype(np.int16)
    steps *= rng.choice(np.array([-1, 1], np.int16), positions.size)
    return Changes(positions, old, bits.advance(old, steps.view(np.uint16), "BF16"))
