"""Weights as unsigned bits, and the signed steps between two of them.

A step is the distance of two bit patterns in the order of the values they stand for,
modulo 2^w for patterns of w bits. It is an exact integer for every pattern, NaN
payloads and both zeros included: no float is ever computed.
"""

from __future__ import annotations

import numpy as np

from jdelta.wire.dtypes import is_float


def to_bits(array: np.ndarray) -> np.ndarray:
    """The array's elements in C order as flat unsigned integers of the same width.

    Shares the array's memory where that is C-contiguous, and is a copy otherwise.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{array.dtype.itemsize}")


def order(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Maps bits to integers that, read as two's complement, sort as the values do.

    Floats are sign and magnitude: the magnitude of a negative one is inverted, so -0.0
    becomes -1, next to +0.0. Integers stay as they are. It is its own inverse.

    Args:
        bits: Unsigned integers of the dtype's width, any shape.
        dtype: The safetensors dtype name.
    """
    if not is_float(dtype):
        return bits
    width = bits.dtype.itemsize * 8
    signed = bits.view(f"i{bits.dtype.itemsize}")
    # The sign bit spread over the whole word, less the sign bit itself.
    mask = (signed >> (width - 1)).view(bits.dtype)
    mask >>= bits.dtype.type(1)
    mask ^= bits
    return mask


def step(old: np.ndarray, new: np.ndarray, dtype: str) -> np.ndarray:
    """The steps from `old` to `new`, modulo 2^w, as unsigned integers."""
    return order(new, dtype) - order(old, dtype)


def advance(old: np.ndarray, steps: np.ndarray, dtype: str) -> np.ndarray:
    """The bits that lie `steps` away from `old`: the inverse of `step`."""
    return order(order(old, dtype) + steps, dtype)
