"""Preparations: requests that a router sends ahead of a request with the same prompt, so that the prompt's KV is loaded
before that request arrives (connector/core/scheduler/preparation.h). This file has the limit on the tokens of
preparations, and the pause of an engine that has no other requests.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry._core import SchedulerNode


def prepared_tokens_max(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Returns the limit on the tokens of all preparations: a quarter of vLLM's KV cache, or 0 if this server serves no
    preparations.

    A preparation's KV is loaded layer by layer into blocks in host memory, and a request finds it in vLLM's prefix
    cache. So preparations need a CPU server with prefix caching, one rank, and one KV cache group with full attention.
    They also need kvferry as vLLM's only connector, kv_load_failure_policy recompute, and no speculative decoding. With
    chunks of whole blocks there are none: a preparation leaves one token to compute, which may be less than a block.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    is_served = (
        vllm_config.device_config.device_type == "cpu" and bool(vllm_config.cache_config.enable_prefix_caching)
        and transfer.kv_connector == "KvFerryConnector" and transfer.kv_load_failure_policy == "recompute"
        and parallel.world_size == 1 and parallel.data_parallel_size == 1 and vllm_config.speculative_config is None
        and len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
    )  # fmt: skip
    return kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size // 4 if is_served else 0


class Preparations(set[str]):
    """The ids of an engine's preparations."""

    def rest(self, node: "SchedulerNode", num_requests: int, num_scheduled: int) -> None:
        """Called in each step. Lets other processes have the processor if the engine has nothing else to do."""
        if self and num_scheduled == 0 and len(self) == num_requests:
            node.rest()
