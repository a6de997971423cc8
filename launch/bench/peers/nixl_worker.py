"""Measures NIXL with its UCX backend. NIXL is called as vLLM's NixlConnector calls it.

For a job, each worker prepares a list of its own blocks and a list of the other worker's blocks. A request picks blocks
from both lists by index (make_prepped_xfer), is posted, and is polled until it is done. The other worker polls for the
notification. With the setting "default", NIXL runs its progress thread, as it does for users; with "best", it does not.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
from bench_worker import Engine, Job, main, poll_until
from nixl_cu13._api import nixl_agent, nixl_agent_config


class NixlEngine(Engine):
    def __init__(self, spec: dict[str, Any], memory: np.ndarray) -> None:
        super().__init__(spec, memory)
        has_thread = spec["setting"] == "default"
        self.agent = nixl_agent(spec["side"], nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def address(self) -> dict[str, Any]:
        return {"metadata": self.agent.get_agent_metadata().hex(), "base": self.memory.ctypes.data}

    def connect(self, peer: dict[str, Any]) -> None:
        name = self.agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.peer_base = peer["base"]

    def describe(self) -> str:
        return f"NIXL {version('nixl-cu13')}"

    def prepare(self, job: Job) -> None:
        def descriptors(base: int) -> np.ndarray:
            rows = np.zeros((job.num_blocks, 3), dtype=np.uint64)
            rows[:, 0] = np.uint64(base) + np.arange(job.num_blocks, dtype=np.uint64) * np.uint64(job.block_bytes)
            rows[:, 1] = job.block_bytes
            return rows

        self.operation = "WRITE" if job.is_push else "READ"
        self.own = self.agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self.agent.get_xfer_descs(descriptors(self.memory.ctypes.data), "DRAM"))
        self.others = self.agent.prep_xfer_dlist(
            self.peer, self.agent.get_xfer_descs(descriptors(self.peer_base), "DRAM"))
        super().prepare(job)

    def move(self, num_blocks: int) -> None:
        handle = self.agent.make_prepped_xfer(
            self.operation, self.own, self.own_order[:num_blocks], self.others, self.others_order[:num_blocks],
            b"moved")
        state = self.agent.transfer(handle)

        def is_done() -> bool:
            nonlocal state
            if state == "PROC":
                state = self.agent.check_xfer_state(handle)
            return state != "PROC"

        poll_until(is_done, "the end of NIXL's transfer")
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended in the state {state}, not DONE")
        self.agent.release_xfer_handle(handle)

    def new_notifications(self) -> int:
        return sum(len(notes) for notes in self.agent.get_new_notifs().values())

    def answer(self) -> None:
        self.wait_notified()
        self.agent.send_notif(self.peer, b"heard")


if __name__ == "__main__":
    main(NixlEngine)
