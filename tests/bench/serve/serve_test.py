"""Tests what tests/bench/serve/run computes from times, streams and /proc."""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import agent
import costs
import loads
import processors
import pytest
import serve_bench
from aiohttp import web
from deployments import Door
from handover import Answer, figures, through_proxy
from proxy_stand_ins import Cluster, run


@pytest.mark.parametrize("of_prefill,handover_ms", [(False, 100.0 - 20.0), (True, 150.0 - 20.0)])
def test_the_hand_over_ends_one_step_before_the_decode_servers_first_token(of_prefill: bool,
                                                                          handover_ms: float) -> None:
    tokens = [11.1, 11.15, 11.17, 11.19, 11.25]  # the first interval belongs to the hand-over, and is no decode step
    found = {name: round(value, 3) for name, value in figures(Answer(10.0, 11.0, tokens, of_prefill)).items()}
    assert found == {"ttft_ms": 1100.0, "second_token_ms": 1150.0, "step_ms": 20.0, "prefill_ms": 1000.0,
                     "first_token_after_prefill_ms": 100.0, "handover_ms": handover_ms}


@pytest.mark.parametrize("of_prefill", [True, False])
def test_the_proxy_tells_when_prefill_answered(of_prefill: bool) -> None:
    body = {"model": "m", "prompt": [5, 6], "temperature": 0, "max_tokens": 4}

    answered: list[float] = []

    async def test(c: Cluster) -> None:
        async def sample(_: web.Request) -> web.Response:
            await asyncio.sleep(0.2)
            answered.append(time.monotonic())
            choice = {"index": 0, "text": "zero", "token_ids": [8], "finish_reason": "length"}
            return web.json_response({"choices": [choice], "kv_transfer_params": {"do_remote_prefill": True}})

        c.prefills[0].on_request = sample
        c.decodes[0].texts, c.decodes[0].pause_s = [" one", " two", " three"], 0.3
        answer = await through_proxy(c.session, Door(c.url), body)
        assert answer.first_is_of_prefill == of_prefill
        assert answer.prefilled is not None
        # Counted back from the end of the answer, which the client sees some ms later than the proxy.
        assert answered[0] <= answer.prefilled < answer.tokens[1]
        assert figures(answer)["step_ms"] >= 290

    run(test, first_token_of_prefill=of_prefill)


def test_one_server_hands_nothing_over() -> None:
    assert figures(Answer(10.0, None, [11.0, 11.5, 12.0])).keys() == {"ttft_ms", "second_token_ms", "step_ms"}


def test_p99_needs_a_hundred_samples() -> None:
    assert [serve_bench.tail(count) for count in (1, 99, 100)] == [("max", 100), ("max", 100), ("p99", 99)]


def test_a_row_names_the_slowest_by_what_its_samples_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"output_throughput": 9.96} | {f"p{percentile}_{kind}_ms": float(percentile)
                                          for percentile in (50, 99, 100) for kind in ("ttft", "itl")}
    asked: list[int] = []

    def one_bench(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments[4])
        return told

    monkeypatch.setattr(serve_bench, "one_bench", one_bench)
    options = argparse.Namespace(output_tokens=11)
    assert serve_bench.bench_serve("url", "label", "model", 512, 10, options) == {  # type: ignore[arg-type]
        "serve_requests": 10, "serve_output_tokens_per_s": 10.0, "serve_ttft_ms_p50": 50.0, "serve_ttft_ms_max": 100.0,
        "serve_itl_ms_p50": 50.0, "serve_itl_ms_p99": 99.0}
    assert asked == [2, 10]


def test_a_nixl_pair_that_fails_leaves_the_others_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_pair(pair: str, *args: Any) -> None:
        if pair == "nixl":
            raise TimeoutError
        args[-1].append({"deployment": pair})

    monkeypatch.setattr(serve_bench, "measure_pair", measure_pair)
    monkeypatch.setattr(serve_bench.toy_model, "kept", lambda kind: kind)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    serve_bench.run(argparse.Namespace(only=["nixl", "pushed", "pulled", "plain"], model="wide"), rows, problems)
    assert [row["deployment"] for row in rows] == ["kvferry", "plain"]
    assert len(problems) == 1
    assert problems[0].startswith("nixl: a server did not answer in time")


def test_costs_are_ratios_of_each_round() -> None:
    rounds = [(costs.Times(1.0, 2.0), costs.Times(1.1, 2.5)), (costs.Times(4.0, 8.0), costs.Times(4.2, 10.0)),
              (costs.Times(2.0, 4.0), costs.Times(2.0, 4.0))]  # a machine that is four times as slow in between
    found = costs.figures(rounds, output_tokens=10)
    assert (found["ttft_ms_without"], found["ttft_ms_with"], found["ttft_ms_ratio"]) == (2000.0, 2000.0, 1.05)
    assert (found["tokens_per_s_ratio"], found["tokens_per_s_quartiles"]) == (0.8, "0.800 to 0.900")


def test_neither_side_is_always_the_first_or_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def turn(_: Any, side: costs.Side, __: int) -> costs.Times:
        asked.append(side.url)
        return costs.Times(1.0, 2.0 if side.url == "with" else 1.0)

    monkeypatch.setattr(costs, "turn", turn)
    sides = costs.Sides(costs.Side("without", "m", 1), costs.Side("with", "m", 1), lambda: asked.append("swap"))
    rounds = asyncio.run(costs.by_turns(sides, 512, 4 - costs.WARM_UP, costs.Step("costs")))
    assert asked == ["without", "with", "with", "without", "swap"] * 2
    assert rounds == [(costs.Times(1.0, 1.0), costs.Times(1.0, 2.0))] * (4 - costs.WARM_UP)


def test_the_intervals_of_a_stream_are_those_while_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    async def streamed(_: Any, url: str, body: dict[str, Any]) -> tuple[list[float], list[str]]:
        assert url == "decode" and body["max_tokens"] == loads.STREAM_TOKENS
        await asyncio.sleep(0.05)
        return [1.0, 1.5, 3.0, time.monotonic()], []

    async def send() -> None:
        sent.append(time.monotonic())
        await asyncio.sleep(0.02)

    monkeypatch.setattr(loads, "streamed", streamed)
    intervals, ended = asyncio.run(loads.intervals_beside(None, "decode", "m", send))
    assert intervals[:2] == [0.5, 1.5]
    assert ended == len(sent) - 1, "the last one ended after the stream"
    often, seldom = [0.1] * 90, 10
    assert loads.figures({"without": often + [0.2] * seldom, "cached": often + [0.25] * seldom,
                          "with": often + [0.4] * seldom}) == {
        "itl_p50_ms_without": 100.0, "itl_p50_ms_cached": 100.0, "itl_p50_ms_with": 100.0,
        "itl_p99_ms_without": 200.0, "itl_p99_ms_cached": 250.0, "itl_p99_ms_with": 400.0,
        "itl_p99_ratio_without": 2.0, "itl_p99_ratio_cached": 1.6}


def test_beside_a_stream_only_one_kind_of_others_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": [], "proxy": []}

    async def streamed(_: Any, url: str, body: dict[str, Any]) -> tuple[list[float], list[str]]:
        if body["max_tokens"] == loads.STREAM_TOKENS:
            await asyncio.sleep(0.05)
            return [1.0, 1.5, 3.0, time.monotonic()], []
        sent[url].append(body)
        await asyncio.sleep(0.02)
        return [], []

    monkeypatch.setattr(loads, "streamed", streamed)
    pair: Any = SimpleNamespace(prefill=Door("prefill"), decode=Door("decode"))
    found = asyncio.run(loads.by_turns(pair, Door("proxy"), "m", 512, 2, loads.Step("loads")))
    assert {(len(body["prompt"]), body["max_tokens"]) for body in sent["prefill"]} == {(512, 1)}
    assert {(len(body["prompt"]), body["max_tokens"]) for body in sent["proxy"]} == {(512, 2)}
    assert len(sent["decode"]) > 1 and all(body is sent["decode"][0] for body in sent["decode"]), "one prompt, kept"
    assert (len(sent["decode"][0]["prompt"]), sent["decode"][0]["max_tokens"]) == (513, 1)
    assert 0 < found["loads"] < len(sent["proxy"]), "those of the warm-up don't count"


def test_an_agents_session_counts_what_was_computed() -> None:
    assert agent.figures([100, 150, 250], 260, [2.0, 0.5, 0.75]) == {
        "turns": 3, "last_prompt_tokens": 250, "repeated_share": 0.5, "from_kv_share": 0.48, "ttft_ms_turn_1": 2000.0,
        "ttft_ms_turn_2": 500.0, "ttft_ms_last_turn": 750.0}


def test_tokens_are_read_from_a_stream() -> None:
    assert agent.tokens_of(['{"choices": [{"text": "w7"}]}', '{"choices": [{"text": " w12"}]}',
                            '{"choices": []}']) == [7, 12]


def test_a_name_with_spaces_and_brackets_is_no_field_of_stat() -> None:
    assert processors.seconds_of("7 (a) b (c) S 1 7 7 0 -1 4194304 1 0 0 0 250 50 9 9 20 0 3 0 1") == pytest.approx(
        300 / os.sysconf("SC_CLK_TCK"))


BUSY = """
import os, subprocess, sys, threading, time
def work(seconds):
    begin = time.thread_time()
    while time.thread_time() - begin < seconds: pass
part = sys.argv[1]
if part == "model":
    helper = threading.Thread(target=work, args=(0.3,))
    helper.start(); helper.join()
    work(0.6)
    print("done", flush=True)
    time.sleep(60)
work({"api": 0.0, "engine": 1.2}[part])
subprocess.run([sys.executable, "-c", os.environ["CODE"], {"api": "engine", "engine": "model"}[part]])
"""


def test_processor_seconds_are_those_of_each_part() -> None:
    leader = subprocess.Popen([sys.executable, "-c", BUSY, "api"], env=os.environ | {"CODE": BUSY},
                              stdout=subprocess.PIPE, start_new_session=True, text=True)
    try:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "done\n"
        found = processors.of_server(leader.pid)
        assert 0.25 <= found["helpers"] <= 0.4
        assert 0.55 <= found["model"] <= 1.1  # the seconds include the start of the process's Python
        assert 1.15 <= found["engine"] <= 1.7
        assert found["api"] <= 0.5
        assert processors.of_program(leader.pid) == pytest.approx(sum(found.values()), abs=0.05)
        cores = sorted(os.sched_getaffinity(0))
        processors.part_from_helpers(leader.pid, cores[0], cores[-1])
        parts = {part: os.sched_getaffinity(int(folder.name)) for folder, _, part in processors._members(leader.pid)}
        assert parts == {"api": {cores[-1]}, "engine": {cores[0]}, "model": {cores[0]}}
        processors.bind(leader.pid, cores[-1])
        assert {os.sched_getaffinity(int(folder.name)).pop() for folder, _, _ in processors._members(leader.pid)} == \
            {cores[-1]}
    finally:
        os.killpg(leader.pid, 9)
        leader.wait()


@pytest.mark.parametrize(("words", "says"), [
    ("--lengths 0", "argument --lengths: '0' is not a whole number from 1 to 8192"),
    ("--lengths 128,8193", "argument --lengths: '8193' is not a whole number from 1 to 8192"),
    ("--lengths 128,", "argument --lengths: '' is not a whole number from 1 to 8192"),
    ("--turns 1", "argument --turns: '1' is not a whole number from 2 to 50"),
    ("--turns 51", "argument --turns: '51' is not a whole number from 2 to 50"),
    ("--output-tokens 1", "argument --output-tokens: '1' is not a whole number from 2 to 1024"),
    ("--requests=-1", "argument --requests: '-1' is not a whole number from 0 to 100000"),
    ("--concurrency 0", "argument --concurrency: '0' is not a whole number from 1 to 100000"),
    ("--repeat 0", "argument --repeat: '0' is not a whole number from 1 to 100000"),
    ("--nixl-requests two", "argument --nixl-requests: 'two' is not a whole number from 1 to 100000"),
    ("--costs --repeat 1", "--repeat must be at least 2")])
def test_numbers_that_can_not_be_measured_are_refused_at_the_start(words: str, says: str,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_bench.parse(words.split())
    assert says in capsys.readouterr().err


def test_the_longest_session_fits_into_the_context() -> None:
    longest = agent.FIRST_TOKENS + (serve_bench.TURNS_MAX - 1) * (agent.ANSWER_TOKENS + agent.NEW_TOKENS)
    assert longest + agent.ANSWER_TOKENS <= serve_bench.CONTEXT
    assert serve_bench.parse(["--turns", "50", "--lengths", "8192", "--output-tokens", "1024"]).lengths == [8192]
