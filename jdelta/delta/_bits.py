"""Arrays as unsigned integers: the only form in which weights are compared and moved.

Float comparisons miss -0.0, NaN payloads and flushed subnormals, and XLA may rewrite
NaN payloads when it scatters or gathers floats, so every kernel works on bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 and the fp8 types with numpy)
import numpy as np
from jax import lax

from jdelta.errors import TreeError

WIDTHS = (1, 2, 4, 8)
_UINTS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def uint(width: int) -> Any:
    """The unsigned numpy dtype of `width` bytes."""
    return _UINTS[width]


def width_of(name: str, dtype: Any) -> int:
    """Bytes of one element of `dtype`, or TreeError naming the leaf `name`."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TreeError(
            f"leaf {name!r} has the extended dtype {dtype}, which has no bits to "
            "compare; leave it out (for a random key: jax.random.key_data)"
        )
    dtype = np.dtype(dtype)
    number = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    sub_byte = number and _bits_of(dtype) % 8 != 0
    if not (number or dtype == np.bool_) or sub_byte or dtype.itemsize not in WIDTHS:
        raise TreeError(
            f"leaf {name!r} has dtype {dtype}; expected bool, an integer or a float of "
            "1, 2, 4 or 8 bytes an element; convert it or leave it out"
        )
    if dtype.itemsize == 8 and not _x64():
        raise TreeError(
            f"leaf {name!r} has dtype {dtype}, but 64-bit types are off in JAX; set "
            "jax_enable_x64 or convert the leaf"
        )
    return dtype.itemsize


def _x64() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8


def _bits_of(dtype: np.dtype) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits


def to_bits(x: Any) -> jax.Array:
    """`x` (any supported dtype) as unsigned integers of the same width and shape."""
    dtype = np.dtype(x.dtype)
    if dtype == np.bool_:
        return jnp.asarray(x).astype(np.uint8)
    return lax.bitcast_convert_type(x, uint(dtype.itemsize))


def narrow_bits(bits: jax.Array, have: Any, want: Any) -> jax.Array:
    """The bits of `want` that bits of `have` are published as.

    Bits of the same width are taken as they are; others are cast.
    """
    if np.dtype(have).itemsize == np.dtype(want).itemsize:
        return bits
    return to_bits(from_bits(bits, have).astype(want))


def own_bits(x: Any) -> jax.Array:
    """`to_bits` in a buffer of its own, so that both may be donated to one jit."""
    bits = to_bits(x)
    return jnp.copy(bits) if bits.dtype == np.dtype(x.dtype) else bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    if np.dtype(dtype) == np.bool_:
        return bits != 0
    return lax.bitcast_convert_type(bits, np.dtype(dtype))
