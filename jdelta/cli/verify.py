"""`jdelta verify`: rebuild a version and prove it."""

from __future__ import annotations

import time

import typer

from jdelta.cli._shared import (
    Debug,
    Json,
    Url,
    Version,
    command,
    human_bytes,
    print_json,
)
from jdelta.errors import JDeltaError


@command
def verify(
    url: Url, version: Version = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Rebuild a version from the bucket and prove it by its digests.

    Every object on the way is read and its hash checked, every delta is checked
    against the weights it changes, and the result is digested whole.
    """
    import jdelta

    begin = time.perf_counter()
    try:
        weights, manifest = jdelta.load(url, version)
    except JDeltaError as error:
        if as_json:
            print_json({"ok": False, "url": url, "error": str(error)})
        raise
    size = sum(array.nbytes for array in weights.values())
    seconds = time.perf_counter() - begin
    if as_json:
        print_json(
            {
                "ok": True,
                "url": url,
                "run": manifest.run,
                "epoch": manifest.epoch,
                "version": manifest.version,
                "step": manifest.step,
                "kind": manifest.kind,
                "tensors": len(weights),
                "bytes": size,
                "digest": f"{manifest.digest:016x}",
                "seconds": seconds,
            }
        )
        return
    typer.echo(
        f"version {manifest.version} (step {manifest.step}) is whole: {len(weights)} "
        f"tensors, {human_bytes(size)}, digest {manifest.digest:016x}, proved in "
        f"{seconds:.2f} s"
    )
