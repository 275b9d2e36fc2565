"""Several JAX devices on a machine that has one."""

from __future__ import annotations

import os
import re

_FLAG = "--xla_force_host_platform_device_count"


def virtual_devices(count: int) -> dict[str, str]:
    """Environment variables that give a new process `count` virtual CPU devices.

    They must be set before JAX starts, hence for another process, as in
    `Processes.start(..., env=virtual_devices(8))`. Other `XLA_FLAGS` are kept.

    Raises:
        ValueError: `count` is less than one.
    """
    if count < 1:
        raise ValueError(f"{count} devices are too few")
    others = re.sub(rf"{_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", "")).split()
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*others, f"{_FLAG}={count}"]),
    }
