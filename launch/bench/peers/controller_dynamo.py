"""Dynamo's KV indexer: its radix tree in this process, and its stand-alone indexer with ZeroMQ events and HTTP lookups.

The hash of a block depends on all blocks before it, so every lookup begins at the first key of a prefix.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import zmq
from controller_load import BATCH_KEYS, LOOKUP_KEYS, NUM_WORKERS, Batch, keys_at
from controller_peer import IN_FLIGHT, Directory, Layout, RemoteDirectory, main
from controller_server import answers_at, free_port, start, wait_until
from dynamo._core import RadixTree, compute_block_hash_for_seq

BLOCK_TOKENS = 2  # the two halves of a key are used as the tokens of a block
MODEL = "model"


def parent_of(prefix: int, position: int) -> int | None:
    return int(keys_at(prefix, position - 1, 1)[0]) if position else None


class Tree(Directory):
    any_position = False

    def __init__(self) -> None:
        self.tree = RadixTree()
        self.num_events = 0

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> list[tuple[int, bytes]]:
        return [(worker, self.event(is_store, prefix, position, batch_keys)) for worker, prefix, position in some]

    def event(self, is_store: bool, prefix: int, position: int, batch_keys: int) -> bytes:
        self.num_events += 1
        keys = keys_at(prefix, position, batch_keys).tolist()
        data: dict[str, Any] = {"removed": {"block_hashes": keys}}
        if is_store:
            data = {"stored": {"parent_hash": parent_of(prefix, position),
                               "blocks": [{"block_hash": key, "tokens_hash": key} for key in keys]}}
        return json.dumps({"event_id": self.num_events, "data": data}).encode()

    def take(self, prepared: list[tuple[int, bytes]]) -> None:
        for worker, event in prepared:
            self.tree.apply_event(worker, event)
        self.tree.find_matches([1])  # returns only after the events before it are applied

    def prepare_lookup(self, prefix: int, position: int) -> list[int]:
        return keys_at(prefix, position, LOOKUP_KEYS).tolist()

    def lookup(self, prepared: list[int]) -> Any:
        return self.tree.find_matches(prepared)

    def found(self, answer: Any) -> dict[int, int]:
        return {worker: depth for (worker, _), depth in answer.scores.items()}


class Http:
    """A persistent HTTP connection, over which encoded requests are sent."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""

    def receive(self) -> tuple[int, bytes]:
        while True:
            head, separator, body = self.received.partition(b"\r\n\r\n")
            if separator:
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                if len(body) >= length:
                    self.received = body[length:]
                    return int(head.split()[1]), body[:length]
            data = self.socket.recv(1 << 16)
            if not data:
                raise RuntimeError("Dynamo's indexer has closed the connection")
            self.received += data

    def ask(self, request: bytes) -> bytes:
        self.socket.sendall(request)
        status, body = self.receive()
        if status // 100 != 2:
            raise RuntimeError(f"Dynamo's indexer answered with status {status}: {body[:200].decode(errors='replace')}")
        return body


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


# The messages, each with the worker that sends it; then for each worker the question() about its last message.
Prepared = tuple[list[tuple[int, list[bytes]]], list[tuple[int, int, bytes]]]


class Indexer(RemoteDirectory):
    any_position = False

    def __init__(self) -> None:
        self.port = free_port()
        # The package's __main__ would import packages that the indexer does not need.
        self.server = start([sys.executable, "-c", "import sys; from dynamo._core import run_kv_indexer\n"
                             "run_kv_indexer(sys.argv[1:])", "--port", str(self.port)])
        wait_until(lambda: answers_at(self.port), "Dynamo's indexer to listen")
        self.http = Http(self.port)
        self.num_events = [0] * NUM_WORKERS
        self.workers = [self.worker(number) for number in range(NUM_WORKERS)]

    def worker(self, number: int) -> zmq.Socket[bytes]:
        publisher = zmq.Context.instance().socket(zmq.XPUB)  # XPUB receives a message when the indexer subscribes
        publisher.setsockopt(zmq.SNDHWM, 0)
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        self.http.ask(post("/register", {"instance_id": number, "endpoint": f"tcp://127.0.0.1:{port}",
                                         "model_name": MODEL, "block_size": BLOCK_TOKENS}))
        if not publisher.poll(10_000):
            raise TimeoutError("Dynamo's indexer did not subscribe to a worker's events within 10 s")
        publisher.recv()
        return publisher

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> Prepared:
        last = {told[0]: told for told in some}  # a worker's events arrive in order, so its last event is enough
        return ([(told[0], self.event(is_store, told, batch_keys)) for told in some],
                [self.question(*told) for told in last.values()])

    def question(self, worker: int, prefix: int, position: int) -> tuple[int, int, bytes]:
        """Returns the worker, the number of keys that it has of the prefix after its last event, and the query that
        shows this number.
        """
        # A worker's last event either stores the end of a prefix, after which all keys of the prefix are found, or
        # evicts the start of a prefix, after which none is found.
        depth = position + BATCH_KEYS if position else 0
        return worker, depth, query(keys_at(prefix, 0, max(depth, 1)))

    def event(self, is_store: bool, told: Batch, batch_keys: int) -> list[bytes]:
        worker, prefix, position = told
        keys = keys_at(prefix, position, batch_keys)
        event: list[Any] = ["BlockRemoved", keys.tolist()]
        if is_store:
            event = ["BlockStored", keys.tolist(), parent_of(prefix, position), tokens_of(keys), BLOCK_TOKENS, None]
        number = self.num_events[worker]
        self.num_events[worker] += 1
        return [b"", struct.pack(">Q", number), msgspec.msgpack.encode([0.0, [event], 0])]

    def take(self, prepared: Prepared) -> None:
        messages, questions = prepared
        for worker, message in messages:
            self.workers[worker].send_multipart(message)
        for worker, depth, asked in questions:
            wait_until(lambda worker=worker, depth=depth, asked=asked:
                       scores(self.http.ask(asked)).get(worker, 0) == depth, "Dynamo's indexer to apply an event")

    def prepare_lookup(self, prefix: int, position: int) -> bytes:
        return query(keys_at(prefix, position, LOOKUP_KEYS))

    def lookup(self, prepared: bytes) -> bytes:
        return self.http.ask(prepared)

    def found(self, answer: bytes) -> dict[int, int]:
        return scores(answer)

    def lookups_in_flight(self, prepared: Sequence[bytes], seconds: float) -> int:
        selector = selectors.DefaultSelector()
        connections = [Http(self.port) for _ in range(IN_FLIGHT)]
        num_asked = num_answered = 0
        end = time.perf_counter() + seconds

        def ask(connection: Http) -> None:
            nonlocal num_asked
            connection.socket.sendall(prepared[num_asked % len(prepared)])
            num_asked += 1

        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            ask(connection)
        while num_answered < num_asked:
            for key, _ in selector.select():
                key.data.receive()
                num_answered += 1
                if time.perf_counter() < end:
                    ask(key.data)
        for connection in connections:
            connection.socket.close()
        return num_answered

    def close(self) -> None:
        for publisher in self.workers:
            publisher.close()
        super().close()


def tokens_of(keys: np.ndarray) -> list[int]:
    return keys.view(np.uint32).tolist()


def query(keys: np.ndarray) -> bytes:
    hashes = np.array(compute_block_hash_for_seq(tokens_of(keys), BLOCK_TOKENS), dtype=np.uint64)
    return post("/query_by_hash", {"block_hashes": hashes.view(np.int64).tolist(), "model_name": MODEL})


def scores(answer: bytes) -> dict[int, int]:
    """Returns the number of blocks found for each worker, converted from the indexer's counts of tokens."""
    return {int(worker): next(iter(ranks.values())) // BLOCK_TOKENS
            for worker, ranks in json.loads(answer)["scores"].items()}


if __name__ == "__main__":
    main(lambda: version("ai-dynamo-runtime"), [
        Layout("dynamo", [Tree, Indexer], "lookups begin at the start of a prefix; remote: Dynamo's HTTP indexer")])
