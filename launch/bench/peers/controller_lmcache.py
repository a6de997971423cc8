"""LMCache's cache controller: its registry in this process, and its controller manager over ZeroMQ.

LMCache imports torch and transformers, but its controller does not use them. Mock modules replace torch and
transformers, because the real modules take gigabytes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from unittest.mock import MagicMock

os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import msgspec
import zmq
from controller_load import LOOKUP_KEYS, NUM_WORKERS, Batch, keys_at
from controller_peer import Directory, Layout, RemoteDirectory, main, pipelined
from controller_server import free_port, start, wait_until

HOLLOW = ("torch", "transformers")
LOCATION = "LocalCPUBackend"
ASKER = "asker"


def import_controller(name: str) -> Any:
    """Imports a module of LMCache's controller, with mock modules in place of torch and transformers."""
    importlib.import_module("lmcache")  # this import needs no torch
    while True:
        try:
            return importlib.import_module(f"lmcache.v1.cache_controller.{name}")
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing.split(".")[0] not in HOLLOW or missing in sys.modules:
                raise
            sys.modules[missing] = hollow(missing)


def hollow(name: str) -> Any:
    module = MagicMock(name=name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.Tensor = type("Tensor", (), {})
    return module


message = import_controller("message")


def name_of(worker: int) -> str:
    return f"worker{worker}"


class Events:
    """Makes events as LMCache's workers send them. The events of each worker are numbered in sequence."""

    def __init__(self) -> None:
        self.next = [0] * NUM_WORKERS

    def batch(self, is_store: bool, batch: Batch, batch_keys: int) -> Any:
        worker, prefix, position = batch
        first = self.next[worker]
        self.next[worker] += batch_keys
        kind = message.OpType.ADMIT if is_store else message.OpType.EVICT
        return message.BatchedKVOperationMsg(
            instance_id=name_of(worker), worker_id=0, location=LOCATION,
            operations=[message.KVOpEvent(op_type=kind, key=key, seq_num=first + i)
                        for i, key in enumerate(keys_at(prefix, position, batch_keys).tolist())])


def asked_for(prefix: int, position: int, count: int = LOOKUP_KEYS, asker: str = ASKER) -> Any:
    return message.BatchedP2PLookupMsg(hashes=keys_at(prefix, position, count).tolist(), instance_id=asker, worker_id=0)


def found_in(answer: Any) -> dict[int, int]:
    """Returns the holder in the answer, which names only one, although other workers may hold the keys too."""
    return {int(name.removeprefix("worker")): depth for name, _, depth, _ in answer.layout_info if name}


class Registry(Directory):
    def __init__(self) -> None:
        controller = import_controller("controllers").KVController
        self.registry = import_controller("utils").RegistryTree()
        self.controller = controller(self.registry)
        for worker in range(NUM_WORKERS):
            self.registry.register_worker(name_of(worker), 0, "127.0.0.1", 1, f"127.0.0.1:{worker + 1}", None,
                                          time.time())
        self.encoder = Events()

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> list[Any]:
        return [self.encoder.batch(is_store, batch, batch_keys) for batch in some]

    def take(self, prepared: list[Any]) -> None:
        for batch in prepared:
            self.registry.handle_batched_kv_operations(batch)

    def prepare_lookup(self, prefix: int, position: int) -> Any:
        return asked_for(prefix, position)

    def lookup(self, prepared: Any) -> Any:
        try:  # the coroutine never waits, so no event loop is needed
            self.controller.batched_p2p_lookup(prepared).send(None)
        except StopIteration as done:
            return done.value
        raise RuntimeError("LMCache's lookup waited, but this program can only call lookups that return at once")

    def found(self, answer: Any) -> dict[int, int]:
        return found_in(answer)


class Controller(RemoteDirectory):
    def __init__(self) -> None:
        pull, reply = free_port(), free_port()
        self.server = start([sys.executable, __file__, "serve", str(pull), str(reply)])
        context = zmq.Context.instance()
        self.events = context.socket(zmq.PUSH)
        self.events.connect(f"tcp://127.0.0.1:{pull}")
        self.lookups = context.socket(zmq.DEALER)
        self.lookups.connect(f"tcp://127.0.0.1:{reply}")
        self.worker = context.socket(zmq.REP)  # the controller connects to its workers
        port = self.worker.bind_to_random_port("tcp://127.0.0.1")
        for worker in range(NUM_WORKERS):
            self.ask(message.RegisterMsg(instance_id=name_of(worker), worker_id=0, ip="127.0.0.1", port=port,
                                         peer_init_url=f"127.0.0.1:{worker + 1}"))
        self.encoder = Events()

    def ask(self, question: Any) -> Any:
        return msgspec.msgpack.decode(self.lookup(msgspec.msgpack.encode(question)), type=message.Msg)

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> list[tuple[bool, Batch, bytes]]:
        return [(is_store, batch, msgspec.msgpack.encode(self.encoder.batch(is_store, batch, batch_keys)))
                for batch in some]

    def take(self, prepared: list[tuple[bool, Batch, bytes]]) -> None:
        for _, _, batch in prepared:
            self.events.send(batch)
        # Events arrive in order, so waiting for the last event is enough.
        is_store, (_, prefix, position), _ = prepared[-1]

        def is_taken() -> bool:
            answer = self.ask(asked_for(prefix, position, 1))
            return (found_in(answer) != {}) == is_store

        wait_until(is_taken, "LMCache's controller to apply an event")

    def prepare_lookup(self, prefix: int, position: int) -> bytes:
        return msgspec.msgpack.encode(asked_for(prefix, position))

    def lookup(self, prepared: bytes) -> bytes:
        self.lookups.send_multipart([b"", prepared])
        return self.answer()

    def answer(self) -> bytes:
        if not self.lookups.poll(60_000):
            raise TimeoutError("LMCache's controller did not answer within 60 s")
        return self.lookups.recv_multipart()[1]

    def found(self, answer: bytes) -> dict[int, int]:
        return found_in(msgspec.msgpack.decode(answer, type=message.Msg))

    def lookups_in_flight(self, prepared: Sequence[bytes], seconds: float) -> int:
        return pipelined(lambda number: self.lookups.send_multipart([b"", prepared[number % len(prepared)]]),
                         lambda _: self.answer(), seconds)

    def close(self) -> None:
        self.events.close(0)
        self.lookups.close(0)
        self.worker.close(0)
        super().close()


def serve(pull: str, reply: str) -> None:
    """Runs the controller manager as LMCache's own server does, without the HTTP API."""
    import uvloop

    manager = import_controller("controller_manager").LMCacheControllerManager

    async def run() -> None:
        urls = {"pull": f"127.0.0.1:{pull}", "reply": f"127.0.0.1:{reply}", "heartbeat": None}
        await manager(urls, health_check_interval=-1, lmcache_worker_timeout=1 << 20).start_all()

    uvloop.run(run())


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    main(lambda: version("lmcache"), [
        Layout("lmcache", [Registry, Controller], "LMCache's batched_p2p_lookup names only one holder")])
