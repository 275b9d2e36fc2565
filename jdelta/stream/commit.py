"""Committing: the order of writes that makes a version exist, and epochs that fence.

Objects first, then the manifest (which commits), then the pointer (which only helps).
Every step may be repeated after a lost answer. A crash between any two of them leaves
the old newest version or the new one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from jdelta.bucket import Bucket
from jdelta.errors import (
    FencedError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunError,
    TreeError,
)
from jdelta.stream.chain import DAMAGE, MAX_DOCUMENT_BYTES, Chain
from jdelta.wire import names
from jdelta.wire.control import EpochClaim, Pointer, RunInfo
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.manifest import Manifest, VersionId
from jdelta.wire.state import State

_log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """One version, encoded and ready to put. Kept until it is committed."""

    manifest: Manifest
    state: State
    document: bytes
    objects: list[tuple[str, bytes | Path]]
    name: str


class Epoch:
    """This publisher's incarnation in a run: its claim and its newest version.

    Attributes:
        run: The run's id.
        number: The epoch claimed.
        last: The newest committed version, or None before the first.
        tip: Its tensors and digests; None too where damage in the bucket hides them.
    """

    def __init__(self, chain: Chain, claim: EpochClaim, tip: State | None):
        """Takes what `claim_epoch` found; use that to make one."""
        self.chain = chain
        self.bucket = chain.bucket
        self.run = claim.run
        self.number = claim.epoch
        self.last = claim.base
        self.tip = tip
        self._claim = claim
        self._written: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def next_version(self) -> int:
        """The number the next version gets; the first of a run is 0."""
        return 0 if self.last is None else self.last.version + 1

    def upload(self, kind: str, name: str, data: bytes | Path) -> None:
        """Puts one object of a version of `kind`; may be repeated."""
        self.bucket.put(name, data, move=True)
        self.count(kind, len(data) if isinstance(data, bytes) else _size(data))

    def commit(self, attempt: Attempt) -> None:
        """Makes an uploaded version exist and becomes its newest.

        Raises:
            FencedError: another publisher writes the run; nothing was committed on its
                lineage.
            BucketError: the bucket failed; the same attempt may be committed again.
        """
        self.check_fence(attempt.manifest.version)
        try:
            create(self.bucket, attempt.name, attempt.document)
        except ObjectExistsError as error:
            raise FencedError(str(error)) from error
        self.count("manifest", len(attempt.document))
        # Whoever claimed meanwhile may not have seen this version.
        self.check_fence(attempt.manifest.version)
        self.last, self.tip = attempt.state.id, attempt.state

    def point(self, *, closed: bool = False) -> None:
        """Moves the pointer to the newest version; says if it is the run's last."""
        if self.last is None:
            return
        pointer = Pointer(
            run=self.run,
            epoch=self.last.epoch,
            version=self.last.version,
            closed=self.number if closed else None,
        ).to_json()
        self.bucket.put(names.POINTER, pointer)
        self.count("pointer", len(pointer))

    def check_fence(self, version: int) -> None:
        """Raises FencedError if a newer epoch took over before `version`."""
        if not self.bucket.capabilities.put_if_absent:
            # Two may have claimed one epoch: the later claim replaced the earlier.
            claim = self.chain.read_claim(self.number)
            if claim is not None and claim != self._claim:
                raise FencedError(
                    f"epoch {self.number} of run {self.run} was claimed by "
                    f"{claim.writer} at the same moment: this publisher may not commit "
                    f"version {version}. Stop one of the two"
                )
        claim = self.chain.read_claim(self.number + 1)
        if claim is None:
            return
        base = claim.base
        if base is not None and base.epoch == self.number and base.version >= version:
            return  # it continues from what we committed
        raise FencedError(
            f"epoch {self.number + 1} of run {self.run} was claimed by {claim.writer}: "
            f"this publisher (epoch {self.number}) may not commit version {version}. "
            "Readers follow the new one; stop this trainer, or open a new Publisher"
        )

    def count(self, kind: str, size: int) -> None:
        """Adds bytes put to the account of `kind`."""
        with self._lock:
            self._written[kind] = self._written.get(kind, 0) + size

    def written(self) -> dict[str, int]:
        """Bytes put so far, by kind of object."""
        with self._lock:
            return dict(self._written)


def create(bucket: Bucket, name: str, data: bytes) -> None:
    """Creates an immutable object; finding the same bytes there counts as done.

    Raises:
        ObjectExistsError: the object exists with other bytes.
    """
    try:
        if bucket.capabilities.put_if_absent:
            bucket.put_if_absent(name, data)
            return
        bucket.stat(name)
    except ObjectNotFoundError:
        bucket.put(name, data)
        return
    except ObjectExistsError:
        pass
    if bucket.get(name, max_bytes=MAX_DOCUMENT_BYTES) != data:
        raise ObjectExistsError(
            f"{name} in {bucket.url} was written by somebody else: two publishers use "
            "one run; stop one of them"
        )


def claim_epoch(
    bucket: Bucket, specs: Mapping[str, TensorSpec], run: str | None
) -> Epoch:
    """Opens a run for writing: finds or creates it, and claims its next epoch.

    From the claim on, publishers of earlier epochs can commit nothing more.

    Args:
        bucket: Where the run lives, or will.
        specs: The tree to be published.
        run: The run's id, if it must be a certain one.

    Raises:
        TreeError: the run publishes other names, shapes or dtypes.
        RunError: the bucket holds another run than `run`.
        FormatError: what the bucket holds is not a run.
    """
    chain = Chain(bucket)
    info = chain.read_run()
    created = 0
    if info is None:
        document = RunInfo(run=run or uuid.uuid4().hex, created=time.time()).to_json()
        try:
            create(bucket, names.RUN, document)
            created = len(document)
        except ObjectExistsError:
            pass  # another publisher began it at the same moment
        info = chain.read_run()
        if info is None:
            raise ObjectNotFoundError(
                f"{names.RUN} cannot be read back from {bucket.url} after writing it"
            )
    if run is not None and info.run != run:
        raise RunError(
            f"{bucket.url} holds run {info.run!r}, run {run!r} was asked for: leave "
            "run= out to continue the run that is there, or publish to another URL"
        )
    while True:
        tip_id = chain.latest()
        tip = None if tip_id is None else _state(chain, tip_id)
        if tip is not None:
            _same_tree(bucket, tip, specs)
        number = 1 + (chain.segments[-1].epoch if chain.segments else 0)
        claim = EpochClaim(
            run=info.run,
            epoch=number,
            base=tip_id,
            writer=f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
            created=time.time(),
        )
        document = claim.to_json()
        try:
            create(bucket, names.epoch_name(number), document)
        except ObjectExistsError:
            continue  # somebody else was first: claim the one after
        chain.refresh_epochs()
        epoch = Epoch(chain, claim, tip)
        epoch.count("control", created + len(document))
        return epoch


def _state(chain: Chain, vid: VersionId) -> State | None:
    try:
        return chain.state(vid)
    except DAMAGE as error:
        _log.warning("version %d cannot be continued: %s", vid.version, error)
        return None


def _same_tree(bucket: Bucket, tip: State, specs: Mapping[str, TensorSpec]) -> None:
    published = tip.specs
    for name in published.keys() | specs.keys():
        if published.get(name) != specs.get(name):
            raise TreeError(
                f"{bucket.url} publishes {published.get(name) or 'no such tensor'}, "
                f"this trainer has {specs.get(name) or 'no such tensor'} ({name!r}): "
                "resume with the same tree, or publish to another URL"
            )


def _size(path: Path) -> int:
    return path.stat().st_size
