"""Follows a run with NumPy alone, where neither JAX nor PyTorch is installed."""

import importlib.util
import sys

import jdelta
from jdelta.errors import MissingExtraError

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "torch")

there = [name for name in HEAVY if importlib.util.find_spec(name)]
if there:
    sys.exit(f"this check is for an environment without {', '.join(there)}")

url = sys.argv[1]
whole, manifest = jdelta.load(url)
with jdelta.Subscriber(url) as sub:
    weights = sub.restore(0)
    for update in sub.updates(every=True, timeout=30):
        weights = update.apply(weights)
        print(f"version {update.version}: a {update.kind}, {update.changed} changed")
        if update.version == manifest.version:
            break
for name, array in jdelta.load(url, manifest.version)[0].items():
    if array.tobytes() != weights[name].tobytes() or array.shape != weights[name].shape:
        sys.exit(f"{name} differs from the version rebuilt from cold")
try:
    import jdelta.torch
except MissingExtraError as error:
    print(f"jdelta.torch: {error}")
print(f"{len(whole)} tensors equal at version {manifest.version}")
