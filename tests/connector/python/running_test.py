"""Compares a scheduler node that recognises running requests by their ids' objects with one that looks each of them up.
"""

import ctypes
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.servers import Controller, running_controller

core = pytest.importorskip("kvferry._core", reason="the Python module is not built")

CHUNK_TOKENS, BLOCK_TOKENS, HEAD_DIM, NUM_BLOCKS = 32, 16, 8, 4096
PLANE_BYTES = BLOCK_TOKENS * HEAD_DIM * 4


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with running_controller("running-controller", LOGS / "tests") as process:
        yield process


class Node:
    """A scheduler node with a worker. Gets each step's running requests with the ids that `named` makes of theirs."""

    def __init__(self, controller: Controller, name: str, named: Any) -> None:
        self._memory = ctypes.create_string_buffer(NUM_BLOCKS * 2 * PLANE_BYTES)
        base, strides = ctypes.addressof(self._memory), (2 * PLANE_BYTES, PLANE_BYTES, HEAD_DIM * 4, 4)
        layout = core.KvLayout(layers=[("layer", 0, (base, *strides), (base + PLANE_BYTES, *strides))], num_kv_heads=1,
                               head_dim=HEAD_DIM, element_bytes=4, planes=2, block_tokens=BLOCK_TOKENS,
                               num_blocks=NUM_BLOCKS)
        extra = json.dumps({"controller": controller.address, "chunk_tokens": CHUNK_TOKENS, "pool_bytes": "2MiB",
                            "namespace": name, "advertise_host": "127.0.0.1"})
        self.core = core.SchedulerNode(
            extra_json=extra, engine_id=name, role="kv_both", fingerprint="model", groups=[(BLOCK_TOKENS, 0, False)],
            whole_blocks=False, keeps_state=False, checkpoint_alignment=0, runs_ahead=True, start_timeout_ms=10_000)
        self.worker = core.WorkerNode(extra_json=extra, rank=0, label=name, layouts=[layout])
        self.core.attach_workers([self.worker.handshake()])
        self._named = named

    def step(self, admitted: list[Any], rows: list[Any], resumed: set[str], scheduled: dict[str, int],
             preempted: list[str], texts: dict[str, list[int]]) -> bytes:
        ids = [self._named(row[0]) for row in rows]
        plan: bytes = self.core.build_step(
            admitted, ids, [row[1] for row in rows], [row[2] for row in rows], set(resumed), dict(scheduled), preempted,
            lambda request_id, known: texts[request_id][known:])
        self.worker.begin_step(plan)
        self.worker.load()
        self.worker.save()
        if (report := self.worker.take_report()) is not None:
            self.core.worker_report(report)
        return plan

    def shutdown(self) -> None:
        self.core.shutdown()
        self.worker.shutdown()


class Schedule:
    """Draws steps as vLLM takes them: requests come, end, are preempted and come back, and drafts are rejected."""

    def __init__(self, seed: int, nodes: list[Node]) -> None:
        self._random = random.Random(seed)
        self._nodes = nodes
        self._names = [f"{seed}-{number}" for number in range(40)]  # an id is used again after its request has ended
        self._blocks = itertools.count(1)
        self._texts: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._running: list[str] = []
        self._preempted: list[str] = []
        self.saves = self.resumed = 0

    def _grow(self, name: str, num_tokens: int) -> tuple[list[int]] | None:
        missing = -(-num_tokens // BLOCK_TOKENS) - len(self._tables[name])
        added = [next(self._blocks) % NUM_BLOCKS or 1 for _ in range(missing)]
        self._tables[name] += added
        return (added,) if added else None

    def _admit(self, name: str) -> int:
        """Returns the number of tokens that the engine need not compute."""
        self._tables[name] = []
        found = set()
        for node in self._nodes:
            answer = None
            while answer is None:
                answer, _ = node.core.lookup(name, 0)
            found.add(answer)
        assert len(found) == 1
        hit: int = found.pop()
        self._grow(name, len(self._texts[name]))
        for node in self._nodes:
            node.core.allocated(name, hit, [list(self._tables[name])])
        return hit

    def _tell_tokens(self, name: str) -> None:
        for node in self._nodes:
            known = node.core.num_tokens(name)
            node.core.update_tokens(name, known, self._texts[name][known:])

    def _end(self, name: str) -> None:
        aborted = self._random.random() < 0.3
        self._tell_tokens(name)
        for node in self._nodes:
            node.core.finished(name, self._computed[name], [list(self._tables[name])], aborted)
        del self._texts[name], self._tables[name], self._computed[name]

    def step(self) -> None:
        draw = self._random
        for name in [name for name in self._running if draw.random() < 0.04]:
            self._running.remove(name)
            self._end(name)
        preempted = [name for name in self._running if draw.random() < 0.03]
        for name in preempted:
            self._running.remove(name)
            self._preempted.append(name)
            self._tell_tokens(name)
        scheduled: dict[str, int] = {}
        rows: list[Any] = []
        for name in self._running:
            if draw.random() < 0.05:  # vLLM has no budget left for this request
                continue
            count = draw.choice((1, 1, 1, 3))
            scheduled[name] = count
            rows.append((name, self._computed[name], self._grow(name, self._computed[name] + count)))
        resumed, admitted = set(), []
        for name in [name for name in self._preempted if name not in preempted and draw.random() < 0.3]:
            self._preempted.remove(name)
            hit = self._admit(name)
            self._computed[name], scheduled[name] = hit, len(self._texts[name]) - hit
            rows.append((name, hit, (list(self._tables[name]),)))
            resumed.add(name)
            self.resumed += 1
        for name in draw.sample(self._names, 3):
            if name in self._texts:
                continue
            self._texts[name] = [draw.randrange(1000) for _ in range(draw.randrange(1, 100))]
            for node in self._nodes:
                node.core.add_request(
                    request_id=name, tokens=self._texts[name], num_prompt_tokens=len(self._texts[name]), digests=[],
                    extras="", items=[], cacheable=True, handoff=False, source=None)
            hit = self._admit(name)
            self._computed[name], scheduled[name] = hit, len(self._texts[name]) - hit
            admitted.append((name, hit, scheduled[name], [list(self._tables[name])]))
        plans = {node.step(admitted, rows, resumed, scheduled, preempted, self._texts) for node in self._nodes}
        assert len(plans) == 1
        self.saves += len(plans.pop()) > 30
        self._running += [row[0] for row in rows if row[0] in resumed] + [row[0] for row in admitted]
        for name, count in scheduled.items():
            taken = draw.randint(1, count) if count <= 3 and self._computed[name] else count  # drafts may be rejected
            self._computed[name] += taken
            wanted = self._computed[name] + 1
            self._texts[name] += [draw.randrange(1000) for _ in range(wanted - len(self._texts[name]))]


@pytest.mark.parametrize("seed", range(1, 9))
def test_requests_recognised_by_their_ids_objects_are_planned_as_if_looked_up(
        seed: int, controller: Controller) -> None:
    nodes = [Node(controller, f"same_{seed}", lambda name: name),
             Node(controller, f"copied_{seed}", lambda name: "".join(list(name)))]
    try:
        schedule = Schedule(seed, nodes)
        for _ in range(150):
            schedule.step()
        assert schedule.saves > 30
        assert schedule.resumed > 10
        first, second = (node.core.metrics() for node in nodes)
        assert first["saved_chunks_total"] == second["saved_chunks_total"] > 100
        assert first["resumed_hit_tokens_total"] == second["resumed_hit_tokens_total"] > 0
    finally:
        for node in nodes:
            node.shutdown()


def test_lists_of_unlike_lengths_are_refused_and_the_next_step_is_planned(controller: Controller) -> None:
    node = Node(controller, "refusing", lambda name: name)
    try:
        with pytest.raises(ValueError, match="must have the same length"):
            node.core.build_step([], ["a"], [], [None], set(), {"a": 1}, [], lambda *_: [])
        with pytest.raises(KeyError):
            node.core.build_step([], ["a"], [1], [None], set(), {}, [], lambda *_: [])
        with pytest.raises(OverflowError, match="a token id or count is -1"):
            node.core.build_step([], ["a"], [-1], [None], set(), {"a": 1}, [], lambda *_: [])
        assert node.step([], [("a", 1, None)], set(), {"a": 1}, [], {})
    finally:
        node.shutdown()
