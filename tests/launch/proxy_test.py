"""Tests launch/proxy with stand-ins for the controller and vLLM: which request goes to which server."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvferry.tickets import PUSH_TARGET, signer_of
from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.paths import REPO
from kvferry_launch.proxy import adapters, bodies, nodes
from kvferry_launch.proxy.main import options_of_member
from kvferry_launch.proxy.nodes import HEALTH_INTERVAL_S
from proxy_stand_ins import DEADLINE_S, TOKENS, Cluster, FakeVllm, eventually, run


# ---- which server gets which request ----
def test_prefill_knows_where_to_push_and_decode_where_the_prompt_lies() -> None:
    async def test(c: Cluster) -> None:
        body = {"model": "m", "prompt": "hello", "max_tokens": 9, "logprobs": 2, "temperature": 0.0}
        status, answer = await c.post(body, Authorization="Bearer x")
        assert (status, answer) == (200, {"choices": [{"text": "text of d0"}]})
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 1, "d1": 0}
        prefill, decode = c.prefills[0].got[0], c.decodes[0].got[0]
        assert prefill["kv_transfer_params"]["kvferry_push_to"] == {"engine_id": "d0", "endpoint": "tcp://d0"}
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert (prefill["max_tokens"], prefill["stream"], prefill["prompt"]) == (1, False, TOKENS)
        assert "logprobs" not in prefill
        assert decode == body | {"prompt": TOKENS, "kv_transfer_params": {"do_remote_prefill": True,
                                                                         "remote_host": "p0"}}
        assert c.controller.asked[0]["token_ids"] == TOKENS
        for server in (c.prefills[0], c.decodes[0]):
            assert server.headers[0]["Authorization"] == "Bearer x"
        assert c.prefills[0].headers[0]["X-Request-Id"] == c.decodes[0].headers[0]["X-Request-Id"]

    run(test)


def test_chats_and_token_ids_go_the_same_way() -> None:
    async def test(c: Cluster) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "cache_salt": "s"}
        assert (await c.post(chat, bodies.CHAT))[0] == 200
        assert c.prefills[0].got[0]["max_completion_tokens"] == 1
        assert c.decodes[0].got[0]["messages"] == chat["messages"]
        assert c.controller.asked[0]["cache_salt"] == "s"
        ids = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "min_tokens": 3}}
        assert (await c.post(ids, bodies.GENERATE))[0] == 200
        assert c.prefills[0].got[1]["sampling_params"] == {"max_tokens": 1, "n": 1}
        assert c.decodes[0].got[1]["sampling_params"] == ids["sampling_params"]
        assert c.controller.asked[1]["token_ids"] == [1, 2]

    run(test)


def test_what_decode_holds_is_not_prefilled_again_and_batches_neither() -> None:
    async def test(c: Cluster) -> None:
        c.controller.skip_prefill = True
        assert (await c.post({"prompt": "hello"}))[0] == 200
        assert c.num_got() == {"p0": 0, "p1": 0, "d0": 1, "d1": 0}
        assert "kv_transfer_params" not in c.decodes[0].got[0]
        c.controller.skip_prefill = False
        assert (await c.post({"prompt": ["hello", "world"]}))[0] == 200
        assert c.num_got() == {"p0": 0, "p1": 0, "d0": 2, "d1": 0}
        assert await c.metric(r'kvferry_proxy_skipped_prefills_total\{reason="cached"\}') == 1
        assert await c.metric(r'kvferry_proxy_skipped_prefills_total\{reason="batch"\}') == 1

    run(test)


def test_a_stream_is_passed_on_as_it_comes() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": "a", "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            first = await answer.content.readany()
            assert first == b'data: {"n": 0}\n\n', "before the server has the rest"
            c.decodes[0].hold.set()
            assert await answer.content.read() == b'data: {"n": 1}\n\ndata: [DONE]\n\n'
        assert c.prefills[0].got[0]["stream"] is False
        assert await c.metric(r'kvferry_proxy_stage_seconds_count\{stage="first_byte"\}') == 1

    run(test)


def test_models_health_and_metrics() -> None:
    async def test(c: Cluster) -> None:
        assert json.loads((await c.get("/v1/models"))[1])["from"].startswith("d")
        assert (await c.get("/health"))[0] == 200
        await c.post({"prompt": "a"})
        text = (await c.get("/metrics"))[1]
        assert f'kvferry_proxy_requests_total{{path="{bodies.COMPLETIONS}",status="200"}} 1.0' in text
        for stage in ("read", "tokenize", "pair", "prefill", "hand_over", "rest", "total"):
            assert f'kvferry_proxy_stage_seconds_count{{stage="{stage}"}} 1.0' in text, stage
        assert 'kvferry_proxy_nodes{role="kv_producer",state="ready"} 2.0' in text

    run(test)


def test_each_request_has_one_line_with_its_servers_and_where_its_time_went(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.proxy")

    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            return web.Response(status=500)

        await c.post({"prompt": "hello"}, **{"X-Request-Id": "x" * 200})
        c.prefills[0].on_request = fail
        await c.post({"prompt": "hello"})
        await c.post({"prompt": "longer than the proxy's limit" * 9})

    run(test, body_bytes_max=200)
    first, second, third = (line for line in caplog.messages if line.startswith("POST "))
    assert re.fullmatch(r"POST /v1/completions 200 in [\d.]+ ms, request x{80}, trace [0-9a-f]{32}: 3 tokens; p0, d0; "
                        r"read [\d.]+ ms, tokenize [\d.]+ ms, pair [\d.]+ ms, prefill [\d.]+ ms, hand_over [\d.]+ ms, "
                        r"rest [\d.]+ ms", first)
    assert "; p0, d0 then p1, d0; " in second
    assert re.fullmatch(r"POST /v1/completions 413 in [\d.]+ ms, trace [0-9a-f]{32}; read [\d.]+ ms", third)
    for line in (first, second, third):
        wall, *parts = map(float, re.findall(r"([\d.]+) ms", line))
        assert sum(parts) == pytest.approx(wall, abs=0.05 * (len(parts) + 1)), line


def test_a_prompt_that_is_too_long_for_the_controller_is_placed_by_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAIR_TOKENS_MAX", 2)

    async def test(c: Cluster) -> None:
        for tokens in ([1, 2], [1, 2, 3]):
            assert (await c.post({"prompt": tokens}))[0] == 200
        assert [asked["token_ids"] for asked in c.controller.asked] == [[1, 2], []]

    run(test)


def test_a_prompt_of_an_adapter_is_paired_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ASK_INTERVAL_S", 0.0)

    async def test(c: Cluster) -> None:
        told = c.decodes[0].models
        told.append({"id": "base", "root": "/models/base", "parent": None})
        for model in ("base", "sql"):
            assert (await c.post({"prompt": "a", "model": model}))[0] == 200
        told.append({"id": "sql", "root": "/adapters/sql", "parent": "base"})
        for model in ("sql", "base"):
            body = {"prompt": "a", "model": model, "cache_salt": "s"}
            assert (await c.post(body, Authorization="Bearer x"))[0] == 200
        of_interest = ("lora_name", "lora_path", "cache_salt")
        asked = [{name: one[name] for name in of_interest if name in one} for one in c.controller.asked]
        assert asked == [{}, {}, {"lora_name": "sql", "lora_path": "/adapters/sql", "cache_salt": "s"},
                         {"cache_salt": "s"}]
        assert c.decodes[0].asked_for_models == [None, None, "Bearer x"], "once for each name that was not known"

    run(test)


def test_a_server_that_does_not_tell_its_models_keeps_one_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "TIMEOUT_S", 1000.0)

    async def test(c: Cluster) -> None:
        c.decodes[0].answers_models.clear()
        first = asyncio.create_task(c.post({"prompt": "a", "model": "sql"}))
        await eventually(lambda: len(c.decodes[0].asked_for_models) == 1)
        assert (await c.post({"prompt": "a", "model": "sql"}))[0] == 200
        assert not first.done()
        c.decodes[0].answers_models.set()
        assert (await first)[0] == 200

    run(test)


@pytest.mark.parametrize("answer", [{}, {"data": 3}, {"data": [{"root": "x"}]}, [], {"data": [7]}])
def test_models_that_make_no_sense_are_no_adapters(answer: Any) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].models_answer = answer
        for model in ("sql", 7, None, ""):
            assert (await c.post({"prompt": "a", "model": model}))[0] == 200
        assert all("lora_name" not in asked for asked in c.controller.asked)

    run(test)


# ---- parameters that a client must not send ----
FORGED = {"do_remote_prefill": True, "remote_host": "10.0.0.66", "remote_port": 14600, "remote_engine_id": "evil"}
FORGERIES: list[dict[str, Any]] = [
    {"kv_transfer_params": FORGED},
    {"kv_transfer_params": {"kvferry_push_to": "tcp://10.0.0.66:1"}},
    {"kv_transfer_params": {"do_remote_decode": True}},
    {"kv_transfer_params": [FORGED]},
    {"ec_transfer_params": {"x": {"peer_host": "10.0.0.66"}}},
    {"kvferry_push_to": "tcp://10.0.0.66:1"},
    {"extra_body": {"kv_transfer_params": FORGED}},
    {"vllm_xargs": {"kv_transfer_params": "10.0.0.66"}},
    {"sampling_params": {"extra_args": {"kv_transfer_params": FORGED}}},
    {"extra_body": {"extra_body": {"kvferry_ticket": "10.0.0.66"}}},
]


@pytest.mark.parametrize("path", bodies.PATHS)
@pytest.mark.parametrize("skips_prefill", [False, True])
def test_a_client_names_no_address(path: str, skips_prefill: bool) -> None:
    prompts: dict[str, dict[str, Any]] = {
        bodies.COMPLETIONS: {"prompt": "a"}, bodies.CHAT: {"messages": [{"role": "user", "content": "a"}]},
        bodies.GENERATE: {"token_ids": [1, 2]}}

    async def test(c: Cluster) -> None:
        c.controller.skip_prefill = skips_prefill
        for forgery in FORGERIES:
            assert (await c.post({**prompts[path], "stream": False, **forgery}, path))[0] == 200
        got = [body for server in c.controller.servers for body in server.got]
        assert len(got) == len(FORGERIES) * (1 if skips_prefill else 2)
        assert "10.0.0.66" not in json.dumps(got)
        for body in c.decodes[0].got:
            assert body.get("kv_transfer_params") == (None if skips_prefill else
                                                      {"do_remote_prefill": True, "remote_host": "p0"})
        assert await c.metric("kvferry_proxy_stripped_params_total") == len(FORGERIES)

    run(test)


def test_batches_name_no_address_either() -> None:
    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": ["a", "b"], "kv_transfer_params": FORGED}))[0] == 200
        assert c.decodes[0].got == [{"prompt": ["a", "b"]}]

    run(test)


def test_a_client_may_ask_for_a_report_and_choose_a_salt() -> None:
    async def test(c: Cluster) -> None:
        report = {"kvferry_report": True}
        body = {"prompt": "a", "cache_salt": "s", "vllm_xargs": {"session_id": "x"}}
        assert (await c.post({**body, "kv_transfer_params": report}))[0] == 200
        assert "kvferry_report" not in c.prefills[0].got[0]["kv_transfer_params"]
        assert c.decodes[0].got[0] == {**body, "prompt": TOKENS,
                                       "kv_transfer_params": {**report, "do_remote_prefill": True, "remote_host": "p0"}}
        assert await c.metric("kvferry_proxy_stripped_params_total") == 0
        assert (await c.post({**body, "kv_transfer_params": {**FORGED, **report}}))[0] == 200
        assert c.decodes[0].got[1] == c.decodes[0].got[0]
        assert await c.metric("kvferry_proxy_stripped_params_total") == 1

    run(test)


def test_the_key_signs_the_target_of_a_push_and_gives_the_controllers_token(tmp_path: Path) -> None:
    signer = signer_of(str(ensure_key(tmp_path / "cluster.key")))

    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": "a"}))[0] == 200
        target = c.prefills[0].got[0]["kv_transfer_params"]["kvferry_push_to"]
        assert (target["engine_id"], target["endpoint"]) == ("d0", "tcp://d0")
        assert signer.refusal(PUSH_TARGET, target) is None
        assert c.controller.authorizations == {f"Bearer {signer.http_token()}"}
        for server in (c.prefills[0], c.decodes[0]):
            assert all("Authorization" not in headers for headers in server.headers)

    run(test, **options_of_member(str(tmp_path / "cluster.key")))


def test_without_a_target_the_prefill_server_pushes_nothing() -> None:
    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": "a"}))[0] == 200
        assert "kvferry_push_to" not in c.prefills[0].got[0]["kv_transfer_params"]

    run(test, sign_push_target=lambda _: None)


def test_a_key_that_others_can_read_ends_the_proxy(tmp_path: Path) -> None:
    ensure_key(tmp_path / "cluster.key").chmod(0o644)
    with pytest.raises(SystemExit, match=r"^proxy: cluster_key_file .* has mode 0644; allowed: 0600 and 0400"):
        options_of_member(str(tmp_path / "cluster.key"))


# ---- which servers take requests ----
def test_without_a_pair_there_is_a_sentence() -> None:
    async def test(c: Cluster) -> None:
        status, answer = await c.post({"prompt": "a"})
        assert status == 503
        assert answer["error"]["message"].startswith("no decode server takes requests in namespace 'default'")
        assert (await c.get("/health"))[0] == 503

    run(test, num_decode=0)


def test_without_a_prefill_server_decode_does_it_alone_or_nobody() -> None:
    async def alone(c: Cluster) -> None:
        assert (await c.post({"prompt": "a"}))[0] == 200
        assert await c.metric(r'kvferry_proxy_skipped_prefills_total\{reason="no prefill server"\}') == 1

    async def refused(c: Cluster) -> None:
        status, answer = await c.post({"prompt": "a"})
        assert status == 503
        assert "no prefill server takes requests" in answer["error"]["message"]
        assert (await c.get("/health"))[0] == 503

    run(alone, num_prefill=0)
    run(refused, num_prefill=0, needs_prefill=True)


def test_the_only_prefill_server_dies_and_the_request_is_answered() -> None:
    async def test(c: Cluster) -> None:
        await c.prefills[0].kill()
        assert (await c.post({"prompt": "a"}))[0] == 200

    run(test, num_prefill=1)


def test_without_the_controller_known_servers_take_turns() -> None:
    async def test(c: Cluster) -> None:
        await c.controller.kill()
        for _ in range(4):
            assert (await c.post({"prompt": "a"}))[0] == 200
        assert c.num_got() == {"p0": 2, "p1": 2, "d0": 2, "d1": 2}
        assert await c.metric("kvferry_proxy_controller_up") == 0
        await c.controller.start()
        await eventually(lambda: c.door.nodes.controller_up)

    run(test)


@pytest.mark.parametrize(("tokens", "says"), [
    ([], "it asks for a token, for which the proxy needs a cluster key (--cluster-key-file)"),
    (["t"], "it refuses the token of the proxy's cluster key (--cluster-key-file), so it has another key, or the "
            "proxy's key was revoked")])
def test_a_proxy_that_the_controller_refuses_says_what_it_needs(
        tokens: list[str], says: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(c: Cluster) -> None:
        c.controller.nodes_answer, c.controller.nodes_status = {"error": "the token is missing"}, 401
        await eventually(lambda: not c.door.nodes.controller_up)

    run(test, controller_tokens=lambda: tokens)
    assert f"(ControllerError: {says}); it is asked again each second, and the 4 servers known before" in caplog.text


def test_a_controller_that_does_not_answer_is_done_without_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CONTROLLER_TIMEOUT_S", 0.2)

    async def test(c: Cluster) -> None:
        c.controller.answers.clear()
        assert (await c.post({"prompt": "a"}))[0] == 200
        await eventually(lambda: not c.door.nodes.controller_up)
        assert (await c.post({"prompt": "a"}))[0] == 200
        c.controller.answers.set()
        await eventually(lambda: c.door.nodes.controller_up)

    run(test)


def test_a_controller_that_begins_anew_and_knows_nobody_yet_loses_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(c: Cluster) -> None:
        servers = c.controller.servers
        await c.controller.kill()
        c.controller.servers = []
        await c.controller.start()
        await c.door.nodes.refresh()
        assert (await c.post({"prompt": "a"}))[0] == 200
        c.controller.servers = servers[1:]
        c.controller.draining = {"d1"}
        await c.door.nodes.refresh()
        assert set(c.door.nodes.known) == {"p0", "p1", "d0", "d1"}
        c.controller.servers = servers[:3]
        await c.door.nodes.refresh()
        assert "d1" not in c.door.nodes.known, "it was drained, so it has left"
        c.controller.servers = []
        c.controller.began_at = time.monotonic()
        c.door.nodes.failed(c.door.nodes.known["p0"])
        await c.door.nodes.refresh()
        assert set(c.door.nodes.known) == {"p1", "d0"}, "who failed and is not named is gone"
        monkeypatch.setattr(nodes, "DROP_AFTER_S", 0.0)
        await c.door.nodes.refresh()
        assert c.door.nodes.known == {}
        c.controller.servers = servers

    run(test)


def test_draining_servers_get_nothing_new_and_new_ones_take_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "DROP_AFTER_S", 1.0)

    async def test(c: Cluster) -> None:
        c.controller.draining = {"d0", "p0"}
        await eventually(lambda: c.door.nodes.known["d0"].draining)
        await c.controller.kill()  # a controller that runs would leave the draining servers out by itself
        for _ in range(2):
            assert (await c.post({"prompt": "a"}))[0] == 200
        assert c.num_got() == {"p0": 0, "p1": 2, "d0": 0, "d1": 2}
        await c.controller.start()
        late = FakeVllm("d2", "kv_consumer")
        late.healthy = False
        await late.start()
        c.controller.servers = [*c.prefills, late]
        await eventually(lambda: "d2" in c.door.nodes.known and "d1" not in c.door.nodes.known)
        await asyncio.sleep(3 * HEALTH_INTERVAL_S)
        assert (await c.post({"prompt": "a"}))[0] == 503, "it is there, but its server does not answer yet"
        late.healthy = True
        await eventually(lambda: c.door.nodes.known["d2"].ready)
        assert (await c.post({"prompt": "a"}))[0] == 200
        assert len(late.got) == 1

    run(test)


def test_a_host_that_says_nothing_keeps_no_new_server_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "HEALTH_TIMEOUT_S", 1000.0)

    async def test(c: Cluster) -> None:
        silent = c.decodes[0]
        silent.answers_health.clear()
        c.door.nodes.failed(c.door.nodes.known["d0"])
        await silent.asked_for_health.wait()
        late = FakeVllm("d2", "kv_consumer")
        await late.start()
        c.controller.servers = [*c.prefills, silent, late]
        await eventually(lambda: "d2" in c.door.nodes.known and c.door.nodes.known["d2"].ready)
        silent.answers_health.set()

    run(test)


# ---- the program launch/proxy ----
def test_the_program_says_where_it_listens_and_ends_when_its_requests_have() -> None:
    async def test(c: Cluster) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", "--controller", c.controller.url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=dict(os.environ))
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode()
            found = re.fullmatch(r"kvferry proxy listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            c.url = found[1]

            async def is_up() -> bool:
                return (await c.get("/health"))[0] == 200

            while not await is_up():
                await asyncio.sleep(0.05)
            c.decodes[0].hold.clear()
            asking = asyncio.create_task(c.post({"prompt": "a"}))
            await eventually(lambda: len(c.decodes[0].got) == 1)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert process.returncode is None
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as fresh, fresh.get(c.url + "/health"):
                    pass
            c.decodes[0].hold.set()
            assert (await asking)[0] == 200
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    run(test)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_controller_is_awaited_ends_the_program_without_a_traceback(number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, subprocess.Popen(
            [sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", "--controller",
             f"http://127.0.0.1:{silent.getsockname()[1]}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True) as process:
        silent.settimeout(DEADLINE_S)
        connection, _ = silent.accept()
        process.send_signal(number)
        said, complained = process.communicate(timeout=DEADLINE_S)
        connection.close()
    assert (process.returncode, said) == (0, "")
    assert "Traceback" not in complained


@pytest.mark.parametrize(("flags", "word"), [
    (["--controller", "tcp://h:1"], "--controller is 'tcp://h:1'"),
    (["--controller", "http://["], "--controller is 'http://['"),
    (["--controller", "http://"], "--controller is 'http://'"),
    (["--controller", "http://h:x"], "--controller is 'http://h:x'"),
    (["--controller", "http://user:secret@h:1"], "--controller is 'http://user:secret@h:1'"),
    (["--controller", "http://h:1?x"], "--controller is 'http://h:1?x'"),
    (["--controller", "http:// h:1"], "--controller is 'http:// h:1'"),
    (["--controller", "http://caf\u00e9:1"], "--controller is 'http://caf\u00e9:1'"),
    (["--host", ""], "--host is empty; 0.0.0.0 or :: stands for all addresses"),
    (["--namespace", ""], "--namespace is empty"),
    (["--prepare-from", "-1"], "--prepare-from is -1; it must be at least 0"),
    (["--port", "70000"], "--port is 70000"),
    (["--tries", "0"], "--tries is 0"),
    (["--max-body", "0"], "--max-body is 0"),
    (["--request-timeout", "0"], "--request-timeout is 0.0; it must be a number of seconds above 0"),
    (["--request-timeout", "nan"], "--request-timeout is nan"),
    (["--grace", "-1"], "--grace is -1.0; it must be a number of seconds from 0 on"),
    (["--grace", "inf"], "--grace is inf"),
])
def test_bad_options_are_named(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry_launch.proxy.main import parse

    with pytest.raises(SystemExit):
        parse(flags)
    assert word in capsys.readouterr().err
