"""The demo's followers: hold the trainer's weights in JAX, PyTorch or NumPy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jdelta
from jdelta.cli._demo.channel import Channel, Settings
from jdelta.cli._demo.truth import sha256
from jdelta.stream import Chain


class _Holder(Protocol):
    """Weights in one framework's arrays."""

    def restore(self, subscriber: jdelta.Subscriber) -> None: ...
    def apply(self, update: jdelta.Update) -> None: ...
    def weights(self) -> Mapping[str, Any]: ...


class _NumPy:
    """A dict of NumPy arrays, updated in place."""

    def restore(self, subscriber: jdelta.Subscriber) -> None:
        self._weights: Any = subscriber.restore()

    def apply(self, update: jdelta.Update) -> None:
        self._weights = update.apply(self._weights)

    def weights(self) -> Mapping[str, Any]:
        return self._weights


class _Torch:
    """A state dict of torch tensors, updated in place."""

    def restore(self, subscriber: jdelta.Subscriber) -> None:
        import torch

        import jdelta.torch

        torch.set_num_threads(1)
        self._weights = jdelta.torch.restore(subscriber)

    def apply(self, update: jdelta.Update) -> None:
        import jdelta.torch

        jdelta.torch.apply(update, self._weights)

    def weights(self) -> Mapping[str, Any]:
        return self._weights


class _Jax:
    """The model's own tree of JAX arrays."""

    def restore(self, subscriber: jdelta.Subscriber) -> None:
        from jdelta.cli import _model

        like = _model.abstract_params(_model.DEMO)
        self._params = subscriber.restore(like=like)

    def apply(self, update: jdelta.Update) -> None:
        import jax

        self._params = jax.block_until_ready(update.apply(self._params))

    def weights(self) -> Mapping[str, Any]:
        import jax

        from jdelta.delta import leaf_names

        leaves = jax.tree.leaves(self._params)
        return dict(zip(leaf_names(self._params), leaves, strict=True))


_HOLDERS: dict[str, type[_Holder]] = {"jax": _Jax, "torch": _Torch, "numpy": _NumPy}


def _step_of(url: str, version: int | None) -> int:
    """The trainer's step of a committed version (0 for the first anchor)."""
    chain = Chain(url)
    chain.latest()
    vid = None if version is None else chain.locate(version)
    return 0 if vid is None else chain.manifest(vid).step or 0


def follow(kind: str, settings: Settings, channel: Channel) -> None:
    """Follow the stream to the trainer's last step and tell of it through `channel`."""
    holder = _HOLDERS[kind]()

    def tell(event: str, step: int, **fields: Any) -> bool:
        now = time.time()
        version = subscriber.version
        channel.send(event, version=version, step=step, time=now, **fields)
        if settings.compared(step):
            channel.send("held", step=step, sha256=sha256(holder.weights()))
        return step >= settings.steps

    with jdelta.Subscriber(settings.bucket) as subscriber:
        subscriber.wait_for(0, timeout=settings.pretrain_seconds + settings.timeout)
        holder.restore(subscriber)
        done = tell("restored", _step_of(settings.bucket, subscriber.version))
        updates = subscriber.updates(timeout=settings.timeout)
        while not done:
            update = next(updates)
            begin = time.perf_counter()
            holder.apply(update)
            seconds = time.perf_counter() - begin
            done = tell("update", update.step or 0, apply_ms=seconds * 1e3)
    channel.send("end", version=subscriber.version)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # on one machine the followers must not slow the trainer
    follow(sys.argv[1], Settings.parse(sys.argv[2]), Channel())
