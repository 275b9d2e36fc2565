"""Helpers for tests and benchmarks: faults, processes, devices, realistic weights.

Importing it loads neither JAX nor any test library.
"""

from jdelta.testing.devices import virtual_devices
from jdelta.testing.faults import Fault, FaultyBucket, Operation, at, every_fault
from jdelta.testing.processes import (
    Child,
    Finished,
    Processes,
    ProcessFailedError,
    free_port,
    run,
)
from jdelta.testing.traces import synthetic, trace

__all__ = [
    "Child",
    "Fault",
    "FaultyBucket",
    "Finished",
    "Operation",
    "ProcessFailedError",
    "Processes",
    "at",
    "every_fault",
    "free_port",
    "run",
    "synthetic",
    "trace",
    "virtual_devices",
]
