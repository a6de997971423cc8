"""Feeds the KV events of simulated pools to Dynamo's radix tree, and compares what it answers with the truth."""

import argparse
import json
import random
import sys
import time
from typing import Any

import msgspec
from kvferry_launch.setup.commands import SetupError
from kvferry_launch.setup.dynamo import ensure_dynamo
from simulated_pool import BLOCK_TOKENS, Node, SimulatedPool, make_nodes


class Indexer:
    """Dynamo's radix tree, which gets events as its routers do: decoded from the bytes that vLLM publishes."""

    def __init__(self, nodes: list[Node]) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq
        from vllm.distributed.kv_events import KVEventBatch

        self._tree = RadixTree()
        self._num_events = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._make_batch = KVEventBatch
        self._hash_tokens = compute_block_hash_for_seq
        self._queries = {node.key: compute_block_hash_for_seq(list(node.request.all_token_ids), BLOCK_TOKENS)
                         for node in nodes}

    def take(self, worker: int, events: list[Any]) -> None:
        sent = self._encoder.encode(self._make_batch(ts=time.time(), events=events))
        for event in self._decoder.decode(sent).events:
            self._num_events += 1
            told = {"event_id": self._num_events, "data": self._data(event)}
            self._tree.apply_event(worker, json.dumps(told).encode())

    def _data(self, event: Any) -> Any:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            return "cleared"
        assert event.medium == "CPU", event
        hashes = event.block_hashes
        if kind == "BlockRemoved":
            return {"removed": {"block_hashes": hashes}}
        assert len(event.token_ids) == len(hashes) * event.block_size == len(event.extra_keys) * BLOCK_TOKENS
        local = self._hash_tokens(event.token_ids, BLOCK_TOKENS)
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in zip(hashes, local, strict=True)]
        return {"stored": {"parent_hash": event.parent_block_hash, "blocks": blocks}}

    def drop(self, worker: int) -> None:
        """Does what a router does that notices the end of a worker."""
        self._tree.remove_worker(worker)

    def find(self, node: Node) -> dict[int, int]:
        """Returns how many blocks of the prompt each worker has."""
        found = self._tree.find_matches(self._queries[node.key]) if self._queries[node.key] else None
        return {worker: depth for (worker, _), depth in found.scores.items() if depth} if found else {}


def prove(num_events: int, seed: int, num_workers: int = 8, num_nodes: int = 4000, capacity: int = 500,
          events_per_query: int = 20) -> tuple[int, int, int, int]:
    """Returns the numbers of events, of queries, of wrong answers, and of answers with blocks that a worker has not."""
    dice = random.Random(seed)
    nodes = make_nodes(dice, num_nodes)
    indexer = Indexer(nodes)
    pools = {worker: SimulatedPool(dice, nodes, capacity) for worker in range(num_workers)}
    dead: set[int] = set()
    events = queries = wrong = stale = 0

    def ask(node: Node) -> None:
        nonlocal queries, wrong, stale
        queries += 1
        found = indexer.find(node)
        for worker, pool in pools.items():
            true = 0 if worker in dead else pool.num_held(node.prompt_blocks)
            wrong += found.get(worker, 0) < true
            stale += found.get(worker, 0) > true

    while events < num_events:
        worker = dice.randrange(num_workers)
        if dice.random() < 0.0005:  # killed; its router may notice it at once, or not before the next process speaks
            if dice.random() < 0.5:
                indexer.drop(worker)
                dead.add(worker)
                for _ in range(10):
                    ask(dice.choice(nodes))
                dead.discard(worker)
            pools[worker] = SimulatedPool(dice, nodes, capacity)
        told = pools[worker].step()
        if not told:
            continue
        indexer.take(worker, told)
        events += len(told)
        while queries * events_per_query < events:
            ask(dice.choice(nodes))
    for worker in pools:
        indexer.drop(worker)
        dead.add(worker)
        for node in nodes[:: num_workers]:
            ask(node)
    return events, queries, wrong, stale


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/events/run", description="Feed the KV events of pools that are filled, emptied, reset and killed "
        "at random to Dynamo's radix tree (ai-dynamo-runtime, which is installed into build/dynamo), and compare each "
        "answer with what the pools hold. The last line counts events, queries, answers that lack blocks (wrong) and "
        "answers with blocks that a worker does not have (stale).")
    parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="number of events (1000000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the pools (1)")
    chosen = parser.parse_args(arguments)
    if chosen.events < 1:
        parser.error(f"--events is {chosen.events}; allowed: 1 and more")
    try:
        sys.path.append(str(ensure_dynamo()))
    except SetupError as error:
        print(f"tests/events/run: {error}", file=sys.stderr)
        return 1
    begun = time.monotonic()
    events, queries, wrong, stale = prove(chosen.events, chosen.seed)
    print(f"seed {chosen.seed}, {time.monotonic() - begun:.0f} s")
    print(f"{events} events, {queries} queries, {wrong} wrong, {stale} stale")
    return 1 if wrong or stale else 0
