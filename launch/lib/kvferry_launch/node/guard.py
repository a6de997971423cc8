"""Runs one command on a node's host. When the guard ends, unless by SIGKILL, no process of the command is left.

The guard is a script that also runs through ssh or srun, so it uses only the standard library and no other file of
kvferry. The guard watches its stdin. If stdin ends (the launcher died, the connection broke, or the launcher stops the
node) or is silent for longer than --silence, the command gets SIGTERM and, after --grace seconds, SIGKILL; then the
guard ends all remaining descendants. A line "." on stdin shows that the launcher still runs. With --stdin, other lines
go to the command's stdin.

With --key-file, lines "key HEX" of stdin are written to that file and lines "members HEX" to the list of members beside
it, and the command starts after the first key. The key is not an argument, because every user of the host can read a
command's arguments.
"""

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.2
_libc = ctypes.CDLL(None, use_errno=True)


def descendants(*of: int) -> list[int]:
    """Returns the descendants of these processes that still run. The guard's descendants include orphans, because the
    guard is a subreaper: when the parent of a descendant ends, the kernel makes the guard the descendant's new parent.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [*of]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def signal_each(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass


class Guard:
    """One run of the command. run() returns the command's exit status, or 128 + N if signal N ended the command."""

    def __init__(self, command: list[str], grace_s: float, silence_s: float, with_stdin: bool,
                 key_file: Path | None = None) -> None:
        self._key_file = key_file
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._with_stdin = with_stdin
        self._wants_stop = False
        self._is_stopping = False
        self._has_grace = True
        self._heard_at = time.monotonic()
        self._pending = b""
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        # The command has its own session, so that the SIGINT of a Ctrl-C on the terminal reaches only the guard, which
        # then ends the command. If the guard is killed, the kernel sends SIGTERM to the command.
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE if with_stdin else subprocess.DEVNULL,
                                       start_new_session=True,
                                       preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM))

    def run(self) -> int:
        status = None
        while status is None and not self._wants_stop:
            self._listen()
            status = self._child.poll()
        if status is None:
            status = self._stop()
        self._kill_the_rest()
        return status if status >= 0 else 128 - status

    def _on_signal(self, number: int, _: Any) -> None:
        self._wants_stop = True
        # SIGTERM does not end the grace period, because the kernel sends SIGTERM when the launcher dies, in addition to
        # the end of stdin, which begins the period.
        self._has_grace &= not (self._is_stopping and number == signal.SIGINT)

    def _listen(self) -> None:
        ready, _, _ = select.select([0], [], [], TICK_S)
        if ready:
            piece = os.read(0, 65536)
            self._wants_stop |= not piece
            self._heard_at = time.monotonic()
            *lines, self._pending = (self._pending + piece).split(b"\n")
            for line in lines:
                self._pass_on(line)
        if self._silence_s and time.monotonic() - self._heard_at > self._silence_s:
            print(f"kvferry guard: the launcher sent nothing for {self._silence_s:.0f} s, so the command is stopped",
                  flush=True)
            self._wants_stop = True

    def _pass_on(self, line: bytes) -> None:
        if self._key_file is not None and line.startswith((b"key ", b"members ")):
            try:
                take(line, self._key_file)
            except (OSError, ValueError) as error:
                print(f"kvferry guard: can't write a key or list of members to {self._key_file.parent} ({error}); the "
                      "former file stays in use", flush=True)
        elif line not in (b"", b".") and self._with_stdin and self._child.stdin is not None:
            try:
                self._child.stdin.write(line + b"\n")
                self._child.stdin.flush()
            except OSError:
                pass  # the command has ended; poll() will report its status

    def _stop(self) -> int:
        """Sends SIGTERM to the command, and kills it if it still runs after the grace period, which SIGINT to the guard
        cuts short. Returns the exit status, -N after signal N.
        """
        self._is_stopping = True
        self._child.terminate()
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and self._has_grace:
            if self._child.poll() is not None:
                return self._child.returncode
            time.sleep(0.05)
        self._child.kill()
        return self._child.wait()

    def _kill_the_rest(self) -> None:
        """Ends the processes that the command left running: sends SIGTERM and, after at most 1 s, SIGKILL."""
        deadline = time.monotonic() + min(1.0, self._grace_s)
        first = True
        while left := descendants(os.getpid()):
            if first:
                signal_each(left, signal.SIGTERM)
                first = False
            elif time.monotonic() > deadline:
                signal_each(left, signal.SIGKILL)
            time.sleep(0.05)
            reap()


def take_key(file: Path) -> None:
    """Reads lines from stdin up to the first key, and writes the key and the list of members in them. Errors: OSError;
    ValueError if stdin ends before a key, or if a line has neither a key nor a list of members.
    """
    line = b""
    while not line.startswith(b"key "):
        line = b""
        while (piece := os.read(0, 1)) not in (b"", b"\n"):  # one byte at a time, so that Guard gets the rest
            line += piece
        take(line, file)


def take(line: bytes, key_file: Path) -> None:
    """Writes the key or the list of members in a line to a file that only this user can read. Removes the list's file
    if the list in the line is empty. Errors: OSError, ValueError.
    """
    kind, _, text = line.decode().partition(" ")
    content = bytes.fromhex(text)
    if kind not in ("key", "members") or (kind == "key" and not content):
        raise ValueError("the launcher sent no key, but a line other than 'key HEX' and 'members HEX', or nothing")
    file = key_file if kind == "key" else key_file.with_name("kvferry.members")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not content:
        file.unlink(missing_ok=True)
        return
    # The temporary file has a unique name, because another guard may write the same list at the same time.
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.unlink(missing_ok=True)
    with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(content)
    written.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="guard.py", description=__doc__)
    parser.add_argument("--grace", type=float, default=10.0,
                        help="seconds from SIGTERM to SIGKILL (default: 10); SIGINT to the guard ends this time")
    parser.add_argument("--silence", type=float, default=0.0,
                        help="seconds without a line on stdin after which the command is ended (default: 0, no limit)")
    parser.add_argument("--stdin", action="store_true",
                        help="pass lines of stdin on to the command, except for lines with only a dot and, with "
                        "--key-file, those with keys and lists of members")
    parser.add_argument("--key-file", type=Path,
                        help="write the key that comes on stdin to this file, and the list of members beside it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments, after --")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        if arguments.key_file:
            take_key(arguments.key_file)
    except (OSError, ValueError) as error:
        sys.exit(f"kvferry guard: can't write the key from stdin to {arguments.key_file}: {error}")
    if not command:
        sys.exit("kvferry guard: there is no command to run; give it after --")
    try:
        guard = Guard(command, arguments.grace, arguments.silence, arguments.stdin, arguments.key_file)
    except OSError as error:
        sys.exit(f"kvferry guard: can't run {command[0]}: {error.strerror or error}")
    sys.exit(guard.run())


if __name__ == "__main__":
    main()
