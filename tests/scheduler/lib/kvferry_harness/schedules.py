"""Random schedules on one engine, or on a prefill and a decode engine. The seed decides everything that happens in a
run.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from kvferry_launch.testbed.servers import Controller
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState

from kvferry_harness.engine import Engine
from kvferry_harness.handing_over import REMOTE_DECODE
from kvferry_harness.setup import EngineSetup
from kvferry_harness.stamps import VOCAB, continuation

_BLOCK = 32
_STEPS = 50


def draw_setup(dice: random.Random, role: str = "kv_both") -> EngineSetup:
    asynchronous = dice.random() < 0.5
    return EngineSetup(
        num_blocks=dice.randint(8, 26), block_tokens=_BLOCK, chunk_tokens=_BLOCK * dice.choice((1, 2, 2, 4)),
        pool_chunks=dice.choice((3, 8, 64)), token_budget=dice.choice((33, 64, 150, 512)),
        max_requests=dice.randint(2, 8), prefix_caching=dice.random() < 0.7, async_scheduling=asynchronous,
        executes_late=asynchronous and dice.random() < 0.5, v2_runner=dice.random() < 0.3,
        policy=dice.choice(("fcfs", "fcfs", "fcfs", "priority")), role=role,
        on_failed_load=dice.choice(("recompute", "recompute", "fail")), reserve_full_prompt=dice.random() < 0.7,
        extra={"save_decode_cache": dice.random() < 0.8, "save_partial_chunks": dice.random() < 0.8},
        num_drafts=0 if asynchronous else dice.choice((0, 0, 3)))


class Schedule:
    """run() steps one of the engines at a time; BrokenError says what was wrong. `tally` counts what happened."""

    def __init__(self, seed: int, config: VllmConfig, controller: Controller, mortal: Controller | None = None) -> None:
        """mortal: a second controller, which dies and returns. Only few schedules use it."""
        self.tally: Counter[str] = Counter()
        self._dice = random.Random(seed)
        dice = self._dice
        self._mortal = mortal if dice.random() < 0.04 else None
        if self._mortal is not None:
            self._mortal.start()
            self._mortal.wait_ready()
        address = (self._mortal or controller).address
        pair = dice.random() < 0.3
        setups = ([draw_setup(dice, "kv_producer"), draw_setup(dice, "kv_consumer")] if pair
                  else [draw_setup(dice, dice.choice(("kv_both", "kv_both", "kv_producer")))])
        if pair and setups[0].chunk_tokens != setups[1].chunk_tokens:
            setups[1] = EngineSetup(**{**vars(setups[1]), "chunk_tokens": setups[0].chunk_tokens})
        late = random.Random(f"late loads {seed}")  # dice of its own, so that the other draws of a seed stay the same
        setups = [replace(setup, late_loads=late.choice((0, 0, 1, 4))) for setup in setups]
        has_whole_blocks = random.Random(f"whole blocks {seed}").random() < 0.25
        # Each schedule has a namespace of its own, because a namespace has only one model, and so that no chunks of
        # earlier schedules are found.
        for setup in setups:
            setup.extra["namespace"] = f"schedule-{seed}-{id(self)}"
            setup.extra["whole_blocks"] = has_whole_blocks
        self.engines = [Engine(config, setup, address) for setup in setups]
        self._pair = pair
        self._corrupts = dice.random() < 0.4
        self._chances = {"add": dice.choice((0.15, 0.4)), "abort": dice.choice((0.0, 0.05, 0.2)),
                         "reset": dice.choice((0.0, 0.03)), "pause": dice.choice((0.0, 0.02))}
        self._most = min((setup.num_blocks - 1) * _BLOCK for setup in setups)
        self._seen: list[list[int]] = []
        self._count = 0
        self._to_decode: dict[str, tuple[list[int], int]] = {}

    def run(self) -> None:
        try:
            for _ in range(_STEPS):
                self._act()
                for engine in self.engines:
                    engine.step()
                self._hand_over()
            self._drain()
        finally:
            for engine in self.engines:
                self.tally["failed loads"] += engine.runner.num_failed_loads
                metrics = engine.metrics()
                for name in ("resumed_total", "resumed_hit_tokens_total", "loaded_tokens_total", "pulled_chunks_total",
                             "evicted_chunks_total", "load_failures_total"):
                    self.tally[name] += int(metrics[name])
                engine.shutdown()
            if self._mortal is not None:
                self._mortal.process.kill()

    def _act(self) -> None:
        dice, engine = self._dice, self._dice.choice(self.engines)
        if dice.random() < self._chances["add"]:
            self._add()
        if dice.random() < self._chances["abort"] and engine.scheduler.requests:
            living = sorted(engine.scheduler.requests)
            victims = dice.sample(living, dice.randint(1, min(2, len(living))))
            engine.abort(*victims, while_executing=dice.random() < 0.5)
            for victim in victims:
                self._to_decode.pop(victim, None)
            self.tally["aborts"] += len(victims)
        if dice.random() < self._chances["reset"]:
            self._reset(engine)
        if dice.random() < self._chances["pause"]:
            engine.scheduler.set_pause_state(dice.choice((PauseState.UNPAUSED, PauseState.PAUSED_NEW,
                                                          PauseState.PAUSED_ALL)))
            self.tally["pauses"] += 1
        elif dice.random() < 0.2:
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        if self._corrupts and dice.random() < 0.15:
            engine.corrupt_chunk(dice.randrange(min(engine.setup.pool_chunks, 12)))
            self.tally["damaged chunks"] += 1
        if self._mortal is not None and dice.random() < 0.05:
            if self._mortal.process.running:
                self._mortal.process.kill()
            else:
                self._mortal.start()
            self.tally["controller deaths and returns"] += 1

    def _reset(self, engine: Engine) -> None:
        running, connector = self._dice.random() < 0.7, self._dice.random() < 0.5
        self.tally["resets"] += 1
        try:
            engine.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError as error:
            # vLLM raises this error to its caller while blocks are still in use, by loads or by frees that wait for a
            # step.
            assert running, error
            self.tally["resets refused"] += 1

    def _add(self) -> None:
        dice = self._dice
        if self._seen and dice.random() < 0.7:
            base = dice.choice(self._seen)
            tokens = base[:len(base) if dice.random() < 0.5 else dice.randint(1, len(base))]
        else:
            tokens = []
        if not tokens or dice.random() < 0.8:
            tokens = tokens + [dice.randrange(1, VOCAB) for _ in range(dice.randint(1, 150))]
        tokens = tokens[:self._most - 10]
        salt = "tenant" if dice.random() < 0.1 else ""
        max_tokens = dice.randint(1, min(80, self._most - len(tokens)))
        stops, priority = dice.random() < 0.2, dice.randint(0, 3)
        self._seen.append(tokens + continuation(tokens, max_tokens, salt))
        self._count += 1
        self.tally["requests"] += 1
        name = f"r{self._count}"
        if self._pair and dice.random() < 0.7:
            self.engines[0].add(name, tokens, 1, salt=salt, priority=priority, params=dict(REMOTE_DECODE))
            self._to_decode[name] = (tokens, max_tokens)
            return
        engine = dice.choice(self.engines)
        engine.add(name, tokens, max_tokens, salt=salt, stops=stops, priority=priority,
                   prompt_logprobs=dice.random() < 0.05)

    def _hand_over(self) -> None:
        for name, (tokens, max_tokens) in list(self._to_decode.items()):
            told = self.engines[0].told[name]
            if told.reason is None:
                continue
            del self._to_decode[name]
            if told.aborted or told.params is None:
                continue
            salt = self.engines[0].salt_of(name)
            self.engines[1].add(f"{name}-d", tokens, max_tokens, salt=salt, params=told.params)
            self.tally["handed over"] += 1

    def _drain(self) -> None:
        for engine in self.engines:
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.engines[0].run()
        self._hand_over()
        for engine in reversed(self.engines):
            engine.check_done(held_chunks=None)
            for name, told in engine.told.items():
                kind = "errors" if told.reason is not None and told.reason.name == "ERROR" else "told"
                self.tally[kind] += 1
                assert kind == "told" or engine.setup.on_failed_load == "fail", name


def summary(tally: Counter[str]) -> dict[str, Any]:
    return dict(sorted(tally.items()))
