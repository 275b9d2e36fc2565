"""What a bucket's objects say of a run: its epochs, its versions, the way to each.

The pointer only speeds finding the newest version. Everything here can be learned from
the immutable objects alone: the epoch claims give the lineage, the manifests give the
versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator

from jdelta.bucket import Bucket, open_bucket
from jdelta.errors import (
    CorruptError,
    FormatError,
    ObjectNotFoundError,
    RunError,
    TreeError,
    VersionNotFoundError,
)
from jdelta.wire import names
from jdelta.wire.control import EpochClaim, Pointer, RunInfo
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.state import State

# An anchor's manifest lists every tensor; 64 MiB is some 400,000 of them.
MAX_DOCUMENT_BYTES = 64 << 20
_MAX_MANIFESTS_KEPT = 256
_EPOCHS = "epochs/"

DAMAGE = (FormatError, VersionNotFoundError, TreeError, RunError)
"""What an object that is missing, wrong or somebody else's raises."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """The versions one epoch contributed: `first` to `last` (None: still growing)."""

    epoch: int
    first: int
    last: int | None


class Chain:
    """A run's versions as its bucket shows them now. Thread-compatible, not shared.

    Attributes:
        bucket: The bucket read.
        run: The run's id, once `refresh` found one.
        ended: The version after which its publisher was closed, as far as `latest`
            knows; a publisher that takes up the run undoes it.
    """

    def __init__(self, bucket: Bucket | str | os.PathLike[str]):
        """Names the bucket; reads nothing yet."""
        self.bucket = open_bucket(bucket)
        self.run: str | None = None
        self.segments: tuple[Segment, ...] = ()
        self.ended: VersionId | None = None
        self._manifests: dict[str, Manifest] = {}

    # -- the run and its epochs

    def read_run(self) -> RunInfo | None:
        """The run in this bucket, or None where nothing was published yet.

        Raises:
            FormatError: `run.json` is not a run's description.
            RunError: the bucket's run is not the one seen before.
        """
        try:
            data = self.bucket.get(names.RUN, max_bytes=MAX_DOCUMENT_BYTES)
        except ObjectNotFoundError:
            return None
        info = RunInfo.parse(data)
        if self.run is not None and info.run != self.run:
            raise RunError(
                f"{self.bucket.url} now holds run {info.run}, it held run {self.run}: "
                "the bucket was wiped and reused; open a new Subscriber or Publisher"
            )
        self.run = info.run
        return info

    def read_claim(self, epoch: int) -> EpochClaim | None:
        """The claim of `epoch`, or None if nobody claimed it."""
        try:
            data = self.bucket.get(
                names.epoch_name(epoch), max_bytes=MAX_DOCUMENT_BYTES
            )
        except ObjectNotFoundError:
            return None
        claim = EpochClaim.parse(data)
        self._check_run(names.epoch_name(epoch), claim.run)
        if claim.epoch != epoch:
            raise FormatError(
                f"{names.epoch_name(epoch)} claims epoch {claim.epoch}: objects were "
                "swapped"
            )
        return claim

    def refresh_epochs(self) -> None:
        """Reads the claims of new epochs and recomputes the lineage.

        Raises:
            FormatError: a claim is malformed or the claims contradict each other.
        """
        known = self.segments[-1].epoch if self.segments else 0
        newest = known
        while self._exists(names.epoch_name(newest + 1)):
            newest += 1
        if not known:
            self._check_claims(newest)
        if newest == known:
            return
        segments: list[Segment] = []
        epoch, last = newest, None
        while True:
            claim = self.read_claim(epoch)
            if claim is None:
                raise FormatError(
                    f"{names.epoch_name(epoch)} is missing, though a later epoch "
                    "continues it"
                )
            first = 0 if claim.base is None else claim.base.version + 1
            if last is None or last >= first:
                segments.append(Segment(epoch, first, last))
            if claim.base is None:
                break
            if claim.base.epoch >= epoch:
                raise FormatError(
                    f"{names.epoch_name(epoch)} is based on epoch {claim.base.epoch}, "
                    "which is not before it"
                )
            epoch, last = claim.base.epoch, claim.base.version
        self.segments = tuple(reversed(segments))

    def _check_claims(self, newest: int) -> None:
        for info in self.bucket.list(_EPOCHS):
            digits = info.name[len(_EPOCHS) :].removesuffix(".json")
            if digits.isdecimal() and int(digits) > newest + 1:
                raise FormatError(
                    f"{names.epoch_name(newest + 1)} is missing from "
                    f"{self.bucket.url}, though there is {info.name}: put it back, or "
                    "the versions after it cannot be told from a fenced publisher's"
                )

    def locate(self, version: int) -> VersionId | None:
        """Which epoch's object is `version` in the run's lineage."""
        for segment in reversed(self.segments):
            if version >= segment.first:
                if segment.last is not None and version > segment.last:
                    return None
                return VersionId(segment.epoch, version)
        return None

    def contains(self, vid: VersionId) -> bool:
        """Whether `vid` is on the lineage, not on a fenced publisher's dead branch."""
        return self.locate(vid.version) == vid

    # -- versions

    def latest(self, known: VersionId | None = None) -> VersionId | None:
        """The newest committed version, or None before the first.

        Follows the pointer where it helps, and never trusts it: a pointer may lag, run
        ahead, be missing or be junk.

        Args:
            known: A version seen before, to start looking from.

        Raises:
            RunError: the bucket holds another run than before.
            FormatError: a control object is malformed.
        """
        self.ended = None
        if not self.segments and self.read_run() is None:
            return None
        self.refresh_epochs()
        if not self.segments:
            return None
        newest = self.segments[-1]
        start = newest.first
        if known is not None and known.epoch == newest.epoch:
            start = max(start, known.version)
        pointer = self._read_pointer()
        if (
            pointer is not None
            and pointer.epoch == newest.epoch
            and pointer.version > start
            and self._committed(newest.epoch, pointer.version)  # else it ran ahead
        ):
            start = pointer.version
        sure = known == VersionId(newest.epoch, start)
        tip = self._probe(newest.epoch, start, sure)
        if tip is None:
            tip = self._last_listed(newest)
        found = None if tip is None else VersionId(newest.epoch, tip)
        for segment in reversed(self.segments[:-1]):
            if found is None and segment.last is not None:
                found = VersionId(segment.epoch, segment.last)
        if pointer is not None and (pointer.closed, pointer.id) == (
            newest.epoch,
            found,
        ):
            self.ended = found
        return found

    def manifest(self, vid: VersionId) -> Manifest:
        """The manifest that committed `vid`.

        Raises:
            VersionNotFoundError: there is none.
            FormatError: it is malformed, of a newer format, or names another version.
            RunError: it belongs to another run.
        """
        name = names.manifest_name(vid.epoch, vid.version)
        manifest = self._read_manifest(name, vid)
        if manifest.kind == "fold":
            raise FormatError(f"{name} is a fold, which commits no version")
        return manifest

    def state(self, vid: VersionId) -> State:
        """The tensors and digests of `vid`, from its manifest back to an anchor's.

        Raises:
            VersionNotFoundError: a manifest on the way is missing.
            FormatError: one is malformed, or they contradict each other.
        """
        deltas: list[Manifest] = []
        for manifest in self.path_back(vid):
            anchor = manifest if manifest.kind == "anchor" else None
            if anchor is None:
                with contextlib.suppress(FormatError):
                    anchor = self.alternate_of(manifest)
            if anchor is not None:
                state = State.of(anchor)
                for delta in reversed(deltas):
                    state = state.after(delta)
                return state
            deltas.append(manifest)
        raise VersionNotFoundError(f"{self.bucket.url}: no anchor before {vid}")

    def anchor_of(self, vid: VersionId) -> Manifest | None:
        """An anchor of exactly `vid`: its own manifest, or one made for it later."""
        manifest = self.manifest(vid)
        if manifest.kind == "anchor":
            return manifest
        return self.alternate_of(manifest)

    def alternate_of(self, manifest: Manifest) -> Manifest | None:
        """The anchor made later for a version committed as a delta, if it is sound."""
        vid = manifest.id
        name = names.manifest_name(vid.epoch, vid.version, alternate="anchor")
        try:
            other = self._read_manifest(name, vid)
        except VersionNotFoundError:
            return None
        if other.kind != "anchor" or not other.same_weights(manifest):
            raise CorruptError(
                f"{name} is not an anchor of the weights that "
                f"{names.manifest_name(vid.epoch, vid.version)} committed"
            )
        return other

    def path_back(
        self, vid: VersionId, stop: VersionId | None = None
    ) -> Iterator[Manifest]:
        """The manifests from `vid` backwards, each the base of the one before.

        Ends after an anchor-kind manifest, or before `stop`.
        """
        at: VersionId | None = vid
        while at is not None and at != stop:
            manifest = self.manifest(at)
            if manifest.base is not None and manifest.base.version != at.version - 1:
                raise FormatError(
                    f"version {at.version} is based on version "
                    f"{manifest.base.version}, not on the one before it"
                )
            yield manifest
            at = manifest.base

    def versions(self) -> Iterator[VersionId]:
        """Every committed version on the lineage that is still there, oldest first."""
        self.read_run()
        self.refresh_epochs()
        for segment in self.segments:
            for vid in sorted(self._listed(segment.epoch)):
                if vid >= segment.first and (
                    segment.last is None or vid <= segment.last
                ):
                    yield VersionId(segment.epoch, vid)

    def before(self, vid: VersionId) -> VersionId | None:
        """The newest version on the lineage that is older than `vid`."""
        older = [found for found in self.versions() if found.version < vid.version]
        return older[-1] if older else None

    # -- helpers

    def _check_run(self, name: str, run: str) -> None:
        if self.run is not None and run != self.run:
            raise RunError(
                f"{name} in {self.bucket.url} belongs to run {run}, this is run "
                f"{self.run}: one bucket path holds one run"
            )

    def _exists(self, name: str) -> bool:
        try:
            self.bucket.stat(name)
        except ObjectNotFoundError:
            return False
        return True

    def _committed(self, epoch: int, version: int) -> bool:
        return self._exists(names.manifest_name(epoch, version))

    def _probe(self, epoch: int, start: int, sure: bool) -> int | None:
        """The last of the consecutive committed versions that begin at `start`."""
        tip = start if sure else None
        while self._committed(epoch, start if tip is None else tip + 1):
            tip = start if tip is None else tip + 1
        return tip

    def _listed(self, epoch: int) -> list[int]:
        found = []
        for info in self.bucket.list(names.manifest_prefix(epoch)):
            parsed = names.parse_manifest_name(info.name)
            if parsed is not None and parsed.alternate is None:
                found.append(parsed.version)
        return found

    def _last_listed(self, segment: Segment) -> int | None:
        return max(
            (v for v in self._listed(segment.epoch) if v >= segment.first),
            default=None,
        )

    def _read_pointer(self) -> Pointer | None:
        try:
            data = self.bucket.get(names.POINTER, max_bytes=MAX_DOCUMENT_BYTES)
            pointer = Pointer.parse(data)
        except (ObjectNotFoundError, FormatError):
            return None  # missing or junk: the objects are found without it
        if pointer.run != self.run:
            self.read_run()  # raises if all of the bucket is another run's by now
            return None
        return pointer

    def _read_manifest(self, name: str, vid: VersionId) -> Manifest:
        cached = self._manifests.get(name)
        if cached is not None:
            return cached
        try:
            data = self.bucket.get(name, max_bytes=MAX_DOCUMENT_BYTES)
        except ObjectNotFoundError:
            raise VersionNotFoundError(
                f"{self.bucket.url} has no {name}: version {vid.version} was not "
                "committed, or was removed"
            ) from None
        manifest = Manifest.parse(data)
        self._check_run(name, manifest.run)
        if manifest.id != vid:
            raise FormatError(
                f"{name} describes version {manifest.version} of epoch "
                f"{manifest.epoch}: objects were swapped or replayed"
            )
        while len(self._manifests) >= _MAX_MANIFESTS_KEPT:
            self._manifests.pop(next(iter(self._manifests)))
        self._manifests[name] = manifest
        return manifest


def sha256_hex(data: bytes | memoryview) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
