"""The objects that vLLM passes between scheduler and worker connectors. Each contains opaque bytes, made and read in
C++.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """The message that each worker sends to the scheduler once: its rank, its addresses and the size of its pool."""

    payload: bytes


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
