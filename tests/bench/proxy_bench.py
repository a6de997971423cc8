#!/usr/bin/env python3
"""Measures launch/proxy in front of stand-in servers, which answer at once: short completions per second of one core,
the time that the proxy adds at a fixed rate, and how long one long body stops all other requests. The proxy has one
core, the clients and the stand-ins have the others.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PATH = "/v1/completions"
CLIENTS = 16
ADDED_MS_MAX = 5.0  # the proxy must not add more to p99
REPEAT = 5
LONG_BYTES = (8 << 20) - 1000
SHORT = {"model": "m", "prompt": list(range(32)), "max_tokens": 16, "temperature": 0}
LONG = {"numbers": "1234567", "digits": "1", "empty lists": "[]", "objects": '{"a":1}'}


class StandIn(asyncio.Protocol):
    """Answers each request on its connection with the JSON that `answer` makes of the request's path."""

    def __init__(self, answer: Callable[[str], object]) -> None:
        self._answer = answer
        self._received = bytearray()
        self._missing = 0  # bytes of the request that have not come yet; 0: its head has not come whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._received += data
            head, end, body = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            self._path = head.split(b" ", 2)[1].decode()
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            self._missing = int(length or 0) - len(body)
        if self._missing <= 0:
            body = json.dumps(self._answer(self._path)).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                                  % len(body) + body)
            self._received.clear()
            self._missing = 0


async def serve(answer: Callable[[str], object]) -> str:
    server = await asyncio.get_running_loop().create_server(lambda: StandIn(answer), "127.0.0.1", 0)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def stand_ins() -> tuple[str, str, str]:
    """Returns the URLs of a controller, a prefill and a decode server."""
    prefill = await serve(lambda _: {"choices": [], "kv_transfer_params": {"do_remote_prefill": True,
                                                                          "remote_host": "10.0.0.1"}})
    decode = await serve(lambda _: {"id": "x", "choices": [{"index": 0, "text": "some text"}]})
    nodes = [{"namespace": "default", "engine_id": name, "role": role, "serves": url, "endpoint": f"tcp://{name}"}
             for name, role, url in (("p0", "kv_producer", prefill), ("d0", "kv_consumer", decode))]
    pair = {"prefill": {"engine_id": "p0"}, "decode": {"engine_id": "d0"}, "skip_prefill": False}
    controller = await serve(lambda path: pair if path == "/pair" else {"uptime_ms": 1, "nodes": nodes})
    return controller, prefill, decode


class Client:
    """One connection that is kept. Errors: RuntimeError if the answer is not 200."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes = b"") -> None:
        reader, writer = self._streams = self._streams or await asyncio.open_connection(self._host, int(self._port))
        method = "POST" if body else "GET"
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        if b" 200 " not in head.split(b"\r\n")[0]:
            status = head.split(b"\r\n")[0].decode()
            raise RuntimeError(f"{self._host}:{self._port} answered {path} with '{status}', not with status 200")


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def per_core(url: str, pid: int, seconds: float) -> tuple[float, float]:
    """Returns the short completions per second of the proxy's processor time, and per second."""
    end = time.monotonic() + seconds
    body = json.dumps(SHORT).encode()

    async def client() -> int:
        one, count = Client(url), 0
        while time.monotonic() < end:
            await one.ask(PATH, body)
            count += 1
        return count

    before, begin = processor_s(pid), time.monotonic()
    count = sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))
    return count / (processor_s(pid) - before), count / (time.monotonic() - begin)


async def times_ms(urls: list[str], rate: float, seconds: float) -> list[float]:
    """Asks the servers one after the other, `rate` times a second, whether or not the answers before have come. Returns
    p50 and p99 of the times from when each was due.
    """
    free: list[list[Client]] = []
    body = json.dumps(SHORT).encode()
    first = time.monotonic() + 0.1

    async def ask(number: int) -> float:
        due = first + number / rate
        await asyncio.sleep(due - time.monotonic())
        clients = free.pop() if free else [Client(url) for url in urls]
        for one in clients:
            await one.ask(PATH, body)
        free.append(clients)
        return (time.monotonic() - due) * 1e3

    found = sorted(await asyncio.gather(*(ask(number) for number in range(int(rate * seconds)))))
    return [found[int(share * len(found))] for share in (0.5, 0.99)]


async def stop_ms(url: str, entry: str) -> float:
    """Returns the longest wait for /health while a long list of `entry` is a prompt; the least of several tries."""
    value = ",".join([entry] * (LONG_BYTES // (len(entry) + 1)))
    body = f'{{"model": "m", "max_tokens": 1, "prompt": [{value}]}}'.encode()
    found = []
    for _ in range(REPEAT):
        long = asyncio.create_task(Client(url).ask(PATH, body))
        health, longest = Client(url), 0.0
        while not long.done():
            begin = time.monotonic()
            await health.ask("/health")
            longest = max(longest, time.monotonic() - begin)
            await asyncio.sleep(0.001)
        await long
        found.append(longest * 1e3)
    return min(found)


async def measure(proxy: str, more: list[str], seconds: float, rate: float) -> None:
    controller, prefill, decode = await stand_ins()
    process = await asyncio.create_subprocess_exec(
        sys.executable, proxy, "--port", "0", "--controller", controller, "--no-log-requests", *more,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(process.pid, {first})
        os.sched_setaffinity(0, others)
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        await asyncio.sleep(1.0)  # until the servers' /health has answered
        await per_core(url, process.pid, 1.0)
        rates = [await per_core(url, process.pid, seconds) for _ in range(REPEAT)]
        of_processor, of_clock = ([rate[part] for rate in rates] for part in (0, 1))
        print(f"short completions per second of the proxy's processor time: {statistics.median(of_processor):.0f} "
              f"({min(of_processor):.0f} to {max(of_processor):.0f}); per second, with {CLIENTS} clients and the "
              f"stand-ins on other cores: {statistics.median(of_clock):.0f}")
        without = await times_ms([prefill, decode], rate, 2 * seconds)
        through = await times_ms([url], rate, 2 * seconds)
        for name, direct, proxied in zip(("p50", "p99"), without, through, strict=True):
            allowed = f" (at most {ADDED_MS_MAX:.0f} ms are allowed)" if name == "p99" else ""
            print(f"{name} at {rate:.0f} requests per second: {proxied:.2f} ms through the proxy, {direct:.2f} ms "
                  f"without it, {proxied - direct:.2f} ms more{allowed}")
        for name, entry in LONG.items():
            print(f"longest stop while 8 MiB of {name} come: {await stop_ms(url, entry):.0f} ms")
    finally:
        process.kill()
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each part of the measurement, in seconds")
    parser.add_argument("--rate", type=float, default=200.0,
                        help="requests per second while the time that the proxy adds is measured")
    parser.add_argument("--proxy", default=str(REPO / "launch" / "proxy"),
                        help="program of the proxy to measure, which may be in another checkout")
    parser.add_argument("more", nargs="*", help="options of the proxy, after --")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.proxy, arguments.more, arguments.seconds, arguments.rate))


if __name__ == "__main__":
    main()
