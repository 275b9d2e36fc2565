"""Published dtypes as torch knows them, and bits as the integers it computes with."""

from __future__ import annotations

import numpy as np
import torch

from jdelta.errors import TreeError
from jdelta.wire.dtypes import TensorSpec

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",  # not in every torch
}
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, ours)
    for name, ours in _TORCH_NAMES.items()
    if hasattr(torch, ours)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype a tensor is published in; raises TreeError if torch has none."""
    try:
        return _DTYPES[spec.dtype]
    except KeyError:
        raise TreeError(
            f"{spec.name!r}: torch {torch.__version__} has no dtype for {spec.dtype}; "
            "a newer torch may"
        ) from None


def published_dtype(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; its own name where it has none."""
    return _NAMES.get(dtype, str(dtype))


def signed(bits: np.ndarray) -> np.ndarray:
    """Unsigned bits as the integers that torch computes with."""
    return bits if bits.itemsize == 1 else bits.view(f"i{bits.itemsize}")


def as_integers(bits: np.ndarray) -> torch.Tensor:
    """A tensor of integers that shares the memory of flat bits."""
    return torch.from_numpy(signed(bits))
