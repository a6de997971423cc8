"""Tests that launch/proxy sends the prefill server's token at once if the answer stays the same, and only then."""

import json
from typing import Any

import pytest
from aiohttp import web
from kvferry_launch.proxy import bodies
from kvferry_launch.proxy.first_token import FirstToken, counted_as_output, first_token, keeps_from_prefill
from proxy_stand_ins import TOKENS, Cluster, run

EXACT = {"model": "m", "prompt": [5, 6], "temperature": 0, "max_tokens": 9, "stream": True}
SAMPLED = {"id": "cmpl-1", "created": 7, "model": "m",
           "choices": [{"text": " one", "token_ids": [8], "finish_reason": "length"}]}


@pytest.mark.parametrize("more", [
    {}, {"seed": 3}, {"ignore_eos": True}, {"stop_token_ids": [4]}, {"stream_options": {"include_usage": True}},
    {"repetition_penalty": 1.2}, {"logit_bias": {"4": 2.0}}, {"n": 1}, {"stop": None}, {"logprobs": None}])
def test_what_cannot_change_the_answer_is_allowed(more: dict[str, Any]) -> None:
    assert keeps_from_prefill(bodies.COMPLETIONS, EXACT | more) == ""


@pytest.mark.parametrize("reason,more", [
    ("sampling", {"temperature": 0.5}), ("sampling", {"temperature": None}), ("sampling", {"max_tokens": None}),
    ("parameter", {"max_tokens": 1}), ("not streamed", {"stream": False}), ("prompt", {"prompt": "text"}),
    ("parameter", {"stop": ["x"]}), ("parameter", {"n": 2}), ("parameter", {"n": True}), ("parameter", {"logprobs": 1}),
    ("parameter", {"presence_penalty": 0.1}), ("parameter", {"frequency_penalty": 0.1}),
    ("parameter", {"min_tokens": 2}), ("parameter", {"structured_outputs": {"choice": ["a"]}}),
    ("parameter", {"echo": True}),
    ("parameter", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("parameter", {"prompt_logprobs": 0}), ("parameter", {"kv_transfer_params": {"kvferry_report": True}}),
    ("parameter", {"bad_words": ["x"]}), ("parameter", {"a_parameter_of_tomorrow": 1})])
def test_what_could_change_it_names_what_does(reason: str, more: dict[str, Any]) -> None:
    assert keeps_from_prefill(bodies.COMPLETIONS, EXACT | more) == reason


def test_chats_are_formatted_by_one_server() -> None:
    assert keeps_from_prefill(bodies.CHAT, EXACT) == "path"


@pytest.mark.parametrize("choice", [
    {"finish_reason": "stop"}, {"text": ""}, {"text": "caf\ufffd"}, {"token_ids": None}, {"token_ids": [1, 2]},
    {"token_ids": [-1]}, {"token_ids": ["8"]}, {"text": None}])
def test_a_token_that_ends_the_answer_or_is_a_part_of_a_character_comes_from_decode(choice: dict[str, Any]) -> None:
    assert first_token(SAMPLED) == FirstToken(8, " one", {"id": "cmpl-1", "created": 7, "model": "m"})
    assert first_token({**SAMPLED, "choices": [SAMPLED["choices"][0] | choice]}) is None  # type: ignore[index]


@pytest.mark.parametrize("answer", [{}, {"choices": None}, {"choices": []}, {"choices": [3]}, {"choices": [{}, {}]}])
def test_answers_without_a_token_do_no_harm(answer: dict[str, Any]) -> None:
    assert first_token(answer) is None


def test_the_token_counts_as_output() -> None:
    told = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15, "prompt_tokens_details": None}
    assert counted_as_output(told) == told | {"prompt_tokens": 10, "completion_tokens": 5}
    assert counted_as_output(None) is None


# ---- tests through the proxy ----
def sampling(c: Cluster, text: str = "zero") -> None:
    """Makes the first prefill server sample a token with this text from now on."""
    async def answer(request: web.Request) -> web.Response:
        assert (await request.json())["return_token_ids"]
        choice = {"index": 0, "text": text, "token_ids": [8], "finish_reason": "length"}
        return web.json_response({"id": "cmpl-p", "created": 7, "model": "m", "choices": [choice],
                                  "kv_transfer_params": {"do_remote_prefill": True, "remote_num_tokens": len(TOKENS)}})

    c.prefills[0].on_request = answer


async def streamed(c: Cluster, **more: Any) -> list[Any]:
    status, text = await c.post(EXACT | {"prompt": "hello"} | more)
    assert status == 200, text
    return [event if (event := line.removeprefix("data: ")) == "[DONE]" else json.loads(event)
            for line in text.splitlines() if line]


def test_the_client_has_the_first_token_before_decode_says_anything() -> None:
    async def test(c: Cluster) -> None:
        sampling(c)
        c.decodes[0].texts = [" one", " two"]
        c.decodes[0].hold_first = True
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json=EXACT | {"prompt": "hello"}) as answer:
            event = json.loads((await answer.content.readany()).removeprefix(b"data: "))
            assert event["choices"][0]["text"] == "zero"
            assert (event["id"], event["object"], event["created"]) == ("cmpl-p", "text_completion", 7)
            c.decodes[0].hold.set()
            *events, usage, end = [line for line in (await answer.text()).splitlines() if line]
        told = [json.loads(line.removeprefix("data: ")) for line in events]
        assert [one["choices"][0]["text"] for one in told] == [" one", " two"]
        assert {one["id"] for one in told} == {"cmpl-p"}
        assert json.loads(usage.removeprefix("data: "))["usage"] == {"completion_tokens": 7}
        assert end == "data: [DONE]"
        got = c.decodes[0].got[0]
        assert (got["prompt"], got["max_tokens"]) == ([*TOKENS, 8], 8)
        assert got["kv_transfer_params"]["remote_num_tokens"] == len(TOKENS)
        assert await c.metric(r'kvferry_proxy_first_tokens_total\{reason="",source="prefill"\}') == 1

    run(test)


def test_another_server_goes_on_with_the_whole_text() -> None:
    async def test(c: Cluster) -> None:
        sampling(c)
        c.decodes[0].texts = [" one", " two", " three"]
        c.decodes[1].texts = ["zero one", " two", " three"]
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json=EXACT | {"prompt": "hello"}) as answer:
            got = await answer.content.readuntil(b"\n\n") + await answer.content.readuntil(b"\n\n")
            await c.decodes[0].kill()
            text = (got + await answer.content.read()).decode()
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines()
                  if line and not line.endswith("[DONE]")]
        assert "".join(one["choices"][0]["text"] for one in events if one["choices"]) == "zero one two three"
        assert c.decodes[1].got[0]["prompt"] == TOKENS
        assert events[-1]["usage"] == {"completion_tokens": 6}

    run(test)


def test_a_request_that_decode_refuses_gets_its_answer_and_no_token() -> None:
    async def test(c: Cluster) -> None:
        async def refuse(_: web.Request) -> web.Response:
            return web.json_response({"error": "too long"}, status=400)

        sampling(c)
        c.decodes[0].on_request = refuse
        assert await c.post(EXACT | {"prompt": "hello"}) == (400, {"error": "too long"})

    run(test)


def test_without_a_usable_token_decode_answers_it_all() -> None:
    async def test(c: Cluster) -> None:
        sampling(c, text="")
        c.decodes[0].texts = ["zero", " one"]
        events = await streamed(c)
        assert [one["choices"][0]["text"] for one in events[:2]] == ["zero", " one"]
        assert c.decodes[0].got[0]["prompt"] == TOKENS
        assert await c.metric(r'kvferry_proxy_first_tokens_total\{reason="token",source="decode"\}') == 1

    run(test)


def test_it_can_be_turned_off() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["zero"]
        await streamed(c)
        assert "return_token_ids" not in c.prefills[0].got[0]
        assert await c.metric(r'kvferry_proxy_first_tokens_total\{reason="option",source="decode"\}') == 1

    run(test, first_token_of_prefill=False)
