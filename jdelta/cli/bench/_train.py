"""Interleaved training, with the stream and without it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
import optax

import jdelta
from jdelta.cli import _model
from jdelta.cli._demo.text import batch, read_sources
from jdelta.cli.bench import _timing

_WARM_STEPS = 6  # the first steps of a fresh Adam change several times as much
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, how, and how often; see `jdelta bench stream --help`."""

    pairs: int
    block: int
    batch: int
    sequence: int
    width: int
    layers: int
    learning_rate: float
    recipe: str


@dataclasses.dataclass(kw_only=True)
class Trained:
    """What was measured: seconds and CPU seconds of each block of `block` steps."""

    block: int
    parameters: int
    on: list[float] = dataclasses.field(default_factory=list)
    off: list[float] = dataclasses.field(default_factory=list)
    cpu_on: list[float] = dataclasses.field(default_factory=list)
    cpu_off: list[float] = dataclasses.field(default_factory=list)
    density: float = 0.0
    versions: int = 0
    merged: int = 0
    anchors: int = 0
    stages: dict[str, float] = dataclasses.field(default_factory=dict)

    def ratios(self) -> list[float]:
        """Throughput with the stream as a share of that without it, by pair."""
        return [off / on for on, off in zip(self.on, self.off, strict=True)]

    def core_ms_per_mparam(self) -> list[float]:
        """Extra CPU time by pair: core-milliseconds a version and million weights."""
        scale = 1e3 / self.block / (self.parameters / 1e6)
        return [
            scale * (on - off)
            for on, off in zip(self.cpu_on, self.cpu_off, strict=True)
        ]

    def extra_ms(self) -> float:
        """How much longer a step takes, by the median of the pairs."""
        extra = [on - off for on, off in zip(self.on, self.off, strict=True)]
        return 1e3 * _timing.median(extra) / self.block


class _Loop(Protocol):
    """A training loop and its state."""

    def step(self, tokens: np.ndarray) -> None:
        """Train on one batch; returns when its loss is known."""
        ...

    def settle(self) -> None:
        """Wait for whatever goes on in the background."""
        ...


class _Plain:
    """Training without jdelta: the step alone, f32 masters and Adam's two moments."""

    def __init__(self, setup: Setup, graphdef: Any, params: Any):
        tx = optax.adamw(setup.learning_rate)
        self._state = jax.jit(tx.init)(params)
        self._params = params
        self._step = _model.make_step(graphdef, tx)

    def step(self, tokens: np.ndarray) -> None:
        self._params, self._state, loss = self._step(self._params, self._state, tokens)
        float(loss)

    def settle(self) -> None:
        pass


class _Streamed:
    """The same with every step published in bf16 into a directory."""

    def __init__(self, setup: Setup, graphdef: Any, params: Any, folder: str):
        self._params = params
        if setup.recipe == "diff":
            tx: Any = optax.adamw(setup.learning_rate)
        else:
            tx = jdelta.wrap(optax.adamw(setup.learning_rate))
        self._state = jax.jit(tx.init)(params)
        self._advance, weights = self._recipe(setup, graphdef, tx)
        self._steps = 0
        self.changed = 0
        self.versions = 0
        self.publisher = jdelta.Publisher(folder, weights, on_commit=self._committed)

    def _committed(self, record: Any) -> None:
        if record.kind == "delta":
            self.versions += 1
            self.changed += record.changed

    def _recipe(
        self, setup: Setup, graphdef: Any, tx: Any
    ) -> tuple[Callable[[np.ndarray], tuple[Any, Any, Any]], Any]:
        """A function from tokens to loss, delta, weights function; first weights."""
        if setup.recipe == "diff":
            step = _model.make_step(graphdef, tx)
            cast, diff = jax.jit(_model.cast), jax.jit(jdelta.diff)
            held = [cast(self._params)]

            def by_diff(tokens: np.ndarray) -> tuple[Any, Any, Any]:
                self._params, self._state, loss = step(
                    self._params, self._state, tokens
                )
                new = cast(self._params)
                delta = diff(held[0], new)
                held[0] = new
                return loss, delta, new

            return by_diff, held[0]
        if setup.recipe == "fused":
            fused = _model.make_step(graphdef, tx, stream=True)

            def by_fused(tokens: np.ndarray) -> tuple[Any, Any, Any]:
                self._params, self._state, loss, delta = fused(
                    self._params, self._state, tokens
                )
                return (
                    loss,
                    delta,
                    functools.partial(jdelta.published, self._state, self._params),
                )

            return by_fused, jdelta.published(self._state, self._params)
        step = _model.make_step(graphdef, tx)
        extract = jax.jit(jdelta.extract, donate_argnums=0)

        def by_wrap(tokens: np.ndarray) -> tuple[Any, Any, Any]:
            self._params, self._state, loss = step(self._params, self._state, tokens)
            delta, self._state = extract(self._state, self._params)
            return (
                loss,
                delta,
                functools.partial(jdelta.published, self._state, self._params),
            )

        return by_wrap, jdelta.published(self._state, self._params)

    def step(self, tokens: np.ndarray) -> None:
        loss, delta, weights = self._advance(tokens)
        self._steps += 1
        self.publisher.publish(delta, step=self._steps, params=weights)
        float(loss)

    def settle(self) -> None:
        self.publisher.flush(_TIMEOUT)
        # An anchor that is being rebuilt belongs to this half as well.
        for thread in threading.enumerate():
            if thread.name.startswith("jdelta-anchor"):
                thread.join(_TIMEOUT)


def run(setup: Setup) -> Trained:
    """Train both ways, alternating, from the same weights on the same text."""
    text, _ = read_sources()
    config = _model.ModelConfig(
        width=setup.width, layers=setup.layers, heads=max(1, setup.width // 64)
    )
    graphdef, params = _model.make_model(config)
    rng = np.random.default_rng(0)
    copy = jax.jit(functools.partial(jax.tree.map, lambda x: x.copy()))
    measured = Trained(block=setup.block, parameters=_model.parameter_count(params))

    def draw(count: int) -> list[np.ndarray]:
        return [batch(text, rng, setup.batch, setup.sequence) for _ in range(count)]

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="jdelta-bench-")
        )
        off = _Plain(setup, graphdef, copy(params))
        on = _Streamed(setup, graphdef, params, folder)
        stack.enter_context(on.publisher)
        for tokens in draw(_WARM_STEPS):
            off.step(tokens)
            on.step(tokens)
        on.settle()
        before = on.publisher.stats()
        on.changed = on.versions = 0
        for number in range(setup.pairs):
            tokens = draw(setup.block)
            halves: list[tuple[_Loop, list[float], list[float]]] = [
                (on, measured.on, measured.cpu_on),
                (off, measured.off, measured.cpu_off),
            ]
            # On first in every other pair: what drifts falls on both alike.
            for loop, wall, cpu in halves if number % 2 else halves[::-1]:
                seconds, used = _block(loop, tokens)
                wall.append(seconds)
                cpu.append(used)
        after = on.publisher.stats()
        measured.versions = max(1, on.versions)
        measured.density = on.changed / measured.versions / measured.parameters
        measured.merged = after.merged - before.merged
        whole = 2 * measured.parameters
        written = after.bytes_written["anchor"] - before.bytes_written["anchor"]
        measured.anchors = written // whole
        measured.stages = {
            stage: seconds - before.times.get(stage, 0.0)
            for stage, seconds in after.times.items()
        }
    return measured


def _block(loop: _Loop, tokens: list[np.ndarray]) -> tuple[float, float]:
    """Seconds and CPU seconds (all threads of the process) of some steps."""
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    for part in tokens:
        loop.step(part)
    loop.settle()
    return time.perf_counter() - start, time.process_time() - cpu
