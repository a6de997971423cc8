"""Measures the time that vLLM's scheduler spends in a KV connector's calls, for `kvferry bench connector`.

vLLM's own Scheduler makes the calls. No model runs: each step returns at once, with a token for each request whose
prompt is computed. The time of each call to the scheduler connector is measured. The program reads one JSON object
from stdin (connector, controller, prompt_tokens, running, repeat) and writes lines of {"step": text},
{"figures": {...}} and {"done": true}.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from json_lines import JsonLines

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
LINES = JsonLines()  # made before vLLM is imported, because vLLM prints to stdout

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS, CHUNK_TOKENS = 32, 256
HEADS, HEAD_SIZE = 2, 32
RUNNING_PROMPT_TOKENS = 500
DISTINCT_PROMPTS = 8
CALLS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
         "update_connector_output", "take_events", "get_kv_connector_stats", "request_finished_all_groups",
         "request_finished")
CONNECTORS = {
    "kvferry": {"kv_connector": "KvFerryConnector", "kv_connector_module_path": "kvferry.vllm"},
    "nixl": {"kv_connector": "NixlConnector"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1"},
}


def make_model(folder: Path) -> Path:
    """Writes the model configuration that a scheduler needs, without weights."""
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32000,
        "hidden_size": HEADS * HEAD_SIZE, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_SIZE, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "bos_token_id": 0,
        "eos_token_id": 1}))
    return folder


def configured(spec: dict[str, Any], model: Path) -> VllmConfig:
    extra: dict[str, Any] = {}
    if spec["connector"] == "kvferry":
        extra = {"controller": spec["controller"], "chunk_tokens": CHUNK_TOKENS, "pool_bytes": "256MiB"}
    transfer = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra, **CONNECTORS[spec["connector"]])
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, dtype="float32",
                      max_model_len=max(2 * spec["prompt_tokens"], longest_running(spec)),
                      block_size=BLOCK_TOKENS, enforce_eager=True, max_num_seqs=spec["running"],
                      max_num_batched_tokens=4 * spec["prompt_tokens"], load_format="dummy",
                      async_scheduling=False, kv_transfer_config=transfer)
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks(spec)
    init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
    with set_current_vllm_config(config):
        rendezvous = f"file://{model}/rendezvous"
        init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        initialize_model_parallel()
    return config


def num_blocks(spec: dict[str, Any]) -> int:
    return (spec["running"] * longest_running(spec) + 4 * spec["prompt_tokens"]) // BLOCK_TOKENS


def longest_running(spec: dict[str, Any]) -> int:
    """Returns the limit on a running request's tokens: the longest prompt, a token per step, and two spare blocks."""
    return RUNNING_PROMPT_TOKENS + spec["running"] + spec["repeat"] + 2 * BLOCK_TOKENS


def cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    tensor = KVCacheTensor(size=spec.page_size_bytes * blocks, layers=["layer.0"],
                           layer_stride=spec.page_size_bytes * blocks, block_stride=spec.page_size_bytes)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor],
                         kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)], hash_block_size=BLOCK_TOKENS)


class NoLookup:
    """Replaces LMCache's lookup client, whose server runs in a worker that needs a GPU. No lookup finds anything."""

    def lookup_cache(self, lookup_id: str) -> int:
        del lookup_id
        return 0

    def lookup(self, *args: Any, **kwargs: Any) -> int:
        del args, kwargs
        return 0

    def supports_producer_reuse(self) -> bool:
        return False

    def clear_lookup_status(self, lookup_id: str) -> None:
        pass


class Engine:
    """Runs vLLM's Scheduler without a model, and measures the time of its calls to the connector (see CALLS)."""

    def __init__(self, spec: dict[str, Any], config: VllmConfig) -> None:
        self._hasher = get_request_block_hasher(
            BLOCK_TOKENS, get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
        blocks = cache_config(num_blocks(spec))
        self.worker: Any = None
        with set_current_vllm_config(config):
            if spec["connector"] == "kvferry":
                self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, blocks)
                shape = (blocks.num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
                self.worker.register_kv_caches({"layer.0": torch.zeros(shape)})
            self.scheduler = Scheduler(config, blocks, StructuredOutputManager(config), block_size=BLOCK_TOKENS,
                                       log_stats=True)
        connector: Any = self.scheduler.connector
        if self.worker is not None:
            hello = self.worker.get_handshake_metadata()
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): hello})
        if spec["connector"] == "lmcache":
            connector._lmcache_engine._manager._lookup_client = NoLookup()
        self.spent_us: dict[str, float] = defaultdict(float)
        for name in CALLS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))
        self._count = 0

    def _timed(self, name: str, call: Any) -> Any:
        clock, spent = time.perf_counter_ns, self.spent_us

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            answer = call(*args, **kwargs)
            spent[name] += (clock() - start) / 1000
            return answer

        return timed

    def add(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> str:
        self._count += 1
        request_id = f"cmpl-{self._count:032x}-0"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True,
                                  extra_args={"kv_transfer_params": params} if params else None)
        self.scheduler.add_request(Request(request_id, prompt, sampling, None, arrival_time=float(self._count),
                                           block_hasher=self._hasher))
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def reset_prefixes(self) -> None:
        self.scheduler.kv_cache_manager.reset_prefix_cache()

    def step(self) -> int:
        """Runs one step and returns the number of requests that it scheduled."""
        output = self.scheduler.schedule()
        done = KVConnectorOutput()
        if self.worker is not None:
            self.worker.handle_preemptions(output.kv_connector_metadata)
            self.worker.bind_connector_metadata(output.kv_connector_metadata)
            self.worker.start_load_kv(None)
            self.worker.wait_for_save()
            done.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
            done.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
            self.worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        tokens = [[7] if self.scheduler.requests[i].num_computed_tokens >= self.scheduler.requests[i].num_tokens else []
                  for i in ids]
        self.scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=ids, req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens, kv_connector_output=done))
        return len(ids)


def prompt_of(seed: int, tokens: int) -> list[int]:
    rng = random.Random(f"connector {seed}")
    return [rng.randrange(2, 32000) for _ in range(tokens)]


def measure_lookups(engine: Engine, spec: dict[str, Any]) -> list[float]:
    """Measures the calls with which the scheduler looks up a request, one request at a time. All prompts were computed
    before, so a connector that stores KV has their KV."""
    prompts = [prompt_of(seed, spec["prompt_tokens"]) for seed in range(DISTINCT_PROMPTS)]
    for prompt in prompts:
        engine.add(prompt, 1)
        engine.step()
    engine.step()
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "prefill",
              "remote_request_id": "x", "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 1,
              "tp_size": 1} if spec["connector"] == "nixl" else None
    times = []
    for turn in range(spec["repeat"]):
        engine.reset_prefixes()
        engine.spent_us.clear()
        # The request gets a new list of tokens, as a request from the network does.
        request_id = engine.add([token + 0 for token in prompts[turn % len(prompts)]], 1, params)
        engine.step()
        times.append(engine.spent_us["on_new_request"] + engine.spent_us["get_num_new_matched_tokens"])
        if request_id in engine.scheduler.requests:
            engine.abort(request_id)
        engine.step()
    return times


def measure_steps(engine: Engine, spec: dict[str, Any]) -> list[float]:
    """Measures steps in which each running request decodes one token. Some steps also fill chunks or blocks."""
    for index in range(spec["running"]):
        engine.add(prompt_of(1000 + index, RUNNING_PROMPT_TOKENS + index), 10_000)
    while len(engine.scheduler.running) < spec["running"] or engine.scheduler.waiting:
        engine.step()
    times = []
    for _ in range(spec["repeat"]):
        engine.spent_us.clear()
        if (num_scheduled := engine.step()) != spec["running"]:
            raise RuntimeError(f"vLLM's scheduler ran {num_scheduled} requests in a step, not all {spec['running']}; "
                               "lower --running")
        times.append(sum(engine.spent_us.values()))
    return times


def figures_of(name: str, times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"{name}_us_p50": statistics.median(ordered), f"{name}_us_p99": ordered[len(ordered) * 99 // 100]}


def main() -> None:
    spec = LINES.first()
    with tempfile.TemporaryDirectory() as folder:
        LINES.say({"step": f"{spec['connector']}: vLLM's scheduler starts"})
        engine = Engine(spec, configured(spec, make_model(Path(folder))))
        LINES.say({"step": f"{spec['connector']}: lookups"})
        figures = {} if spec["connector"] == "lmcache" else figures_of("lookup", measure_lookups(engine, spec))
        LINES.say({"step": f"{spec['connector']}: steps"})
        figures |= figures_of(f"step_{spec['running']}", measure_steps(engine, spec))
        LINES.say({"figures": figures})
        LINES.say({"done": True})


if __name__ == "__main__":
    LINES.run(main)
