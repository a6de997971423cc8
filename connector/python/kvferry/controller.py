"""The controller's client: publishes the keys that this node has, looks up the holders of others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from kvferry._core import ControllerClient, KvFerryError

__all__ = ["Client", "Holder", "KvFerryError"]


@dataclass(frozen=True)
class Holder:
    """A node that has keys[0 .. num_full_chunks) of a lookup."""

    engine_id: str
    incarnation: int
    endpoint: str
    num_full_chunks: int
    tier: str  # the slowest of these chunks: gpu, host, disk or remote
    confirmed: bool  # False if reports of this node were lost, until it has sent a new snapshot


class Client:
    """One registered node. A background thread keeps it registered. Threads: any.

    `controller` is a tcp://, ipc://, unix:// or stream:// endpoint, or several of them with commas between. Keys have
    16 bytes. Failures raise KvFerryError with one sentence.
    """

    def __init__(self, controller: str = "tcp://127.0.0.1:14600", *, engine_id: str, namespace: str = "",
                 fingerprint: str, endpoint: str = "tcp://127.0.0.1:1", incarnation: int | None = None) -> None:
        self._core = ControllerClient(controller=controller, engine_id=engine_id, namespace=namespace,
                                      fingerprint=fingerprint, endpoint=endpoint,
                                      incarnation=time.time_ns() if incarnation is None else incarnation)

    def publish(self, keys: Sequence[bytes]) -> None:
        """This node has these chunks. They are sent later if no controller is reachable now."""
        self._core.publish(list(keys))

    def evict(self, keys: Sequence[bytes]) -> None:
        """This node no longer has these chunks."""
        self._core.evict(list(keys))

    def lookup(self, keys: Sequence[bytes], timeout: float = 1.0) -> list[Holder]:
        """Returns the holders of the longest prefix of `keys`, best first. Waits up to `timeout` seconds."""
        return [Holder(*fields) for fields in self._core.lookup(list(keys), timeout)]

    def wait_registered(self, timeout: float = 5.0) -> bool:
        """Returns False if no controller has accepted this node within `timeout` seconds."""
        return self._core.wait_registered(timeout)

    def status(self) -> str:
        """Returns connecting, registered, closed, or "refused: " and the reason."""
        return self._core.status()

    def close(self) -> None:
        """Unregisters this node. A second call does nothing."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
