"""The controller's client: tells what this node holds, asks who holds what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from kvferry._core import ControllerClient, KvFerryError

__all__ = ["Client", "Holder", "KvFerryError"]


@dataclass(frozen=True)
class Holder:
    """A node that holds keys[0 .. num_full_chunks) of a look-up."""

    engine_id: str
    incarnation: int
    endpoint: str
    num_full_chunks: int
    tier: str  # the slowest of these chunks: gpu, host, disk or remote
    confirmed: bool  # False: word of it was lost and not yet made good


class Client:
    """One node of one or several controllers; a thread of its own keeps it registered. Threads: any.

    `controller` may be tcp://, ipc://, unix:// or stream://, or several with commas between. Keys are 16 bytes each.
    What cannot be done raises KvFerryError with one sentence.
    """

    def __init__(self, controller: str = "tcp://127.0.0.1:14600", *, engine_id: str, namespace: str = "",
                 fingerprint: str, endpoint: str = "tcp://127.0.0.1:1", incarnation: int | None = None) -> None:
        self._core = ControllerClient(controller=controller, engine_id=engine_id, namespace=namespace,
                                      fingerprint=fingerprint, endpoint=endpoint,
                                      incarnation=time.time_ns() if incarnation is None else incarnation)

    def publish(self, keys: Sequence[bytes]) -> None:
        """This node holds them from now on. Kept and sent later where no controller is reachable."""
        self._core.publish(list(keys))

    def evict(self, keys: Sequence[bytes]) -> None:
        """This node holds them no more."""
        self._core.evict(list(keys))

    def lookup(self, keys: Sequence[bytes], timeout: float = 1.0) -> list[Holder]:
        """Who holds the longest prefix of them, best first. Waits up to `timeout` seconds, for the controller too."""
        return [Holder(*fields) for fields in self._core.lookup(list(keys), timeout)]

    def wait_registered(self, timeout: float = 5.0) -> bool:
        """False: no controller took this node within `timeout` seconds."""
        return self._core.wait_registered(timeout)

    def status(self) -> str:
        """connecting, registered, closed, or "refused: " and the reason."""
        return self._core.status()

    def close(self) -> None:
        """Says goodbye; the controller forgets this node at once. A second time does nothing."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
