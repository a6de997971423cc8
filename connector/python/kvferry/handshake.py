"""The objects that vLLM passes between scheduler and worker connectors. Each contains opaque bytes, made and read in
C++.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.errors import refuse_to_start
from kvferry.served import has_state_parts


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """The message that each worker sends to the scheduler once: its rank, its addresses and the size of its pool.

    has_parts: True if the message says which bytes of the layers' states the rank has (chunk_parts()). order: what
    block_order() says in the worker.
    """

    payload: bytes
    has_parts: bool = False
    order: str = ""


def checked_payloads(hellos: dict[tuple[int, int], WorkerHello], fingerprint: str, order: str) -> list[bytes]:
    """Returns the workers' messages in the order of their ranks. Errors: KvFerryError if a handshake is missing, or if
    workers and scheduler disagree on whether other tensor parallel sizes can read the model's states, or on the order
    of elements in blocks. order: what block_order() says in the scheduler.
    """
    if not all(isinstance(hello, WorkerHello) for hello in hellos.values()):
        refuse_to_start("vLLM's MultiConnector passes on only the handshake of its first connector; list "
                        "KvFerryConnector before the other connectors")
    if any(hello.has_parts != has_state_parts(fingerprint) for hello in hellos.values()):
        refuse_to_start("vLLM tells the scheduler and the workers unlike shapes of the model's states")
    for rank, hello in hellos.items():
        if hello.order != order:
            refuse_to_start(f"the elements of a block are in the order '{hello.order.strip()}' at the worker of rank "
                            f"{rank} and '{order.strip()}' at the scheduler; all hosts of a server need processors of "
                            "one kind")
    return [hellos[rank].payload for rank in sorted(hellos)]


@dataclass
class StepPlan(KVConnectorMetadata):
    """The message that the scheduler sends to the workers in each step: the chunks to pack and unpack."""

    payload: bytes


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """The message that the workers send to the scheduler after a step: the chunks packed and unpacked. A rank has up to
    two entries in `payloads`.
    """

    payloads: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(self.payloads + other.payloads)
