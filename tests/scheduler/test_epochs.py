"""Weights that a trainer updates while requests run: KV of other weights is never loaded.

The stamps of a model depend on its weights, so an engine that attends to KV of other weights ends the test.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvferry_harness.prompts import prompt

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
STEPS = 12  # most steps between two updates of the cluster


class Traffic:
    """Requests on two nodes which share a few prompts, so that KV goes both ways: by lookups, hand-overs and pushes."""

    def __init__(self, dice: random.Random, engines: list["Engine"]) -> None:
        self.engines = engines
        self.tally: Counter[str] = Counter()
        self._dice = dice
        self._count = 0
        self._prefilled: dict[str, tuple[Engine, Engine, list[int]]] = {}

    def step(self) -> None:
        if self._dice.random() < 0.6:
            self._add()
        for engine in self.engines:
            engine.step()
        for name, (prefill, decode, tokens) in list(self._prefilled.items()):
            if (told := prefill.told[name]).reason is not None and self._dice.random() < 0.5:
                del self._prefilled[name]
                decode.add(f"{name} d", tokens, self._dice.randint(1, 40), params=told.params)

    def finish(self, engine: "Engine") -> None:
        engine.check_done(held_chunks=None)
        for name in ("pulled_chunks_total", "received_chunks_total", "loaded_tokens_total", "resumed_hit_tokens_total"):
            self.tally[name] += int(engine.metrics()[name])
        self.tally["other epoch"] += sum("weights_epoch" in str(call["source"]) for call in engine.log.of("add"))
        self._prefilled = {name: found for name, found in self._prefilled.items() if engine not in found[:2]}

    def _add(self) -> None:
        dice = self._dice
        self._count += 1
        tokens = prompt(dice.randrange(6), dice.choice((64, 130, 200, 260)))
        here, there = dice.sample(self.engines, 2)
        if dice.random() < 0.5:
            here.add(f"r{self._count}", tokens, dice.randint(1, 60))
            return
        node = there.connector._scheduler._node
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if dice.random() < 0.5:
            params["kvferry_push_to"] = f"tcp://{node.host}:{node.port}"
        here.add(f"r{self._count}", tokens, 1, params=params)
        self._prefilled[f"r{self._count}"] = (here, there, tokens)


@pytest.mark.parametrize(("updates", "restarts"), [(100, False), (40, True)], ids=["nodes stay", "nodes restart"])
def test_updates_under_load_leave_no_stale_kv(make_engine: MakeEngine, updates: int, restarts: bool) -> None:
    """With restarts, nodes miss updates, and while one of them is updated, it has been reset as often as the other."""
    dice = random.Random(7)
    space = f"epochs {restarts} {random.getrandbits(64):x}"

    def start(group: str = "") -> "Engine":
        return make_engine(num_blocks=40, pool_chunks=24, extra={"namespace": space, "update_group": group})

    traffic = Traffic(dice, [start(), start()])
    for update in range(1, updates + 1):
        for index in dice.sample(range(2), 2):
            for _ in range(dice.randint(0, STEPS // 2)):
                traffic.step()
            if restarts and update % 10 == index:
                old = traffic.engines[index]
                traffic.finish(old)
                old.shutdown()
                traffic.engines[index] = start(f"late-{update}")
                traffic.tally["restarts"] += 1
                continue  # this node misses the update
            traffic.engines[index].update_weights(f"weights {update}")
    for engine in traffic.engines:
        traffic.finish(engine)
    print(dict(traffic.tally))
    for happens in ("loaded_tokens_total", "other epoch", *(["restarts"] if restarts else ["pulled_chunks_total"])):
        assert traffic.tally[happens] > 0, f"no {happens}"


def test_a_node_that_started_later_does_not_pair_by_its_count(make_engine: MakeEngine) -> None:
    """Both nodes were reset once, but for different updates."""
    first, late = make_engine(), make_engine(extra={"update_group": "late"})
    first.update_weights("weights 1")
    late.update_weights("weights 2")
    first.add("p", prompt(1, 200), 1, params={"do_remote_decode": True})
    first.run()
    late.add("d", prompt(1, 200), 5, params=first.told["p"].params)
    late.run()
    endpoint, reason, *_ = late.log.of("add", "d")[-1]["source"]
    assert not endpoint
    assert "weights_epoch" in reason
    late.check_done()


def test_before_the_first_reset_groups_share(make_engine: MakeEngine) -> None:
    first, late = make_engine(), make_engine(extra={"update_group": "late"})
    first.add("p", prompt(1, 200), 1, params={"do_remote_decode": True})
    first.run()
    late.add("d", prompt(1, 200), 5, params=first.told["p"].params)
    late.run()
    assert late.log.of("add", "d")[-1]["source"][0]
    late.check_done()
