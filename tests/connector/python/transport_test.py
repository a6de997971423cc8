"""Tests kvferry.transport: moves Python buffers between two transports and between two processes."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kvferry._core", reason="the Python module is not built")

from kvferry.transport import Completion, Direction, KvFerryError, Notification, Transport

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["auto", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    with Transport(path=request.param) as near, Transport(path=request.param) as far:
        yield near, far


def outcome(transport: Transport, transfer: int) -> Completion:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for event in transport.wait(1.0):
            if isinstance(event, Completion):
                assert event.transfer == transfer
                return event
    raise AssertionError("no completion within 10 s")


def test_ranges_are_pulled_and_pushed_and_the_peer_is_notified(pair: tuple[Transport, Transport]) -> None:
    near, far = pair
    mine, its = bytearray(100_000), bytearray(b"a" * 50_000 + b"b" * 50_000)
    here, there = near.register(mine), far.register(its)
    assert here.size == 100_000
    peer = near.connect(far.address())
    ranges = [(10, 49_990, 20), (50_000, 0, 1)]
    done = outcome(near, near.submit(peer, Direction.PULL, here, there.exported, ranges))
    assert (done.ok, done.what) == (True, "")
    assert mine[10:30] == b"a" * 10 + b"b" * 10
    assert (mine[50_000], mine[50_001]) == (ord("a"), 0)
    mine[:5] = b"hello"
    pushed = near.submit(peer, Direction.PUSH, here, there.exported, [(0, 7, 5)], notification=b"five bytes")
    assert outcome(near, pushed).ok
    (note,) = far.wait(10.0)
    assert isinstance(note, Notification)
    assert (note.body, note.sender) == (b"five bytes", near.address())
    assert its[7:12] == b"hello"


def test_memory_is_registered_by_its_address(pair: tuple[Transport, Transport]) -> None:
    near, far = pair
    memory, its = ctypes.create_string_buffer(64), bytearray(b"x" * 64)
    here, there = near.register_memory(ctypes.addressof(memory), 64), far.register(its)
    peer = near.connect(far.address())
    assert outcome(near, near.submit(peer, Direction.PULL, here, there.exported, [(0, 0, 64)])).ok
    assert memory.raw == b"x" * 64
    near.unregister(here)


def test_a_registered_buffer_stays_until_it_is_unregistered() -> None:
    with Transport(path="shm") as transport:
        buffer = bytearray(4096)
        region = transport.register(buffer)
        with pytest.raises(BufferError):
            buffer.clear()
        transport.unregister(region)
        buffer.clear()
        kept = bytearray(4096)
        transport.register(kept)
    kept.clear()  # close() must release them too


def test_what_cannot_be_done_is_an_exception_with_a_sentence() -> None:
    with Transport(path="shm") as transport, Transport(path="shm") as other:
        region = transport.register(bytearray(64))
        with pytest.raises(KvFerryError, match="kvferry: "):
            transport.connect(b"nonsense")
        with pytest.raises(KvFerryError, match="another transport"):
            other.submit(0, Direction.PULL, region, b"", [(0, 0, 1)])
        with pytest.raises(KvFerryError, match="kvferry: "):
            transport.submit(77, Direction.PULL, region, region.exported, [(0, 0, 1)])
        with pytest.raises(KvFerryError, match="gpu=NUMBER"):
            transport.register_memory(4096, 4096, gpu=True)
        with pytest.raises(BufferError):
            transport.register(b"bytes can't be written to")
    with pytest.raises(KvFerryError, match="carrier pigeon"):
        Transport(path="carrier pigeon")
    with pytest.raises(KvFerryError, match="kvferry: "):
        transport.register(bytearray(64))
    transport.close()  # closes the transport a second time


def test_other_threads_run_while_one_waits() -> None:
    with Transport(path="tcp") as transport:
        waited: list[object] = []
        thread = threading.Thread(target=lambda: waited.extend(transport.wait(1.0)))
        began = time.monotonic()
        thread.start()
        ticks = 0
        while thread.is_alive():
            time.sleep(0.01)
            ticks += 1
        assert not waited
        assert time.monotonic() - began >= 0.9
        assert ticks >= 20, "the wait kept the interpreter's lock"


def test_close_ends_a_wait_of_another_thread() -> None:
    transport = Transport(path="tcp")
    thread = threading.Thread(target=transport.wait, args=(60.0,))
    thread.start()
    time.sleep(0.1)
    transport.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_the_example_moves_blocks_between_two_processes() -> None:
    example = REPO / "launch" / "examples" / "move_blocks.py"
    assert len(example.read_text().splitlines()) <= 30
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "every byte is right\n"), done.stderr
