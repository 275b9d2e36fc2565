"""A reader whose memory is measured; its own process.

`python -m jdelta.cli.bench._memory_reader JSON` ends with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from jdelta.cli.bench import _peak


def read(folder: str, chain: int, last: int) -> dict[str, Any]:
    """Restores and follows; peaks are beyond the process before jdelta was loaded.

    Args:
        folder: The bucket.
        chain: A version that is an anchor and deltas.
        last: The version to follow to from there.
    """
    np.zeros(1)  # NumPy itself is no cost of jdelta
    start = _peak.reset()
    import jdelta

    result: dict[str, Any] = {}
    with jdelta.Subscriber(folder) as subscriber:
        weights = subscriber.restore(0)
        result["anchor"] = _peak.peak() - start
        size = sum(array.nbytes for array in weights.values())
        del weights
        _peak.reset()
        weights = subscriber.restore(chain)
        result["chain"] = _peak.peak() - start
        _peak.reset()
        updates = subscriber.updates(every=True, timeout=600.0)
        while subscriber.version != last:
            update = next(updates)
            if update.kind != "delta":
                raise RuntimeError(f"version {update.version} came as {update.kind}")
            weights = update.apply(weights)
        result["updates"] = _peak.peak() - start
    return {**result, "weights": size}


def read_jax(folder: str, chain: int, last: int) -> dict[str, Any]:
    """The same into JAX arrays, which on the CPU are host memory too."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    start = _peak.reset()
    import jdelta

    result: dict[str, Any] = {}
    with jdelta.Subscriber(folder) as subscriber:
        weights = subscriber.restore(0)
        like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in weights.items()}
        size = sum(array.nbytes for array in weights.values())
        del weights
        _peak.reset()
        params = subscriber.restore(chain, like=like)
        jax.block_until_ready(params)
        result["chain"] = _peak.peak() - start
        _peak.reset()
        updates = subscriber.updates(every=True, timeout=600.0)
        while subscriber.version != last:
            params = next(updates).apply(params)
        jax.block_until_ready(params)
        result["updates"] = _peak.peak() - start
    return {**result, "weights": size}


def main(text: str) -> None:
    """Runs what `text` (JSON) says and prints what came of it."""
    options = json.loads(text)
    action = read_jax if options.get("jax") else read
    print(json.dumps(action(options["folder"], options["chain"], options["last"])))


if __name__ == "__main__":
    main(sys.argv[1])
