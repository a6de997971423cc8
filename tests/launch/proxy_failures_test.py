"""Tests launch/proxy with stand-ins when servers or clients fail."""

import asyncio
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kvferry_launch.paths import REPO
from kvferry_launch.proxy import bodies
from kvferry_launch.proxy.nodes import HEALTH_INTERVAL_S, LOST_SILENCE_S
from kvferry_launch.proxy.streams import Stream, gives_the_same_again
from proxy_stand_ins import DEADLINE_S, Cluster, eventually, run


def test_a_refusal_is_passed_on_unchanged_and_no_json_is_refused() -> None:
    async def test(c: Cluster) -> None:
        async def refuse(_: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "max_tokens is -1"}}, status=400)

        c.prefills[0].on_request = refuse
        assert await c.post({"prompt": "a"}) == (400, {"error": {"message": "max_tokens is -1"}})
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 0, "d1": 0}
        for body in (b"{nonsense", b"[1]", b"[" * 100_000):
            status, answer = await c.post(body)
            assert (status, answer["error"]["message"]) == (400, "the body is not a JSON object")
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 0, "d1": 0}, "what the proxy can't read it passes to nobody"

    run(test)


def test_a_body_that_is_too_long_is_refused_with_the_limit() -> None:
    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": "a" * 900}))[0] == 200
        status, answer = await c.post({"prompt": "a" * 1100})
        assert (status, answer["error"]["message"]) == (413, "the body has more than 1024 bytes, the limit that "
                                                             "--max-body sets")
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 1, "d1": 0}

    run(test, body_bytes_max=1024)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["dead", "broken", "status"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_who_fails_before_the_first_byte_is_replaced(kind: str, how: str, stream: bool) -> None:
    async def test(c: Cluster) -> None:
        victim = c.prefills[0] if kind == "prefill" else c.decodes[0]

        async def fail(request: web.Request) -> web.Response | None:
            if how == "status":
                return web.json_response({"error": "engine dead"}, status=500)
            assert request.transport is not None
            request.transport.abort()
            return None

        victim.on_request = fail
        if how == "dead":
            await victim.kill()
        status, answer = await c.post({"prompt": "a", "stream": stream})
        assert status == 200, answer
        other = "p1" if kind == "prefill" else "d1"
        assert c.num_got()[other] == 1
        if kind == "decode":
            assert ("[DONE]" in answer) if stream else answer == {"choices": [{"text": "text of d1"}]}
            assert len(c.prefills[0].got) == 2, "the other pair begins anew"
            assert c.prefills[0].got[1]["kv_transfer_params"]["kvferry_push_to"]["engine_id"] == "d1"
            assert c.prefills[0].headers[0]["X-Request-Id"] != c.prefills[0].headers[1]["X-Request-Id"]
        # the proxy already noticed the dead server when it asked that server to tokenize the prompt
        asked_first = kind == "prefill" and how == "dead"
        assert await c.metric(rf'kvferry_proxy_retries_total\{{role="{kind}"\}}') == (0 if asked_first else 1)

    run(test)


def test_who_fails_gets_nothing_new_before_it_is_healthy() -> None:
    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            return web.Response(status=503)

        c.decodes[0].on_request, c.decodes[0].healthy = fail, False
        for _ in range(3):
            assert (await c.post({"prompt": "a"}))[0] == 200
        assert c.num_got()["d0"] == 1
        assert "d0" in c.controller.asked[-1]["exclude"]
        c.decodes[0].on_request, c.decodes[0].healthy = None, True
        await eventually(lambda: c.door.nodes.known["d0"].ready)
        await c.post({"prompt": "a"})
        assert c.num_got()["d0"] == 2

    run(test)


def test_nobody_is_tried_twice_though_its_health_page_answers() -> None:
    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            await asyncio.sleep(2 * HEALTH_INTERVAL_S)  # waits until the server that failed before is healthy again
            return web.Response(status=500)

        for server in c.prefills:
            server.on_request = fail
        assert (await c.post({"prompt": "a"}))[0] == 200, "decode does it alone at last"
        assert c.num_got() == {"p0": 1, "p1": 1, "d0": 1, "d1": 0}

    run(test)


def test_tries_are_bounded_and_the_last_answer_is_told() -> None:
    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            return web.json_response({"error": "engine dead"}, status=500)

        for server in c.prefills:
            server.on_request = fail
        for server in c.decodes:
            await server.kill()
        status, answer = await c.post({"prompt": "a"})
        assert status in (500, 502)
        assert "error" in answer
        assert sum(c.num_got().values()) <= 3

    run(test)


def test_a_server_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": "a", "stream": True}) as answer:
            assert await answer.content.readany() == b'data: {"n": 0}\n\n'
            await c.decodes[0].kill()
            rest = (await answer.content.read()).decode()
        events = [line.removeprefix("data: ") for line in rest.splitlines() if line]
        message = json.loads(events[0])["error"]["message"]
        assert "decode server d0" in message
        assert "the server's stream stopped before the end of the answer" in message
        assert events[1:] == ["[DONE]"]
        assert c.num_got()["d1"] == 0, "it may answer otherwise, and the client has a part"
        assert await c.metric("kvferry_proxy_broken_streams_total") == 1

    run(test)


async def interrupted(c: Cluster, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns the events of a stream whose server dies after the first event."""
    c.decodes[0].hold.clear()
    async with c.session.post(c.url + path, json={"stream": True, **body}) as answer:
        first = await answer.content.readany()
        await c.decodes[0].kill()
        text = (first + await answer.content.read()).decode()
    return [event if (event := line.removeprefix("data: ")) == "[DONE]" else json.loads(event)
            for line in text.splitlines() if line]


@pytest.mark.parametrize("fixed", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("path", [bodies.COMPLETIONS, bodies.CHAT])
def test_another_server_goes_on_with_a_stream_that_can_be_repeated(path: str, fixed: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["one two", " three", " four"]
        c.decodes[1].texts = ["one", " two th", "ree", " four"]
        body = {"messages": []} if path == bodies.CHAT else {"prompt": "a"}
        *events, usage, end = await interrupted(c, path, body | fixed)
        choices = [event["choices"][0] for event in events]
        texts = [choice["delta"]["content"] if path == bodies.CHAT else choice["text"] for choice in choices]
        assert texts == ["one two", " th", "ree", " four"]
        assert {event["id"] for event in events} == {"of-d0"}, "one answer has one name"
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        assert (usage["usage"], end) == ({"completion_tokens": 6}, "[DONE]")
        assert c.num_got()["d1"] == 1
        assert c.num_got()["p0"] == 2, "the other server needs its prompt too"
        assert await c.metric("kvferry_proxy_continued_streams_total") == 1
        assert await c.metric("kvferry_proxy_broken_streams_total") == 0

    run(test)


@pytest.mark.parametrize("other", ["one too", "one"])
def test_a_stream_does_not_go_on_with_other_text(other: str) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["one two", " three"]
        c.decodes[1].texts = [other, " or not"]
        *events, end = await interrupted(c, bodies.COMPLETIONS, {"prompt": "a", "temperature": 0})
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["one two"]
        assert "with a different text" in events[-1]["error"]["message"]
        assert end == "[DONE]"
        assert await c.metric("kvferry_proxy_broken_streams_total") == 1

    run(test)


def test_a_stream_that_no_server_goes_on_with_ends_in_an_error_event() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["one", " two"]
        *events, end = await interrupted(c, bodies.COMPLETIONS, {"prompt": "a", "temperature": 0})
        assert "decode server d0" in events[-1]["error"]["message"]
        assert end == "[DONE]"

    run(test, num_decode=1)


def test_a_stream_outlives_two_servers_and_events_that_were_cut() -> None:
    def event(content: str, **more: Any) -> bytes:
        return f"data: {json.dumps({'choices': [{'delta': {'content': content}, **more}]})}\n\n".encode()

    stream = Stream(bodies.CHAT, {"temperature": 0})
    got = b""
    for server in ([event(""), event("a b"), event(" c")[:20]],
                   [event(""), event("a")[:9], event("a")[9:] + event(" b") + event(" c"), event(" d")[:-1]],
                   [event("a b c d"), event(" e", finish_reason="stop") + b"data: [DONE]\n\n"]):
        stream.begin()
        got += b"".join(stream.feed(piece) for piece in server)
    texts = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in got.splitlines()
             if line and not line.endswith(b"[DONE]")]
    assert texts == ["", "a b", " c", " d", " e"]
    assert stream.done


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 1}, {"temperature": 1.0}, {"echo": True}, {"tools": [{}]}])
def test_what_can_not_be_repeated_or_cut_is_not_sent_again(more: dict[str, Any]) -> None:
    assert gives_the_same_again(bodies.COMPLETIONS, {"temperature": 0})
    assert not gives_the_same_again(bodies.COMPLETIONS, {"temperature": 0} | more)
    assert not gives_the_same_again(bodies.GENERATE, {"temperature": 0})


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_request_at_the_server(stream: bool) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        asking = asyncio.create_task(c.post({"prompt": "a", "stream": stream}))
        await eventually(lambda: len(c.decodes[0].got) == 1)
        await asyncio.sleep(0.1)  # waits until the first event of a stream was sent
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: c.decodes[0].cancelled == 1)
        await eventually(lambda: all(node.in_flight == 0 for node in c.door.nodes.known.values()))
        assert await c.metric("kvferry_proxy_cancelled_total") == 1
        assert await c.metric("kvferry_proxy_in_flight") == 0
        assert c.num_got()["d1"] == 0

    run(test)


def test_a_client_that_goes_away_ends_a_prefill_too() -> None:
    async def test(c: Cluster) -> None:
        async def wait(_: web.Request) -> None:
            await asyncio.sleep(DEADLINE_S)

        c.prefills[0].on_request = wait
        asking = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(c.prefills[0].got) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: c.prefills[0].cancelled == 1)
        assert c.num_got()["d0"] == 0

    run(test)


def test_a_list_that_can_not_be_read_does_not_end_the_polling() -> None:
    async def test(c: Cluster) -> None:
        for nodes in ([3], "none", [{"namespace": "default", "serves": "http://x:1"}], {"a": 1}):
            c.controller.nodes_answer = {"nodes": nodes}
            await eventually(lambda: not c.door.nodes.controller_up)
            assert (await c.post({"prompt": "a"}))[0] == 200
            c.controller.nodes_answer = None
            await eventually(lambda: c.door.nodes.controller_up)

    run(test)


def test_a_pair_that_can_not_be_read_or_was_refused_is_counted_and_the_proxy_chooses_itself() -> None:
    async def test(c: Cluster) -> None:
        answers = [{}, {"prefill": {"engine_id": "p0"}, "decode": "d0", "skip_prefill": False}, {"prefill": None},
                   {"prefill": {"engine_id": "p0"}, "decode": {"engine_id": "d0"}}, {"error": "nobody"}]
        for number, c.controller.pair_answer in enumerate(answers):
            assert (await c.post({"prompt": "a"}))[0] == 200
            assert await c.metric("kvferry_proxy_controller_errors_total") == number + 1
        assert c.door.nodes.controller_up

    run(test)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_who_accepts_requests_but_never_answers_is_left_as_soon_as_the_controller_loses_it(kind: str) -> None:
    async def test(c: Cluster) -> None:
        victim, other = (c.prefills if kind == "prefill" else c.decodes)[:2]

        async def never(_: web.Request) -> None:
            await asyncio.Event().wait()

        victim.on_request = never
        asking = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(victim.got) == 1)
        c.controller.servers.remove(victim)
        lost_at = asyncio.get_running_loop().time()
        status, answer = await asking
        assert status == 200, answer
        assert asyncio.get_running_loop().time() - lost_at < 5.0
        assert (len(victim.got), len(other.got)) == (1, 1)
        assert (await c.post({"prompt": "a"}))[0] == 200
        assert len(victim.got) == 1, "a lost server gets nothing new, though its health page answers"
        await eventually(lambda: victim.cancelled == 1)
        c.controller.servers.append(victim)
        await victim.kill()

    run(test)


def test_a_server_that_the_controller_has_lost_goes_on_with_an_answer_that_it_still_sends() -> None:
    async def test(c: Cluster) -> None:
        victim = c.decodes[0]
        victim.texts = [f" {number}" for number in range(4)]
        victim.hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": "a", "stream": True}) as answer:
            await answer.content.readany()
            c.controller.servers.remove(victim)
            await eventually(lambda: "d0" not in c.door.nodes.known)
            victim.pause_s = LOST_SILENCE_S / 2
            victim.hold.set()
            rest = (await answer.content.read()).decode()
        assert rest.endswith("[DONE]\n\n")
        assert "error" not in rest
        c.controller.servers.append(victim)
        await eventually(lambda: "d0" in c.door.nodes.known and c.door.nodes.known["d0"].ready)

    run(test)


def test_a_whole_answer_of_a_lost_server_that_still_arrives_is_no_silence() -> None:
    async def test(c: Cluster) -> None:
        victim = c.decodes[0]

        async def slowly(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            for piece in (b'{"choices"', b': [{"te', b'xt": "al', b'l of ', b'd0"}]', b"}"):
                await response.write(piece)
                await asyncio.sleep(LOST_SILENCE_S / 2)
            return response

        victim.on_request = slowly
        asking = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(victim.got) == 1)
        c.controller.servers.remove(victim)
        assert await asking == (200, {"choices": [{"text": "all of d0"}]})
        assert c.num_got() == {"p0": 1, "p1": 0, "d1": 0}
        c.controller.servers.append(victim)

    run(test)


def test_requests_for_the_only_decode_server_are_refused_within_5_s_of_its_loss() -> None:
    async def test(c: Cluster) -> None:
        (only,) = c.decodes[:1]

        async def never(_: web.Request) -> None:
            await asyncio.Event().wait()

        only.on_request = never
        early = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(only.got) == 1)
        c.controller.servers.remove(only)
        lost_at = asyncio.get_running_loop().time()
        await eventually(lambda: "d0" not in c.door.nodes.known)
        late = asyncio.create_task(c.post({"prompt": "b"}))
        assert [status for status, _ in (await early, await late)] == [502, 503]
        assert asyncio.get_running_loop().time() - lost_at < 5.0
        c.controller.servers.append(only)

    run(test, num_decode=1)


def test_the_only_decode_server_has_time_to_come_back() -> None:
    """The server may only have been too busy to send heartbeats."""
    async def test(c: Cluster) -> None:
        only, spare = c.decodes
        await spare.kill()
        c.controller.servers.remove(spare)
        resumed = asyncio.Event()

        async def wait(_: web.Request) -> None:
            await resumed.wait()

        only.on_request = wait
        early = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(only.got) == 1)
        waits = c.door.nodes.known["d0"].waits
        waits._heard_at = {task: heard_at - 60.0 for task, heard_at in waits._heard_at.items()}  # a long prompt
        c.controller.servers.remove(only)
        await eventually(lambda: "d0" not in c.door.nodes.known)
        late = asyncio.create_task(c.post({"prompt": "b"}))
        await asyncio.sleep(LOST_SILENCE_S)
        assert not early.done() and not late.done()
        c.controller.servers.append(only)
        resumed.set()
        assert [status for status, _ in (await early, await late)] == [200, 200]

    run(test)


def test_a_client_that_goes_away_while_its_server_is_lost_is_not_served_elsewhere() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        asking = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(c.decodes[0].got) == 1)
        node = c.door.nodes.known["d0"]
        (task,) = node.waits._heard_at
        node.waits.end_silent(0.0)
        task.cancel()
        await eventually(lambda: not node.waits)
        await eventually(lambda: c.decodes[0].cancelled == 1)
        await asyncio.gather(asking, return_exceptions=True)
        assert c.num_got()["d1"] == (0 if hasattr(task, "uncancel") else 1)

    run(test)


def test_without_file_descriptors_it_says_so_once_and_serves_again_later(tmp_path: Path) -> None:
    async def test(c: Cluster) -> None:
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", "--controller", c.controller.url,
                stdout=asyncio.subprocess.PIPE, stderr=log,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 80)))
        assert process.stdout is not None
        try:
            port = int((await process.stdout.readline()).decode().rpartition(":")[2])
            c.url = f"http://127.0.0.1:{port}"
            used = Path(f"/proc/{process.pid}/fd")
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            await eventually(lambda: len(list(used.iterdir())) == 80)
            await asyncio.sleep(2.5)  # asyncio tries again once a second
            for _, writer in clients:
                writer.close()
            await eventually(lambda: len(list(used.iterdir())) < 40)
            await eventually(lambda: (tmp_path / "log").read_text().count(" takes requests") >= 4)
            assert (await c.post({"prompt": "a"}))[0] == 200
        finally:
            process.kill()
            await process.wait()
        said = (tmp_path / "log").read_text()
        assert said.count("ERROR no file descriptors are left (Too many open files; 80 are allowed)") == 1
        assert "Traceback" not in said

    run(test)
