"""`jdelta inspect`: what a bucket holds, from its manifests alone."""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import TYPE_CHECKING, Annotated, Any

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
from jdelta.errors import FormatError, JDeltaError, VersionNotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from jdelta.stream import Chain
    from jdelta.wire.manifest import Manifest, VersionId
    from jdelta.wire.state import State


@command
def inspect(
    url: Url,
    version: Version = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Show each tensor of the version, too.")
    ] = False,
    last: Annotated[
        int, typer.Option(min=0, help="Show so many of the newest versions; 0: all.")
    ] = 20,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a run's versions, newest first: kinds, sizes, densities, steps and times.

    With `--version`, only the chain that rebuilds that version.
    """
    from rich.console import Console

    from jdelta.stream import Chain

    chain = Chain(url)
    tip = chain.latest()
    if tip is None:
        raise VersionNotFoundError(
            f"{url} holds no committed version: nothing was published there yet, or "
            "the URL is not a run's"
        )
    if version is None:
        every = [*chain.versions()]
    else:
        vid = chain.locate(version)
        if vid is None or version > tip.version:
            raise VersionNotFoundError(
                f"{url} has no version {version}; its newest is {tip.version}"
            )
        every = [manifest.id for manifest in chain.path_back(vid)][::-1]
    elements = _elements(chain, every)
    rows = [_row(chain, vid, elements) for vid in every[-last:][::-1]]
    shown = chain.manifest(every[-1]) if tensors else None
    anchors = _later_anchors(chain)
    for row in rows:
        row["later_anchor"] = (row["epoch"], row["version"]) in anchors
    per_tensor = [] if shown is None else _tensors(shown, chain.state(shown.id))
    if as_json:
        result: dict[str, Any] = {"url": url, "run": chain.run, "newest": tip.version}
        result |= {"epochs": [segment.epoch for segment in chain.segments]}
        result |= {"versions": rows} | ({"tensors": per_tensor} if tensors else {})
        print_json(result)
    else:
        console = Console(highlight=False)
        _print_versions(console, chain, tip, rows, len(every))
        if shown is not None:
            _print_tensors(console, shown, per_tensor)
    broken = [row["version"] for row in rows if "error" in row]
    if broken:
        raise JDeltaError(
            f"manifests that cannot be read: {len(broken)}, the first of them that of "
            f"version {broken[0]}"
        )


def _elements(chain: Chain, versions: list[VersionId]) -> int | None:
    """Elements of the published tree, from the newest version that tells."""
    for vid in reversed(versions):
        with contextlib.suppress(FormatError, VersionNotFoundError):
            return chain.state(vid).elements
    return None


def _row(chain: Chain, vid: VersionId, elements: int | None) -> dict[str, Any]:
    try:
        return _describe(chain.manifest(vid), elements)
    except (FormatError, VersionNotFoundError) as error:
        return {"epoch": vid.epoch, "version": vid.version, "error": str(error)}


def _describe(manifest: Manifest, elements: int | None) -> dict[str, Any]:
    if manifest.kind == "anchor":
        changed = elements
    else:
        changed = sum(entry.changed for entry in manifest.changes.values())
    base = manifest.base
    return {
        "epoch": manifest.epoch,
        "version": manifest.version,
        "kind": manifest.kind,
        "base": None if base is None else base.version,
        "step": manifest.step,
        "meta": manifest.meta,
        "created": manifest.created,
        "codec": manifest.codec,
        "objects": len(manifest.objects),
        "bytes": sum(ref.size for ref in manifest.objects),
        "elements": elements,
        "changed": changed,
        "density": changed / elements if changed and elements else 0.0,
        "digest": f"{manifest.digest:016x}",
    }


def _later_anchors(chain: Chain) -> set[tuple[int, int]]:
    """Epoch and version of every anchor made later for a version that is a delta."""
    from jdelta.wire import names

    found = set()
    for info in chain.bucket.list("manifests/"):
        parsed = names.parse_manifest_name(info.name)
        if parsed is not None and parsed.alternate == "anchor":
            found.add((parsed.epoch, parsed.version))
    return found


def _tensors(manifest: Manifest, state: State) -> list[dict[str, Any]]:
    rows = []
    for name, spec in state.specs.items():
        changed = spec.size
        if manifest.kind != "anchor":
            entry = manifest.changes.get(name)
            changed = 0 if entry is None else entry.changed
        rows.append(
            {
                "name": name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "changed": changed,
                "density": changed / spec.size if spec.size else 0.0,
                "digest": f"{state.digests[name]:016x}",
            }
        )
    return rows


def _print_versions(
    console: Console,
    chain: Chain,
    tip: VersionId,
    rows: list[dict[str, Any]],
    total: int,
) -> None:
    from rich.table import Table
    from rich.text import Text

    # Names and messages come from the bucket: shown as text, never as markup.
    console.print(Text(chain.bucket.url), soft_wrap=True)
    console.print(Text(f"run {chain.run}, newest version {tip.version}"))
    table = Table()
    for heading in ("version", "kind", "base", "epoch", "step", "bytes", "density"):
        table.add_column(heading, justify="right")
    table.add_column("created (UTC)")
    if any(row.get("meta") for row in rows):
        table.add_column("meta", overflow="fold")
    for row in rows:
        if "error" in row:
            table.add_row(str(row["version"]), "unreadable")
            continue
        table.add_row(
            str(row["version"]),
            Text(row["kind"] + (" + anchor" if row["later_anchor"] else "")),
            "" if row["base"] is None else str(row["base"]),
            str(row["epoch"]),
            "" if row["step"] is None else str(row["step"]),
            human_bytes(row["bytes"]),
            f"{row['density']:.3%}",
            _time(row["created"]),
            *([Text(json.dumps(row["meta"]))] if row["meta"] else []),
        )
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(Text(f"version {row['version']}: {row['error']}"))
    sound = [row for row in rows if "error" not in row]
    deltas = [row["density"] for row in sound if row["kind"] == "delta"]
    size = sum(row["bytes"] for row in sound)
    mean = f", mean density of deltas {sum(deltas) / len(deltas):.3%}" if deltas else ""
    count = f"{total} versions" if len(rows) == total else f"{len(rows)} of {total}"
    console.print(f"{count}, {human_bytes(size)}{mean}")


def _print_tensors(
    console: Console, manifest: Manifest, rows: list[dict[str, Any]]
) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"tensors of version {manifest.version}", title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("changed", justify="right")
    table.add_column("density", justify="right")
    for row in rows:
        table.add_row(
            Text(row["name"]),
            row["dtype"],
            Text("x".join(map(str, row["shape"])) or "scalar"),
            f"{row['changed']:,}",
            f"{row['density']:.3%}",
        )
    console.print(table)


def _time(seconds: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"
    return moment.strftime("%Y-%m-%d %H:%M:%S")
