"""Dtypes by their safetensors names; what a tensor is: name, dtype, shape."""

from __future__ import annotations

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jdelta.errors import TreeError

_NUMPY: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Sign and magnitude: bits above the sign bit run against the order of the values.
_SIGNED_MAGNITUDE = frozenset(
    "F16 BF16 F32 F64 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ".split()
)

NAMES: tuple[str, ...] = tuple(_NUMPY)
"""The safetensors names of every dtype that can be published."""


class TensorSpec(NamedTuple):
    """One published tensor.

    Attributes:
        name: Its published name.
        dtype: Its safetensors dtype name, such as "BF16".
        shape: Its shape, in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Dtype and shape as JAX prints them: `bf16[40, 50]`."""
        return f"{self.dtype.lower()}{list(self.shape)}"

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element: 1, 2, 4 or 8."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.itemsize


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a safetensors dtype name.

    Raises:
        TreeError: no such dtype can be published.
    """
    try:
        return _NUMPY[name]
    except KeyError:
        raise TreeError(
            f"no dtype {name!r} can be published; the safetensors names are "
            f"{', '.join(NAMES)}"
        ) from None


def dtype_name(dtype: np.dtype | type | str) -> str:
    """The safetensors name of a NumPy dtype, or of its name such as "bfloat16".

    Raises:
        TreeError: safetensors cannot hold it.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = _by_numpy_name(dtype)
    # Big-endian arrays have other bytes for the same values.
    name = _NAMES.get(found) if found is not None and found.isnative else None
    if name is None:
        raise TreeError(
            f"dtype {dtype} cannot be stored in safetensors, so it cannot be "
            "published; cast the leaf to one of "
            f"{', '.join(d.name for d in _NAMES)} or leave it out"
        )
    return name


def _by_numpy_name(name: object) -> np.dtype | None:
    return next((d for d in _NAMES if d.name == name), None)


def bits_dtype(name: str) -> np.dtype:
    """The unsigned integer dtype as wide as a dtype given by safetensors name."""
    return np.dtype(_BITS[numpy_dtype(name).itemsize])


def is_float(name: str) -> bool:
    """Whether the dtype is stored as sign and magnitude, as IEEE floats are.

    False for C64, which is two floats, and F8_E8M0, which has no sign.
    """
    numpy_dtype(name)
    return name in _SIGNED_MAGNITUDE


def tensor_spec(name: str, array: np.ndarray) -> TensorSpec:
    """What `array` is when published as `name`.

    Raises:
        TreeError: safetensors cannot hold its dtype.
    """
    try:
        dtype = dtype_name(array.dtype)
    except TreeError as error:
        raise TreeError(f"{name!r}: {error}") from None
    return TensorSpec(name, dtype, tuple(int(n) for n in array.shape))
