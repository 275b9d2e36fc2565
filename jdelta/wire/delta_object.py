"""A delta's object: a safetensors file that holds the payload of each changed tensor.

Any safetensors tool lists what changed: one U8 tensor of payload bytes by published
name, and under the metadata key "jdelta" a JSON text with the version, its base, the
codec and the changed elements of each tensor. The metadata is for people and tools; a
reader goes by the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save

from jdelta.errors import FormatError
from jdelta.wire import safetensors
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import check_tensor_name
from jdelta.wire.tensor import CHUNK_ELEMENTS, EncodedTensor

METADATA_KEY = "jdelta"


def pack(tensors: Mapping[str, EncodedTensor], metadata: Mapping[str, Any]) -> bytes:
    """The object's bytes; the same for the same tensors and metadata.

    Args:
        tensors: The encoded tensors by published name.
        metadata: JSON values to say what it is: version, base, codec.

    Raises:
        TreeError: safetensors cannot hold a tensor of that name.
    """
    # One key: the library writes several in no certain order.
    described = {
        **metadata,
        "changed": {name: tensor.changed for name, tensor in sorted(tensors.items())},
    }
    return save(
        {
            check_tensor_name(name): np.frombuffer(tensor.payload, np.uint8)
            for name, tensor in tensors.items()
        },
        {METADATA_KEY: json.dumps(described, separators=(",", ":"))},
    )


def max_bytes(specs: Collection[TensorSpec]) -> int:
    """The most bytes that an object with changes of these tensors can have.

    Twice the tensors: once for where, once for what; and each chunk's headers.
    """
    header = safetensors.max_header_bytes(spec.name for spec in specs)
    chunks = sum(1 + spec.size // CHUNK_ELEMENTS for spec in specs)
    return header + 256 * chunks + 2 * sum(spec.nbytes for spec in specs)


def unpack(
    data: bytes | memoryview, expected: Collection[str]
) -> dict[str, memoryview]:
    """The payloads by name: views of `data`.

    Args:
        data: The object's bytes.
        expected: The names it must hold: no fewer, no more.

    Raises:
        FormatError: it is no such file.
    """
    view = memoryview(data).cast("B")
    header = safetensors.parse(view, expected)
    for tensor in header.tensors:
        if tensor.spec.dtype != "U8" or len(tensor.spec.shape) != 1:
            raise FormatError(f"{tensor.spec.name!r} is not a run of bytes")
    return {
        tensor.spec.name: view[tensor.start : tensor.end] for tensor in header.tensors
    }
