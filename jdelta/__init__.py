"""Delta weight sync for JAX: stream exactly what changed, bit for bit.

Importing `jdelta` loads none of JAX, torch, flax, orbax, huggingface_hub or the command
line's libraries: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdelta.bucket import open_bucket as open_bucket
    from jdelta.delta import Delta as Delta
    from jdelta.delta import apply as apply
    from jdelta.delta import diff as diff
    from jdelta.delta import extract as extract
    from jdelta.delta import merge as merge
    from jdelta.delta import published as published
    from jdelta.delta import wrap as wrap
    from jdelta.stream import Publisher as Publisher
    from jdelta.stream import Subscriber as Subscriber
    from jdelta.stream import Update as Update
    from jdelta.stream import load as load

__version__ = "0.1.0"

_HOMES = {
    "Delta": "jdelta.delta",
    "apply": "jdelta.delta",
    "diff": "jdelta.delta",
    "extract": "jdelta.delta",
    "merge": "jdelta.delta",
    "published": "jdelta.delta",
    "wrap": "jdelta.delta",
    "open_bucket": "jdelta.bucket",
    "Publisher": "jdelta.stream",
    "Subscriber": "jdelta.stream",
    "Update": "jdelta.stream",
    "load": "jdelta.stream",
}

__all__ = [
    "Delta",
    "Publisher",
    "Subscriber",
    "Update",
    "__version__",
    "apply",
    "diff",
    "extract",
    "load",
    "merge",
    "open_bucket",
    "published",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jdelta' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib", "optax"):
            raise
        from jdelta.errors import MissingExtraError

        raise MissingExtraError(
            f"jdelta.{name} needs {error.name}: pip install 'jdelta[jax]'"
        ) from error
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
