"""Tests what `up` prints on a terminal and elsewhere, and what the control socket answers."""

import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.cluster import control
from kvferry_launch.cluster.front import packed
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.status import StatusView, table

ROW = {"name": "decode-0", "role": "decode", "host": "b", "state": "starting", "url": "", "pid": 7,
       "since": "2026-01-02T03:04:05", "restarts": 0, "detail": ""}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_for_each_node_in_columns() -> None:
    lines = table([ROW, ROW | {"name": "p", "url": "http://b:1", "detail": "why"}])
    assert [line.split() for line in lines] == [
        ["name", "host", "role", "state", "url", "pid", "since", "detail"],
        ["decode-0", "b", "decode", "starting", "-", "7", "03:04:05", "-"],
        ["p", "b", "decode", "starting", "http://b:1", "7", "03:04:05", "why"]]
    assert len({line.index("decode", 8) for line in lines[1:]}) == 1


def test_elsewhere_only_changes_are_written() -> None:
    out = io.StringIO()
    view = StatusView(as_json=False, stream=out)
    for row in (ROW, ROW, ROW | {"state": "ready"}, ROW | {"state": "ready"}):
        view.show([row])
    view.show([])
    assert [line.split()[4] if len(line.split()) > 4 else line for line in out.getvalue().splitlines()] == [
        "starting", "ready", "gone"]


def test_json_is_an_object_for_each_change() -> None:
    out = io.StringIO()
    view = StatusView(as_json=True, stream=out)
    view.say("ready")
    view.show([ROW])
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"text": "ready"}, ROW]


def test_on_a_terminal_the_table_is_written_over() -> None:
    out = Terminal()
    view = StatusView(as_json=False, stream=out)
    view.show([ROW])
    view.show([ROW], at_once=True)
    view.say("above")
    text = out.getvalue()
    assert text.count("\x1b[2A\x1b[J") == 2
    assert text.endswith("\x1b[Jabove\n")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder with a control socket that echoes requests and refuses the word "no". The socket's path is longer
    than a Unix socket allows.
    """
    long = tmp_path / ("x" * 120)
    long.mkdir()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "no":
            raise SpecError("never")
        return {"did": request["do"]}

    server = control.ControlServer(long, answer)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    yield long
    over.set()
    thread.join()
    server.close()


def test_the_socket_answers_and_refuses(folder: Path) -> None:
    assert control.ask(folder, {"do": "that"}) == {"did": "that"}
    with pytest.raises(SpecError, match=r"^never$"):
        control.ask(folder, {"do": "no"})
    with pytest.raises(SpecError, match=r"^the request is not valid, because .* \(\w+Error: "):
        control.ask(folder, {})
    assert (folder / control.SOCKET).stat().st_mode & 0o077 == 0


def test_a_client_that_says_nothing_does_not_stop_the_others(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent, control.short_path(folder) as path:
        silent.connect(path)
        assert control.ask(folder, {"do": "that"}) == {"did": "that"}


def test_nobody_is_there(tmp_path: Path) -> None:
    assert control.ask(tmp_path, {"do": "that"}) is None
    assert control.ask(tmp_path / "none", {"do": "that"}) is None


def test_announcements_are_message_pack() -> None:
    msgspec = pytest.importorskip("msgspec")
    fields = {"type": "P", "http_address": "host-" + "x" * 60 + ":8100", "zmq_address": "ä:1"}
    assert msgspec.msgpack.decode(packed(fields)) == fields
