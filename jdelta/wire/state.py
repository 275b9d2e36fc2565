"""What a version is, without its bytes: its tensors and their digests.

An anchor's manifest says it; each delta's manifest says what it makes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdelta.errors import CorruptError, FormatError, TreeError
from jdelta.wire import digest as digests
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import Manifest, VersionId, version_digest, weighted


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """One version's tensors.

    Attributes:
        run: The run it belongs to.
        id: The version.
        step: The trainer's step, if it was told.
        meta: The user's own words on it.
        specs: Name, dtype and shape of every tensor, shared along a chain.
        digests: Every tensor's digest.
        digest: The version's.
    """

    run: str
    id: VersionId
    step: int | None
    meta: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]
    digests: Mapping[str, int]
    digest: int

    @classmethod
    def of(cls, anchor: Manifest) -> State:
        """The version that an anchor holds."""
        return cls(
            run=anchor.run,
            id=anchor.id,
            step=anchor.step,
            meta=anchor.meta,
            specs={
                name: TensorSpec(name, entry.dtype, entry.shape)
                for name, entry in anchor.whole.items()
            },
            digests={name: entry.digest for name, entry in anchor.whole.items()},
            digest=anchor.digest,
        )

    @classmethod
    def new(
        cls,
        run: str,
        vid: VersionId,
        step: int | None,
        meta: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        digests: Mapping[str, int],
    ) -> State:
        """A version to be published whole."""
        return cls(
            run=run,
            id=vid,
            step=step,
            meta=meta,
            specs=specs,
            digests=digests,
            digest=version_digest((spec, digests[n]) for n, spec in specs.items()),
        )

    @property
    def version(self) -> int:
        """The version's number."""
        return self.id.version

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def elements(self) -> int:
        """Elements of its weights."""
        return sum(spec.size for spec in self.specs.values())

    def then(
        self,
        vid: VersionId,
        step: int | None,
        meta: Mapping[str, Any],
        changed: Mapping[str, int],
    ) -> State:
        """The version after it, in which some tensors have other digests."""
        digest = self.digest
        for name, now in changed.items():
            spec = self.specs[name]
            left = weighted(spec, self.digests[name])
            digest = digests.add(digests.subtract(digest, left), weighted(spec, now))
        return State(
            run=self.run,
            id=vid,
            step=step,
            meta=meta,
            specs=self.specs,
            digests={**self.digests, **changed},
            digest=digest,
        )

    def after(self, delta: Manifest) -> State:
        """The version that a delta's manifest makes of this one.

        Raises:
            FormatError: it is not based on this version.
            TreeError: it changes a tensor that this version does not have.
            CorruptError: more elements change than a tensor has, or the digests do not
                add up to the version's.
        """
        if delta.kind == "anchor" or delta.base != self.id:
            raise FormatError(
                f"version {delta.version} ({delta.kind}) is based on {delta.base}, not "
                f"on {self.id}"
            )
        for name, entry in delta.changes.items():
            spec = self.specs.get(name)
            if spec is None:
                raise TreeError(
                    f"version {delta.version} changes {name!r}, which version "
                    f"{self.version} does not have: names, dtypes and shapes may "
                    "only change at an anchor"
                )
            if entry.changed > spec.size:
                raise CorruptError(
                    f"version {delta.version} changes {entry.changed} elements of "
                    f"{name!r} ({spec})"
                )
        found = self.then(
            delta.id,
            delta.step,
            delta.meta,
            {n: e.digest for n, e in delta.changes.items()},
        )
        if found.digest != delta.digest:
            raise CorruptError(
                f"version {delta.version}: its tensors lead to digest "
                f"{found.digest:016x}, its manifest promises {delta.digest:016x}"
            )
        return found
