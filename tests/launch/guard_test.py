"""Tests guard.py: no process of the command is left, however the guard's parent ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployment import eventually, marked
from kvferry_launch.node import guard

GUARD = [sys.executable, str(Path(guard.__file__))]
# Starts a grandchild in a session of its own, whose parent has ended. The guard can only find the grandchild because
# the kernel makes the guard its new parent.
DAEMON = ("import subprocess, sys, time\n"
          "subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; sleep 600 & sleep 601'])")
WAITING = f"{DAEMON}\nprint('up', flush=True)\ntime.sleep(600)"
STUBBORN = ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITING)


def start(mark: str, code: str, *flags: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*GUARD, "--grace", "1", *flags, "--", sys.executable, "-c", code, mark],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"MARK": mark})
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.mark.parametrize("code", [WAITING, STUBBORN], ids=["obedient", "stubborn"])
@pytest.mark.parametrize("how", ["end of stdin", "SIGTERM", "silence"])
def test_all_that_descends_from_the_command_ends(mark: str, code: str, how: str) -> None:
    process = start(mark, code, *(["--silence", "2"] if how == "silence" else []))
    assert process.stdin is not None
    eventually(lambda: len(marked(mark)) == 5, lambda: str(marked(mark)), within_s=1.5)
    if how == "end of stdin":
        process.stdin.close()
    elif how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    process.wait(10.0)
    eventually(lambda: not marked(mark), lambda: str(marked(mark)), within_s=2.0)


def test_sigint_ends_the_grace_period(mark: str) -> None:
    process = start(mark, STUBBORN, "--grace", "60")
    assert process.stdin is not None
    process.stdin.close()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None, "SIGTERM, which comes when the launcher dies, leaves the grace period as it is"
    process.send_signal(signal.SIGINT)
    process.wait(10.0)
    eventually(lambda: not marked(mark), lambda: str(marked(mark)), within_s=2.0)


def line(kind: str, content: bytes) -> bytes:
    return f"{kind} {content.hex()}\n".encode()


def test_keys_on_stdin_are_written_for_their_owner_alone_and_other_lines_follow(tmp_path: Path) -> None:
    file = tmp_path / "deployments" / "a.key"
    members = file.with_name("kvferry.members")
    show = [*GUARD, "--key-file", str(file), "--stdin", "--", sys.executable, "-uc",
            f"key = open({str(file)!r}).read().strip()\nprint(key, input())\nprint(input())"]
    for key, others in ((b"first\n", b"list 1\n"), (b"second\n", b"")):
        with subprocess.Popen(show, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line("members", others) + line("key", key) + b".\nline\n")
            assert process.stdout.readline().split() == [key.strip(), b"line"]
            assert file.stat().st_mode & 0o7777 == 0o600
            assert members.exists() == bool(others)
            process.stdin.write(line("members", b"list 2\n") + line("key", b"newer\n") + b"key xyz\nend\n")
            *said, last = process.stdout.read().decode().splitlines()
            assert ("can't write a key" in said[0], len(said), last) == (True, 1, "end")
        assert (members.read_bytes(), file.read_bytes()) == (b"list 2\n", b"newer\n")
        assert sorted(one.name for one in file.parent.iterdir()) == ["a.key", "kvferry.members"]


@pytest.mark.parametrize(("sent", "reason"), [
    (b"", "sent no key"), (b"\n", "sent no key"), (b"key \n", "sent no key"), (b"key xyz\n", "hexadecimal"),
    (b"other 00\n", "sent no key"), (b"\xff\n", "utf-8")])
def test_without_a_key_nothing_is_started(sent: bytes, reason: str, tmp_path: Path) -> None:
    done = subprocess.run([*GUARD, "--key-file", str(tmp_path / "k"), "--", "touch", str(tmp_path / "started")],
                          input=sent, capture_output=True, check=False)
    assert done.returncode == 1
    assert reason in done.stderr.decode()
    assert not list(tmp_path.iterdir())


def test_dots_are_a_sign_of_life(mark: str) -> None:
    process = start(mark, WAITING, "--silence", "3")  # start() sends no dots until the command is up
    assert process.stdin is not None
    for _ in range(16):
        time.sleep(0.25)
        process.stdin.write(b".\n")
        process.stdin.flush()
    assert process.poll() is None
    process.stdin.close()
    process.wait(10.0)


def test_what_the_command_leaves_behind_ends_with_it(mark: str) -> None:
    done = subprocess.run([*GUARD, "--", sys.executable, "-c", f"{DAEMON}\nsys.exit(3)", mark],
                          stdin=subprocess.PIPE, check=False, timeout=10.0)
    # run() closes the guard's stdin at once, so the guard may stop the command (143) before the command ends by itself
    # (3).
    assert done.returncode in (3, 143)
    eventually(lambda: not marked(mark), lambda: str(marked(mark)), within_s=2.0)


def test_the_exit_status_is_the_commands(tmp_path: Path) -> None:
    for code, status in (("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        process = subprocess.Popen([*GUARD, "--", sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=tmp_path)
        assert process.wait(10.0) == status


def test_lines_go_to_the_command_where_asked_and_dots_do_not() -> None:
    process = subprocess.Popen([*GUARD, "--stdin", "--", sys.executable, "-uc", "print(input()); print(input())"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b".\nfirst\n.\nsecond\n")
    process.stdin.flush()
    assert process.stdout.read() == b"first\nsecond\n"
    assert process.wait(10.0) == 0


def test_a_command_that_is_not_there_is_one_line() -> None:
    done = subprocess.run([*GUARD, "--", "/no/such"], capture_output=True, text=True, check=False, timeout=10.0)
    assert done.returncode == 1
    assert done.stderr.startswith("kvferry guard: can't run /no/such: ")
