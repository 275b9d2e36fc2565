"""Pairs of consecutive bf16 weights as training leaves them.

`trace` gives the pairs that jdelta's sizes and speeds are quoted on: 64Mi parameters
after 60 AdamW steps under noisy gradients, slow to make and kept on disk. `synthetic`
draws something alike of any size in a moment, from the same cause: a master weight in
float32 moves a little, and its bf16 rounding changes or does not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from jdelta.errors import MissingExtraError

if TYPE_CHECKING:
    import jax

STEPS = 60
SHAPE = (8, 2048, 4096)
STDS = (0.01, 0.015, 0.02, 0.02, 0.03, 0.03, 0.04, 0.05)

_CHUNK = 1 << 22
_BLOCK = 64
_SAMPLE = 1 << 20


class Recipe(NamedTuple):
    """A trace and how to know that it was made right.

    Attributes:
        rate: Learning rate.
        density: Share of changed elements between the last two steps.
        tolerance: By how much the share may differ.
    """

    rate: float
    density: float
    tolerance: float


RECIPES = {
    "A": Recipe(rate=3e-6, density=0.02417, tolerance=0.0002),
    "A1": Recipe(rate=1e-6, density=0.00957, tolerance=0.0001),
}


def trace(
    name: str, cache: str | os.PathLike[str] | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Eight matrices before and after one optimizer step, as bf16 bits.

    The first call makes both traces in one run of some minutes with JAX on the CPU
    (about 2 GiB of memory) and keeps them (512 MiB); later calls read them and check
    them against their hash, without JAX.

    Args:
        name: "A" (learning rate 3e-6, 2.417 % changed) or "A1" (1e-6, .957 %).
        cache: Folder to keep them in; by default the environment's `JDELTA_TRACES`,
            else `~/.cache/jdelta/traces`.

    Returns:
        The old and the new matrices: 8 arrays each, uint16, shape (2048, 4096).

    Raises:
        MissingExtraError: they are to be made and JAX is not installed.
        ValueError: there is no such trace, or this machine made it wrong (its density
            is not the known one).
    """
    if name not in RECIPES:
        raise ValueError(f"no trace {name!r}; there are {', '.join(RECIPES)}")
    folder = _folder(cache)
    pair = _read(folder, name)
    if pair is None:
        for made, bits in _generate().items():
            _check(made, bits)
            _write(folder, made, bits)
        pair = _read(folder, name)
        if pair is None:
            raise ValueError(f"the trace {name} just written to {folder} is not sound")
    old, new = pair
    return list(old), list(new)


def synthetic(n: int, density: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A pair of flat bf16 weights, old and new, in which about a share changed.

    As in training, small weights change far more often (the rate doubles with each
    octave down, until nearly all do) and 88 to 91 % of the changes are by one step of
    bf16 where the density is a few per cent or less. Deterministic for one version of
    NumPy.

    Args:
        n: Elements.
        density: Share of changed elements, 0 to 0.9; met within sampling noise.
        seed: Another seed, another pair.

    Returns:
        Two uint16 arrays of shape (n,), bf16 bits.

    Raises:
        ValueError: `n` is negative or `density` out of range.
    """
    if n < 0 or not 0 <= density <= 0.9:
        raise ValueError(f"n {n} is negative, or density {density} is not in 0 .. 0.9")
    scale = _scale(density, seed) if density else np.float32(0)
    old, new = np.empty(n, np.uint16), np.empty(n, np.uint16)
    for index, start in enumerate(range(0, n, _CHUNK)):
        stop = min(start + _CHUNK, n)
        master, update = _draw(seed, index, stop - start)
        old[start:stop] = _bits(master)
        new[start:stop] = _bits(master - scale * update)
    return old, new


def _draw(seed: int, index: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Master weights of several magnitudes, and the directions they move in."""
    rng = np.random.default_rng((seed, index))
    blocks = -(-n // _BLOCK)
    std = np.asarray(STDS, np.float32)[np.arange(blocks) % len(STDS), None]
    master = rng.standard_normal((blocks, _BLOCK), np.float32) * std
    update = rng.standard_normal((blocks, _BLOCK), np.float32)
    return master.reshape(-1)[:n], update.reshape(-1)[:n]


def _scale(density: float, seed: int) -> np.float32:
    """The size of update that changes such a share, by bisection on a sample."""
    master, update = _draw(seed, 0, _SAMPLE)
    old = _bits(master)
    low, high = -12.0, 2.0
    for _ in range(20):
        middle = (low + high) / 2
        new = _bits(master - np.float32(10.0**middle) * update)
        if np.count_nonzero(old != new) < density * _SAMPLE:
            low = middle
        else:
            high = middle
    return np.float32(10.0**high)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def _folder(cache: str | os.PathLike[str] | None) -> Path:
    if cache is None:
        cache = os.environ.get("JDELTA_TRACES") or "~/.cache/jdelta/traces"
    return Path(cache).expanduser()


def _read(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The pair on disk, or None where there is none or it is damaged."""
    try:
        sums = json.loads((folder / f"{name}.json").read_bytes())
        old, new = (np.load(folder / f"{name}-{which}.npy") for which in ("old", "new"))
        found = {"old": _sum(old), "new": _sum(new)}
    except (OSError, ValueError, EOFError):
        return None
    return (old, new) if sums == found else None


def _write(folder: Path, name: str, pair: tuple[np.ndarray, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{uuid.uuid4().hex}.tmp"
    try:
        for which, bits in zip(("old", "new"), pair, strict=True):
            with open(temporary, "wb") as file:
                np.save(file, bits)
            temporary.replace(folder / f"{name}-{which}.npy")
        sums = {"old": _sum(pair[0]), "new": _sum(pair[1])}
        temporary.write_text(json.dumps(sums))
        temporary.replace(folder / f"{name}.json")
    finally:
        temporary.unlink(missing_ok=True)


def _sum(bits: np.ndarray) -> str:
    if bits.dtype != np.uint16 or bits.shape != SHAPE:
        return f"{bits.dtype} {bits.shape}"
    return hashlib.sha256(np.ascontiguousarray(bits).data).hexdigest()


def _check(name: str, pair: tuple[np.ndarray, np.ndarray]) -> None:
    recipe, (old, new) = RECIPES[name], pair
    found = float(np.mean(old != new))
    if not math.isclose(found, recipe.density, abs_tol=recipe.tolerance, rel_tol=0):
        raise ValueError(
            f"trace {name} came out with density {found:.5%}, expected "
            f"{recipe.density:.3%} +- {recipe.tolerance:.3%}"
        )


def _generate() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Runs the optimizer; all traces share its gradients, which ignore the weights."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise MissingExtraError(
            "making the traces needs JAX: pip install 'jdelta[jax]', or set "
            "JDELTA_TRACES to a folder that has them"
        ) from error

    def normal(key: int, shape: tuple[int, ...] = SHAPE) -> jax.Array:
        return jax.random.normal(jax.random.key(key), shape)

    @jax.jit
    def start():
        std = jnp.asarray(STDS, jnp.float32)[:, None, None]
        return normal(0) * std, (0.1 * normal(1)).astype(jnp.bfloat16)

    def step(weights, m, v, signal, row, column, t):
        key = jax.random.split(jax.random.key(100 + t))[0]
        z = jax.random.normal(key, SHAPE)
        g = 1e-5 * row * column * (signal.astype(jnp.float32) + 0.6 * z * jnp.abs(z))
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.95**t)
        u = m_hat / (jnp.sqrt(v_hat) + 1e-8)
        weights = {
            name: w - RECIPES[name].rate * (u + 0.01 * w) for name, w in weights.items()
        }
        return weights, m, v

    with jax.default_device(jax.devices("cpu")[0]):
        w, signal = start()
        row = jnp.exp(normal(2, (*SHAPE[:2], 1)))
        column = jnp.exp(0.7 * normal(3, (SHAPE[0], 1, SHAPE[2])))
        weights = {name: w.copy() for name in RECIPES}
        del w
        m, v = jnp.zeros(SHAPE), jnp.zeros(SHAPE)
        advance = jax.jit(step, donate_argnums=(0, 1, 2))
        published = []
        for t in range(1, STEPS + 1):
            weights, m, v = advance(weights, m, v, signal, row, column, t)
            if t >= STEPS - 1:
                published.append({n: _bits(np.asarray(w)) for n, w in weights.items()})
    before, after = published
    return {name: (before[name], after[name]) for name in RECIPES}
