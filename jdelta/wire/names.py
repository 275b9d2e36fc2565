"""The names of a run's objects in its bucket.

run.json                                            which run this bucket holds
pointer.json                                        the newest version, mutable
epochs/000001.json                                  the claim of one epoch
manifests/e000001/v0000000017.json                  commits one version
manifests/e000001/v0000000017.anchor.json           the same version as an anchor
manifests/e000001/v0000000017.fold-0000000001.json  the same as one delta from 1
deltas/e000001-v0000000017/00000.safetensors
anchors/e000001-v0000000017/model-00001-of-00002.safetensors
readers/<id>.json
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jdelta.errors import FormatError

RUN = "run.json"
POINTER = "pointer.json"
MAX_EPOCH = 999_999
MAX_VERSION = 9_999_999_999
MAX_NAME_LENGTH = 1024
_MANIFEST = re.compile(
    r"manifests/e(\d{6})/v(\d{10})(?:\.(anchor|fold-(\d{10})))?\.json", re.ASCII
)
_READER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class ManifestName(NamedTuple):
    """What a manifest's name says.

    Attributes:
        epoch: The epoch that wrote it.
        version: The version it describes.
        alternate: None for the manifest that commits the version; "anchor" or "fold"
            for another way to the same weights.
        base: A fold's base version.
    """

    epoch: int
    version: int
    alternate: str | None
    base: int | None


def epoch_name(epoch: int) -> str:
    """The claim of an epoch, 1 or more."""
    return f"epochs/{_epoch(epoch)}.json"


def manifest_prefix(epoch: int) -> str:
    """The folder of an epoch's manifests, with its slash."""
    return f"manifests/e{_epoch(epoch)}/"


def manifest_name(
    epoch: int, version: int, *, alternate: str | None = None, base: int | None = None
) -> str:
    """The manifest of a version.

    Args:
        epoch: The epoch that wrote it.
        version: The version.
        alternate: None, "anchor" or "fold".
        base: The base version of a fold.
    """
    stem = f"{manifest_prefix(epoch)}v{_version(version)}"
    if alternate is None and base is None:
        return f"{stem}.json"
    if alternate == "anchor" and base is None:
        return f"{stem}.anchor.json"
    if alternate == "fold" and base is not None:
        return f"{stem}.fold-{_version(base)}.json"
    raise ValueError(f"no manifest is an alternate {alternate!r} with base {base!r}")


def parse_manifest_name(name: str) -> ManifestName | None:
    """What a manifest's name says, or None if it is not one."""
    found = _MANIFEST.fullmatch(name)
    if found is None:
        return None
    epoch, version, alternate, base = found.groups()
    if int(epoch) == 0:
        return None
    if base is not None:
        return ManifestName(int(epoch), int(version), "fold", int(base))
    return ManifestName(int(epoch), int(version), alternate, None)


def delta_name(epoch: int, version: int, index: int, *, base: int | None = None) -> str:
    """The object number `index` of a delta, or of the fold from version `base`."""
    if not 0 <= index <= 99_999:
        raise ValueError(f"a delta has no object number {index}")
    suffix = "" if base is None else f"-fold-{_version(base)}"
    folder = f"deltas/e{_epoch(epoch)}-v{_version(version)}{suffix}"
    return f"{folder}/{index:05d}.safetensors"


def anchor_folder(epoch: int, version: int, *, alternate: bool = False) -> str:
    """The folder of an anchor's files, without a slash at its end."""
    suffix = "-alt" if alternate else ""
    return f"anchors/e{_epoch(epoch)}-v{_version(version)}{suffix}"


def reader_name(reader: str) -> str:
    """The status object of a reader.

    Raises:
        ValueError: the id is not 1 to 128 letters, digits, ".", "_" or "-".
    """
    if not _READER.fullmatch(reader):
        raise ValueError(
            f"{reader!r} is no reader's name: use 1 to 128 letters, digits, '.', '_' "
            "or '-', beginning with a letter or digit"
        )
    return f"readers/{reader}.json"


def check_object_name(name: str) -> str:
    """Returns `name` if it is a relative path that stays inside its bucket.

    Raises:
        FormatError: it is not: empty, absolute, too long, with empty, "." or ".."
            parts, a backslash, a colon or a character outside printable ASCII.
    """
    parts = name.split("/")
    if (
        len(name) > MAX_NAME_LENGTH
        or any(part in ("", ".", "..") for part in parts)
        or any(not " " < c <= "~" or c in "\\:" for c in name)
    ):
        raise FormatError(f"{name[:80]!r} is no safe object name")
    return name


def _epoch(epoch: int) -> str:
    if not 1 <= epoch <= MAX_EPOCH:
        raise ValueError(f"epochs are 1 to {MAX_EPOCH}, not {epoch}")
    return f"{epoch:06d}"


def _version(version: int) -> str:
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"versions are 0 to {MAX_VERSION}, not {version}")
    return f"{version:010d}"
