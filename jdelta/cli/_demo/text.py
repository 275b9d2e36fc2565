"""Real text that every Python has: the standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import numpy as np

from jdelta.errors import JDeltaError

_LIMIT = 8_000_000  # bytes; more would only cost time to read
_EVAL_SHARE = 16  # one file of this many is kept for evaluation
_LEAST = 100_000  # bytes; less text than this teaches nothing


def read_sources(folder: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Read Python's standard library as text.

    Args:
        folder: Where to look for `.py` files; the standard library's when None.

    Returns:
        `(train, evaluation)`: u8[bytes] each. A file is wholly in one of them, chosen
        by a hash of its name.

    Raises:
        JDeltaError: There is too little text, as in a Python without its sources.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if {"site-packages", "dist-packages", "test", "tests"} & set(name.parts):
            continue
        try:
            data = path.read_bytes()
        except OSError:
            continue  # an unreadable file is no loss
        evaluation = zlib.crc32(name.as_posix().encode()) % _EVAL_SHARE == 0
        parts[evaluation].append(data)
        total += len(data)
        if total >= _LIMIT:
            break
    train, evaluate = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    if min(train.size, evaluate.size * _EVAL_SHARE) < _LEAST:
        raise JDeltaError(
            f"found only {train.size + evaluate.size} bytes of Python sources under "
            f"{root}: the demo trains on them; run it on a Python that ships them"
        )
    return train, evaluate


def batch(
    text: np.ndarray, rng: np.random.Generator, size: int, sequence: int
) -> np.ndarray:
    """Draw u8[size, sequence + 1] windows of `text` at random places."""
    starts = rng.integers(0, text.size - sequence, size)
    return text[starts[:, None] + np.arange(sequence + 1)]
