"""What the demo's processes say to each other: settings in, JSON lines out."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What every process of one demo is told.

    Attributes:
        bucket: URL of the bucket.
        steps: Fine-tuning steps; each is published.
        learning_rate: Of the fine-tuning's AdamW.
        pretrain_seconds: How long to train before the stream starts.
        compare_every: The trainer and the followers hash the weights they hold at
            every step that is a multiple of this, and at the last.
        timeout: Seconds that one wait inside a process may take.
        batch: Sequences a step.
        sequence: Tokens a sequence.
    """

    bucket: str
    steps: int
    learning_rate: float
    pretrain_seconds: float
    compare_every: int = 10
    timeout: float = 120.0
    batch: int = 4
    sequence: int = 128

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def parse(text: str) -> Settings:
        """Read what `to_json` wrote."""
        return Settings(**json.loads(text))

    def compared(self, step: int) -> bool:
        """Whether the weights of `step` are hashed and compared."""
        return step % self.compare_every == 0 or step == self.steps


class Channel:
    """The child's end: events as JSON lines on what was its standard output.

    File descriptor 1 is pointed at the standard error stream, so that nothing a
    library prints can get between the lines. When the parent goes away (its end of the
    child's standard input closes), the process ends at once.
    """

    def __init__(self) -> None:
        """Take over standard output and watch standard input."""
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def _watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    def send(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()
