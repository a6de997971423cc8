"""A deployment of real vLLM servers of the toy model, and whether it answers what one plain server does."""

import asyncio
from pathlib import Path
from typing import Any

from deployment import Deployment
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from texts import complete_text, text_of

PROMPT_SET = PromptSet(seed=1, count=4)
MAX_TOKENS = 40
READY_WITHIN_S = 400.0
FLAGS = ["--max-model-len", 1024]


def real(folder: Path, model: Path, **document: Any) -> Deployment:
    """One prefill and one decode server, a core each, with vllm-router in front."""
    prefill, decode = own_cores()
    return Deployment(folder, **({
        "model": str(model), "vllm": [], "router": {"kind": "vllm-router"},
        "prefill": {"cores": [prefill], "flags": FLAGS}, "decode": {"cores": [decode], "flags": FLAGS}} | document))


def expected(reference: Reference) -> list[Generation]:
    """The plain server's answers."""
    return reference.generations(PROMPT_SET.prompts(), MAX_TOKENS)


def ask(url: str) -> list[str]:
    """OpenAI completions through the front door, one after the other."""
    async def each() -> list[str]:
        async with VllmClient(url) as client:
            return [await complete_text(client, text_of(prompt), MAX_TOKENS) for prompt in PROMPT_SET.prompts()]

    return asyncio.run(each())


def metric(url: str, name: str) -> float:
    async def one() -> float:
        async with VllmClient(url) as client:
            return (await client.metrics()).get(name, 0.0)

    return asyncio.run(one())


def assert_answers_are_right(deployment: Deployment, wanted: list[Generation]) -> None:
    """The tokens are the plain server's, and the decode server got KV from elsewhere for them."""
    rows = deployment.rows()
    before = metric(rows["decode-0"]["url"], "vllm:external_prefix_cache_hits_total")
    answers = ask(deployment.url())
    assert [answer.split() for answer in answers] == [text_of(one.tokens).split() for one in wanted]
    assert metric(rows["decode-0"]["url"], "vllm:external_prefix_cache_hits_total") > before
