"""Measures what one tenant can observe of another's prompts. A victim sends one prompt of each pair; a prober looks
both up, in random order, and sees how many tokens were found, and how long that took.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
from vllm.v1.request import Request

from kvferry_harness.engine import Engine
from kvferry_harness.prompts import prompt

PROMPT_TOKENS = 100
_ROUND = 12  # pairs between two visits of the prober; their KV fits into the pool and into vLLM's own cache


@dataclass(frozen=True)
class Observed:
    was_sent: bool
    num_local: int  # tokens that vLLM found in its own prefix cache
    num_external: int  # tokens that kvferry found
    seconds: float  # from the arrival of the request at the scheduler until the number of tokens is known


def probe(victims: Engine, asked: Engine, num_pairs: int, victim: str, prober: str, seed: int,
          wait_published: Callable[[Engine], None]) -> list[Observed]:
    """Returns what the prober sees at the engine `asked`, whatever the engine `victims` has done before. `victim` and
    `prober`: their cache_salt. `wait_published`: waits until other nodes can find what an engine has in its pool.
    """
    dice, seen = random.Random(seed), []
    for first in range(0, num_pairs, _ROUND):
        pairs = range(first, min(first + _ROUND, num_pairs))
        sent = [dice.random() < 0.5 for _ in pairs]  # which prompt of the pair
        for pair, which in zip(pairs, sent, strict=True):
            victims.add(f"victim {pair}", _prompt(seed, pair, which), salt=victim)
        victims.run()
        wait_published(victims)
        asks = [(pair, which) for pair in pairs for which in (False, True)]
        dice.shuffle(asks)
        seen += [_ask(asked, f"prober {pair} {which}", _prompt(seed, pair, which), prober, which == sent[pair - first])
                 for pair, which in asks]
        for engine in (victims, asked):
            engine.log.calls.clear()
    return seen


def _prompt(seed: int, pair: int, which: bool) -> list[int]:
    return prompt(hash((seed, pair, which)), PROMPT_TOKENS)


def _ask(engine: Engine, request_id: str, tokens: list[int], salt: str, was_sent: bool) -> Observed:
    """Looks a prompt up as vLLM's scheduler does for a new request, and aborts the request."""
    began: list[int] = []
    arrive = engine.scheduler.add_request

    def arrived(request: Request) -> None:
        began.append(time.perf_counter_ns())
        arrive(request)

    with mock.patch.object(engine.scheduler, "add_request", arrived):
        engine.add(request_id, tokens, salt=salt)
    request = engine.request(request_id)
    num_local = engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
    num_external, _ = engine.connector.get_num_new_matched_tokens(request, num_local)
    seconds = (time.perf_counter_ns() - began[0]) / 1e9
    engine.abort(request_id)
    assert num_external is not None, "the lookup has no answer"
    return Observed(was_sent, num_local, num_external, seconds)


def area_under_curve(sent: Sequence[float], others: Sequence[float]) -> float:
    """Returns how well a value tells prompts that were sent from others: the probability that of one each the right one
    is named (the area under the ROC curve). 0.5: not at all; 1: always. A prober may use a value either way.
    """
    ordered = np.sort(np.asarray(others))
    below, up_to = (np.searchsorted(ordered, np.asarray(sent), side) for side in ("left", "right"))
    area = float((below + up_to).mean() / 2 / len(ordered))
    return max(area, 1 - area)
