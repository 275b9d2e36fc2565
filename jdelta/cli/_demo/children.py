"""The demo's child processes, seen from the parent."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from jdelta.errors import JDeltaError

_TAIL_LINES = 15  # of a dead child's standard error
_GRACE = 5.0  # seconds between asking a child to end and killing it


class Event(NamedTuple):
    """One line of one child; `event` None is the end of its output."""

    child: str
    event: str | None
    fields: dict[str, Any]


class Children:
    """Starts children, gathers their events, and ends them all when it is left.

    Each runs in a session of its own, so that a Ctrl-C in the terminal reaches the
    parent alone, which then ends them in order.
    """

    def __init__(self) -> None:
        """Start none yet."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._errors: dict[str, Any] = {}

    def __enter__(self) -> Children:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every child."""
        self.stop()

    def start(
        self, name: str, module: str, arguments: Sequence[str], **environment: str
    ) -> None:
        """Start `python -m module arguments`, known as `name`.

        Args:
            name: What its events and errors are told under.
            module: A module of jdelta.
            arguments: Its command line.
            **environment: Variables that are set unless the user has set them.
        """
        # The child must find the very modules that this process would.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        env = {**environment, **os.environ, "PYTHONPATH": path}
        errors = tempfile.TemporaryFile("w+b")
        self._errors[name] = errors
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=env,
            start_new_session=True,
        )
        self._processes[name] = process
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            with process.stdout:
                for line in process.stdout:
                    if not line.endswith("\n"):
                        break  # it was ended in the middle of a word
                    fields = json.loads(line)
                    self.events.put(Event(name, fields.pop("event"), fields))
        self.events.put(Event(name, None, {}))

    def check_exit(self, name: str) -> None:
        """Wait for a child whose output has ended.

        Raises:
            JDeltaError: It did not end well; the message holds the last lines of its
                standard error.
        """
        try:
            code = self._processes[name].wait(_GRACE)
        except subprocess.TimeoutExpired:
            raise JDeltaError(
                f"the {name} process fell silent and does not end"
            ) from None
        if code != 0:
            how = f"was killed by signal {-code}" if code < 0 else f"died (exit {code})"
            raise JDeltaError(
                f"the {name} process {how}; its last words:\n{self._tail(name)}"
            )

    def _tail(self, name: str) -> str:
        errors = self._errors[name]
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (none)"

    def stop(self) -> None:
        """End the children that still run: ask, then kill."""
        running = [p for p in self._processes.values() if p.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join(_GRACE)
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for errors in self._errors.values():
            errors.close()
