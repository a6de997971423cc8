"""Hosts for a test: network namespaces that a virtual cable joins, and programs in them.

A namespace lives as long as the process that holds it, which ends when its stdin closes. So everything is removed when
the test's process ends, however it ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvferry_launch.paths import RELEASE

BIN = Path(os.environ.get("KVFERRY_BUILD", RELEASE)) / "bin"
RELAY = Path(__file__).with_name("delay_relay.py")
PATIENCE_S = 90.0


class Program:
    """A program with which the test exchanges lines."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, **(environment or {})})
        self._heard = b""

    def read_line(self) -> str:
        """Returns the next line. Fails if no line comes in time."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                assert selector.select(deadline - time.monotonic()), f"{self.process.args} says nothing"
                got = os.read(self.process.stdout.fileno(), 1 << 16)
                assert got, f"{self.process.args} ended with {self.process.wait()}"
                self._heard += got
        line, self._heard = self._heard.split(b"\n", 1)
        return line.decode()

    def ask(self, line: str) -> list[str]:
        """Sends a line, and returns the words of the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        words = self.read_line().split(" ")
        assert words[0] != "error", f"{line[:80]}: {' '.join(words)}"
        return words

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Host:
    """One network namespace."""

    def __init__(self, first: Host | None = None) -> None:
        """`first`: any of the other hosts. Without root rights, the new namespace uses its user namespace."""
        # UCX lists the interfaces in /sys, which shows the interfaces of the namespace in which it was mounted.
        hold = ["-n", "-m", "sh", "-c", "mount -t sysfs kvferry /sys && exec cat"]
        is_root = os.geteuid() == 0
        self._user = [] if is_root else ["-U", "--preserve-credentials"]
        if is_root or first is None:
            command = ["unshare", *([] if is_root else ["-Ur"]), *hold]
        else:
            command = ["nsenter", "-t", first.pid, *self._user, "unshare", *hold]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE)
        self._programs: list[Program] = []
        self.pid = str(self._holder.pid)
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            if self._holder.poll() is not None or time.monotonic() > deadline:
                raise OSError(self._holder.communicate()[1].decode().strip() or "no namespace came about")
            time.sleep(0.01)

    def _is_ready(self) -> bool:
        try:
            is_apart = Path(f"/proc/{self.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
            return is_apart and Path(f"/proc/{self.pid}/comm").read_text().strip() == "cat"
        except OSError:
            return False

    def inside(self, *command: str | Path) -> list[str]:
        return ["nsenter", "-t", self.pid, *self._user, "-n", "-m", *(str(word) for word in command)]

    def run(self, *command: str) -> None:
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def start(self, *command: str | Path, environment: dict[str, str] | None = None) -> Program:
        program = Program(self.inside(*command), environment)
        self._programs.append(program)
        return program

    def join(self, own_name: str, other: Host, others_name: str) -> None:
        """Joins this host to another one by a virtual cable."""
        self.run("ip", "link", "add", own_name, "type", "veth", "peer", "name", others_name, "netns", other.pid)
        self.run("ip", "link", "set", own_name, "up")
        other.run("ip", "link", "set", others_name, "up")

    def close(self) -> None:
        for program in self._programs:
            program.kill()
        self._holder.communicate()


class TwoHosts:
    """Two hosts, `near` and `far`. Each has one interface, `cable`."""

    def __init__(self, delay_ms: float = 0) -> None:
        self.hosts: list[Host] = []
        try:
            self.near = self._add()
            self.far = self._add()
            if delay_ms == 0:
                self.near.join("cable", self.far, "cable")
            else:
                middle = self._add()
                self.near.join("cable", middle, "near")
                self.far.join("cable", middle, "far")
                relay = middle.start(sys.executable, RELAY, str(delay_ms), "near", "far")
                assert relay.read_line() == "ready"
            for number, host in enumerate((self.near, self.far), 1):
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "address", "add", f"10.77.0.{number}/24", "dev", "cable")
        except BaseException:
            self.close()
            raise

    def _add(self) -> Host:
        self.hosts.append(Host(self.hosts[0] if self.hosts else None))
        return self.hosts[-1]

    def sent_bytes(self) -> list[int]:
        """Returns how many bytes near and far have sent over the cable."""
        return [int(subprocess.check_output(host.inside("cat", "/sys/class/net/cable/statistics/tx_bytes")))
                for host in (self.near, self.far)]

    def limit_windows(self, window_bytes: int) -> None:
        for host in (self.near, self.far):
            for which in ("tcp_rmem", "tcp_wmem"):
                host.run("sh", "-c", f"echo 4096 {window_bytes} {window_bytes} > /proc/sys/net/ipv4/{which}")

    def limit(self, rate: str) -> None:
        for host in (self.near, self.far):
            host.run("tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, "burst", "64kb", "latency",
                     "50ms")

    def cut(self) -> None:
        self.far.run("ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        self.far.run("ip", "link", "set", "cable", "up")

    def close(self) -> None:
        for host in reversed(self.hosts):
            host.close()
