"""The objects that vLLM passes between scheduler and worker connectors: opaque bytes, made and read in C++."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: the address of this rank's pool."""

    payload: bytes


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers, each step: the chunks to pack and unpack."""

    payload: bytes


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, after a step: the chunks packed and unpacked, one entry per rank."""

    payloads: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(self.payloads + other.payloads)
