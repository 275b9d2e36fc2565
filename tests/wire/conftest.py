from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def trained():
    """Draws chunk-local positions and bf16 steps as one optimizer step leaves them."""

    def draw(density, size=1 << 20, seed=0):
        rng = np.random.default_rng(seed)
        positions = np.flatnonzero(rng.random(size) < density)
        # 88 % by one unit; the rest fall off as a power.
        sizes = np.minimum(0.6 + 0.12 * rng.pareto(1.0, positions.size), 27_000)
        sizes = np.maximum(np.rint(sizes), 1).astype(np.int64)
        signs = rng.choice((-1, 1), positions.size)
        return positions, (sizes * signs).astype(np.int16).view(np.uint16)

    return draw
