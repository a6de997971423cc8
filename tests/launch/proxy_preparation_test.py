"""Tests that launch/proxy lets the decode server load a prompt while it is computed, and no longer than that helps."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kvferry_launch.proxy import bodies
from proxy_stand_ins import DEADLINE_S, TOKENS, Cluster, FakeVllm
from proxy_stand_ins import run as run_with

EXACT = {"model": "m", "prompt": TOKENS, "temperature": 0, "max_tokens": 9, "stream": True, "cache_salt": "s",
         "stream_options": {"include_usage": True}}


def run(test: Callable[[Cluster], Awaitable[None]], **options: Any) -> None:
    run_with(test, **{"prepare_from": len(TOKENS), **options})


def sampling(c: Cluster, *, until: Callable[[], bool] = lambda: True, status: int = 200) -> None:
    """Makes the first prefill server answer when `until` is true."""
    async def answer(_: web.Request) -> web.Response:
        await when(until)
        choice = {"index": 0, "text": "zero", "token_ids": [8], "finish_reason": "length"}
        return web.json_response({"id": "cmpl-p", "created": 7, "model": "m", "choices": [choice],
                                  "kv_transfer_params": {"do_remote_prefill": True}}, status=status)

    c.prefills[0].on_request = answer


async def when(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def is_over(server: FakeVllm, number: int = 1) -> Callable[[], bool]:
    return lambda: server.num_aborted == len(server.prepared) == number


def test_a_preparation_is_sent_beside_the_prefill_and_ends_with_the_answer() -> None:
    async def test(c: Cluster) -> None:
        decode = c.decodes[0]
        sampling(c, until=lambda: len(decode.prepared) == 1)
        decode.texts = [" one", " two"]
        status, text = await c.post(EXACT)
        assert status == 200 and "zero" in text
        assert decode.prepared[0] == {
            "model": "m", "prompt": [*TOKENS, TOKENS[-1]], "temperature": 0, "max_tokens": 1, "n": 1, "stream": False,
            "cache_salt": "s",
            "kv_transfer_params": {"kvferry_prepare": c.prefills[0].got[0]["kv_transfer_params"]["kvferry_push_to"]}}
        assert decode.got[0]["prompt"] == [*TOKENS, 8]
        await when(is_over(decode))

    run(test)


def test_it_ends_when_the_prefill_fails_and_is_sent_anew() -> None:
    async def test(c: Cluster) -> None:
        decode = c.decodes[0]
        sampling(c, until=lambda: len(decode.prepared) == 1, status=500)
        assert (await c.post(EXACT))[0] == 200
        await when(is_over(decode, 2))

    run(test)


def test_it_ends_when_the_client_goes_away() -> None:
    async def test(c: Cluster) -> None:
        decode = c.decodes[0]
        sampling(c, until=lambda: False)
        asking = asyncio.create_task(c.post(EXACT))
        await when(lambda: len(decode.prepared) == 1)
        asking.cancel()
        await when(is_over(decode))

    run(test)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_its_answer_does_not_matter(status: int) -> None:
    async def test(c: Cluster) -> None:
        decode = c.decodes[0]
        decode.answers_prepared = web.json_response({}, status=status)
        decode.texts = [" one"]
        sampling(c, until=lambda: len(decode.prepared) == 1)
        status_of_all, text = await c.post(EXACT)
        assert status_of_all == 200 and text.endswith("[DONE]\n\n")
        assert await c.metric('kvferry_proxy_nodes\\{role="kv_consumer",state="ready"\\}') == 2

    run(test)


@pytest.mark.parametrize("more,options", [
    ({"temperature": 1}, {}), ({"stream": False}, {}), ({}, {"first_token_of_prefill": False}),
    ({}, {"sign_push_target": lambda target: None}), ({}, {"prepare_from": 0}),
    ({}, {"prepare_from": len(TOKENS) + 1})])
def test_none_is_sent_where_the_token_is_not_of_prefill_or_nothing_is_pushed_or_the_prompt_is_too_short(
        more: dict[str, Any], options: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        sampling(c)
        await c.post(EXACT | more)
        assert not any(server.prepared for server in c.decodes)

    run(test, **options)


@pytest.mark.parametrize("told", ["", "2", "many", "-3", None])
def test_none_is_sent_to_a_server_that_takes_none_or_only_shorter_ones(told: Any) -> None:
    async def test(c: Cluster) -> None:
        for server in c.decodes:
            server.prepared_tokens_max = told
        await c.door.nodes.refresh()  # type: ignore[attr-defined]
        sampling(c)
        await c.post(EXACT)
        assert not any(server.prepared for server in c.decodes)

    run(test)


def test_a_client_can_not_prepare_anything() -> None:
    body, removed = bodies.from_client(json.loads(json.dumps(EXACT | {
        "kv_transfer_params": {"kvferry_prepare": {"engine_id": "d0", "endpoint": "tcp://x:1"}}})))
    assert removed and "kv_transfer_params" not in body
