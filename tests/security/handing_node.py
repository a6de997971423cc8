"""A node with a worker and memory in place of an engine, as a prefill or decode server has it.

For each line of JSON on its stdin it prints one: `{"prefill": NUMBER}` computes a prompt and answers with the signed
parameters of a hand-off; `{"decode": NUMBER, "params": PARAMS}` loads the prompt's KV and answers how many tokens were
loaded, and whether all their bytes are right; `{"steps": NUMBER}` plans as many steps, one a millisecond, and answers
with the microseconds that each took.
"""

import ctypes
import json
import sys
import time
from typing import Any

from kvferry import _core as core
from kvferry.tickets import HANDOFF, member_of, signer_of

CHUNK_TOKENS, BLOCK_TOKENS, HEAD_DIM, NUM_BLOCKS = 32, 16, 8, 8
PLANE_BYTES = BLOCK_TOKENS * HEAD_DIM * 4
BLOCK_BYTES = 2 * PLANE_BYTES
PROMPT_TOKENS = 64 + 1
BLOCKS = [[3, 1, 4, 6, 5]]


class Node:
    def __init__(self, controller: str, key_file: str, name: str, path: str = "tcp") -> None:
        self._memory = ctypes.create_string_buffer(NUM_BLOCKS * BLOCK_BYTES)
        base, strides = ctypes.addressof(self._memory), (BLOCK_BYTES, PLANE_BYTES, HEAD_DIM * 4, 4)
        layout = core.KvLayout(layers=[("layer", 0, (base, *strides), (base + PLANE_BYTES, *strides))], num_kv_heads=1,
                               head_dim=HEAD_DIM, element_bytes=4, planes=2, block_tokens=BLOCK_TOKENS,
                               num_blocks=NUM_BLOCKS)
        extra = json.dumps({"controller": controller, "cluster_key_file": key_file, "chunk_tokens": CHUNK_TOKENS,
                            "pool_bytes": "16MiB", "advertise_host": "127.0.0.1", "path": path,
                            "load_timeout_ms": 10_000})
        self._name = name
        self._signer = signer_of(key_file)
        self._core = core.SchedulerNode(
            extra_json=extra, engine_id=name, role="kv_both", fingerprint="model", groups=[(BLOCK_TOKENS, 0, False)],
            whole_blocks=False, keeps_state=False, checkpoint_alignment=0, runs_ahead=False, start_timeout_ms=20_000)
        self._worker = core.WorkerNode(extra_json=extra, rank=0, label=name.replace("-", "_"), layouts=[layout])
        self._core.attach_workers([self._worker.handshake()])

    def answer(self, asked: dict[str, Any]) -> Any:
        if "steps" in asked:
            return [self._timed_step() for _ in range(asked["steps"])]
        return self.prefill(asked["prefill"]) if "prefill" in asked else self.decode(asked["decode"], asked["params"])

    def prefill(self, number: int) -> dict[str, Any]:
        name = f"p-{number}"
        self._admit(name, number, handoff=True, source=None)
        done = self._core.finished(name, PROMPT_TOKENS, BLOCKS, False)
        return self._signer.signed(HANDOFF, {
            "remote_engine_id": self._name, "remote_host": self._core.host, "remote_port": self._core.port,
            "remote_request_id": done["handoff_name"], "remote_num_tokens": done["handoff_tokens"],
            "kvferry_fingerprint": "model"})

    def decode(self, number: int, params: dict[str, Any]) -> dict[str, Any]:
        if (why := self._signer.refusal(HANDOFF, params)) is not None:
            return {"loaded": 0, "right": True, "why": why}
        ctypes.memset(self._memory, 0, len(self._memory))
        source = (f"tcp://{params['remote_host']}:{params['remote_port']}", params["remote_request_id"],
                  params["remote_num_tokens"], member_of(params))
        name = f"d-{number}"
        loaded = self._admit(name, number, handoff=False, source=source)
        self._core.finished(name, PROMPT_TOKENS, BLOCKS, False)
        return {"loaded": loaded, "right": self._holds(number, loaded)}

    def _timed_step(self) -> float:
        time.sleep(0.001)
        begin = time.perf_counter()
        self._step([], {}, [])
        return 1e6 * (time.perf_counter() - begin)

    def _admit(self, name: str, number: int, *, handoff: bool, source: tuple[str, str, int, str] | None) -> int:
        """Runs the engine's step for a new request. Returns the number of tokens that were loaded."""
        tokens = [number % 30_000, number // 30_000, *range(2, PROMPT_TOKENS)]
        self._core.add_request(request_id=name, tokens=tokens, num_prompt_tokens=PROMPT_TOKENS, digests=[], extras="",
                               items=[], cacheable=True, handoff=handoff, source=source)
        hit = None
        while hit is None:
            hit, _ = self._core.lookup(name, 0)
            if hit is None:
                self._step([], {}, tokens)
        self._core.allocated(name, hit, BLOCKS)
        count = PROMPT_TOKENS - hit
        self._step([(name, hit, count, BLOCKS)], {name: count}, tokens, computes=number if handoff else None)
        return int(hit)

    def _step(self, admitted: list[Any], scheduled: dict[str, int], tokens: list[int], computes: int | None = None
              ) -> None:
        self._worker.begin_step(self._core.build_step(admitted, [], [], [], set(), scheduled, [],
                                                      lambda _, known: tokens[known:]))
        self._worker.load()
        if computes is not None:
            for at, block in enumerate(BLOCKS[0]):
                ctypes.memmove(ctypes.addressof(self._memory) + block * BLOCK_BYTES, content(computes, at), BLOCK_BYTES)
        self._worker.save()
        if (report := self._worker.take_report()) is not None:
            self._core.worker_report(report)

    def _holds(self, number: int, num_tokens: int) -> bool:
        held = bytes(self._memory)
        return all(held[block * BLOCK_BYTES:(block + 1) * BLOCK_BYTES] == content(number, at)
                   for at, block in enumerate(BLOCKS[0][:num_tokens // BLOCK_TOKENS]))


def content(number: int, block: int) -> bytes:
    return bytes([number % 251, number // 251 % 251, block, 7] * (BLOCK_BYTES // 4))


def main() -> None:
    node = Node(*sys.argv[1:])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(node.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
