"""A trainer whose memory is measured, with or without a publisher; its own process.

`python -m jdelta.cli.bench._memory_trainer JSON` ends with a line of JSON.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdelta.cli import _model
from jdelta.cli.bench import _peak

_WARM_STEPS = 3  # the first steps of a fresh Adam change several times as much
_TIMEOUT = 1800.0
_TOKENS = 16  # the smallest step: its activations shall not hide anything


def config_of(params: int) -> _model.ModelConfig:
    """A transformer of about `params` weights, at most ten layers deep."""
    width = max(64, 64 * round((params / 120) ** 0.5 / 64))
    layers = max(1, round(params / 12 / width**2))
    return _model.ModelConfig(width=width, layers=layers, heads=width // 64)


class Trainer:
    """AdamW on f32 masters; the step computes with a bf16 copy of them.

    That copy is what a trainer of this kind holds anyway and what is published. Without
    a publisher it is renewed in place; with one, the old copy is kept until `diff` has
    seen both.
    """

    def __init__(self, config: _model.ModelConfig, capacity: float, rate: float):
        """Makes the weights and the optimizer's state."""
        graphdef, self.master = _model.make_model(config)
        tx = optax.adamw(rate, b2=0.95)
        self.state = jax.jit(tx.init)(self.master)
        self.weights = jax.jit(_model.cast)(self.master)
        self.parameters = _model.parameter_count(self.master)
        self._rng = np.random.default_rng(0)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(master: Any, state: Any, weights: Any, tokens: jax.Array) -> Any:
            value, grads = jax.value_and_grad(
                lambda w: _model.loss(graphdef, w, tokens)
            )(weights)
            grads = _model.cast(grads, jnp.float32)
            updates, state = tx.update(grads, state, master)
            return optax.apply_updates(master, updates), state, value

        self._step = step
        # The first argument is only there to give its memory to the result.
        self._renew = jax.jit(
            lambda old, master: _model.cast(master),
            donate_argnums=0,
            keep_unused=True,
        )
        self._cast = jax.jit(_model.cast)
        self._capacity = capacity
        self._diff: Callable[[Any, Any], Any] | None = None

    def advance(self) -> None:
        """One step of training; `weights` stay the ones it computed with."""
        tokens = self._rng.integers(0, 256, (1, _TOKENS + 1)).astype(np.uint8)
        self.master, self.state, loss = self._step(
            self.master, self.state, self.weights, tokens
        )
        float(loss)

    def renew(self) -> None:
        """Without a publisher: the bf16 copy is renewed in place."""
        self.weights = jax.block_until_ready(self._renew(self.weights, self.master))

    def renew_and_diff(self) -> Any:
        """With one: a new copy, and what changed; the old copy is let go of."""
        if self._diff is None:
            import jdelta

            self._diff = jax.jit(
                functools.partial(jdelta.diff, capacity=self._capacity)
            )
        new = self._cast(self.master)
        delta = self._diff(self.weights, new)
        self.weights = new
        jax.block_until_ready(delta)
        return delta


def without(trainer: Trainer, steps: int) -> dict[str, Any]:
    """The same training without jdelta."""
    for _ in range(_WARM_STEPS):
        trainer.advance()
        trainer.renew()
    start = _peak.reset()
    for _ in range(steps):
        trainer.advance()
        trainer.renew()
    return {"start": start, "peak": _peak.peak()}


def with_publisher(trainer: Trainer, steps: int, folder: str) -> dict[str, Any]:
    """Training that publishes every step: through three phases, each with its peak."""
    import jdelta

    for _ in range(_WARM_STEPS):
        trainer.advance()
        trainer.renew_and_diff()
    result: dict[str, Any] = {"start": _peak.reset()}
    kinds: list[str] = []
    changed: list[int] = []
    sizes: list[int] = []

    def committed(record: Any) -> None:
        kinds.append(record.kind)
        if record.kind == "delta":
            changed.append(record.changed)
            sizes.append(record.bytes_written["delta"])

    number = 0
    # The version that becomes an anchor in the background: after the second phase.
    versions = 2 * steps + 1

    def train() -> None:
        nonlocal number
        number += 1
        trainer.advance()
        delta = trainer.renew_and_diff()
        publisher.publish(delta, step=number, params=trainer.weights)

    publisher = jdelta.Publisher(
        folder, trainer.weights, anchor_every=versions, on_commit=committed
    )
    with publisher:
        # Trains on while the first anchor is written; it may take longer.
        while number < 2 or (not kinds and number < steps):
            train()
        publisher.flush(_TIMEOUT)
        result["first_anchor"] = _peak.peak()
        result["deltas_start"] = _peak.reset()
        for _ in range(steps):
            train()
        publisher.flush(_TIMEOUT)
        result["deltas"] = _peak.peak()
        result["anchor_before"] = publisher.stats().bytes_written["anchor"]
        result["second_anchor_start"] = _peak.reset()
        deadline = time.monotonic() + _TIMEOUT
        extra = 0
        while extra < 2 and time.monotonic() < deadline:
            train()
            due = len(changed) >= versions
            extra += due and not _anchor_running()
        publisher.flush(_TIMEOUT)
        while _anchor_running():
            time.sleep(0.05)
        result["second_anchor"] = _peak.peak()
        stats = publisher.stats()
        if stats.bytes_written["anchor"] <= result["anchor_before"]:
            raise RuntimeError("no second anchor was made")
    return {
        **result,
        "changed": changed,
        "sizes": sizes,
        "merged": stats.merged,
        "overflowed": stats.overflowed,
        "version": publisher.version,
        "times": stats.times,
    }


def _anchor_running() -> bool:
    return any(t.name.startswith("jdelta-anchor") for t in threading.enumerate())


def main(text: str) -> None:
    """Runs what `text` (JSON) says and prints what came of it."""
    options = json.loads(text)
    trainer = Trainer(config_of(options["params"]), options["capacity"], options["lr"])
    folder = options.get("folder")
    if folder is None:
        result = without(trainer, options["steps"])
    else:
        result = with_publisher(trainer, options["steps"], folder)
    print(json.dumps({**result, "parameters": trainer.parameters}))


if __name__ == "__main__":
    main(sys.argv[1])
