"""Measures Mooncake's transfer engine over TCP. The two engines find each other by address (P2PHANDSHAKE).

A request is one batch transfer with a notification.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
from bench_worker import Engine, Job, main, make_memory
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

SCRATCH_BYTES = 4096


class MooncakeEngine(Engine):
    def __init__(self, spec: dict[str, Any], memory: np.ndarray) -> None:
        super().__init__(spec, memory)
        self.engine = TransferEngine()
        if self.engine.initialize(spec["host"], "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError(f"Mooncake's transfer engine did not start at {spec['host']}")
        self.scratch = make_memory(SCRATCH_BYTES, "foreign")
        for part in (memory, self.scratch):
            if self.engine.register_memory(part.ctypes.data, part.nbytes) != 0:
                raise RuntimeError(f"Mooncake could not register {part.nbytes} bytes of memory")

    def address(self) -> dict[str, Any]:
        return {"name": f"{self.spec['host']}:{self.engine.get_rpc_port()}", "base": self.memory.ctypes.data,
                "scratch": self.scratch.ctypes.data}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = peer

    def describe(self) -> str:
        return f"Mooncake {version('mooncake-transfer-engine-non-cuda')} over TCP"

    def prepare(self, job: Job) -> None:
        self.job = job
        self.opcode = TransferOpcode.Write if job.is_push else TransferOpcode.Read
        super().prepare(job)

    def move(self, num_blocks: int) -> None:
        size = self.job.block_bytes
        own = (self.memory.ctypes.data + self.own_order[:num_blocks].astype(np.int64) * size).tolist()
        others = (self.peer["base"] + self.others_order[:num_blocks].astype(np.int64) * size).tolist()
        if self.engine.batch_transfer_sync(self.peer["name"], own, others, [size] * num_blocks, self.opcode,
                                           TransferNotify("bench", "moved")) != 0:
            raise RuntimeError(f"Mooncake's batch transfer of {num_blocks} blocks with {self.peer['name']} failed")

    def new_notifications(self) -> int:
        return len(self.engine.get_notifies())

    def answer(self) -> None:
        self.wait_notified()
        if self.engine.transfer_sync(self.peer["name"], self.scratch.ctypes.data, self.peer["scratch"], 8,
                                     TransferOpcode.Write, TransferNotify("bench", "heard")) != 0:
            raise RuntimeError(f"Mooncake's transfer of the answer to {self.peer['name']} failed")


if __name__ == "__main__":
    main(MooncakeEngine)
