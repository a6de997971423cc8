"""A deployment of real vLLM servers of the toy model, and checks that it answers the same as one plain server."""

import asyncio
import signal
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
    """Returns a deployment with one prefill and one decode server, each on a core of its own, behind vllm-router."""
    prefill, decode = own_cores()
    return Deployment(folder, **({
        "model": str(model), "vllm": [], "router": {"kind": "vllm-router"},
        "prefill": {"cores": [prefill], "flags": FLAGS}, "decode": {"cores": [decode], "flags": FLAGS}} | document))


def expected(reference: Reference) -> list[Generation]:
    """Returns the plain server's answers to the prompts."""
    return reference.generations(PROMPT_SET.prompts(), MAX_TOKENS)


def ask(url: str) -> list[str]:
    """Sends the prompts to the OpenAI completions endpoint, one after the other. Returns the texts."""
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
    """Checks that the tokens are those of the plain server, and that the decode server got KV for them from another
    node.
    """
    rows = deployment.rows()
    before = metric(rows["decode-0"]["url"], "vllm:external_prefix_cache_hits_total")
    answers = ask(deployment.url())
    assert [answer.split() for answer in answers] == [text_of(one.tokens).split() for one in wanted]
    assert metric(rows["decode-0"]["url"], "vllm:external_prefix_cache_hits_total") > before


def end(deployment: Deployment) -> None:
    """Ends the deployment as Ctrl-C does, and checks that no process is left."""
    deployment.signal(signal.SIGINT)
    assert deployment.wait_end() == 0
    deployment.none_left(within_s=5.0)
