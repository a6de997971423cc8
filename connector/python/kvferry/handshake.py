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
    """Sent once by each worker to the scheduler: the address of the rank's pool."""

    payload: bytes


@dataclass
class StepPlan(KVConnectorMetadata):
    """Sent in each step by the scheduler to the workers: the chunks to pack and unpack."""

    payload: bytes


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Sent after a step by the workers to the scheduler: the chunks packed and unpacked. A rank has up to two entries.
    """

    payloads: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(self.payloads + other.payloads)
