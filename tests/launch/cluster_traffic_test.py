"""Tests how tests/cluster/run judges requests: which are wrong or failed, and when a request may be sent again."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cluster_traffic import MAX_TOKENS, Traffic
from kvferry_launch.testbed.answers import Generation
from texts import text_of

TOKENS = list(range(1, MAX_TOKENS + 1))
REFERENCE = Generation([*TOKENS, 500], [1.0] * (MAX_TOKENS + 1))
DEADLINE_S = 20.0


class Door:
    """A server that answers with the right tokens. `mischief` is called first with each request's number; if it returns
    True, it has answered the request itself.
    """

    def __init__(self, mischief: Callable[[Any, int, bool], bool]) -> None:
        door = self
        self.requests = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number, door.requests = door.requests, door.requests + 1
                if not mischief(self, number, body["stream"]):
                    self.answer(text_of(TOKENS), body["stream"])

            def answer(self, text: str, is_stream: bool, end: str = "data: [DONE]\n\n") -> None:
                content = json.dumps({"choices": [{"text": text}]})
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
                self.end_headers()
                self.wfile.write((f"data: {content}\n\n{end}" if is_stream else content).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def traffic_before() -> Iterator[Callable[..., Traffic]]:
    made: list[tuple[Door, Traffic]] = []

    def before(mischief: Callable[[Any, int, bool], bool], requests: int = 6, may_break: bool = False) -> Traffic:
        door = Door(mischief)
        traffic = Traffic(door.url, [[7, 8]], [REFERENCE])
        traffic.clients = 1
        made.append((door, traffic))
        traffic.pause_s, traffic.door_may_break = 0.0, may_break
        traffic.begin("tested")
        traffic.start()
        deadline = time.monotonic() + DEADLINE_S
        while door.requests < requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        traffic.stop()
        return traffic

    yield before
    for door, traffic in made:
        traffic.stop()
        door.server.shutdown()
        door.server.server_close()


def test_right_answers_are_right(traffic_before: Callable[..., Traffic]) -> None:
    tally = traffic_before(lambda handler, number, is_stream: False).tallies["tested"]
    assert tally.requests >= 6
    assert (tally.failures, tally.wrong, tally.sent_again) == ([], 0, 0)


@pytest.mark.parametrize("at", [2, 3])  # one of the two requests is a stream
def test_one_wrong_token_is_seen(traffic_before: Callable[..., Traffic], at: int) -> None:
    def mischief(handler: Any, number: int, is_stream: bool) -> bool:
        if number == at:
            handler.answer(text_of([*TOKENS[:-1], 9]), is_stream)
        return number == at

    tally = traffic_before(mischief).tallies["tested"]
    assert (tally.failures, tally.wrong) == ([], 1)


@pytest.mark.parametrize(("at", "how", "word"), [
    (2, "status", "status 500"), (3, "status", "status 500"), (3, "error event", "the stream says"),
    (3, "no end", "without [DONE]"), (2, "gone", "Server disconnected")])
def test_what_was_not_answered_failed(traffic_before: Callable[..., Traffic], at: int, how: str, word: str) -> None:
    def mischief(handler: Any, number: int, is_stream: bool) -> bool:
        if number != at:
            return False
        if how == "status":
            handler.send_error(500)
        elif how == "no end":
            handler.answer("w1", is_stream, end="")
        elif how == "error event":
            handler.answer("w1", is_stream, end='data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n')
        return True

    tally = traffic_before(mischief).tallies["tested"]
    assert len(tally.failures) == 1, tally
    assert word in tally.failures[0]
    assert tally.sent_again == 0


def test_a_request_is_sent_again_once_and_only_where_the_door_may_break(traffic_before: Callable[..., Traffic]) -> None:
    once = traffic_before(lambda handler, number, is_stream: number == 2, may_break=True).tallies["tested"]
    assert (once.failures, once.sent_again) == ([], 1)
    twice = traffic_before(lambda handler, number, is_stream: number in (2, 3), may_break=True).tallies["tested"]
    assert (len(twice.failures), twice.sent_again) == (1, 1)
