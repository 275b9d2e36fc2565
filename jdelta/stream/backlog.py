"""What was published and is not committed yet: merged, or spooled to disk.

With "merge" everything since the last commit becomes one version. With "spill" each
waits on its own, all but the first on disk; past the spool's bound, or where the disk
takes no more, the newest become one.

What becomes one version waits as runs of falling size, as in a log-structured merge
tree (O'Neil et al., 1996): a delta is merged a logarithmic number of times, however
much waits already.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jdelta.wire.changes import Changes, merge
from jdelta.wire.dtypes import TensorSpec

_log = logging.getLogger(__name__)

WhenBehind = Literal["merge", "spill"]


@dataclasses.dataclass(kw_only=True)
class Item:
    """One version to be: changes since the one before, or whole weights.

    Attributes:
        changes: Changes by tensor; None for whole weights.
        whole: Flat bits by tensor; None for changes.
        step: The trainer's step.
        meta: The user's own words on it.
        handed: When it (the first part of it) was handed over, `time.perf_counter`.
        copy_seconds: Time from the device being ready to the bytes being ours.
        merged: How many published deltas it holds.
    """

    changes: dict[str, Changes] | None
    whole: dict[str, np.ndarray] | None
    step: int | None
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    handed: float = dataclasses.field(default_factory=time.perf_counter)
    copy_seconds: float = 0.0
    merged: int = 1

    @property
    def nbytes(self) -> int:
        """Host memory it takes."""
        if self.whole is not None:
            return sum(bits.nbytes for bits in self.whole.values())
        return sum(array.nbytes for c in (self.changes or {}).values() for array in c)


def join(first: Item, second: Item) -> Item:
    """One item equal to `first` then `second`. May reuse the memory of both."""
    if second.whole is not None:
        changes, whole = None, second.whole
    elif first.whole is not None:
        changes, whole = None, first.whole
        for name, later in (second.changes or {}).items():
            if not whole[name].flags.writeable:  # lent by JAX
                whole[name] = whole[name].copy()
            whole[name][later.positions] = later.new
    else:
        changes, whole = dict(first.changes or {}), None
        for name, later in (second.changes or {}).items():
            earlier = changes.get(name)
            both = later if earlier is None else merge(earlier, later)
            if len(both.positions):
                changes[name] = both
            else:
                changes.pop(name, None)
    return Item(
        changes=changes,
        whole=whole,
        step=second.step,
        meta=second.meta,
        handed=first.handed,
        copy_seconds=first.copy_seconds + second.copy_seconds,
        merged=first.merged + second.merged,
    )


class Runs:
    """Items that become one version: from the oldest and largest to the newest."""

    def __init__(self, first: Item):
        """Starts with one item."""
        self._items = [first]

    @property
    def nbytes(self) -> int:
        """Host memory they take."""
        return sum(item.nbytes for item in self._items)

    @property
    def whole(self) -> bool:
        """Whether they hold whole weights: then they grow no more."""
        return self._items[0].whole is not None

    def push(self, item: Item) -> None:
        """Adds the newest item.

        Raises:
            StateMismatchError: it, or the one before, does not follow; left out.
        """
        items = self._items
        while items and (
            item.whole is not None
            or items[-1].whole is not None
            or items[-1].nbytes < 2 * item.nbytes
        ):
            item = join(items[-1], item)
            items.pop()
        items.append(item)

    def merged(self) -> Item:
        """All as one item.

        Raises:
            StateMismatchError: two do not follow each other.
        """
        item = self._items[-1]
        for older in reversed(self._items[:-1]):
            item = join(older, item)
        return item


class Backlog:
    """Items waiting for the commit thread. Thread-safe: merging holds up nobody else.

    Args:
        specs: The published tree.
        when_behind: "merge" or "spill".
        spool: Folder for spilled items; None makes a temporary one when needed.
        spool_bytes: Bound on the spool.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        when_behind: WhenBehind,
        spool: Path | None,
        spool_bytes: int,
    ):
        """Starts empty; touches the disk only when something is spilled."""
        if when_behind not in ("merge", "spill"):
            raise ValueError(
                f"when_behind must be 'merge' or 'spill', got {when_behind!r}"
            )
        self._whole_bytes = sum(spec.nbytes for spec in specs.values())
        self._spill = when_behind == "spill"
        self._parent = spool
        self._folder: Path | None = None
        self._bound = spool_bytes
        self._spooled = 0
        self._items: deque[Runs | Path] = deque()
        self._serial = 0
        self._complained = self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many versions wait."""
        return len(self._items)

    @property
    def heavy(self) -> bool:
        """Whether the deltas in memory take more of it than whole weights would."""
        with self._lock:
            last = self._items[-1] if self._items else None
            return (
                isinstance(last, Runs)
                and not last.whole
                and last.nbytes > self._whole_bytes
            )

    def push(self, item: Item) -> bool:
        """Adds an item; returns whether it joins the version of the one before.

        Raises:
            StateMismatchError: it, or the one before, does not follow; left out.
        """
        with self._lock:
            if self._closed:
                return False
            if not self._items:
                self._items.append(Runs(item))
                return False
            if self._spill and self._spilled(item):
                return False
            last = self._items[-1]
            if isinstance(last, Runs):
                last.push(item)
                return True
            self._items.append(Runs(item))
            return False

    def pop(self) -> Item:
        """Takes the oldest version.

        Raises:
            StateMismatchError: its deltas do not follow each other; it is dropped.
        """
        with self._lock:
            first = self._items.popleft()
        if isinstance(first, Runs):
            return first.merged()
        return self._load(first)

    def close(self) -> None:
        """Removes the spool; nothing is taken from then on."""
        with self._lock:
            self._closed = True
            self._items.clear()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _spilled(self, item: Item) -> bool:
        """Adds an item on disk, if there is room for it."""
        try:
            last = self._items[-1]
            if isinstance(last, Runs) and len(self._items) > 1:
                # Merged here when there was no room; only the first stays in memory.
                if self._spooled + last.nbytes > self._bound:
                    return False
                self._items[-1] = self._save(last.merged())
            if self._spooled + item.nbytes > self._bound:
                return False
            self._items.append(self._save(item))
            return True
        except OSError as error:
            self._complain(error)
            return False

    def _save(self, item: Item) -> Path:
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(
                tempfile.mkdtemp(prefix="jdelta-spool-", dir=self._parent)
            )
        arrays: dict[str, np.ndarray] = {}
        names = list(item.whole if item.whole is not None else item.changes or {})
        for i, name in enumerate(names):
            if item.whole is not None:
                arrays[f"w{i}"] = item.whole[name]
            elif item.changes is not None:
                for field, array in item.changes[name]._asdict().items():
                    arrays[f"{field}{i}"] = array
        self._serial += 1
        path = self._folder / f"{self._serial:010d}.npz"
        try:
            np.savez(
                path,
                names=np.array(names, dtype=np.str_),
                whole=np.array(item.whole is not None),
                step=np.array([] if item.step is None else [item.step], np.int64),
                meta=np.array(json.dumps(dict(item.meta))),
                clock=np.array([item.handed, item.copy_seconds]),
                merged=np.array(item.merged),
                **arrays,  # type: ignore[arg-type]
            )
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._complained = False
        self._spooled += path.stat().st_size
        return path

    def _complain(self, error: OSError) -> None:
        """Says once that versions are being merged because the disk takes none."""
        if not self._complained:
            where = self._folder or self._parent or tempfile.gettempdir()
            _log.warning("merging: the spool %s cannot be written: %s", where, error)
        self._complained = True

    def _load(self, path: Path) -> Item:
        with np.load(path, allow_pickle=False) as z:
            names = [str(name) for name in z["names"]]
            is_whole = bool(z["whole"])
            changes = whole = None
            if is_whole:
                whole = {name: z[f"w{i}"] for i, name in enumerate(names)}
            else:
                changes = {
                    name: Changes(*(z[f"{f}{i}"] for f in Changes._fields))
                    for i, name in enumerate(names)
                }
            loaded = Item(
                changes=changes,
                whole=whole,
                step=int(z["step"][0]) if len(z["step"]) else None,
                meta=json.loads(str(z["meta"])),
                handed=float(z["clock"][0]),
                copy_seconds=float(z["clock"][1]),
                merged=int(z["merged"]),
            )
        with self._lock:
            self._spooled -= path.stat().st_size
        path.unlink()
        return loaded
