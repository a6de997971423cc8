"""Tests that a subscriber of a real server's KV events (vLLM's publisher over ZeroMQ) knows what its pool holds, also
after resets and after the server was killed and has restarted at the same address.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.process import free_port
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.servers import VllmServer, running_controller

BLOCK, CHUNK, POOL_CHUNKS = 32, 64, 20
CHUNK_BYTES = CHUNK * 4 * 2 * 32 * 2 * 4  # of the toy model: layers, KV heads, head size, K and V, float32
DEADLINE_S, QUIET_S = 30.0, 0.5


class Subscriber:
    """Receives events as routers do, in a thread of its own. Prompts are found by their tokens."""

    def __init__(self, port: int) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._ends = False
        self._heard_at = 0.0
        self.blocks: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # [hash] the hash before it, and the block's tokens
        self.kinds: list[str] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ends:
            if self._socket.poll(100):
                for event in self._decoder.decode(self._socket.recv_multipart()[2]).events:
                    self._take(event)
                self._heard_at = time.monotonic()

    def _take(self, event: Any) -> None:
        self.kinds.append(f"{type(event).__name__} {getattr(event, 'medium', '')}".strip())
        if self.kinds[-1] == "AllBlocksCleared":
            self.blocks.clear()
        elif self.kinds[-1] == "BlockStored CPU":
            parent = event.parent_block_hash
            for index, block in enumerate(event.block_hashes):
                self.blocks[block] = (parent, tuple(event.token_ids[index * BLOCK:(index + 1) * BLOCK]))
                parent = block
        elif self.kinds[-1] == "BlockRemoved CPU":
            for block in event.block_hashes:
                del self.blocks[block]

    def settle(self) -> None:
        """Waits until events have come and no more come."""
        deadline = time.monotonic() + DEADLINE_S
        begun = time.monotonic()
        while self._heard_at < begun - QUIET_S or time.monotonic() < self._heard_at + QUIET_S:
            assert time.monotonic() < deadline, "no events arrive"
            time.sleep(0.02)

    def num_tokens(self, prompt: list[int]) -> int:
        after = {named: block for block, named in self.blocks.items()}
        block, count = None, 0
        while (block := after.get((block, tuple(prompt[count:count + BLOCK])))) is not None:
            count += BLOCK
        return count

    def stop(self) -> None:
        self._ends = True
        self._thread.join()
        self._socket.close(0)


@pytest.fixture
def server(kvferry_connector: KvConnector, toy: Path, run_server: Callable[[VllmServer], VllmServer]
           ) -> Iterator[tuple[VllmServer, Subscriber]]:
    port = free_port()
    with running_controller("events-controller", LOGS / "tests") as controller:
        extra = {"chunk_tokens": CHUNK, "pool_bytes": POOL_CHUNKS * CHUNK_BYTES}
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"}
        made = VllmServer("events", toy, own_cores()[0], kvferry_connector.config("kv_both", controller.address,
                                                                                  extra=extra),
                          ("--kv-events-config", json.dumps(published)), {"VLLM_SERVER_DEV_MODE": "1"},
                          log_folder=LOGS / "tests")
        subscriber = Subscriber(port)
        try:
            run_server(made).wait_ready()
            yield made, subscriber
        finally:
            subscriber.stop()


async def found(server: VllmServer, prompt: list[int]) -> int:
    """Asks the server. Returns how many of the prompt's tokens its pool held."""
    async with VllmClient(server.url) as client:
        answer = await client.generate(prompt, 1, {"kvferry_report": True})
    admission, = (answer.kv_transfer_params or {})["kvferry_report"]["admissions"]
    hit: int = admission["hit"]
    return hit


async def reset(server: VllmServer, query: str = "") -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/reset_prefix_cache{query}") as answer:
        assert answer.status == 200, await answer.text()


def test_a_subscriber_knows_what_a_pool_holds(server: tuple[VllmServer, Subscriber]) -> None:
    one, subscriber = server
    prompts = PromptSet(4711, 8, 4 * CHUNK + 1, 4 * CHUNK + 1).prompts()
    for prompt in prompts:  # more than the pool holds
        assert asyncio.run(found(one, prompt)) == 0
    subscriber.settle()
    assert subscriber.kinds[0] == "AllBlocksCleared"
    assert "BlockRemoved CPU" in subscriber.kinds
    told = []
    for prompt in reversed(prompts):
        asyncio.run(reset(one))  # of vLLM's own cache, so that vLLM tells subscribers to drop all
        told.append(subscriber.num_tokens(prompt))
        assert asyncio.run(found(one, prompt)) == told[-1]
        subscriber.settle()
    assert told[0] == 4 * CHUNK
    assert told[-1] == 0

    asyncio.run(reset(one, "?reset_external=true"))
    assert asyncio.run(found(one, prompts[0])) == 0
    subscriber.settle()
    assert [subscriber.num_tokens(prompt) for prompt in prompts] == [4 * CHUNK] + [0] * 7

    one.process.kill()
    one.start()
    one.wait_ready()
    subscriber.kinds.clear()
    assert asyncio.run(found(one, prompts[1])) == 0
    subscriber.settle()
    assert subscriber.kinds[0] == "AllBlocksCleared"
    assert [subscriber.num_tokens(prompt) for prompt in prompts] == [0, 4 * CHUNK] + [0] * 6
    assert len(subscriber.blocks) == 4 * CHUNK // BLOCK
