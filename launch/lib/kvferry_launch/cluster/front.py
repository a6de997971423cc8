"""Starts the router of a deployment, announces the workers to a vllm-router, and reports when the router answers.

A vllm-router 0.1.17 that was started with the URLs of its workers accepts no new workers. With
--vllm-discovery-address instead, the router listens for workers that announce themselves. The router uses a worker from
the first announcement until 5 s after the last one, so this program announces every worker once a second.
"""

import argparse
import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

from kvferry_launch.cluster.plan import OWN_TOOLS
from kvferry_launch.node import serving
from kvferry_launch.process import _die_with_parent, free_port, shell_status

ANNOUNCE_EVERY_S = 1.0
END_WITHIN_S = 3.0  # time from SIGTERM to SIGKILL; without a limit, a router may wait for idle connections to close
LETTERS = {"prefill": "P", "decode": "D"}
POLICY = ("--policy", "round_robin")  # no decode server is preferred, because each can pull every chunk


class Announcer:
    """Announces the workers to vllm-router. `address`: HOST:PORT at which the router listens for announcements. The
    router expects the announcements of each worker on a ZeroMQ connection of its own.
    """

    def __init__(self, address: str) -> None:
        import zmq  # imported here, because only vllm-router needs pyzmq, which is installed with vLLM

        self._context = zmq.Context()
        self._dealer = zmq.DEALER
        self._address = address
        self._sockets: dict[str, Any] = {}

    def announce(self, workers: dict[str, list[str]]) -> None:
        urls = {url for several in workers.values() for url in several}
        for url in set(self._sockets) - urls:
            self._sockets.pop(url).close(linger=0)
        for role, several in workers.items():
            for url in several:
                if url not in self._sockets:
                    self._sockets[url] = self._context.socket(self._dealer)
                    self._sockets[url].linger = 0  # close() must not wait for a router that has ended
                    self._sockets[url].connect(f"tcp://{self._address}")
                place = url.removeprefix("http://")
                with contextlib.suppress(Exception):  # if the socket's queue is full, this announcement is lost
                    self._sockets[url].send(packed({"type": LETTERS[role], "http_address": place,
                                                    "zmq_address": place}), flags=1)


def packed(fields: dict[str, str]) -> bytes:
    """Encodes a small map of short texts as MessagePack."""
    def text(value: str) -> bytes:
        return b"\xd9" + bytes([len(value.encode())]) + value.encode()

    return bytes([0x80 | len(fields)]) + b"".join(text(name) + text(value) for name, value in fields.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--advertise-host", required=True)
    parser.add_argument("--controller", required=True, help="HTTP address of the controller")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--command")
    parser.add_argument("rest", nargs=argparse.REMAINDER)


def door_command(arguments: argparse.Namespace, discovery: str) -> list[str]:
    flags = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
    place = ["--host", arguments.host, "--port", str(arguments.port)]
    if arguments.command:
        return [*shlex.split(arguments.command), *place, *flags]
    if arguments.kind == "proxy":
        return [*OWN_TOOLS.script("proxy"), "--controller", arguments.controller, "--namespace",
                arguments.namespace, *place, *flags]
    return [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--vllm-discovery-address",
            discovery, *POLICY, *place, "--prometheus-port", str(free_port()), *flags]


def main(arguments: argparse.Namespace) -> int:
    if arguments.port == 0:
        arguments.port = serving.reserve_port(arguments.host)
    discovery = f"127.0.0.1:{free_port()}"
    announcer = Announcer(discovery) if arguments.kind == "vllm-router" and not arguments.command else None
    command = door_command(arguments, discovery)
    print(shlex.join(command), flush=True)
    door = subprocess.Popen(command, stdin=subprocess.PIPE if arguments.command else subprocess.DEVNULL,
                            preexec_fn=_die_with_parent)
    ending: list[float] = []

    def end(*_: Any) -> None:
        ending.append(time.monotonic())
        door.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    reporter = Reporter(arguments)
    workers: dict[str, list[str]] = {}
    pending, announced_at, is_open = b"", 0.0, True
    while door.poll() is None:
        if ending and time.monotonic() - ending[0] > END_WITHIN_S:
            door.kill()
        ready, _, _ = select.select([0] if is_open else [], [], [], 0.2)
        if ready:
            piece = os.read(0, 65536)
            is_open = bool(piece)
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"workers "):
                    workers = json.loads(line.partition(b" ")[2])
                    announced_at = 0.0
                    if door.stdin is not None:
                        door.stdin.write(line + b"\n")
                        door.stdin.flush()
        if time.monotonic() - announced_at > ANNOUNCE_EVERY_S:
            announced_at = time.monotonic()
            if announcer is not None:
                announcer.announce(workers)
            reporter.look()
    return shell_status(door.returncode)


class Reporter:
    """Prints a line when the router begins to answer health checks, and when the router stops answering them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        is_https = (arguments.kind == "proxy" and not arguments.command
                    and any(flag.startswith("--tls-cert-file") for flag in arguments.rest))
        scheme = "https" if is_https else "http"
        self._url = f"{scheme}://{serving.bracketed(arguments.advertise_host)}:{arguments.port}"
        host = "127.0.0.1" if serving.is_any(arguments.host) else serving.bracketed(arguments.host)
        self._health = f"{scheme}://{host}:{arguments.port}/health"
        self._is_up = False

    def look(self) -> None:
        is_up = serving.answers(self._health)
        if is_up != self._is_up:
            self._is_up = is_up
            print(f"kvferry router node {'serves' if is_up else 'does not answer'} at {self._url}", flush=True)
