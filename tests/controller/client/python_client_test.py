"""Tests kvferry.controller.Client with a real controller, over each kind of socket."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

RELEASE = Path(__file__).resolve().parents[3] / "build" / "release"


@pytest.fixture(scope="module")
def api() -> Iterator[ModuleType]:
    sys.path.insert(0, str(RELEASE / "python"))
    try:
        yield pytest.importorskip("kvferry.controller")
    finally:
        sys.path.remove(str(RELEASE / "python"))


@pytest.fixture(params=["tcp", "ipc", "unix", "stream", "replicas"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    kind = request.param
    zmq = f"ipc://{tmp_path}/zmq" if kind == "ipc" else "tcp://127.0.0.1:0"
    stream = "stream://127.0.0.1:0" if kind == "stream" else f"unix://{tmp_path}/stream"
    with subprocess.Popen([RELEASE / "bin" / "kvferry", "controller", "--bind", zmq, "--stream", stream],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        places = [process.stdout.readline().split()[-1] for _ in range(2)]
        try:
            # the first replica does not exist, and the client works all the same
            replicas = f"tcp://127.0.0.1:1,{places[1]}"
            yield {"tcp": places[0], "ipc": places[0], "replicas": replicas}.get(kind, places[1])
        finally:
            process.terminate()


def keys_of(first: int, last: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest()[:16] for number in range(first, last)]


def wait_until(is_reached: object, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not is_reached():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_node_publishes_and_another_finds_it(api: ModuleType, endpoint: str) -> None:
    with (api.Client(endpoint, engine_id="a", fingerprint="m") as a,
          api.Client(endpoint, engine_id="b", fingerprint="m", endpoint="tcp://h:7", incarnation=9) as b):
        assert a.wait_registered(20)
        assert b.wait_registered(20)
        assert a.status() == "registered"
        b.publish(keys_of(0, 4))
        expected = [api.Holder("b", 9, "tcp://h:7", 4, "host", True)]
        assert wait_until(lambda: a.lookup(keys_of(0, 6), timeout=20) == expected)
        b.evict(keys_of(1, 2))
        assert wait_until(lambda: [holder.num_full_chunks for holder in a.lookup(keys_of(0, 6), timeout=20)] == [1])
        assert b.lookup(keys_of(0, 6), timeout=20) == [], "nobody is told of itself"
        b.close()
        assert wait_until(lambda: a.lookup(keys_of(0, 6), timeout=20) == [])
        with pytest.raises(api.KvFerryError, match="closed"):
            b.publish(keys_of(0, 1))


def test_what_is_wrong_is_one_sentence(api: ModuleType, endpoint: str) -> None:
    with pytest.raises(api.KvFerryError, match="tcp://HOST:PORT"):
        api.Client("nonsense", engine_id="a", fingerprint="m")
    with api.Client(endpoint, engine_id="a", fingerprint="m") as a:
        assert a.wait_registered(20)
        with pytest.raises(api.KvFerryError, match="a chunk key has 3 bytes; it must have 16"):
            a.lookup([b"abc"])
        if "," in endpoint:
            return  # no further controllers are started, because one could get the port at which no controller must be
        with api.Client(endpoint, engine_id="b", fingerprint="another") as b:
            with pytest.raises(api.KvFerryError, match="refused this node"):
                b.wait_registered(20)
            assert b.status().startswith("refused: ")


def test_waiting_for_nobody_ends_and_lets_other_threads_run(api: ModuleType) -> None:
    with api.Client("tcp://127.0.0.1:1", engine_id="a", fingerprint="m") as client:
        failures = []

        def ask() -> None:
            try:
                client.lookup(keys_of(0, 1), timeout=1.0)
            except api.KvFerryError as failure:
                failures.append(str(failure))

        thread = threading.Thread(target=ask)
        thread.start()
        num_turns = 0
        while thread.is_alive():
            num_turns += 1
            time.sleep(0.001)
        assert num_turns > 10, "the interpreter's lock is free meanwhile"
        assert len(failures) == 1
        assert "tcp://127.0.0.1:1 within 1" in failures[0]
        assert client.status() == "connecting"
