"""Tests that no process outlives the process that started it, however that one ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvferry_launch.paths import REPO
from kvferry_launch.process import ManagedProcess, ProcessError, free_port, stop_all

DEADLINE_S = 10.0
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [sys.executable, "-c", "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "print('up', flush=True)\ntime.sleep(600)"]
PARENT_OF_SLEEPER = [sys.executable, "-c", "import subprocess, sys\n"
                     "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
                     "print('up', child.pid, flush=True)\nchild.wait()"]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Returns True if the process runs. A process that is dead but not reaped yet does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(tmp_path: Path, command: list[str], name: str = "child") -> ManagedProcess:
    process = ManagedProcess(name, command, {}, tmp_path / f"{name}.log")
    process.start()
    eventually(lambda: "up" in process.log_text())
    return process


def test_stop_ends_a_process_that_ignores_the_interrupt(tmp_path: Path) -> None:
    process = started(tmp_path, STUBBORN)
    process.stop(grace_s=0.1)
    assert process.exit_status == -signal.SIGKILL


def test_stop_interrupts_the_child_of_a_process_that_ignores_interrupts(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        process = started(tmp_path, SLEEPER)
    finally:
        signal.signal(signal.SIGINT, before)
    process.stop()
    assert process.exit_status == -signal.SIGINT


def test_stop_ends_the_children_of_the_process_too(tmp_path: Path) -> None:
    process = started(tmp_path, PARENT_OF_SLEEPER)
    grandchild = int(process.log_text().split()[1])
    process.stop()
    eventually(lambda: not alive(grandchild))


def test_stop_all_gives_several_processes_one_grace_period(tmp_path: Path) -> None:
    processes = [started(tmp_path, STUBBORN, f"stubborn-{index}") for index in range(6)]
    start = time.monotonic()
    stop_all(processes, grace_s=1.0)
    assert time.monotonic() - start < 4.0
    assert not any(process.running for process in processes)


def test_a_process_dies_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = ("import sys, time\nfrom pathlib import Path\nfrom kvferry_launch.process import ManagedProcess\n"
            "process = ManagedProcess('child', sys.argv[2:], {}, Path(sys.argv[1]))\nprocess.start()\n"
            "print(process.pid, flush=True)\ntime.sleep(600)\n")
    environment = os.environ | {"PYTHONPATH": str(REPO / "launch" / "lib")}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "child.log"), *SLEEPER], env=environment,
                          stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    eventually(lambda: not alive(child))


def test_a_dead_process_is_reported_with_its_status_and_the_tail_of_its_log(tmp_path: Path) -> None:
    process = ManagedProcess("child", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {},
                             tmp_path / "child.log")
    process.start()
    assert process.wait(DEADLINE_S) == 3
    with pytest.raises(ProcessError, match=r"child ended with exit status 3(.|\n)*the reason"):
        process.fail_if_dead()


def test_a_free_port_can_be_listened_on() -> None:
    assert 1024 <= free_port() <= 65535
