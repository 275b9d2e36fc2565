from __future__ import annotations

import os
import socket
import time

import pytest

from jdelta.errors import WaitTimeoutError
from jdelta.testing import (
    Processes,
    ProcessFailedError,
    free_port,
    run,
    virtual_devices,
)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def add(a: int, b: int) -> dict[str, int]:
    print("adding")
    return {"sum": a + b, "pid": os.getpid()}


class Nested:
    @staticmethod
    def double(value: str) -> str:
        return value * 2


def test_functions_and_snippets_run_apart_and_at_once():
    first, second, third = run(
        (add, 1, 2),
        "import sys; print(6 * 7); print('err', file=sys.stderr)",
        (Nested.double, "ab"),
    )
    assert first.value["sum"] == 3
    assert first.value["pid"] != os.getpid()
    assert first.stdout == "adding\n"
    assert (second.stdout, second.stderr, second.value) == ("42\n", "err\n", None)
    assert third.value == "abab"


def test_arguments_and_environment_reach_a_snippet():
    code = "import os, sys; print(sys.argv[1:], os.environ['JDELTA_X'])"
    (ended,) = run((code, "a b", 3), env={"JDELTA_X": "yes"})
    assert ended.stdout == "['a b', '3'] yes\n"


def test_a_failure_shows_the_output():
    with pytest.raises(ProcessFailedError, match="(?s)status 3.*before the end"):
        run("import sys; print('before the end'); sys.exit(3)")
    with pytest.raises(ProcessFailedError, match="ZeroDivisionError"):
        run("1 / 0")
    (ended,) = run("import os, signal; os.kill(os.getpid(), 9)", check=False)
    assert ended.returncode == -9


def test_a_hanging_child_is_killed_and_shows_where_it_hung():
    start = time.monotonic()
    with Processes() as group:
        child = group.start("import time\ndef stuck():\n    time.sleep(600)\nstuck()")
        with pytest.raises(WaitTimeoutError, match="(?s)did not end.*in stuck"):
            child.wait(1.0)
        assert not alive(child.pid)
    assert time.monotonic() - start < 20


def test_wait_for_output():
    with Processes() as group:
        child = group.start("print('ready')\nimport time; time.sleep(600)")
        child.wait_for("ready")
        assert child.running
        ended = group.start("print('something else')")
        with pytest.raises(ProcessFailedError, match="something else"):
            ended.wait_for("ready")
        silent = group.start("import time; time.sleep(600)")
        with pytest.raises(WaitTimeoutError, match="did not print 'ready'"):
            silent.wait_for("ready", timeout=0.2)


def test_children_and_theirs_end_with_the_block():
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('grandchild', p.pid, 'end')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(KeyError):
        with Processes() as group:
            child = group.start(code)
            child.wait_for("end")
            grandchild = int(child.stdout.split()[1])
            assert alive(child.pid) and alive(grandchild)
            raise KeyError
    deadline = time.monotonic() + 10
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child.pid)
    assert not alive(grandchild)


def test_much_output_does_not_block():
    (ended,) = run("print('x' * 5_000_000)")
    assert len(ended.stdout) == 5_000_001


def test_a_local_function_cannot_be_found():
    with pytest.raises(ValueError, match="top level"):
        run(lambda: None)


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_importing_the_helpers_is_light():
    heavy = "{'jax', 'torch', 'flax', 'hypothesis', 'pytest', 'huggingface_hub'}"
    (ended,) = run(f"import sys, jdelta.testing; print({heavy} & set(sys.modules))")
    assert ended.stdout == "set()\n"


def test_virtual_devices():
    pytest.importorskip("jax")
    (ended,) = run("import jax; print(len(jax.devices()))", env=virtual_devices(3))
    assert ended.stdout == "3\n"


def test_virtual_devices_keep_other_flags(monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=9 --b=2"
    )
    flags = virtual_devices(2)["XLA_FLAGS"]
    assert flags == "--a=1 --b=2 --xla_force_host_platform_device_count=2"
    with pytest.raises(ValueError):
        virtual_devices(0)
