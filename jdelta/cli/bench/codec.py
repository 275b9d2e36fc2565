"""`jdelta bench codec`: bits a change and speed, against the bound and memory copy."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from jdelta.cli._shared import Debug, Json, command, human_bytes
from jdelta.cli.bench import _timing
from jdelta.cli.bench._bound import bound
from jdelta.cli.bench._pairs import CacheOption, Pair, Trace, TraceOption, load_pair
from jdelta.cli.bench._report import Bar, Quick, Report, Row, progress
from jdelta.errors import JDeltaError
from jdelta.wire import delta_object
from jdelta.wire.changes import Changes, Steps
from jdelta.wire.dtypes import TensorSpec
from jdelta.wire.tensor import EncodedTensor, decode_tensor, encode_tensor, stage

# Bits a changed element.
_BARS = {Trace.A: 9.5, Trace.A1: 10.2}


@command
def codec(
    trace: TraceOption = Trace.A,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds that are timed.")
    ] = 9,
    cache: CacheOption = None,
    quick: Quick = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Size and speed of the codec on a recorded step, on one thread.

    Encoding includes finding the changes between two host arrays, applying includes
    decoding and the check against the old weights. Both count 2 bytes a weight, the
    memory copy the bytes it reads and the bytes it writes.
    """
    report = Report(
        name="codec", settings={"trace": trace.value, "rounds": rounds}, quick=quick
    )
    pair = load_pair(trace, cache, quick)
    progress("computing the bound")
    least = bound(pair.old, pair.new)
    changed, elements = pair.changed, pair.elements
    work = _Work(pair)
    size = work.object_bytes()
    progress("timing")
    actions = {
        "memcpy": work.memcpy,
        "detect": work.detect,
        "fast_encode": work.encode,
        "decode": work.decode,
        "fast_apply": work.apply,
    }
    times = _timing.rounds(actions, rounds, before={"fast_apply": work.undo})
    seconds = {name: _timing.median(values) for name, values in times.items()}
    work.check()
    scale = elements / 1e9
    gbps = {
        "memcpy": 4 * scale / seconds["memcpy"],
        "fast_encode": 2 * scale / seconds["fast_encode"],
        "fast_apply": 2 * scale / seconds["fast_apply"],
    }
    found = 8 * size / changed
    limit = _BARS[trace]

    def share(name: str) -> str:
        return (
            f"{gbps[name] / gbps['memcpy']:.3f} of memcpy, "
            f"{changed / seconds[name] / 1e6:.0f} M changes/s"
        )

    report.finish(
        {
            "bits_per_changed": {"fast": found, "bound": least.total},
            "gbps": gbps,
            "trace": pair.name,
            "density": changed / elements,
            "changed": changed,
            "elements": elements,
            "delta_bytes": size,
            "bound": {"positions": least.positions, "values": least.values},
            "seconds": seconds,
        },
        [
            Row(
                "density",
                f"{changed / elements:.3%}",
                f"{pair.name}, {elements:,} bf16",
            ),
            Row("fast", f"{found:.2f} b/change", f"whole object, {human_bytes(size)}"),
            Row(
                "bound",
                f"{least.total:.2f} b/change",
                f"given the old exponent: positions {least.positions:.2f} (adaptive "
                f"code), steps {least.values:.2f} (entropy)",
            ),
            Row("dense / delta", f"x{2 * elements / size:.1f}"),
            Row("memcpy", f"{gbps['memcpy']:.2f} GB/s", "read + written, one thread"),
            Row("fast encode", f"{gbps['fast_encode']:.2f} GB/s", share("fast_encode")),
            Row(
                "  of which detection",
                f"{seconds['detect'] * 1e3:.1f} ms",
                f"of {seconds['fast_encode'] * 1e3:.1f} ms",
            ),
            Row("fast apply", f"{gbps['fast_apply']:.2f} GB/s", share("fast_apply")),
            Row(
                "  of which decoding",
                f"{seconds['decode'] * 1e3:.1f} ms",
                f"of {seconds['fast_apply'] * 1e3:.1f} ms",
            ),
            Row("rounds", str(rounds), "interleaved; medians"),
        ],
        [
            Bar(
                f"fast takes at most {limit} bits a change on trace {trace.value}",
                f"{found:.2f}",
                found <= limit,
            )
        ],
        as_json=as_json,
    )


class _Work:
    """What is timed: whole passes over the pair, one tensor after the other."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.specs = [
            TensorSpec(f"layers.{index}.kernel", "BF16", (array.size,))
            for index, array in enumerate(pair.old)
        ]
        self.changes = self.detect()
        self.encoded = self.encode()
        self.target = [array.copy() for array in pair.old]
        self.scratch = [np.zeros_like(array) for array in pair.old]

    def object_bytes(self) -> int:
        """The size of the object that a bucket would hold."""
        tensors = {
            spec.name: encoded
            for spec, encoded in zip(self.specs, self.encoded, strict=True)
        }
        return len(delta_object.pack(tensors, {"version": 1, "base": 0}))

    def memcpy(self) -> None:
        for into, array in zip(self.scratch, self.pair.new, strict=True):
            np.copyto(into, array)

    def detect(self) -> list[Changes]:
        pairs = zip(self.pair.old, self.pair.new, strict=True)
        return [Changes.between(old, new) for old, new in pairs]

    def encode(self) -> list[EncodedTensor]:
        return [
            encode_tensor(spec, Changes.between(old, new))
            for spec, old, new in zip(
                self.specs, self.pair.old, self.pair.new, strict=True
            )
        ]

    def decode(self) -> list[Steps]:
        return [
            decode_tensor(spec, [encoded.payload], encoded.changed)
            for spec, encoded in zip(self.specs, self.encoded, strict=True)
        ]

    def undo(self) -> None:
        """Put the old weights back where `apply` finds them."""
        for target, changes in zip(self.target, self.changes, strict=True):
            target[changes.positions] = changes.old

    def apply(self) -> None:
        for spec, encoded, target in zip(
            self.specs, self.encoded, self.target, strict=True
        ):
            steps = decode_tensor(spec, [encoded.payload], encoded.changed)
            target[steps.positions] = stage(target, steps, spec)

    def check(self) -> None:
        """Raise JDeltaError unless `apply` makes the new weights, bit for bit."""
        self.undo()
        self.apply()
        for target, new in zip(self.target, self.pair.new, strict=True):
            if not np.array_equal(target, new):
                raise JDeltaError("the codec did not rebuild the new weights")
