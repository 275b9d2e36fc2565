"""A hash of weights that owes nothing to jdelta: what equality is judged by.

The trainer hashes its f32 master weights cast to bf16, each follower hashes what it
holds, each straight from its own arrays. None of jdelta's digests, manifests or bytes
takes part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def sha256(weights: Mapping[str, Any]) -> str:
    """SHA-256 over every tensor's name, dtype, shape and raw bytes, sorted by name.

    Args:
        weights: Arrays of NumPy, JAX or torch (on any device) by name.
    """
    whole = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        whole.update(f"{name}|{dtype}|{tuple(tensor.shape)}|".encode())
        whole.update(_raw(tensor).data)
    return whole.hexdigest()


def _raw(tensor: Any) -> np.ndarray:
    if type(tensor).__module__.partition(".")[0] == "torch":
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(tensor)).reshape(-1).view(np.uint8)
