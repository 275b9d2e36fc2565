"""What the demo knows of its processes, and how it shows it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from rich import box
from rich.table import Table

from jdelta.cli._demo.channel import Settings
from jdelta.cli._shared import human_bytes

BYTES_PER_WEIGHT = 2  # bf16 is what is published


@dataclasses.dataclass
class Follower:
    """One follower, as far as it has told."""

    kind: str
    version: int | None = None
    step: int | None = None
    held: dict[int, str] = dataclasses.field(default_factory=dict)
    apply_ms: list[float] = dataclasses.field(default_factory=list)
    behind_s: list[float] = dataclasses.field(default_factory=list)
    updates: int = 0
    ended: bool = False


class Board:
    """Takes every event of every child; answers with tables and figures."""

    def __init__(self, settings: Settings, kinds: list[str]) -> None:
        """Know nothing yet of a demo with these followers."""
        self.settings = settings
        self.followers = {kind: Follower(kind) for kind in kinds}
        self.truths: dict[int, str] = {}
        self.steps: list[dict[str, Any]] = []
        self.parameters = 0
        self.pretrain: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self._published: dict[int, float] = {}

    # -- what comes in

    def take(self, child: str, event: str, fields: dict[str, Any]) -> None:
        """Note one event of one child."""
        if child == "trainer":
            self._take_trainer(event, fields)
        else:
            self._take_follower(self.followers[child], event, fields)

    def _take_trainer(self, event: str, fields: dict[str, Any]) -> None:
        if event == "start":
            self.parameters = fields["parameters"]
        elif event == "pretrain":
            self.pretrain = fields
        elif event == "truth":
            self.truths[fields["step"]] = fields["sha256"]
        elif event == "step":
            self.steps.append(fields)
            self._published[fields["step"]] = fields["time"]
        elif event == "end":
            self.end = fields

    def _take_follower(
        self, follower: Follower, event: str, fields: dict[str, Any]
    ) -> None:
        if event == "held":
            follower.held[fields["step"]] = fields["sha256"]
            return
        follower.version = fields["version"]
        if event == "end":
            follower.ended = True
            return
        follower.step = fields["step"]
        if event == "update":
            follower.updates += 1
            follower.apply_ms.append(fields["apply_ms"])
            published = self._published.get(fields["step"])
            if published is not None:
                follower.behind_s.append(max(0.0, fields["time"] - published))

    def ended(self, child: str) -> bool:
        """Whether a child has told that its work is done."""
        if child == "trainer":
            return self.end is not None
        return self.followers[child].ended

    # -- figures

    @property
    def full_bytes(self) -> int:
        """Size of one version's weights stored whole."""
        return self.parameters * BYTES_PER_WEIGHT

    def densities(self) -> list[float]:
        """Changed share of the elements, by step."""
        return [step["changed"] / self.parameters for step in self.steps]

    def saved_fraction(self) -> float:
        """1 - bytes put into the bucket / bytes of as many whole versions.

        Every write since the stream was opened counts, the anchor of version 0 and
        each overwritten pointer too.
        """
        if self.end is None:
            raise ValueError("the trainer has not ended")
        written = sum(self.end["written"].values())
        return 1 - written / ((self.end["version"] + 1) * self.full_bytes)

    def compare(self, kind: str) -> tuple[bool, int]:
        """Whether a follower held the trainer's weights at every compared step.

        Returns:
            `(equal, compared)`; not equal also if the last step was not compared.
        """
        held = self.followers[kind].held
        compared = [step for step in held if step in self.truths]
        equal = all(held[step] == self.truths[step] for step in compared)
        return equal and self.settings.steps in compared, len(compared)

    # -- what is shown

    def line(self) -> str:
        """One line for a terminal that cannot redraw."""
        if not self.steps and not self.pretrain:
            return "starting the processes"
        if not self.steps:
            seconds, loss = self.pretrain["elapsed"], self.pretrain["loss"]
            return f"pretraining {seconds:.0f} s, loss {loss:.3f}"
        last = self.steps[-1]
        lags = ", ".join(
            f"{kind} {self._lag(follower)}" for kind, follower in self.followers.items()
        )
        written, share = self._written()
        return (
            f"step {last['step']}/{self.settings.steps}, loss {last['loss']:.3f}, "
            f"density {self.densities()[-1]:.2%}, {written} written ({share} of whole "
            f"versions), publish "
            f"{last['publish_ms']:.2f} ms, steps behind: {lags}"
        )

    def _lag(self, follower: Follower) -> str:
        if follower.step is None or not self.steps:
            return "-"
        return str(max(0, self.steps[-1]["step"] - follower.step))

    def _written(self) -> tuple[str, str]:
        """Bytes written so far, and their share of as many whole versions."""
        last = self.steps[-1]
        whole = max(1, (last["committed"] or 0) + 1) * self.full_bytes
        written = sum(last["written"].values())
        return human_bytes(written), f"{written / whole:.2%}"

    def _phase(self) -> str:
        if self.steps:
            return "fine-tuning, every step published" if self.end is None else "done"
        elapsed = self.pretrain.get("elapsed", 0.0)
        return f"pretraining, {elapsed:.0f} of {self.settings.pretrain_seconds:.0f} s"

    def table(self) -> Table:
        """The live table: the trainer, then its followers. At most 80 columns."""
        size = f", {human_bytes(self.full_bytes)} a version" if self.parameters else ""
        trainer = _table(f"trainer: {self._phase()}{size}")
        for heading in ("step", "loss", "density", "delta", "written", "of full"):
            trainer.add_column(heading, justify="right")
        trainer.add_column("publish", justify="right")
        trainer.add_column("a step", justify="right")
        if self.steps:
            last = self.steps[-1]
            trainer.add_row(
                f"{last['step']}/{self.settings.steps}",
                f"{last['loss']:.3f}",
                f"{self.densities()[-1]:.2%}",
                human_bytes(last["delta_bytes"]),
                *self._written(),
                f"{last['publish_ms']:.2f} ms",
                f"{last['step_ms']:.0f} ms",
            )
        else:
            loss = f"{self.pretrain['loss']:.3f}" if self.pretrain else "-"
            step = str(self.pretrain.get("step", "-"))
            trainer.add_row(step, loss, *["-"] * 6)
        outer = Table.grid()
        outer.add_row(trainer)
        outer.add_row(self._followers_table())
        return outer

    def _followers_table(self) -> Table:
        table = _table("followers")
        for heading in ("kind", "version", "updates", "apply", "behind"):
            table.add_column(heading, justify="right")
        table.add_column("equal")
        for kind, follower in self.followers.items():
            equal, compared = self.compare(kind)
            mark = f"{'yes' if equal else 'NO'} ({compared} versions)"
            table.add_row(
                kind,
                "-" if follower.version is None else str(follower.version),
                str(follower.updates),
                f"{follower.apply_ms[-1]:.1f} ms" if follower.apply_ms else "-",
                f"{self._lag(follower)} steps"
                + (f", {follower.behind_s[-1]:.2f} s" if follower.behind_s else ""),
                mark if follower.ended and self.end is not None else "...",
            )
        return table

    def report(self) -> dict[str, Any]:
        """What the last JSON line says, but for what the parent measured itself."""
        end = self.end or {}
        densities = self.densities()
        followers = []
        for kind, follower in self.followers.items():
            equal, compared = self.compare(kind)
            followers.append(
                {
                    "kind": kind,
                    "equal": equal,
                    "version": follower.version,
                    "step": follower.step,
                    "versions_compared": compared,
                    "updates": follower.updates,
                    "apply_ms": _summary(follower.apply_ms),
                    "behind_s": _summary(follower.behind_s),
                }
            )
        return {
            "saved_fraction": self.saved_fraction(),
            "versions": end["version"] + 1,
            "steps": len(self.steps),
            "parameters": self.parameters,
            "full_bytes": self.full_bytes,
            "written": end["written"],
            "followers": followers,
            "density": {
                "mean": statistics.fmean(densities),
                "first": densities[0],
                "last": densities[-1],
            },
            "loss": {
                "pretrained": _finite(end["loss_before"]),
                "fine_tuned": _finite(end["loss_after"]),
            },
            "times": {
                "pretrain_s": self.pretrain.get("elapsed", 0.0),
                "fine_tune_s": end["seconds"],
                "step_ms": _summary([step["step_ms"] for step in self.steps]),
                "publish_ms": _summary([step["publish_ms"] for step in self.steps]),
            },
        }


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": statistics.median(values), "max": max(values)}
