"""Makes vLLM's own configurations for the harness. The model is only a config.json."""

import copy
import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvferry_launch.process import free_port
from kvferry_launch.testbed import toy_model
from vllm.config import KVEventsConfig, KVTransferConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

LAYERS, HEADS, HEAD_SIZE = 2, 2, 32
MAX_MODEL_LEN = 2048
RECORDER = "kvferry_harness.recorder"


@dataclass(frozen=True)
class EngineSetup:
    """Everything that a test may choose. The default sizes are small, but large enough for the requests of a test."""

    num_blocks: int = 64  # block 0 is the null block
    block_tokens: int = 32
    chunk_tokens: int = 64
    pool_chunks: int = 64
    token_budget: int = 512
    max_requests: int = 16
    prefix_caching: bool = True
    async_scheduling: bool = False
    # with asynchronous scheduling, a step runs after the next step was planned, as on a device
    executes_late: bool = False
    v2_runner: bool = False  # resumed requests are sent to the runner as new requests
    num_drafts: int = 0  # number of speculative tokens of each request in a step
    # the last layer belongs to a drafter, which writes the layer after the report of the step was requested
    draft_model: bool = False
    policy: str = "fcfs"
    role: str = "kv_both"
    on_failed_load: str = "recompute"
    reserve_full_prompt: bool = True  # vLLM's scheduler_reserve_full_isl, with vLLM's default
    chunked_prefill: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # kv_connector_extra_config
    connector: str = "RecordingConnector"
    multi: tuple[str, ...] = ()  # the children of vLLM's MultiConnector; one of them is `connector`
    patience_s: float = 5.0  # see RecordedNode
    kv_events: bool = False  # Engine.event_batches has what vLLM would publish
    traced: bool = False  # spans of transfers are made
    late_loads: int = 0  # number of steps after which a load ends, as on a device; 0: it ends within its step
    context_ranks: int = 1  # decode context parallel ranks, each with its own connector, worker and pool
    interleave: int = 1  # cp_kv_cache_interleave_size
    waits_for_loads: bool = True  # False: requests don't wait for loads that may fail, see CoreConfig::runs_ahead


def make_model(folder: Path) -> Path:
    """Writes the part of a model that a scheduler needs, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = toy_model.Shape(LAYERS, HEADS * HEAD_SIZE, HEADS, HEADS, HEAD_SIZE, 64)
    (folder / "config.json").write_text(json.dumps(toy_model.config(shape)))
    return folder


def base_config(model: Path) -> VllmConfig:
    """Returns one real configuration. for_engine() derives the others from it, which is a hundred times faster."""
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN,
                      block_size=32, enforce_eager=True, load_format="dummy", async_scheduling=False,
                      kv_transfer_config=KVTransferConfig(kv_connector="RecordingConnector",
                                                          kv_connector_module_path=RECORDER, kv_role="kv_both"))
    config = args.create_engine_config()
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    if not model_parallel_is_initialized():  # needed because the worker connector asks for its rank
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
            initialize_model_parallel()
    return config


def for_engine(base: VllmConfig, setup: EngineSetup, controller: str) -> VllmConfig:
    config = copy.deepcopy(base)
    scheduler, cache = config.scheduler_config, config.cache_config
    scheduler.max_num_batched_tokens = setup.token_budget
    scheduler.max_num_seqs = setup.max_requests
    scheduler.async_scheduling = setup.async_scheduling
    scheduler.policy = setup.policy
    scheduler.scheduler_reserve_full_isl = setup.reserve_full_prompt
    scheduler.enable_chunked_prefill = setup.chunked_prefill
    config.observability_config.otlp_traces_endpoint = "http://127.0.0.1:1" if setup.traced else None
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=setup.kv_events, publisher="null")
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.decode_context_parallel_size = setup.context_ranks
    parallel.cp_kv_cache_interleave_size = setup.interleave
    cache.block_size = setup.block_tokens
    cache.enable_prefix_caching = setup.prefix_caching
    cache.num_gpu_blocks = setup.num_blocks
    if setup.num_drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=setup.num_drafts, target_model_config=config.model_config,
            target_parallel_config=config.parallel_config)
        if setup.draft_model:
            config.speculative_config.method = "draft_model"
    chunk_bytes = LAYERS * HEADS * HEAD_SIZE * 2 * 4 * setup.chunk_tokens
    extra = {"controller": controller, "chunk_tokens": setup.chunk_tokens,
             "pool_bytes": setup.pool_chunks * chunk_bytes} | setup.extra
    transfer: dict[str, Any] = {"kv_connector": setup.connector, "kv_connector_module_path": RECORDER,
                                "kv_role": setup.role, "kv_connector_extra_config": extra}
    if setup.multi:
        idle = {"kv_connector": "IdleConnector", "kv_connector_module_path": RECORDER, "kv_role": setup.role}
        children = [transfer if name == setup.connector else idle for name in setup.multi]
        transfer = {"kv_connector": "MultiConnector", "kv_role": setup.role,
                    "kv_connector_extra_config": {"connectors": children}}
    config.kv_transfer_config = KVTransferConfig(engine_id=uuid.uuid4().hex,
                                                 kv_load_failure_policy=setup.on_failed_load, **transfer)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if setup.v2_runner else "0"
    return config


def kv_cache_config(setup: EngineSetup) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=setup.block_tokens, num_kv_heads=HEADS, head_size=HEAD_SIZE,
                             dtype=torch.float32)
    names = [f"layer.{index}" for index in range(LAYERS)]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=page * setup.num_blocks * LAYERS, layers=names,
                           layer_stride=page * setup.num_blocks, block_stride=page)
    return KVCacheConfig(num_blocks=setup.num_blocks, kv_cache_tensors=[tensor],
                         kv_cache_groups=[KVCacheGroupSpec(names, spec)],
                         hash_block_size=setup.block_tokens * setup.context_ranks)
