r"""Real processes for tests: started together, bounded in time, never left behind.

Example:
    >>> run("print(6 * 7)", timeout=30)[0].stdout
    '42\n'
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jdelta.errors import JDeltaError, WaitTimeoutError

_PACKAGE_HOME = str(Path(__file__).resolve().parents[2])
_SHOWN = 4000


class ProcessFailedError(JDeltaError):
    """A child ended with another exit status than zero; the message has its output."""


class Finished(NamedTuple):
    """How a child ended.

    Attributes:
        returncode: Its exit status, or minus the signal that killed it.
        stdout: What it printed.
        stderr: What it printed there.
        seconds: From its start until it was seen to have ended.
        value: What its function returned; None for a snippet or a killed child.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    value: Any


class Child:
    """One running python process, its own process group."""

    def __init__(
        self,
        what: str | Callable[..., Any],
        args: tuple[Any, ...],
        env: Mapping[str, str] | None,
        folder: Path,
    ):
        """Starts it; `Processes.start` is the way to get one."""
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._value = folder / "value.json"
        if callable(what):
            self.label = what.__qualname__
            command = ["-c", _CALLER, *_target(what), str(self._value)]
            command.append(json.dumps(args))
        else:
            self.label = what.strip().splitlines()[0][:60] if what.strip() else "empty"
            command = ["-c", what, *map(str, args)]
        full = {**os.environ, **(env or {})}
        paths = [_PACKAGE_HOME, full.get("PYTHONPATH", "")]
        full["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        full.setdefault("PYTHONUNBUFFERED", "1")
        self._start = time.monotonic()
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=full,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it printed there so far."""
        return self._err.read_text(errors="replace")

    def wait(self, timeout: float = 60.0, *, check: bool = True) -> Finished:
        """Waits for its end.

        Args:
            timeout: Seconds; then it is made to show the stacks of its threads (as a
                part of its stderr) and killed.
            check: An exit status other than zero is an error.

        Raises:
            WaitTimeoutError: it did not end in time.
            ProcessFailedError: with `check`, it failed.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill(stacks=True)
            raise WaitTimeoutError(
                f"process {self.label!r} did not end within {timeout} s{self._shown()}"
            ) from None
        code = self._process.returncode
        if check and code != 0:
            raise ProcessFailedError(
                f"process {self.label!r} ended with status {code}{self._shown()}"
            )
        value = None
        if code == 0 and self._value.exists():
            value = json.loads(self._value.read_text())
        seconds = time.monotonic() - self._start
        return Finished(code, self.stdout, self.stderr, seconds, value)

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Waits until its standard output holds `text`.

        Raises:
            WaitTimeoutError: it did not within `timeout` seconds; it is killed.
            ProcessFailedError: it ended without.
        """
        deadline = time.monotonic() + timeout
        while True:
            running = self.running  # before looking: its last words count
            if text in self.stdout:
                return
            if not running:
                raise ProcessFailedError(
                    f"process {self.label!r} ended without {text!r}{self._shown()}"
                )
            if time.monotonic() > deadline:
                self.kill(stacks=True)
                raise WaitTimeoutError(
                    f"process {self.label!r} did not print {text!r} within "
                    f"{timeout} s{self._shown()}"
                )
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Sends it a signal; none if it has ended."""
        self._process.send_signal(number)

    def kill(self, *, stacks: bool = False) -> None:
        """Ends it and what it started, at once, and waits for that.

        Args:
            stacks: Have it write its threads' stacks to stderr first.
        """
        if stacks and self.running:
            self._signal_group(signal.SIGCONT)
            self.signal(signal.SIGABRT)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)  # its group outlives it while members do
        except (ProcessLookupError, PermissionError):
            pass

    def _shown(self) -> str:
        return "".join(
            f"\n--- {name}\n{text[-_SHOWN:]}"
            for name, text in (("stdout", self.stdout), ("stderr", self.stderr))
            if text
        )


class Processes:
    """A group of children; all are killed when the `with` block ends.

    Example:
        >>> with Processes() as group:
        ...     child = group.start("print('up'); import time; time.sleep(60)")
        ...     child.wait_for("up")
    """

    def __init__(self):
        """Makes an empty group."""
        self._folder = tempfile.TemporaryDirectory(prefix="jdelta-processes-")
        self.children: list[Child] = []

    def start(
        self,
        what: str | Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a python process, with this interpreter and this jdelta.

        Args:
            what: Python source, or a function defined at the top level of a file
                (imported there again, so guard what else the file does).
            *args: The function's arguments, as far as JSON can carry them (paths as
                text); for source, they are in `sys.argv[1:]` as text.
            env: Variables added to this process's.
        """
        folder = Path(self._folder.name, str(len(self.children)))
        folder.mkdir()
        child = Child(what, args, env, folder)
        self.children.append(child)
        return child

    def wait(self, timeout: float = 60.0, *, check: bool = True) -> list[Finished]:
        """Waits for all children, `timeout` seconds altogether.

        Raises:
            WaitTimeoutError: one did not end in time.
            ProcessFailedError: with `check`, one failed.
        """
        deadline = time.monotonic() + timeout
        return [
            child.wait(max(deadline - time.monotonic(), 0.01), check=check)
            for child in self.children
        ]

    def __enter__(self) -> Processes:
        """The group itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Kills whatever still runs and removes the captured output."""
        for child in self.children:
            child.kill()
        self._folder.cleanup()


def run(
    *whats: str | Callable[..., Any] | tuple[Any, ...],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[Finished]:
    """Runs several processes at once and waits for all.

    Args:
        *whats: For each, source or a function, or a tuple of that and its arguments
            (see `Processes.start`).
        timeout: Seconds for all of them; then all are killed.
        env: Variables added to this process's.
        check: An exit status other than zero is an error.

    Raises:
        WaitTimeoutError: one did not end in time.
        ProcessFailedError: with `check`, one failed.
    """
    with Processes() as group:
        for what in whats:
            source, *args = what if isinstance(what, tuple) else (what,)
            group.start(source, *args, env=env)
        return group.wait(timeout, check=check)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _target(function: Callable[..., Any]) -> tuple[str, str]:
    """How another process finds a function: its file and its name there."""
    file, name = function.__code__.co_filename, function.__qualname__
    if "<" in name or not os.path.exists(file):
        raise ValueError(f"{name} is not at the top level of a file")
    return os.path.abspath(file), name


_CALLER = """
import functools, importlib.util, json, sys
file, name, into, args = sys.argv[1:]
spec = importlib.util.spec_from_file_location("child_module", file)
home = importlib.util.module_from_spec(spec)
sys.modules["child_module"] = home
spec.loader.exec_module(home)
value = functools.reduce(getattr, name.split("."), home)(*json.loads(args))
with open(into, "w") as out:
    json.dump(value, out)
"""
