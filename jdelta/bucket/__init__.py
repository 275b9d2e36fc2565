"""Where objects live: the store protocol and its backends.

A bucket is a flat map from names to immutable byte strings. It knows nothing about
weights, and nothing here imports JAX.
"""

from jdelta.bucket.directory import DirectoryBucket
from jdelta.bucket.memory import MemoryBucket
from jdelta.bucket.protocol import (
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    safe_name,
)
from jdelta.bucket.url import open_bucket

__all__ = [
    "Bucket",
    "Capabilities",
    "Data",
    "DirectoryBucket",
    "MemoryBucket",
    "ObjectInfo",
    "open_bucket",
    "safe_name",
]
