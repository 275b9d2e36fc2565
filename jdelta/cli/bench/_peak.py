"""Peak memory of the running process, from Linux's own books."""

from __future__ import annotations

import gc
from pathlib import Path

from jdelta.errors import JDeltaError

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def resident() -> int:
    """Bytes of physical memory that the process holds now."""
    return _field("VmRSS:")


def peak() -> int:
    """The most bytes it held since `reset`."""
    return _field("VmHWM:")


def reset() -> int:
    """Forget the peak so far; returns the bytes held now.

    Raises:
        JDeltaError: this system keeps no such books.
    """
    gc.collect()
    try:
        _RESET.write_text("5")
    except OSError as error:
        raise JDeltaError(
            f"peak memory is read from {_STATUS} and reset through {_RESET}, which "
            f"this system does not allow ({error}); run it on Linux"
        ) from error
    return resident()


def _field(name: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    except OSError as error:
        raise JDeltaError(
            f"peak memory is read from {_STATUS}, which this system does not have "
            f"({error}); run it on Linux"
        ) from error
    raise JDeltaError(f"{_STATUS} has no field {name}")
