"""Measures an agent's session. Each turn sends the whole conversation again, with the last answer and some new tokens.
"""

import asyncio
import json
import time
from typing import Any

from deployments import Deployment, Door
from handover import metric, new_prompt, session, streamed

FIRST_TOKENS = 2048
NEW_TOKENS = 136
ANSWER_TOKENS = 8
COMPUTED = r'vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\}'


def tokens_of(events: list[str]) -> list[int]:
    """Returns a stream's tokens; the toy model's tokenizer writes token 7 as w7."""
    text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    return [int(word[1:]) for word in text.split()]


def figures(lengths: list[int], computed: float, ttft_s: list[float]) -> dict[str, Any]:
    """`lengths`: number of prompt tokens of each turn; `computed`: how many of all these tokens a server computed."""
    return {"turns": len(lengths), "last_prompt_tokens": lengths[-1],
            "repeated_share": round(sum(lengths[:-1]) / sum(lengths), 3),
            "from_kv_share": round(1 - computed / sum(lengths), 3),
            "ttft_ms_turn_1": round(1e3 * ttft_s[0], 1), "ttft_ms_turn_2": round(1e3 * ttft_s[1], 1),
            "ttft_ms_last_turn": round(1e3 * ttft_s[-1], 1)}


async def _measure(deployment: Deployment, door: Door, turns: int) -> dict[str, Any]:
    servers = [server.url for server in (deployment.prefill, deployment.decode) if server]
    lengths: list[int] = []
    ttft_s: list[float] = []
    prompt = new_prompt(FIRST_TOKENS)
    async with session() as http:
        before = sum([await metric(http, url, COMPUTED) for url in servers])
        for _ in range(turns):
            body = {"model": str(deployment.decode.model), "prompt": prompt, "temperature": 0.0, "ignore_eos": True,
                    "max_tokens": ANSWER_TOKENS}
            sent = time.monotonic()
            times, events = await streamed(http, door.url, body)
            lengths.append(len(prompt))
            ttft_s.append(times[0] - sent)
            prompt = prompt + tokens_of(events) + new_prompt(NEW_TOKENS)
        computed = sum([await metric(http, url, COMPUTED) for url in servers]) - before
    return {"load": "agent", "prompt_tokens": FIRST_TOKENS} | figures(lengths, computed, ttft_s)


def measure(deployment: Deployment, door: Door, turns: int) -> dict[str, Any]:
    """Measures one session. A prompt token counts as computed if the prefill server or the decode server computed it.
    """
    return asyncio.run(_measure(deployment, door, turns))
