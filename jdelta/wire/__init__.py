"""Bytes: codecs, digests, containers, manifests and names. NumPy only, never JAX.

Read `FORMAT.md` beside this file for the format itself. The modules, from the smallest
idea to the largest: `dtypes`, `bits`, `digest`, `changes`, `fast` (one chunk),
`tensor`, `safetensors`, `delta_object`, `anchor`, `manifest`, `control`, `names`.
"""
