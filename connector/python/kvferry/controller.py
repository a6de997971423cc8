"""A client of the controller: publishes the keys of this node's chunks, and looks up which nodes have the chunks of a
list of keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvferry._core import ControllerClient, KvFerryError

__all__ = ["Client", "Holder", "KvFerryError"]


class Holder(NamedTuple):
    """A node that has the chunks of the first num_full_chunks keys of a lookup."""

    engine_id: str
    incarnation: int
    endpoint: str
    num_full_chunks: int
    tier: str  # slowest tier among these chunks: gpu, host, disk or remote
    confirmed: bool  # False if this entry may be out of date, for example after lost reports


class Client(ControllerClient):
    """A node that registers with the controller. A background thread registers it again after a lost connection. Every
    method may be called from any thread.

    `controller` is a tcp://, ipc://, unix:// or stream:// endpoint, or several of them with commas between. A key has
    16 bytes. If the controller has a cluster key, `cluster_key_file` must name a file with that key or a member's key.
    Failures raise KvFerryError with one sentence.
    """

    def __init__(self, controller: str = "tcp://127.0.0.1:14600", *, engine_id: str, namespace: str = "",
                 fingerprint: str, endpoint: str = "tcp://127.0.0.1:1", incarnation: int | None = None,
                 cluster_key_file: str = "") -> None:
        super().__init__(controller=controller, engine_id=engine_id, namespace=namespace, fingerprint=fingerprint,
                         endpoint=endpoint, incarnation=time.time_ns() if incarnation is None else incarnation,
                         cluster_key_file=cluster_key_file)

    def lookup(self, keys: Sequence[bytes], timeout: float = 1.0) -> list[Holder]:
        """Returns at most 64 other nodes that have a prefix of `keys`, best first. Waits up to `timeout` seconds."""
        return [Holder(*fields) for fields in self.lookup_holders(keys, timeout)]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
