"""The demo's trainer: pretrains a transformer, then fine-tunes it and streams that."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdelta
from jdelta.cli import _model
from jdelta.cli._demo.channel import Channel, Settings
from jdelta.cli._demo.counting import CountingBucket
from jdelta.cli._demo.text import batch, read_sources
from jdelta.cli._demo.truth import sha256
from jdelta.delta import leaf_names

_PEAK_RATE = 2e-3  # learning rate of the pretraining
_WARM_UP = 20  # steps


def _truth(params: Any) -> str:
    """Hash of the published form of the real weights, made without jdelta."""
    weights = jax.jit(_model.cast)(params)
    return sha256(dict(zip(leaf_names(weights), jax.tree.leaves(weights), strict=True)))


def _pretrain(
    graphdef: Any, params: Any, text: np.ndarray, settings: Settings, channel: Channel
) -> Any:
    """AdamW for so many seconds, the second half of them with a falling rate."""
    tx = optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.0, b2=0.95, weight_decay=0.1
    )
    opt_state: Any = tx.init(params)
    step = _model.make_step(graphdef, tx)
    rng = np.random.default_rng(0)
    begin, number, value = time.perf_counter(), 0, float("nan")
    while (elapsed := time.perf_counter() - begin) < settings.pretrain_seconds:
        left = 1 - elapsed / settings.pretrain_seconds
        rate = _PEAK_RATE * min(1, (number + 1) / _WARM_UP) * min(1, 2 * left)
        opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        tokens = batch(text, rng, settings.batch, settings.sequence)
        params, opt_state, loss = step(params, opt_state, tokens)
        number, value = number + 1, float(loss)
        channel.send("pretrain", step=number, loss=value, elapsed=elapsed)
    return params


def train(settings: Settings, channel: Channel) -> None:
    """Do the trainer's whole work and tell of it through `channel`."""
    text, evaluation = read_sources()
    graphdef, params = _model.make_model(_model.DEMO)
    channel.send("start", parameters=_model.parameter_count(params))
    params = _pretrain(graphdef, params, text, settings, channel)

    held_out = batch(evaluation, np.random.default_rng(1), 16, settings.sequence)
    evaluate = jax.jit(lambda p: _model.loss(graphdef, _model.cast(p), held_out))
    tx = jdelta.wrap(optax.adamw(settings.learning_rate))
    opt_state = tx.init(params)
    # The first steps of a fresh AdamW change the most, with a large rate very much.
    step = _model.make_step(graphdef, tx, stream=True, capacity=0.25)
    rng = np.random.default_rng(2)
    channel.send("truth", step=0, sha256=_truth(params))
    loss_before = float(evaluate(params))

    bucket = CountingBucket(jdelta.open_bucket(settings.bucket))
    begin = time.perf_counter()
    with jdelta.Publisher(bucket, jdelta.published(opt_state, params)) as publisher:
        for number in range(1, settings.steps + 1):
            step_begin = time.perf_counter()
            tokens = batch(text, rng, settings.batch, settings.sequence)
            params, opt_state, loss, delta = step(params, opt_state, tokens)
            call = time.perf_counter()
            whole = functools.partial(jdelta.published, opt_state, params)
            publisher.publish(delta, step=number, params=whole)
            publish = time.perf_counter() - call
            value = float(loss)  # waits for the step
            changed = sum(int(group.count) for group in delta.groups)
            channel.send(
                "step",
                step=number,
                loss=value,
                changed=changed,
                delta_bytes=bucket.newest_delta,
                written=bucket.written,
                committed=publisher.version,
                publish_ms=publish * 1e3,
                step_ms=(time.perf_counter() - step_begin) * 1e3,
                time=time.time(),
            )
            if settings.compared(number):
                channel.send("truth", step=number, sha256=_truth(params))
        publisher.flush(timeout=settings.timeout)
    channel.send(
        "end",
        version=publisher.version,
        written=bucket.written,
        seconds=time.perf_counter() - begin,
        loss_before=loss_before,
        loss_after=float(evaluate(params)),
    )


if __name__ == "__main__":
    train(Settings.parse(sys.argv[1]), Channel())
