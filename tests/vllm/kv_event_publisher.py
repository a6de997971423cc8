"""Runs vLLM's own publisher of KV events in a process. Each command is one line of JSON on stdin; the program prints a
line when the command is done.

python kv_event_publisher.py ENDPOINT REPLAY_ENDPOINT BUFFER_STEPS FORM; FORM: vllm, or sglang (events as SGLang
declares them).
"""

import json
import sys
import time
from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)


class SglangBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    # SGLang names this field attn_dp_rank; the publisher here needs the name data_parallel_rank
    data_parallel_rank: int | None = None


class SglangEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class SglangStored(SglangEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class SglangRemoved(SglangEvent, tag="BlockRemoved"):
    block_hashes: list[int]


def as_bytes(value: int) -> bytes:
    return b"\xab" * 24 + value.to_bytes(8, "big")


def main() -> None:
    endpoint, replay, steps, form = sys.argv[1:]
    publisher = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay or None, buffer_steps=int(steps))
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        convert = as_bytes if command.get("bytes") else int
        hashes = [convert(value) for value in command.get("hashes", [])]
        parent = None if command.get("parent") is None else convert(command["parent"])
        event: Any
        match command["do"], form:
            case "store", "vllm":
                event = BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=command["tokens"],
                                    block_size=command["block_size"], lora_id=None,
                                    medium=command.get("medium", "GPU"), lora_name=None,
                                    extra_keys=command.get("extra_keys"), group_idx=0,
                                    kv_cache_spec_kind="full_attention")
            case "store", _:
                event = SglangStored(hashes, parent, command["tokens"], command["block_size"], None)
            case "remove", "vllm":
                event = BlockRemoved(block_hashes=hashes, medium=command.get("medium", "GPU"), group_idx=0)
            case "remove", _:
                event = SglangRemoved(hashes)
            case "lose", _:  # the message is numbered and kept for replay, but never sent
                sent = publisher._pub

                class Deaf:
                    def send_multipart(self, _: object) -> None:
                        pass

                publisher._pub = Deaf()
                event = BlockRemoved(block_hashes=hashes, medium="GPU", group_idx=0)
            case _:
                event = AllBlocksCleared()
        batch = SglangBatch(time.time(), [event]) if form == "sglang" else KVEventBatch(ts=time.time(), events=[event])
        publisher.publish(batch)
        if command["do"] == "lose":
            deadline = time.monotonic() + 10
            while publisher._event_queue.unfinished_tasks and time.monotonic() < deadline:
                time.sleep(0.01)
            publisher._pub = sent
        print("done", flush=True)
    publisher.shutdown()


if __name__ == "__main__":
    main()
