"""The objects that vLLM carries between the connector's halves: opaque bytes, made and read in C++."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: where this rank's pool lies."""

    payload: bytes


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers, each step: what to pack and unpack."""

    payload: bytes


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, after a step: what was packed and unpacked, one entry a rank."""

    payloads: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(self.payloads + other.payloads)
