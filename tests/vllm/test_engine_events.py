"""Tests that kvferry's controller follows the KV events of vLLM's own publisher, and answers routers over HTTP."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.process import free_port
from kvferry_launch.testbed.servers import Controller

BLOCK = 16
DEADLINE_S = 60.0  # much longer than any wait in these tests takes


class Publisher:
    """vLLM's ZmqEventPublisher in a process of its own, on fixed ports, so that it can restart at the same address."""

    def __init__(self, form: str = "vllm", buffer_steps: int = 10_000, replay: bool = True) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay = f"tcp://127.0.0.1:{free_port()}" if replay else ""
        self.arguments = [self.endpoint.replace("127.0.0.1", "*"), self.replay, str(buffer_steps), form]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> "Publisher":
        program = str(Path(__file__).with_name("kv_event_publisher.py"))
        self.process = subprocess.Popen([sys.executable, program, *self.arguments], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self._wait_for("ready")
        return self

    def _wait_for(self, word: str) -> None:
        assert self.process is not None
        for line in self.process.stdout:  # vLLM's log lines come on stdout too
            if line.strip() == word:
                return
        raise AssertionError("the publisher ended")

    def do(self, **command: Any) -> None:
        assert self.process is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        self._wait_for("done")

    def store(self, hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> None:
        self.do(do="store", hashes=hashes, tokens=tokens, parent=parent, block_size=BLOCK, **more)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


class Http:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data=data), timeout=20) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if answer.headers.get_content_type().endswith("json") else text
        except urllib.error.HTTPError as failure:
            return failure.code, json.loads(failure.read())

    def register(self, instance: str, publisher: Publisher, **more: Any) -> None:
        status, answer = self.call("/register", {
            "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay or None, "type": "vLLM",
            "modelname": "m", "instance_id": instance, "block_size": BLOCK, "dp_rank": 0} | more)
        assert (status, answer["instance_id"]) == (200, instance), answer

    def matched(self, tokens: list[int], **more: Any) -> dict[str, int]:
        status, answer = self.call("/query", {"model": "m", "token_ids": tokens, "block_size": BLOCK} | more)
        assert status == 200, answer
        return {name: found["longest_matched"] for name, found in answer["default"].items()}

    def engine(self, instance: str) -> dict[str, Any]:
        return next(engine for engine in self.call("/status")[1]["engines"] if engine["instance_id"] == instance)


def wait_until(reached: Callable[[], bool]) -> float:
    """Returns how many seconds it took until `reached` returned True."""
    begun = time.monotonic()
    while not reached():
        assert time.monotonic() - begun < DEADLINE_S
        time.sleep(0.01)
    return time.monotonic() - begun


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Http]:
    port = free_port()
    controller = Controller(flags=("--state", "none", "--http", f"127.0.0.1:{port}"), log_folder=tmp_path)
    controller.start()
    controller.wait_ready()
    yield Http(port)
    controller.stop()


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    made: list[Publisher] = []
    yield made
    for publisher in made:
        publisher.stop()


def prompt(number: int, num_blocks: int) -> list[int]:
    return [(number * 7919 + i * 104_729) % 150_000 for i in range(num_blocks * BLOCK)]


def test_a_router_is_told_who_holds_a_prompt_best(http: Http, publishers: list[Publisher]) -> None:
    publishers += [Publisher().start(), Publisher("sglang").start()]
    vllm, sglang = publishers
    tokens = prompt(1, 4)
    # these blocks are published before the controller subscribes; the replay brings them
    vllm.store([11, 12], tokens[: 2 * BLOCK])
    http.register("vllm", vllm)
    http.register("sglang", sglang)
    wait_until(lambda: http.matched(tokens) == {"vllm": 2 * BLOCK, "sglang": 0})
    vllm.store([13, 14], tokens[2 * BLOCK :], parent=12, medium="CPU", bytes=True)
    sglang.store([-5, 901, 902], tokens[: 3 * BLOCK])  # the same tokens with other hashes, some of them negative
    wait_until(lambda: http.matched(tokens) == {"vllm": 4 * BLOCK, "sglang": 3 * BLOCK})
    status, found = http.call("/query", {"model": "m", "token_ids": tokens, "block_size": BLOCK})
    assert status == 200
    assert found["default"]["vllm"] | {"DP": {"0": 4 * BLOCK}, "GPU": 2 * BLOCK, "CPU": 0} == found["default"]["vllm"]
    by_hash = http.call("/query_by_hash", {"model": "m", "seq_hashes": [11, 12, 13, 14], "block_size": BLOCK})[1]
    assert by_hash["default"]["vllm"]["longest_matched"] == 4 * BLOCK
    assert by_hash["default"]["sglang"]["longest_matched"] == 3 * BLOCK  # the same blocks, found by SGLang's hashes
    scores = http.call("/score", {"model": "m", "token_ids": tokens, "candidates": ["vllm", "sglang", "none"]})[1]
    assert [entry["instance_id"] for entry in scores["scores"]] == ["vllm", "sglang", "none"]
    assert scores["scores"][0]["score"] == pytest.approx((2 + 2 * 0.8) / 4)
    assert scores["best"]["instance_id"] == "vllm"
    only_gpu = {"model": "m", "token_ids": tokens, "weights": {"gpu": 1, "cpu": 0}}
    assert http.call("/score", only_gpu)[1]["best"]["instance_id"] == "sglang"

    vllm.do(do="remove", hashes=[12])
    wait_until(lambda: http.matched(tokens)["vllm"] == BLOCK)
    assert http.matched(tokens, cache_salt="s") == {"vllm": 0, "sglang": 0}
    vllm.store([21], tokens[:BLOCK], extra_keys=[["s"]])
    wait_until(lambda: http.matched(tokens, cache_salt="s")["vllm"] == BLOCK)
    vllm.do(do="clear")
    wait_until(lambda: http.matched(tokens) == {"vllm": 0, "sglang": 3 * BLOCK})
    metrics = http.call("/metrics")[1]
    assert 'kvferry_controller_engine_clears_total{engine="vllm"' in metrics
    assert http.call("/unregister", {"instance_id": "sglang"})[1]["removed_instances"] == ["sglang|default|0"]
    assert http.matched(tokens) == {"vllm": 0}


def test_a_lost_batch_is_made_good_by_the_replay(http: Http, publishers: list[Publisher]) -> None:
    publishers.append(Publisher().start())
    tokens = prompt(2, 3)
    http.register("a", publishers[0])
    publishers[0].store([1, 2, 3], tokens)
    wait_until(lambda: http.matched(tokens) == {"a": 3 * BLOCK})
    publishers[0].do(do="lose", hashes=[2])
    publishers[0].store([9], prompt(3, 1))  # this message shows the controller that one is missing
    seconds = wait_until(lambda: http.matched(tokens) == {"a": BLOCK})
    print(f"a lost batch was repaired within {seconds * 1000:.0f} ms")
    counters = http.engine("a")["counters"]
    assert (counters["gaps"], counters["gaps_unrepaired"], counters["restarts"]) == (1, 0, 0)


@pytest.mark.parametrize("replay", [True, False])
def test_nothing_of_an_engine_is_credited_after_it_restarted_in_place(http: Http, publishers: list[Publisher],
                                                                      replay: bool) -> None:
    publishers.append(Publisher(replay=replay).start())
    tokens = prompt(4, 3)
    http.register("a", publishers[0])
    wait_until(lambda: http.engine("a")["is_connected"])
    publishers[0].store([1, 2, 3], tokens)
    publishers[0].store([4], prompt(5, 1))
    wait_until(lambda: http.matched(tokens) == {"a": 3 * BLOCK})
    publishers[0].stop()
    wait_until(lambda: http.matched(tokens) == {})  # the engine is lost, so it is not even listed
    publishers[0].start()
    wait_until(lambda: http.engine("a")["is_connected"])
    publishers[0].store([4], prompt(5, 1))
    wait_until(lambda: http.matched(prompt(5, 1)) == {"a": BLOCK})
    assert http.matched(tokens) == {"a": 0}
    assert http.engine("a")["counters"]["restarts"] == 1
