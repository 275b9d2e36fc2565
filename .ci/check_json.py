"""Checks the JSON line that ends a command's standard output."""

import json
import math
import sys

KEYS = {
    "demo": ("saved_fraction", "versions", "followers", "density", "times"),
    "verify": ("version",),
    "stream": ("throughput_ratio", "publish_ms", "core_ms_per_mparam"),
    "restore": ("ratio",),
    "memory": ("publisher_anchor_x", "publisher_x", "subscriber_x", "allowance_mib"),
    "codec": (),
    "kernels": (),
}


def check_finite(value, path):
    if isinstance(value, dict):
        for key, part in value.items():
            check_finite(part, f"{path}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            check_finite(part, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        sys.exit(f"{path} is {value}")


kind = sys.argv[1]
lines = sys.stdin.read().splitlines()
if not lines:
    sys.exit(f"{kind}: nothing was printed")
result = json.loads(lines[-1])
missing = [key for key in KEYS[kind] if key not in result]
if missing or not result:
    sys.exit(f"{kind}: no {missing} in {sorted(result)}")
check_finite(result, kind)
if kind == "demo":
    followers = {
        follower["kind"]: follower["equal"] for follower in result["followers"]
    }
    if followers != {"jax": True, "torch": True}:
        sys.exit(f"demo: followers are {followers}")
    # A short run pretrains too little for the full demo's 95 %.
    if not (result["verified"] and 0.5 < result["saved_fraction"] < 1):
        sys.exit(f"demo: {result}")
print(f"{kind}: {lines[-1][:300]}")
