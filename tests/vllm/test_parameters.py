"""Sends requests with random parameters through launch/proxy. The answers must be those of a single server: text,
logprobs, finish reasons, usage. The prefill server, to which the requests go directly, is this single server.
"""

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest
from kvferry_launch.proxy.first_token import keeps_from_prefill
from proxy_deployment import ProxyDeployment
from texts import text_of

REQUESTS = 40
FROM_PREFILL = r'kvferry_proxy_first_tokens_total\{reason="",source="prefill"\}'
TOKENS = (3, 500)  # lowest and highest token of the prompts, from the toy model's vocabulary


def drawn(dice: random.Random) -> dict[str, Any]:
    """Returns a random completion request. Its sampling is repeatable: greedy, or with a seed."""
    prompt = [dice.randrange(*TOKENS) for _ in range(dice.randrange(40, 300))]
    body: dict[str, Any] = {"prompt": dice.choice((prompt, text_of(prompt))), "max_tokens": dice.randrange(1, 14),
                            "temperature": dice.choice((0.0, 0.0, 0.8)), "ignore_eos": dice.random() < 0.8}
    if body["temperature"]:
        body["seed"] = dice.randrange(1000)
    optional: dict[str, Any] = {
        "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "min_tokens": 1, "logprobs": dice.randrange(3), "stop": [f"w{dice.randrange(*TOKENS)}", "7 "],
        "stop_token_ids": [dice.randrange(*TOKENS) for _ in range(40)], "n": 2,
        "logit_bias": {str(dice.randrange(*TOKENS)): 3.0}, "bad_words": [f"w{dice.randrange(*TOKENS)}"],
        "skip_special_tokens": False, "include_stop_str_in_output": True, "cache_salt": f"salt {dice.randrange(9)}"}
    for name in dice.sample(sorted(optional), dice.choice((0, 0, 1, 2, 3))):
        body[name] = optional[name]
    if body["temperature"] == 0:
        body.pop("n", None)  # vLLM refuses to give several greedy answers
    return body


async def answered(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer in one form, whether it was streamed or not."""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, (body, text)
    told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for one in told for choice in one["choices"]):
        found = choices.setdefault(choice["index"], {"text": "", "tokens": []})
        found["text"] += choice["text"]
        found["finish_reason"] = choice["finish_reason"]
        found["stop_reason"] = choice.get("stop_reason")
        if choice.get("logprobs"):
            found["tokens"] += choice["logprobs"]["tokens"]
    usage = told[-1]["usage"]
    return {"choices": choices, "usage": {name: count for name, count in usage.items() if isinstance(count, int)}}


async def compared(deployment: ProxyDeployment, seed: int, requests: int) -> int:
    """Sends random requests through the proxy and to the prefill server, and compares the answers. Returns how many
    requests may have got their first token from the prefill server.
    """
    dice = random.Random(seed)
    allowed = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        for number in range(requests):
            body = drawn(dice)
            if dice.random() < 0.7:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            # the proxy replaces the text by its tokens
            tokens = [0] if isinstance(body["prompt"], str) else body["prompt"]
            allowed += not keeps_from_prefill("/v1/completions", body | {"prompt": tokens})
            behind_proxy = await answered(session, deployment.url, body)
            assert behind_proxy == await answered(session, deployment.prefill.url, body), (seed, number, body)
    return allowed


@pytest.mark.servers("proxied")
def test_parameters_of_all_kinds_change_nothing(proxied: ProxyDeployment) -> None:
    before = proxied.metric(FROM_PREFILL)
    allowed = asyncio.run(compared(proxied, seed=1, requests=REQUESTS))
    found = proxied.metric(FROM_PREFILL) - before
    assert allowed / 2 < found <= allowed, "where a token ended the answer, or decode held the prompt, it was not so"


@pytest.mark.long
@pytest.mark.servers("proxied")
def test_a_thousand_requests_of_all_kinds(proxied: ProxyDeployment) -> None:
    asyncio.run(compared(proxied, seed=2, requests=1000))
