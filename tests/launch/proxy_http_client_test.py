"""Tests the proxy's HTTP client with a server that sends what a test says: which connections are used again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from kvferry_launch.proxy import http_client, http_connection
from kvferry_launch.proxy.http_answer import HEAD_MAX, Answer, AnswerError
from kvferry_launch.proxy.http_client import HttpClient
from kvferry_launch.proxy.http_connection import UnansweredError
from kvferry_launch.proxy.metrics import Metrics
from proxy_stand_ins import eventually

CLOSE = b"<close>"  # at the end of what the server sends: it then closes the connection
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
           b"2\r\nhe\r\n003;name=value\r\nllo\r\n0\r\nTrailer: x\r\n\r\n")


class Server:
    """Answers each request with the next entry of `script`."""

    def __init__(self, script: list[bytes]) -> None:
        self.script = script
        self.got: list[tuple[int, str]] = []  # number of the connection, and the head of the request
        self.ended: set[int] = set()  # numbers of connections that the client has closed
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.writers)
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if "Content-Length: " in head:
                    await reader.readexactly(int(head.partition("Content-Length: ")[2].split("\r\n")[0]))
                self.got.append((number, head))
                answer = self.script.pop(0)
                writer.write(answer.removesuffix(CLOSE))
                if answer.endswith(CLOSE):
                    break
        self.ended.add(number)
        writer.close()

    @property
    def connections(self) -> list[int]:
        return [number for number, _ in self.got]


class Both:
    """A server and a client of it."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.url = server, url
        self.metrics = Metrics()
        self.client = HttpClient(10.0, self.metrics.resent)

    async def ask(self, method: str = "POST", total_s: float | None = None) -> tuple[int, bytes]:
        with await self.client.ask(method, self.url, "/x", {"X-Request-Id": "a"}, b"body" if method == "POST" else b"",
                                   total_s) as answer:
            return answer.status, await answer.read()

    @property
    def num_resent(self) -> float:
        return float(self.metrics.registry.get_sample_value("kvferry_proxy_resent_total") or 0.0)


def run(script: list[bytes], test: Callable[[Both], Awaitable[None]]) -> None:
    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[Both]:
        server = Server(list(script))
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        made = Both(server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        try:
            yield made
        finally:
            made.client.close()
            listening.close()

    async def inside() -> None:
        async with served() as made:
            await asyncio.wait_for(test(made), 30.0)

    asyncio.run(inside())


# ---- which connections are used again ----
@pytest.mark.parametrize(("method", "first", "body"), [
    ("POST", HELLO, b"hello"), ("POST", CHUNKED, b"hello"), ("GET", HELLO, b"hello"),
    ("HEAD", HELLO[:-5], b""), ("POST", b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ("POST", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
    ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ("POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + HELLO, b"hello"),
])
def test_a_connection_whose_answer_has_ended_carries_the_next_request(method: str, first: bytes, body: bytes) -> None:
    async def test(both: Both) -> None:
        assert (await both.ask(method))[1] == body
        assert await both.ask() == (200, b"hello")
        assert both.server.connections == [0, 0]

    run([first, HELLO], test)


@pytest.mark.parametrize("first", [
    b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 5\r\n\r\nhello", HELLO.replace(b"1.1", b"1.0"),
    b"HTTP/1.1 200 OK\r\n\r\nhello" + CLOSE, HELLO + b"more", HELLO + CLOSE,
    CHUNKED.replace(b"\r\n", b"\r\nContent-Length: 5\r\n", 1), CHUNKED + b"HTTP/1.1 200 OK\r\n\r\n",
])
def test_a_connection_that_the_server_ends_or_that_has_too_many_bytes_is_not_used_again(first: bytes) -> None:
    async def test(both: Both) -> None:
        assert await both.ask() == (200, b"hello")
        await eventually(lambda: both.server.ended == {0} and not both.client._servers[both.url]._idle)
        assert await both.ask() == (200, b"hello")
        assert both.server.connections == [0, 1]
        assert both.num_resent == 0

    run([first, HELLO], test)


def test_a_connection_that_the_server_closed_while_it_was_idle_fails_no_request() -> None:
    async def test(both: Both) -> None:
        for _ in range(2):
            assert await both.ask() == (200, b"hello")
        assert both.num_resent == 1
        assert both.server.connections == [0, 0, 1]
        assert ["a-again" in head for _, head in both.server.got] == [False, False, True]

    run([HELLO, CLOSE, HELLO], test)


def test_a_request_is_sent_again_once_and_only_over_a_new_connection() -> None:
    async def test(both: Both) -> None:
        with pytest.raises(UnansweredError, match="the server closed the connection"):
            await both.ask()  # a new connection: the server itself has failed
        assert both.server.connections == [0]
        await both.ask()
        with pytest.raises(UnansweredError):
            await both.ask()
        assert both.server.connections == [0, 1, 1, 2]
        assert both.num_resent == 1

    run([CLOSE, HELLO, CLOSE, CLOSE], test)


def test_a_request_that_ran_for_a_while_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "RESEND_WITHIN_S", 0.0)

    async def test(both: Both) -> None:
        await both.ask()
        with pytest.raises(UnansweredError):
            await both.ask()
        assert both.num_resent == 0

    run([HELLO, CLOSE, HELLO], test)


@pytest.mark.parametrize("part", [HELLO[:1], HELLO[:30], HELLO[:-1], CHUNKED[:60], CHUNKED[:-2]])
def test_a_request_whose_answer_has_begun_is_not_sent_again(part: bytes) -> None:
    async def test(both: Both) -> None:
        await both.ask()
        with pytest.raises(ConnectionError, match="before the end of its answer"):
            await both.ask()
        assert both.num_resent == 0
        assert await both.ask() == (200, b"hello")
        assert both.server.connections == [0, 0, 1]

    run([HELLO, part + CLOSE, HELLO], test)


def test_an_answer_that_was_not_read_to_its_end_ends_the_connection() -> None:
    async def test(both: Both) -> None:
        with await both.client.ask("POST", both.url, "/x", {}) as answer:
            assert await answer.read_any() == b"hell"
        await eventually(lambda: both.server.ended == {0})
        assert await both.ask() == (200, b"hello")
        assert both.server.connections == [0, 1]

    run([HELLO[:-1], HELLO], test)


# ---- how many connections are kept, and how long ----
def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_MAX", 2)

    async def test(both: Both) -> None:
        assert await asyncio.gather(*(both.ask() for _ in range(4))) == [(200, b"hello")] * 4
        assert sorted(both.server.connections) == [0, 1, 2, 3]
        await eventually(lambda: len(both.server.ended) == 2)
        await asyncio.sleep(0.1)
        assert len(both.server.ended) == 2

    run([HELLO] * 4, test)


def test_idle_connections_end_when_they_are_old_or_their_server_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(both: Both) -> None:
        await both.ask()
        both.client.keep_only([both.url])
        await both.ask()
        assert both.server.connections == [0, 0]
        both.client.keep_only([])
        await eventually(lambda: both.server.ended == {0})
        with await both.client.ask("POST", both.url, "/x", {}) as answer:
            both.client.drop(both.url)  # the server fails for another request
            both.server.writers[1].write(b"o")
            assert await answer.read() == b"hello"
        await eventually(lambda: both.server.ended == {0, 1})
        await both.ask()
        monkeypatch.setattr(http_client, "IDLE_S", 0.0)
        await both.ask()
        assert both.server.connections == [0, 0, 1, 2, 3]
        both.client.keep_only([both.url])
        await eventually(lambda: len(both.server.ended) == 4)

    run([HELLO, HELLO, HELLO[:-1], HELLO, HELLO], test)


# ---- limits ----
def test_silence_and_the_whole_exchange_are_limited() -> None:
    async def test(both: Both) -> None:
        with pytest.raises(TimeoutError, match=r"not complete after 0\.1 s"):
            await both.ask(total_s=0.1)
        both.client = HttpClient(0.2, both.metrics.resent)
        with pytest.raises(TimeoutError, match=r"sent nothing for 0\.2 s"):
            await both.ask()
        await eventually(lambda: both.server.ended == {0, 1})
        assert both.num_resent == 0

    run([b"", HELLO[:-1]], test)


def test_a_server_that_does_not_speak_https_is_suspected_of_that() -> None:
    async def test(both: Both) -> None:
        both.url = both.url.replace("http:", "https:")
        with pytest.raises(TimeoutError, match=r"within 0\.1 s; the server may not speak HTTPS"):
            await both.ask(total_s=0.1)

    run([], test)


def test_a_caller_that_reads_slowly_stops_the_server_and_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "BUFFERED_MAX", 64 << 10)
    size = 16 << 20

    async def test(both: Both) -> None:
        both.client = HttpClient(0.2, both.metrics.resent)
        with await both.client.ask("POST", both.url, "/x", {}) as answer:
            await asyncio.sleep(0.5)
            assert 0 < sum(map(len, answer.pieces)) < 1 << 20
            assert len(await answer.read()) == size
        assert await both.ask() == (200, b"hello")
        assert both.server.connections == [0, 0]

    run([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), HELLO], test)


@pytest.mark.parametrize("url", ["", "tcp://h:1", "http://", "http://[", "http://h:x", "http://u:p@h", "http://h/a b"])
def test_a_url_that_can_not_be_used_is_named(url: str) -> None:
    async def test(both: Both) -> None:
        with pytest.raises(ConnectionError, match=r"the server's URL is '.*', not http\[s\]://HOST:PORT"):
            await both.client.ask("GET", url, "/x", {})

    run([], test)


def test_a_header_can_not_begin_another_line() -> None:
    async def test(both: Both) -> None:
        for value in ("a\r\nB: c", "a\nB: c", "a\rB", "a\0"):
            with pytest.raises(ValueError, match="a line break or a zero byte"):
                await both.client.ask("GET", both.url, "/x", {"A": value})
        assert both.server.got == []

    run([], test)


# ---- answers ----
@pytest.mark.parametrize("whole", [HELLO, CHUNKED])
def test_an_answer_may_come_byte_by_byte(whole: bytes) -> None:
    answer = Answer("GET")
    for byte in whole:
        assert not answer.done
        answer.feed(bytes([byte]))
    assert (answer.done, answer.can_reuse, b"".join(answer.pieces)) == (True, True, b"hello")


@pytest.mark.parametrize(("raw", "sentence"), [
    (b"SSH-2.0\r\n\r\n", "begins with"), (b"HTTP/2 200\r\n\r\n", "begins with"), (b"HTTP/1.1 99 x\r\n\r\n", "begins"),
    (b"HTTP/1.1 101 Switching\r\n\r\n", "another protocol"), (b"a" * (HEAD_MAX + 1), "more than 65536 bytes"),
    (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "malformed header"),
    (b"HTTP/1.1 200 OK\r\nA: b\nC: d\r\n\r\n", "malformed header"),
    (HELLO.replace(b"5", b"-5"), "Content-Length"), (HELLO.replace(b"5", b"5\r\nContent-Length: 6"), "Content-Length"),
    (HELLO.replace(b"5", b"9" * 30), "Content-Length"), (CHUNKED.replace(b"chunked", b"gzip"), "Transfer-Encoding"),
    (CHUNKED.replace(b"2\r\nhe", b"+2\r\nhe"), "hexadecimal"),
    (CHUNKED.replace(b"2\r\nhe", b"0x2\r\nhe"), "hexadecimal"),
    (CHUNKED.replace(b"2\r\nhe", b"1\r\nhe"), "longer than its size"), (CHUNKED[:-2] + b"a" * (HEAD_MAX + 1), "line"),
    (CHUNKED[:-2] + b"T: x\r\n" * (HEAD_MAX // 4 + 1), "trailers"),
    (CHUNKED.partition(b"003")[0] + b"0" * 300, "line"),
])
def test_what_is_no_answer_is_named(raw: bytes, sentence: str) -> None:
    with pytest.raises(AnswerError, match=sentence):
        Answer("GET").feed(raw)
