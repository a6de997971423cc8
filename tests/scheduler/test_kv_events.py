"""Tests that what a subscriber of vLLM's KV events knows is what the pool and vLLM's own cache hold."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvferry_harness.prompts import prompt

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


class Subscriber:
    """Knows only the events. Fails if an event of the pool does not fit to those before it."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.held: defaultdict[str, set[int]] = defaultdict(set)
        self.kinds: list[str] = []

    def listen(self) -> None:
        for batch in self._engine.event_batches:
            for event in batch.events:
                self._take(event)
        self._engine.event_batches.clear()

    def _take(self, event: Any) -> None:
        kind = type(event).__name__
        self.kinds.append(f"{kind} {getattr(event, 'medium', '')}".strip())
        if kind == "AllBlocksCleared":
            self.held.clear()
            return
        held, blocks = self.held[event.medium], set(event.block_hashes)
        assert len(blocks) == len(event.block_hashes)
        if kind == "BlockStored":
            if event.medium == "CPU":
                assert not held & blocks
                assert event.parent_block_hash is None or event.parent_block_hash in held
                assert len(event.token_ids) == len(blocks) * event.block_size
                assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
            held |= blocks
        else:
            assert event.medium != "CPU" or blocks <= held
            held -= blocks

    def num_held(self, blocks: list[int]) -> int:
        return next((index for index, block in enumerate(blocks) if block not in self.held["CPU"]), len(blocks))


def num_loadable(engine: "Engine", tokens: list[int]) -> int:
    """Returns how many tokens of a prompt that is one token longer the node would load now."""
    node = engine.connector._scheduler._node
    epoch = engine.connector._scheduler._extras.weights_epoch
    node.add_request(request_id="probe", tokens=[*tokens, 1], num_prompt_tokens=len(tokens) + 1, digests=[],
                     extras=f"epoch={epoch}" if epoch else "", items=[], cacheable=True, handoff=False, source=None)
    node.take_named_chunks()
    found, _ = node.lookup("probe", 0)
    node.finished("probe", 0, [], True)
    return found or 0


def check(engine: "Engine", subscriber: Subscriber, prompts: list[list[int]]) -> int:
    """Compares what the subscriber knows of the prompts with the pool. Returns the number of blocks that it has."""
    subscriber.listen()
    loadable = {tuple(engine.block_hashes(tokens)): num_loadable(engine, tokens) // engine.setup.block_tokens
                for tokens in prompts}
    total = 0
    for blocks, true in loadable.items():
        held = subscriber.num_held(list(blocks))
        # A chunk is loaded as a whole: a prompt that differs from it in the chunk has only the blocks before it.
        assert held == true or (held > true and any(
            other[:held] == blocks[:held] and there >= held for other, there in loadable.items())), (held, true)
        total += held
    return total


def check_vllms_own(engine: "Engine", subscriber: Subscriber) -> None:
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

    own = engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    assert subscriber.held["GPU"] == {maybe_convert_block_hash(get_block_hash(block)) for block in own}


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_knows_what_can_be_loaded(make_engine: MakeEngine, async_scheduling: bool, seed: int) -> None:
    """The pool holds ten chunks, so that many are evicted, and caches are reset, vLLM's alone and both."""
    engine = make_engine(kv_events=True, async_scheduling=async_scheduling, pool_chunks=10, num_blocks=40)
    subscriber, dice = Subscriber(engine), random.Random(seed)
    texts: list[list[int]] = []
    asked: list[list[int]] = []
    seen = 0
    for turn in range(40):
        tokens = list(dice.choice(asked)) if asked and dice.random() < 0.5 else []
        texts.append((tokens + prompt(1000 * seed + turn, dice.randrange(33, 300)))[:600])
        engine.add(str(turn), texts[turn], dice.randrange(1, 60))
        if dice.random() < 0.3:
            continue  # runs together with the next one
        engine.run()
        asked = [text + engine.told[str(number)].tokens[:-1] for number, text in enumerate(texts)]
        chance = dice.random()
        if chance < 0.1:
            assert engine.scheduler.reset_prefix_cache()
        elif chance < 0.2:
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        if chance < 0.2:  # vLLM publishes with its next step
            engine.add(f"{turn}-next", prompt(5000 + turn, 20), 1)
            engine.run()
        seen += check(engine, subscriber, asked)
    engine.run()
    check(engine, subscriber, asked)
    check_vllms_own(engine, subscriber)
    assert seen > 100
    assert subscriber.kinds[0] == "AllBlocksCleared"  # nothing of an earlier process at this address is left
    assert subscriber.kinds.count("AllBlocksCleared") > 2
    assert {"BlockStored CPU", "BlockRemoved CPU", "BlockStored GPU"} <= set(subscriber.kinds)
    engine.check_done()


def test_chunks_that_other_nodes_sent_are_told(make_engine: MakeEngine) -> None:
    prefill = make_engine(role="kv_producer")
    decode = make_engine(role="kv_consumer", kv_events=True, prefix_caching=False)
    subscriber = Subscriber(decode)
    prefill.add("p", prompt(1, 200), 1, params={"do_remote_decode": True})
    prefill.run()
    decode.add("d", prompt(1, 200), 1, params=prefill.told["p"].params)
    decode.run()
    assert decode.metrics()["pulled_chunks_total"] == 4
    assert check(decode, subscriber, [prompt(1, 200)]) == 6


def test_a_damaged_chunk_takes_what_follows_it_along(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_events=True, prefix_caching=False)
    subscriber = Subscriber(engine)
    engine.add("a", prompt(1, 256), 1)
    engine.run()
    assert check(engine, subscriber, [prompt(1, 256)]) == 8
    engine.corrupt_chunk(0)
    engine.add("b", prompt(1, 256), 1)
    engine.run()
    check(engine, subscriber, [prompt(1, 256)])
    assert "BlockRemoved CPU" in subscriber.kinds
    engine.add("c", prompt(1, 256), 1)
    engine.run()
    assert check(engine, subscriber, [prompt(1, 256)]) == 8


def test_nothing_is_kept_for_events_that_nobody_wants(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(1, 200), 1)
    engine.run()
    assert engine.event_batches == []
    assert engine.connector._scheduler.events is None
    assert engine.connector.take_events() == ()
    assert engine.connector._scheduler._node.take_named_chunks() == []
    assert engine.connector._scheduler._node.take_pool_changes() == (False, [])


ORDERS = [("RecordingConnector", "IdleConnector"), ("IdleConnector", "RecordingConnector")]


@pytest.mark.parametrize("children", ORDERS, ids=["first", "second"])
def test_events_pass_vllms_multi_connector(make_engine: MakeEngine, children: tuple[str, ...],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry_harness.recorder import IdleConnector
    from vllm.distributed.kv_events import BlockRemoved

    other = BlockRemoved(block_hashes=[b"other"], medium="STORAGE")
    monkeypatch.setattr(IdleConnector, "take_events", lambda self: [other])
    engine = make_engine(multi=children, kv_events=True, pool_chunks=10, num_blocks=40)
    subscriber = Subscriber(engine)
    asked = [prompt(seed, 250) for seed in range(4)]
    for number, tokens in enumerate(asked):
        engine.add(str(number), tokens, 1)
        engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", asked[-1], 1)
    engine.run()
    assert check(engine, subscriber, asked) >= 7
    check_vllms_own(engine, subscriber)
    assert subscriber.kinds.count("AllBlocksCleared") == 2
    assert subscriber.kinds.count("BlockRemoved STORAGE") >= 5
