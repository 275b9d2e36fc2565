"""How long `publish` holds its caller."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdelta

_WARM_CALLS = 6
_DENSITY = (
    0.0075  # of each tree against the first: 1 % from one to the next, on average
)
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """What was measured.

    Attributes:
        seconds: Of each call.
        parameters: Weights of the tree.
        leaves: Arrays of the tree.
        density: Mean share that changed from one version to the next.
        pending: Share of calls whose delta was not computed yet.
        busy: Share of calls that found earlier deltas still in the background.
        merged: Deltas that were merged with another.
    """

    seconds: list[float]
    parameters: int
    leaves: int
    density: float
    pending: float
    busy: float
    merged: int


def run(params: int, calls: int) -> Latency:
    """Publish a delta after the other, each right after its diff was dispatched."""
    first = _tree(params)
    trees = [first, *(_moved(first, jax.random.key(seed)) for seed in (1, 2))]
    jax.block_until_ready(trees)
    diff = jax.jit(jdelta.diff)
    elements = sum(leaf.size for leaf in first.values())
    seconds: list[float] = []
    pending = busy = changed = versions = 0

    def committed(record: Any) -> None:
        nonlocal changed, versions
        if record.kind == "delta":
            changed += record.changed
            versions += record.merged

    with (
        tempfile.TemporaryDirectory(prefix="jdelta-bench-") as folder,
        jdelta.Publisher(folder, first, on_commit=committed) as publisher,
    ):
        publisher.flush(_TIMEOUT)
        for number in range(-_WARM_CALLS, calls):
            new = trees[(number + 1) % 3]
            delta = diff(trees[number % 3], new)
            count = delta.groups[0].count
            ready = count.is_ready()
            waiting = publisher.stats().waiting
            start = time.perf_counter()
            publisher.publish(delta, step=number + _WARM_CALLS, params=new)
            elapsed = time.perf_counter() - start
            del delta
            if number >= 0:
                seconds.append(elapsed)
                pending += not ready
                busy += waiting > 0
            count.block_until_ready()
        publisher.flush(_TIMEOUT)
        merged = publisher.stats().merged
    return Latency(
        seconds=seconds,
        parameters=elements,
        leaves=len(first),
        density=changed / max(1, versions) / elements,
        pending=pending / calls,
        busy=busy / calls,
        merged=merged,
    )


def _tree(params: int) -> dict[str, jax.Array]:
    """About `params` bf16 weights in the arrays of a decoder-only transformer."""
    layers = 8
    width = max(8, int((params / layers / 12) ** 0.5))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        name = f"layers.{layer}"
        shapes[f"{name}.attention_norm.scale"] = (width,)
        shapes[f"{name}.qkv.kernel"] = (width, 3 * width)
        shapes[f"{name}.out.kernel"] = (width, width)
        shapes[f"{name}.mlp_norm.scale"] = (width,)
        shapes[f"{name}.up.kernel"] = (width, 4 * width)
        shapes[f"{name}.down.kernel"] = (4 * width, width)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(
        lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(jnp.bfloat16),
        static_argnums=1,
    )
    return {
        name: draw(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@jax.jit
def _moved(tree: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
    """The tree with the last bit of a few weights turned over."""

    def turn(leaf: jax.Array, key: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, np.uint16)
        mask = jax.random.bernoulli(key, _DENSITY, leaf.shape)
        return jax.lax.bitcast_convert_type(bits ^ mask.astype(np.uint16), leaf.dtype)

    keys = jax.random.split(key, len(tree))
    return {
        name: turn(leaf, k) for k, (name, leaf) in zip(keys, tree.items(), strict=True)
    }
