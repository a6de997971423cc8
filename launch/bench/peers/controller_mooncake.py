"""Measures Mooncake's master. The workers are 64 store clients in this process. A chunk is an object of one byte.

A batch query names the holders of each object, and batch_is_exist() only says whether there is a holder. The times of
single lookups include the time that Mooncake's client library takes, because the master has no other interface.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mooncake
from controller_load import LOOKUP_KEYS, NUM_WORKERS, PREFIX_KEYS, Batch, keys_at, workers_of
from controller_peer import IN_FLIGHT, Layout, RemoteDirectory, depths, main
from controller_server import answers_at, free_port, start, wait_until
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
CLIENT_TTL_S = 600  # long, because this process is too busy to send the clients' heartbeats in time
KEPT: list[Any] = []


def names_of(prefix: int, position: int, count: int) -> list[str]:
    return [f"{key:016x}" for key in keys_at(prefix, position, count).tolist()]


def endpoints(replicas: Sequence[Any]) -> list[str]:
    return [replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas]


class Master(RemoteDirectory):
    # Each batch of load() has PREFIX_KEYS keys, because load() would take minutes with the default of 32 keys.
    load_keys = PREFIX_KEYS

    def __init__(self) -> None:
        port, metrics_port = free_port(), free_port()
        self.server = start([str(Path(mooncake.__file__).parent / "mooncake_master"), f"--rpc_port={port}",
                             f"--metrics_port={metrics_port}", f"--client_ttl={CLIENT_TTL_S}"])
        wait_until(lambda: answers_at(port), "mooncake_master to listen")
        self.stores = [self.store(port) for _ in range(NUM_WORKERS)]
        self.names = [store.get_hostname() for store in self.stores]
        self.worker_at: dict[str, int] = {}
        for worker, store in enumerate(self.stores):
            name = f"whose-{worker}"
            if store.put_batch([name], [b"x"], self.to([worker])) != 0:
                raise RuntimeError(f"Mooncake did not store the test object {name}")
            [endpoint] = endpoints(store.batch_get_replica_desc([name])[name])
            self.worker_at[endpoint] = worker

    def store(self, port: int) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        code = store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "",
                           f"127.0.0.1:{port}")
        if code != 0:
            raise RuntimeError(f"a client of Mooncake's store did not start: setup() returned {code}")
        return store

    def to(self, workers: list[int]) -> ReplicateConfig:
        config = ReplicateConfig()
        config.replica_num = len(workers)
        config.preferred_segments = [self.names[worker] for worker in workers]
        return config

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> list[Any]:
        """Prepares one call for each batch of objects, by the first of the workers that hold the batch. The call stores
        or removes the batch on all of them.
        """
        prepared = []
        for worker, prefix, position in some:
            workers = workers_of(prefix)
            if worker == workers[0]:
                config = self.to(workers) if is_store else None
                prepared.append((self.stores[worker], names_of(prefix, position, batch_keys), config))
        return prepared

    def take(self, prepared: list[Any]) -> None:
        for store, names, config in prepared:
            if config is None:
                codes = set(store.batch_remove(names))
            else:
                codes = {store.put_batch(names, [b"x"] * len(names), config)}
            if codes != {0}:
                done = "removed" if config is None else "stored"
                raise RuntimeError(f"Mooncake returned the codes {sorted(codes)} when objects were {done}; only 0 is "
                                   "success")

    def prepare_lookup(self, prefix: int, position: int) -> list[str]:
        return names_of(prefix, position, LOOKUP_KEYS)

    def lookup(self, prepared: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
        return prepared, self.stores[0].batch_get_replica_desc(prepared)

    def other_lookups(self) -> dict[str, Any]:
        return {"exist": self.stores[0].batch_is_exist}

    def found(self, answer: tuple[list[str], dict[str, list[Any]]]) -> dict[int, int]:
        names, replicas = answer
        return depths([self.worker_at.get(endpoint, -1) for endpoint in endpoints(replicas.get(name, []))]
                      for name in names)

    def lookups_in_flight(self, prepared: Sequence[list[str]], seconds: float) -> int:
        """Uses 16 clients, because a client can have only one lookup in flight."""
        counts = [0] * IN_FLIGHT
        end = time.perf_counter() + seconds

        def ask(number: int) -> None:
            while time.perf_counter() < end:
                self.stores[number].batch_get_replica_desc(prepared[(number + counts[number]) % len(prepared)])
                counts[number] += 1

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    def close(self) -> None:
        """Does not close the clients, because closing takes a minute for each. The master ends with this process."""
        KEPT.append(self)


if __name__ == "__main__":
    main(lambda: version("mooncake-transfer-engine-non-cuda"), [
        Layout("mooncake", [Master], "lookups are batch queries to Mooncake's master; events are puts and removals of "
               "1-byte objects")])
