"""Redis as a directory: three layouts in a redis-server that this program starts, over loopback TCP.

Requests are encoded before the measured time begins, because a Python client library would take more time than the
server.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from controller_load import LOOKUP_KEYS, NUM_WORKERS, Batch, keys_at
from controller_peer import IN_FLIGHT, Directory, Layout, RemoteDirectory, depths, main, pipelined
from controller_server import answers_at, free_port, start, wait_until

Prepared = tuple[bytes, int]  # a request and the number of its replies


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class RedisDirectory(RemoteDirectory):
    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError("redis-server is not on this machine; install the Debian package redis-server")
        port = free_port()
        self.server = start([binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"])
        wait_until(lambda: answers_at(port), "redis-server to listen")
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = hiredis.Reader()

    def replies(self, count: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < count:
            reply = self.reader.gets()
            if reply is False:
                data = self.socket.recv(1 << 16)
                if not data:
                    raise RuntimeError("redis-server has closed the connection")
                self.reader.feed(data)
            elif isinstance(reply, hiredis.ReplyError):
                raise reply
            else:
                got.append(reply)
        return got

    def version(self) -> str:
        info: bytes = self.lookup((command(b"INFO", b"server"), 1))[0]
        return info.split(b"redis_version:")[1].split()[0].decode()

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> list[Prepared]:
        return [self.request(is_store, worker, keys_at(prefix, position, batch_keys).tolist())
                for worker, prefix, position in some]

    def request(self, is_store: bool, worker: int, keys: list[int]) -> Prepared:
        raise NotImplementedError

    def take(self, prepared: list[Prepared]) -> None:
        """Sends 16 batches at a time and then waits for their replies, as if 16 workers sent at the same time."""
        for begin in range(0, len(prepared), IN_FLIGHT):
            some = prepared[begin:begin + IN_FLIGHT]
            self.socket.sendall(b"".join(request for request, _ in some))
            self.replies(sum(count for _, count in some))

    def lookup(self, prepared: Prepared) -> list[Any]:
        self.socket.sendall(prepared[0])
        return self.replies(prepared[1])

    def lookups_in_flight(self, prepared: Sequence[Prepared], seconds: float) -> int:
        return pipelined(lambda number: self.socket.sendall(prepared[number % len(prepared)][0]),
                         lambda number: self.replies(prepared[number % len(prepared)][1]), seconds)

    def close(self) -> None:
        self.socket.close()
        super().close()


class Sets(RedisDirectory):
    """Keeps a Redis set of workers for each hash."""

    def request(self, is_store: bool, worker: int, keys: list[int]) -> Prepared:
        verb, member = b"SADD" if is_store else b"SREM", b"%d" % worker
        return b"".join(command(verb, b"%016x" % key, member) for key in keys), len(keys)

    def prepare_lookup(self, prefix: int, position: int) -> Prepared:
        keys = keys_at(prefix, position, LOOKUP_KEYS).tolist()
        return b"".join(command(b"SMEMBERS", b"%016x" % key) for key in keys), len(keys)

    def found(self, answer: list[Any]) -> dict[int, int]:
        return depths([{int(member) for member in members} for members in answer])


class Bitmaps(RedisDirectory):
    """Keeps a bitmap of workers for each hash, so that one MGET is a lookup."""

    def request(self, is_store: bool, worker: int, keys: list[int]) -> Prepared:
        number, bit = b"%d" % worker, b"1" if is_store else b"0"
        return b"".join(command(b"SETBIT", b"%016x" % key, number, bit) for key in keys), len(keys)

    def prepare_lookup(self, prefix: int, position: int) -> Prepared:
        keys = keys_at(prefix, position, LOOKUP_KEYS).tolist()
        return command(b"MGET", *(b"%016x" % key for key in keys)), 1

    def found(self, answer: list[Any]) -> dict[int, int]:
        return depths([{worker for worker in range(8 * len(bits or b"")) if bits[worker // 8] >> 7 - worker % 8 & 1}
                       for bits in answer[0]])


class Nodes(RedisDirectory):
    """Keeps a Redis hash for each worker, with a field for each of its keys. A lookup queries all of these hashes."""

    def request(self, is_store: bool, worker: int, keys: list[int]) -> Prepared:
        node = b"node%d" % worker
        if is_store:
            return command(b"HSET", node, *(word for key in keys for word in (b"%016x" % key, b"1"))), 1
        return command(b"HDEL", node, *(b"%016x" % key for key in keys)), 1

    def prepare_lookup(self, prefix: int, position: int) -> Prepared:
        fields = [b"%016x" % key for key in keys_at(prefix, position, LOOKUP_KEYS).tolist()]
        return b"".join(command(b"HMGET", b"node%d" % worker, *fields) for worker in range(NUM_WORKERS)), NUM_WORKERS

    def found(self, answer: list[Any]) -> dict[int, int]:
        found = {worker: next((i for i, value in enumerate(values) if value is None), LOOKUP_KEYS)
                 for worker, values in enumerate(answer)}
        return {worker: depth for worker, depth in found.items() if depth}


def version() -> str:
    server = RedisDirectory()
    try:
        return server.version()
    finally:
        server.close()


def layout(name: str, kind: Callable[[], Directory], notes: str) -> Layout:
    return Layout(f"redis {name}", [kind], notes)


if __name__ == "__main__":
    main(version, [layout("sets", Sets, "a set of workers for each hash, 128 SMEMBERS in a pipeline"),
                   layout("bitmaps", Bitmaps, "a bitmap of workers for each hash, one MGET"),
                   layout("nodes", Nodes, "a Redis hash of keys for each worker, HMGET to all 64 in a pipeline")])
