"""A KvFerryConnector that records vLLM's calls and its own answers. vLLM loads it by its module path."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
from kvferry.vllm import KvFerryConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec

Call = dict[str, Any]


class Log:
    """Records the calls of one scheduler connector, in order. Times are in microseconds since the log was made."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._start = time.monotonic_ns()

    def add(self, call: str, **fields: Any) -> Call:
        entry = {"call": call, "us": (time.monotonic_ns() - self._start) // 1000, **fields}
        self.calls.append(entry)
        return entry

    def of(self, call: str, request_id: str | None = None) -> list[Call]:
        return [entry for entry in self.calls
                if entry["call"] == call and request_id in (None, entry.get("request"))]


def readable_plan(payload: bytes) -> Call:
    """Decodes the StepPlan of connector/core/plan.h. Fields that a later version appends to a list are left out."""
    step, before, loads, after = msgspec.msgpack.decode(payload)[:4]

    def save(job: list[Any]) -> Call:
        return {"request": job[0], "blocks": job[1],
                "items": [{"slot": item[0], "first": item[1], "tokens": item[2]} for item in job[2]]}

    def load(job: list[Any]) -> Call:
        return {"request": job[0], "attempt": job[1], "blocks": job[2], "async": job[4], "items": [
            {"slot": item[0], "chunk_tokens": item[2], "skip": item[3], "first": item[4], "tokens": item[5]}
            for item in job[3]]}

    return {"step": step, "before": [save(job) for job in before], "loads": [load(job) for job in loads],
            "after": [save(job) for job in after]}


def readable_report(payload: bytes) -> Call:
    """Decodes the WorkerReport of connector/core/plan.h, without the checksums."""
    rank, step, saves, loads = msgspec.msgpack.decode(payload)[:4]
    return {"rank": rank, "step": step, "saves": [{"slot": save[0], "ok": save[1]} for save in saves],
            "loads": [dict(zip(("request", "attempt", "loaded", "corrupt"), load, strict=False)) for load in loads]}


class RecordedNode:
    """Wraps the C++ scheduler node, and records the calls that reach the scheduler core.

    patience_s: how long a lookup waits for other nodes. The node itself waits only 2 ms in a step, so the result of a
    step would depend on how busy the machine is.
    """

    patience_s = 5.0
    scheduled: ClassVar[list[Call]] = []  # the rows of the step that vLLM is building

    def __init__(self, node: Any, log: Log) -> None:
        self._node = node
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def add_request(self, **arguments: Any) -> None:
        fields = {("request" if name == "request_id" else name): value for name, value in arguments.items()}
        del fields["digests"]  # replays hash all tokens, so they show that digests change no key
        self._log.add("add", **fields)
        self._node.add_request(**arguments)

    def update_tokens(self, request_id: str, keep: int, new_tokens: list[int]) -> None:
        self._log.add("tokens", request=request_id, keep=keep, new=list(new_tokens))
        self._node.update_tokens(request_id, keep, new_tokens)

    def lookup(self, request_id: str, num_local: int) -> tuple[int | None, bool]:
        entry = self._log.add("lookup", request=request_id, local=num_local)
        answer, is_async = self._node.lookup(request_id, num_local)
        deadline = time.monotonic() + self.patience_s
        waits = True
        while answer is None and waits and time.monotonic() < deadline:
            # The answer may have come since the last lookup, even if the node waits for no other node any more.
            waits = self._node.metrics()["fetching_requests"] > 0
            time.sleep(0.0002 * waits)
            answer, is_async = self._node.lookup(request_id, num_local)
        entry |= {"answer": answer, "async": is_async}
        return answer, is_async

    def allocated(self, request_id: str, num_external: int, block_ids: list[list[int]]) -> None:
        self._log.add("allocated", request=request_id, external=num_external,
                      blocks=[list(group) for group in block_ids])
        self._node.allocated(request_id, num_external, block_ids)

    def build_step(self, *arguments: Any) -> bytes:
        *requests, preempted, tokens_of = arguments

        def told(request_id: str, known: int) -> list[int]:
            tokens = tokens_of(request_id, known)
            entry["tokens"].append({"request": request_id, "keep": known, "new": list(tokens)})
            return tokens

        entry = self._log.add("step", scheduled=self.scheduled, preempted=sorted(preempted), tokens=[])
        plan: bytes = self._node.build_step(*requests, preempted, told)
        entry["plan"] = readable_plan(plan)
        return plan

    def finished(self, request_id: str, num_computed: int, block_ids: list[list[int]], aborted: bool) -> dict[str, Any]:
        entry = self._log.add("finished", request=request_id, computed=num_computed,
                              blocks=[list(group) for group in block_ids], aborted=aborted)
        done: dict[str, Any] = self._node.finished(request_id, num_computed, block_ids, aborted)
        entry |= {"handoff_tokens": done["handoff_tokens"], "admissions": done["admissions"]}
        return done

    def worker_report(self, report: bytes) -> None:
        self._log.add("report", **readable_report(report))
        self._node.worker_report(report)

    def reset_cache(self) -> None:
        self._log.add("reset")
        self._node.reset_cache()


class RecordingConnector(KvFerryConnector):
    """A connector with the `log` of its scheduler connector. vLLM's own calls are recorded too if they say more than
    the calls of the node.
    """

    # the newest scheduler connector, for tests that can't reach it otherwise
    newest: "RecordingConnector | None" = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.log = Log()
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.windows = [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs]
        if role == KVConnectorRole.SCHEDULER:
            self.node = RecordedNode(self._scheduler._node, self.log)
            self._scheduler._node = self.node
            RecordingConnector.newest = self

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        entry = self.log.add("vllm_match", request=request.request_id, local=num_computed_tokens,
                             status=request.status.name, preemptions=request.num_preemptions,
                             num_tokens=request.num_tokens, skips_cache=request.skip_reading_prefix_cache)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        entry["answer"] = list(answer)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.log.add("vllm_allocated", request=request.request_id, external=num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        self.log.add("vllm_step", new=[new.req_id for new in scheduler_output.scheduled_new_reqs],
                     cached=list(cached.req_ids), resumed=sorted(cached.resumed_req_ids),
                     counts=dict(scheduler_output.num_scheduled_tokens),
                     speculative={key: len(ids) for key, ids in scheduler_output.scheduled_spec_decode_tokens.items()},
                     preempted=sorted(scheduler_output.preempted_req_ids or ()),
                     finished=sorted(scheduler_output.finished_req_ids), sync_loads=scheduler_output.has_sync_kv_loads)
        self.node.scheduled = list(_rows(scheduler_output))
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        entry = self.log.add("vllm_finished", request=request.request_id, status=request.status.name)
        answer = super().request_finished_all_groups(request, block_ids)
        entry["holds"] = answer[0]
        return answer

    def update_connector_output(self, connector_output: Any) -> None:
        self.log.add("vllm_output", bad_blocks=sorted(connector_output.invalid_block_ids),
                     failed=sorted(connector_output.failed_recving),
                     sent=sorted(connector_output.finished_sending or ()),
                     received=sorted(connector_output.finished_recving or ()))
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        self.log.add("vllm_reset")
        return super().reset_cache()


def _rows(output: Any) -> Iterator[Call]:
    """Yields the scheduled requests in the order in which the core gets them. A row has the whole block table if the
    table changed.
    """
    cached = output.scheduled_cached_reqs
    whole = [(new.req_id, new.num_computed_tokens, True) for new in output.scheduled_new_reqs]
    whole += [(request_id, cached.num_computed_tokens[index],
               cached.new_block_ids[index] is not None or request_id in cached.resumed_req_ids)
              for index, request_id in enumerate(cached.req_ids)]
    for request_id, computed, changed in whole:
        table = output.kv_connector_block_state.get_block_ids(request_id) if changed else None
        yield {"request": request_id, "computed": computed, "scheduled": output.num_scheduled_tokens[request_id],
               "blocks": table and [list(group) for group in table]}


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """A second connector for a MultiConnector. It has no KV and stores none."""

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int | None, bool]:
        return 0, False

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, Call | None]:
        return False, {"idle": True}

    def update_state_after_alloc(self, *_: Any) -> None: ...
    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def set_xfer_handshake_metadata_pp_aware(self, *_: Any) -> None: ...
