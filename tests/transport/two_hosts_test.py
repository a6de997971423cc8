"""Tests a transport between two hosts, which are network namespaces of this machine: its bytes, a slow cable, a long
cable, a cut cable, and a peer that dies, restarts or stops.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import BIN, Program, TwoHosts

EVERY_BACKEND = pytest.mark.parametrize("make_link", ["tcp", "ucx_one_sided", "ucx_packed"], indirect=True)
"""Not used by tests that cut the cable or stop the peer: over UCX, a put that was given up may still arrive when the
cable is mended.
"""
MEMORY = 8 << 20
SILENCE_S = 2.0
"""The default of CommonOptions::silence_ns."""
SLACK_S = 10.0
"""Added to deadlines: the promise is 1 s, but this machine may be busy."""
OK, PEER_LOST = "0", "6"


class Link:
    """A driver on the near host, and its peer on the far host."""

    def __init__(self, backend: str, hosts: TwoHosts) -> None:
        self.backend, self.hosts = backend, hosts
        # Otherwise UCX would notice that both ends are on one machine, and move bytes through its memory.
        self._environment = {"UCX_NET_DEVICES": "cable", "UCX_TLS": "tcp"}
        self.driver = hosts.near.start(BIN / "host_driver", backend, str(MEMORY), environment=self._environment)
        self.memory = self.driver.read_line().split(" ")[1]
        self.restart_peer()

    def restart_peer(self) -> None:
        self.peer: Program = self.hosts.far.start(BIN / "remote_process", self.memory, self.backend,
                                                  environment=self._environment)
        self._ready = self.peer.read_line()
        assert self._ready.startswith("ready ")
        self.connect()

    def connect(self) -> str:
        return self.driver.ask(f"peer {self._ready.removeprefix('ready ')}")[1]

    def start_move(self, direction: str, num_ranges: int, bytes_max: int, note: str = "-") -> str:
        return self.driver.ask(f"move {direction} {num_ranges} {bytes_max} {note}")[1]

    def move(self, direction: str, num_ranges: int, bytes_max: int) -> int:
        """Runs one transfer, verifies it and its notification, and returns its milliseconds."""
        transfer = self.start_move(direction, num_ranges, bytes_max, f"note-{direction}-{num_ranges}")
        _, done, code, ms, bytes_are = self.driver.ask("await")
        assert (done, code, bytes_are) == (transfer, OK, "equal")
        kind, _, body = self.peer.read_line().split(" ")
        assert (kind, bytes.fromhex(body).decode()) == ("note", f"note-{direction}-{num_ranges}")
        return int(ms)

    def move_both_ways(self) -> dict[str, int]:
        return {f"{direction} of {num_ranges} ranges of up to {bytes_max} bytes":
                self.move(direction, num_ranges, bytes_max)
                for direction in ("pull", "push") for num_ranges, bytes_max in ((1, 100), (1500, 4096), (7, 1 << 20))}

    def lose(self, transfer: str) -> float:
        """Waits until a transfer fails because its peer is lost. Returns the seconds."""
        start = time.monotonic()
        _, done, code, _, _ = self.driver.ask("await")
        assert (done, code) == (transfer, PEER_LOST)
        return time.monotonic() - start


MakeLink = Callable[..., Link]


def make_hosts(delay_ms: float = 0) -> TwoHosts:
    """Makes two hosts. Skips the test if this machine can't have them."""
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"two hosts need {tool}, which is not installed")
    try:
        return TwoHosts(delay_ms)
    except OSError as error:
        pytest.skip(f"this system lets nobody make network namespaces: {error}")


@pytest.fixture
def make_link(request: pytest.FixtureRequest) -> Iterator[MakeLink]:
    """Yields make_link(delay_ms), which makes two hosts and a transport between them. `window_bytes`: limit on the
    window of each TCP connection.
    """
    usual = getattr(request, "param", "tcp")
    made: list[TwoHosts] = []

    def make(delay_ms: float = 0, backend: str = usual, window_bytes: int | None = None) -> Link:
        made.append(make_hosts(delay_ms))
        if window_bytes is not None:
            made[-1].limit_windows(window_bytes)
        return Link(backend, made[-1])

    yield make
    for hosts in made:
        hosts.close()


@EVERY_BACKEND
def test_bytes_move_both_ways(make_link: MakeLink) -> None:
    link = make_link()
    before = link.hosts.sent_bytes()
    link.move_both_ways()
    for host, (sent, at_first) in enumerate(zip(link.hosts.sent_bytes(), before, strict=True)):
        assert sent - at_first > 4 << 20, f"host {host} moved its bytes by another way than the cable"


def test_a_slow_cable_carries_the_same_bytes(make_link: MakeLink) -> None:
    link = make_link()
    link.hosts.limit("200mbit")
    for what, ms in link.move_both_ways().items():
        print(f"{link.backend} at 200 Mbit/s: {what} took {ms} ms")


def test_a_long_cable_carries_the_same_bytes(make_link: MakeLink) -> None:
    link = make_link(delay_ms=1)
    link.move_both_ways()  # opens the TCP windows
    for what, ms in link.move_both_ways().items():
        assert ms >= 2 or what.startswith("push")  # 1 ms for the request and 1 ms for the bytes
        print(f"{link.backend} with 1 ms delay each way: {what} took {ms} ms")


def test_several_connections_hide_the_delay(make_link: MakeLink) -> None:
    """A connection moves one window per round trip, however fast the cable is."""
    ms: dict[str, int] = {}
    for backend in ("tcp1", "tcp"):
        link = make_link(delay_ms=5, backend=backend, window_bytes=128 << 10)
        link.move("pull", 7, 1 << 20)  # opens the connections
        ms[backend] = min(link.move(direction, 7, 1 << 20) for direction in ("pull", "push", "pull", "push"))
    print(f"3.5 MiB with 5 ms delay each way: {ms['tcp1']} ms over one connection, {ms['tcp']} ms over four")
    assert ms["tcp"] < ms["tcp1"]


def test_a_cut_cable_loses_the_peer_and_a_mended_one_finds_it_again(make_link: MakeLink) -> None:
    link = make_link()
    link.move("pull", 7, 1000)
    link.hosts.limit("20mbit")  # slow, so that the cut comes in the middle of the transfer
    for direction in ("pull", "push"):
        transfer = link.start_move(direction, 7, 1 << 20)
        time.sleep(0.2)
        link.hosts.cut()
        assert link.lose(transfer) < SILENCE_S + SLACK_S
        link.hosts.mend()
        link.connect()
        link.move(direction, 7, 1000)


@EVERY_BACKEND
def test_a_restarted_peer_is_reached_by_the_same_transport(make_link: MakeLink) -> None:
    link = make_link()
    for _ in range(3):
        link.move("push", 7, 1 << 20)
        first = link.connect()
        transfer = link.start_move("push", 7, 1 << 20)
        link.peer.kill()
        _, done, code, _, _ = link.driver.ask("await")
        assert done == transfer
        assert code in (OK, PEER_LOST)
        link.restart_peer()
        assert link.connect() != first
        link.move("pull", 7, 1 << 20)


def test_a_stopped_peer_is_lost_and_leaves_the_memory_alone(make_link: MakeLink) -> None:
    link = make_link()
    link.hosts.limit("20mbit")
    link.move("pull", 7, 1000)
    transfer = link.start_move("pull", 7, 1 << 20)
    time.sleep(0.2)
    link.peer.stop()
    assert link.lose(transfer) < SILENCE_S + SLACK_S
    assert link.driver.ask("paint") == ["painted"]
    link.peer.go_on()
    time.sleep(1)  # bytes that were on their way arrive
    assert link.driver.ask("look") == ["quiet"]
    link.connect()
    link.move("pull", 7, 1000)


def test_the_benchmark_measures_between_two_hosts(tmp_path: Path) -> None:
    hosts = make_hosts()
    try:
        listener = hosts.near.start(BIN / "kvferry", "bench", "transfer", "--listen", "10.77.0.1:0")
        address = listener.read_line().split(";")[0].split()[-1]
        before = hosts.sent_bytes()
        done = subprocess.run(
            hosts.far.inside(BIN / "kvferry", "bench", "transfer", "--connect", address, "--path", "tcp",
                             "--block-bytes", "64KiB", "--blocks", "16", "--repeat", "1", "--json",
                             tmp_path / "rows.json"),
            capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        sent = [now - at_first for now, at_first in zip(hosts.sent_bytes(), before, strict=True)]
    finally:
        hosts.close()
    rows = [row for row in json.loads((tmp_path / "rows.json").read_text())["rows"] if row["engine"] == "kvferry"]
    assert {(row["op"], row["path"]) for row in rows} == {("push", "tcp"), ("pull", "tcp")}
    assert all(row["verified"] is True for row in rows)
    # There are two requests of 1 MiB each: one that counts, and one before it that does not. Pulls read from near.
    assert min(sent) > 2 << 20, "the bytes took another way than the cable"
