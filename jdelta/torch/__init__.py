"""PyTorch receivers: weights into tensors, updates in place, bit for bit.

Works beside the NumPy half of jdelta alone: JAX is never imported. Weights move as
integers, so NaN payloads, -0.0 and every dtype survive.

Example:
    >>> import jdelta, jdelta.torch                       # doctest: +SKIP
    >>> sub = jdelta.Subscriber("/data/run")              # doctest: +SKIP
    >>> jdelta.torch.load_into(sub, model)                # doctest: +SKIP
    >>> for update in sub.updates():                      # doctest: +SKIP
    ...     jdelta.torch.apply(update, model)

Threads: every function works on the calling thread (and helper threads that it joins)
and on each device's current stream, and returns when the weights are there for every
stream. Nothing else may read or write the weights meanwhile: pause the engine around
`apply`, which is all that is left to do of an update. Collective: no.
"""

from __future__ import annotations

from jdelta.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError(
        "jdelta.torch needs PyTorch: pip install 'jdelta[torch]'"
    ) from error

from jdelta.torch._receive import apply, load_into, restore

__all__ = ["apply", "load_into", "restore"]
