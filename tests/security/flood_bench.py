#!/usr/bin/env python3
"""Measures what unknown peers cost a deployment with a key: a controller and two nodes (no engine) that hand KV over.

It compares as long a time without attackers as with them: silent connections to every port, clients that ask the
controller's HTTP API for much and read none of it, and a sender of random bytes to every port at full speed. The
deployment has one core and the attackers have the others. The last line is what must hold: health answers within 1 s,
256 MiB more memory at most, no node lost, no hand-over failed.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from handing_deployment import Deployment, Traffic
from outsiders_test import GREETING, listening_ports

HEALTH_S, MORE_MIB = 1.0, 256


def attack(http: int, ports: list[int], silent: int, deaf: int) -> None:
    """Prints a line once all connections are made, then sends garbage until stdin is closed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = []
    for number in range(silent):
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=1))
            kept[-1].send(GREETING)
    for _ in range(deaf):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", http))
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        kept.append(client)
    print(len(kept), flush=True)
    garbage = random.Random(1).randbytes(1 << 20)
    reader = threading.Thread(target=sys.stdin.read, daemon=True)
    reader.start()
    while reader.is_alive():
        for port in (http, *ports):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2) as peer:
                peer.sendall(garbage)


def rss_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Observer:
    """Measures, for `seconds`, the nodes' steps, hand-overs, health answers and memory."""

    def __init__(self, deployment: Deployment, pids: list[int], seconds: float) -> None:
        end = time.monotonic() + seconds
        self.health_s, self.rss_mib, self.steps_us = list[float](), list[float](), list[float]()
        with Traffic(deployment.prefill, deployment.decode) as traffic:
            while time.monotonic() < end:
                begin = time.monotonic()
                with urllib.request.urlopen(f"http://{deployment.http}/healthz", timeout=20) as answer:
                    assert answer.status == 200
                self.health_s.append(time.monotonic() - begin)
                self.steps_us += deployment.decode.ask({"steps": 50})
                self.rss_mib.append(sum(map(rss_mib, pids)))
        self.num_handed_over, self.failures = traffic.num_handed_over, traffic.failures

    def step_us(self, percent: int) -> float:
        return sorted(self.steps_us)[len(self.steps_us) * percent // 100]

    def text(self) -> str:
        return (f"step p50 {self.step_us(50):.1f} us, p99 {self.step_us(99):.1f} us; "
                f"{self.num_handed_over} hand-overs; health answers within {1e3 * max(self.health_s):.0f} ms; "
                f"{max(self.rss_mib):.0f} MiB")


def measure(silent: int, deaf: int, seconds: float) -> bool:
    own, *others = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        os.sched_setaffinity(0, {own})
        os.environ["KVFERRY_LOG"] = "error"  # a flood is logged, ever more seldom
        deployment = Deployment(Path(folder), ended)
        key_file = deployment.copies[0]
        pids = [deployment.controller.pid, *(node.process.pid for node in deployment.nodes.values())]
        http = int(deployment.http.rpartition(":")[2])
        ports = sorted({port for pid in pids for port in listening_ports(pid)} - {http})
        before = Observer(deployment, pids, seconds)
        print(f"without attackers: {before.text()}", flush=True)
        attacker = subprocess.Popen(
            [sys.executable, __file__, "--attack", json.dumps([http, ports, silent, deaf])], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, others or {own}))
        ended.callback(attacker.kill)
        assert attacker.stdout is not None
        connections = int(attacker.stdout.readline())
        during = Observer(deployment, pids, seconds)
        print(f"with {connections} connections and garbage: {during.text()}", flush=True)
        nodes = json.loads(deployment.status(key_file).stdout)["nodes"]
        more_mib = max(during.rss_mib) - max(before.rss_mib)
        holds = (max(during.health_s) <= HEALTH_S and more_mib <= MORE_MIB and len(nodes) == len(deployment.nodes)
                 and not during.failures and during.num_handed_over > 0)
        growth = 100 * (during.step_us(99) / before.step_us(99) - 1)
        print(f"step p99 {growth:+.0f} %, health within {1e3 * max(during.health_s):.0f} ms, {more_mib:+.0f} MiB, "
              f"{len(nodes)} of {len(deployment.nodes)} nodes, {len(during.failures)} failed hand-overs")
        return holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/security/flood_bench.py", description=__doc__)
    parser.add_argument("--silent", type=int, default=5000, help="silent connections, to all ports (%(default)s)")
    parser.add_argument("--deaf", type=int, default=100, help="HTTP clients that read nothing (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="length of each of both parts (%(default)s)")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        attack(*json.loads(arguments.attack))
        return 0
    return 0 if measure(arguments.silent, arguments.deaf, arguments.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
