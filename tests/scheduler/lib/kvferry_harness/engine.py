"""One engine without a model: vLLM's real Scheduler, the real scheduler connector and worker connector, and
StampRunner.

step() does what vLLM's EngineCore does in one step, synchronously or with a batch queue (asynchronous scheduling). The
harness checks which KV is attended to, which tokens are returned, and what is left at the end. BrokenError says what
was wrong.
"""

import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvferry import scheduler_connector
from kvferry._core import SchedulerNode
from kvferry.stats import GAUGES
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, maybe_convert_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry_harness.recorder import Log, RecordingConnector
from kvferry_harness.runner import StampRunner
from kvferry_harness.setup import EngineSetup, for_engine, kv_cache_config
from kvferry_harness.stamps import STOP_TOKENS, BrokenError, continuation


@dataclass
class Told:
    """The tokens and the end that the engine reported to a client, for one request."""

    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    params: dict[str, Any] | None = None  # kv_transfer_params of the answer
    aborted: bool = False


@dataclass
class _InFlight:
    output: SchedulerOutput
    result: ModelRunnerOutput | None = None


class Engine:
    def __init__(self, base: VllmConfig, setup: EngineSetup, controller: str) -> None:
        self.setup = setup
        self.config = for_engine(base, setup, controller)
        kv_config = kv_cache_config(setup)
        self._salts: dict[str, str] = {}
        self._weights = ""  # what the stamps of this engine's model depend on
        self._adapters: dict[str, int] = {}  # maps an adapter's name to the number of times it was loaded
        self._adapter_folder = tempfile.TemporaryDirectory()
        self.told: dict[str, Told] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._aborts: list[str] = []  # aborts that arrive while a step is executed
        self._metrics: dict[str, float] = {}
        self._hasher = get_request_block_hasher(setup.block_tokens * setup.context_ranks,
                                                get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo))
        def start_node(**options: Any) -> SchedulerNode:
            options["on_device"] = setup.late_loads > 0
            return SchedulerNode(**options | ({} if setup.waits_for_loads else {"runs_ahead": False}))

        with set_current_vllm_config(self.config), mock.patch.object(scheduler_connector, "SchedulerNode", start_node):
            self.runner = StampRunner(self.config, kv_config, self._salts)
            scheduler = AsyncScheduler if setup.async_scheduling else Scheduler
            self.scheduler = scheduler(self.config, kv_config, StructuredOutputManager(self.config),
                                       block_size=setup.block_tokens * setup.context_ranks, log_stats=True)
        self.event_batches: list[KVEventBatch] = []
        self.scheduler.kv_event_publisher.publish = self.event_batches.append
        self.top_connector: Any = self.scheduler.connector
        self.connector: RecordingConnector = (
            self.top_connector.sub_connectors[setup.multi.index(setup.connector)] if setup.multi
            else self.top_connector)
        self.connector.node.patience_s = setup.patience_s
        if setup.late_loads > 0:
            self.connector._scheduler._is_on_device = True
            self.runner.end_loads_late(setup.late_loads)
        hellos = {(0, rank): one.get_handshake_metadata() for rank, one in enumerate(self.runner.connectors)}
        self.top_connector.set_xfer_handshake_metadata_pp_aware(hellos)
        self._num_free = self.num_free_blocks

    # ---- what clients do ----
    def add(self, request_id: str, prompt: list[int], max_tokens: int = 1, *, stops: bool = False, salt: str = "",
            lora: str = "", priority: int = 0, params: dict[str, Any] | None = None, prompt_logprobs: bool = False,
            resumable: bool = False, headers: dict[str, str] | None = None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True,
                                  stop_token_ids=sorted(STOP_TOKENS) if stops else None,
                                  prompt_logprobs=1 if prompt_logprobs else None,
                                  extra_args={"kv_transfer_params": params} if params else None)
        request = Request(request_id, list(prompt), sampling, None, cache_salt=salt or None, priority=priority,
                          lora_request=self._adapter(lora) if lora else None,
                          arrival_time=float(len(self.told)), block_hasher=self._hasher, resumable=resumable,
                          trace_headers=headers)
        self._salts[request_id] = salt + lora + str(self._adapters.get(lora, "")) + self._weights
        if request_id not in self.scheduler.requests:
            self.told[request_id] = Told(continuation(prompt, max_tokens, self._salts[request_id], stops))
        self.scheduler.add_request(request)

    def update_weights(self, weights: str) -> None:
        """Gives the model other weights, as a trainer does between two steps: the caches are reset, and running
        requests begin again with the tokens that they have. Not for asynchronous scheduling.
        """
        for _ in range(100):
            try:
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                break
            except RuntimeError:  # a load still uses blocks, so vLLM's caller has to try again
                self.step()
        for request_id, request in self.scheduler.requests.items():
            told, salt = self.told[request_id], self._salts[request_id].removesuffix(self._weights) + weights
            self._salts[request_id] = salt
            told.expected = told.tokens + continuation(list(request.all_token_ids), request.max_tokens
                                                       - len(told.tokens), salt)
        self._weights = weights
        self.runner.recompute_cells()

    def load_adapter(self, name: str) -> None:
        """Loads the adapter with new content. If the adapter was loaded before, it is replaced in place."""
        self._adapters[name] = self._adapters.get(name, 0) + 1
        folder = Path(self._adapter_folder.name) / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(f"{name} {self._adapters[name]}")

    def _adapter(self, name: str) -> LoRARequest:
        if name not in self._adapters:
            self.load_adapter(name)
        return LoRARequest(name, 1 + list(self._adapters).index(name), str(Path(self._adapter_folder.name) / name),
                           load_inplace=self._adapters[name] > 1)

    def expect_more(self, request_id: str, history: list[int], max_tokens: int) -> None:
        """Sets the expected tokens of a session that continues: the tokens so far, then those that follow the history
        that vLLM keeps.
        """
        told = self.told[request_id]
        told.expected = told.tokens + continuation(history, max_tokens, self._salts[request_id])

    def abort(self, *request_ids: str, while_executing: bool = False) -> None:
        """Aborts requests whose client has disconnected. while_executing: vLLM gets the abort between the execution of
        a step and the processing of its outputs.
        """
        for request_id in request_ids:
            self.told[request_id].aborted = True
        if while_executing:
            self._aborts += request_ids
        else:
            self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    # ---- what EngineCore does ----
    def step(self) -> None:
        if self.setup.async_scheduling:
            self._step_with_queue()
        elif self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._take_in(output, self.runner.execute(output))
            if self.setup.num_drafts:
                self.scheduler.update_draft_token_ids(self.runner.drafts)
        self._check_metrics()

    def _step_with_queue(self) -> None:
        if self.scheduler.has_requests():
            step = _InFlight(self.scheduler.schedule())
            self._in_flight.append(step)
            if not self.setup.executes_late:
                self._execute()
            executed = step.output.total_num_scheduled_tokens > 0
            if len(self._in_flight) < 2 and (executed or self.scheduler.has_requests()):
                return
        elif not self._in_flight:
            return
        if self.setup.executes_late:  # the device worked on the oldest step while the newest one was planned
            self._execute(self._in_flight[0])
        oldest = self._in_flight.popleft()
        assert oldest.result is not None
        self._take_in(oldest.output, oldest.result)

    def _execute(self, only: _InFlight | None = None) -> None:
        for step in self._in_flight:
            if step.result is None and (only is None or step is only):
                step.result = self.runner.execute(step.output)

    def _take_in(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if self._aborts:
            self.scheduler.finish_requests(self._aborts, RequestStatus.FINISHED_ABORTED)
            self._aborts = []
        told = self.scheduler.update_from_output(output, result)
        self.runner.heard()
        self._tell(told.values())

    def _tell(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        for batch in outputs:
            for one in batch.outputs:
                told = self.told[one.request_id]
                told.tokens += one.new_token_ids
                if told.tokens != told.expected[:len(told.tokens)]:
                    raise BrokenError(f"request {one.request_id} says {told.tokens}, not {told.expected}")
                if one.finish_reason is not None:
                    told.reason, told.params = one.finish_reason, one.kv_transfer_params

    # ---- what tests query ----
    @property
    def log(self) -> Log:
        return self.connector.log

    @property
    def engine_id(self) -> str:
        name = self.config.kv_transfer_config.engine_id  # type: ignore[union-attr]
        assert name is not None
        return name

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def metrics(self) -> dict[str, float]:
        return dict(self.connector._scheduler._node.metrics())

    def block_hashes(self, tokens: list[int]) -> list[int]:
        """Returns vLLM's hashes of the whole blocks of a prompt, as they are in KV events."""
        made = Request("", list(tokens), SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        return [maybe_convert_block_hash(block) for block in made.block_hashes]

    def request(self, request_id: str) -> Request:
        return self.scheduler.requests[request_id]

    def table(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def run(self, max_steps: int = 2000) -> int:
        """Runs steps until vLLM has nothing to do. Returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return count
            self.step()
        raise BrokenError(f"still busy after {max_steps} steps: {list(self.scheduler.requests)}")

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def salt_of(self, request_id: str) -> str:
        return self._salts[request_id]

    def check_done(self, held_chunks: int | None = 0) -> None:
        """Checks that nothing is left of any request, and that every request that was not aborted got all the right
        tokens. held_chunks: number of chunks that finished prefills may hold for their decode workers; None: any
        number.
        """
        self.run()
        if self.scheduler.requests or self.scheduler.running or self.scheduler.waiting:
            raise BrokenError(f"requests are left: {list(self.scheduler.requests)}")
        if self.num_free_blocks != self._num_free:
            raise BrokenError(f"{self._num_free - self.num_free_blocks} blocks are not free")
        half = self.connector._scheduler
        if half._known_tokens or half._requests or half._wants_report:
            raise BrokenError(f"the scheduler connector still knows {list(half._known_tokens)}")
        for request_id, told in self.told.items():
            if self.connector._scheduler._node.num_tokens(request_id) != 0:
                raise BrokenError(f"the core still knows request {request_id}")
            if not told.aborted and told.reason != FinishReason.ERROR and told.tokens != told.expected:
                raise BrokenError(f"request {request_id} was told {len(told.tokens)} of {len(told.expected)} tokens")
        pinned = self.metrics()["pool_pinned_chunks"]
        if held_chunks is not None and pinned != held_chunks:
            raise BrokenError(f"{pinned:.0f} chunks are held, not {held_chunks}")
        for connector in self.runner.connectors:
            report = connector.build_connector_worker_meta()
            if report is not None and report.payloads:
                raise BrokenError("the workers still have something to report")

    def _check_metrics(self) -> None:
        metrics = self.metrics()
        for name, before in self._metrics.items():
            if metrics[name] < 0 or (name not in GAUGES and metrics[name] < before):
                raise BrokenError(f"{name} went from {before} to {metrics[name]}")
        self._metrics = metrics

    def pool_memory(self) -> Path:
        """Returns the chunk pool's shared memory, as a path of the file that this process has open."""
        for link in Path("/proc/self/fd").iterdir():
            try:
                target = str(link.readlink())
            except FileNotFoundError:
                continue
            if f"memfd:kvferry-{self.engine_id}" in target:
                return link
        raise FileNotFoundError(f"no chunk pool of engine {self.engine_id}")

    def corrupt_pool(self) -> None:
        """Damages one byte in every chunk of the pool."""
        for slot in range(self.setup.pool_chunks):
            self.corrupt_chunk(slot)

    def corrupt_chunk(self, slot: int) -> None:
        path = self.pool_memory()
        chunk = path.stat().st_size // self.setup.pool_chunks
        with path.open("r+b", buffering=0) as memory:
            memory.seek(slot * chunk + 5)
            byte = memory.read(1)
            memory.seek(slot * chunk + 5)
            memory.write(bytes([byte[0] ^ 0x40]))

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        for connector in self.runner.connectors:
            connector.shutdown()
