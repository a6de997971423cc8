"""The deployments with which the proof tests the connector, and the processes that are killed in each."""

from dataclasses import dataclass, field
from typing import Any, Literal

MAX_TOKENS = 100  # tokens in each answer
Part = Literal["prefill", "decode", "controller"]


@dataclass(frozen=True)
class Kill:
    """Kills with SIGKILL the first server of a kind, or the controller, once the share `after` of the answers has
    arrived. The process is started again at once.
    """

    part: Part
    after: float


@dataclass(frozen=True)
class Configuration:
    """One deployment. Its decode servers have few blocks, so that they preempt.

    num_prefill: 0 means that the decode servers compute the prompts themselves. model: a kind of toy model, or a family
    of tests/models whose weights the servers generate. recovers: the pool keeps the KV that
    preempted requests had computed, so nearly all of this KV must be loaded again. evicts: the pool is so small that
    chunks are evicted. pushes: the prefill server knows the decode server before it computes the prompt.
    """

    name: str
    num_prefill: int = 1
    num_decode: int = 1
    prefill_role: str = "kv_producer"
    decode_role: str = "kv_consumer"
    model: str = "toy"
    decode_blocks: int = 40
    flags: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    shared_prefixes: int = 0
    kills: tuple[Kill, ...] = ()
    recovers: bool = True
    evicts: bool = False
    pushes: bool = False


CONFIGURATIONS = (
    Configuration("base"),
    Configuration("chunks of one block, CMA", extra={"chunk_tokens": 32, "path": "cma"}),
    Configuration("chunked prefill, shared prefixes", flags=("--max-num-batched-tokens", "128"),
                  extra={"chunk_tokens": 64}, shared_prefixes=5),
    Configuration("both sides kv_both, controller killed", prefill_role="kv_both", decode_role="kv_both",
                  extra={"chunk_tokens": 128}, kills=(Kill("controller", 0.3), Kill("controller", 0.7))),
    Configuration("two prefill, two decode, prefill killed", num_prefill=2, num_decode=2,
                  extra={"chunk_tokens": 64}, kills=(Kill("prefill", 0.3),)),
    Configuration("two prefill, two decode, decode killed", num_prefill=2, num_decode=2,
                  extra={"chunk_tokens": 64}, shared_prefixes=5, kills=(Kill("decode", 0.3),)),
    Configuration("one prefill killed, sockets", extra={"path": "tcp", "load_timeout_ms": 2000},
                  kills=(Kill("prefill", 0.3),)),
    Configuration("one server alone", num_prefill=0, decode_role="kv_both", extra={"chunk_tokens": 64}),
    Configuration("no decode cache, no tails", extra={"save_decode_cache": False, "save_partial_chunks": False,
                                                      "chunk_tokens": 64}, recovers=False),
    Configuration("a pool that is always full", extra={"pool_bytes": "3MiB", "chunk_tokens": 64}, recovers=False,
                  evicts=True),
    Configuration("sliding windows", model="windowed", decode_blocks=56, extra={"chunk_tokens": 64}),
    Configuration("sliding windows, chunked prefill, prefill killed", model="windowed", decode_blocks=56,
                  flags=("--max-num-batched-tokens", "128"), extra={"chunk_tokens": 128}, shared_prefixes=5,
                  kills=(Kill("prefill", 0.4),)),
    Configuration("no prefix cache in the engine, UCX", flags=("--no-enable-prefix-caching",),
                  extra={"chunk_tokens": 64, "path": "ucx"}, env={"UCX_TLS": "all"}),
    Configuration("sliding windows, pushed", model="windowed", decode_blocks=56, extra={"chunk_tokens": 64},
                  shared_prefixes=5, pushes=True),
    Configuration("state beside attention, prefill killed", model="granite-hybrid", decode_blocks=30,
                  extra={"chunk_tokens": 64}, kills=(Kill("prefill", 0.4),)),
    Configuration("windows of two sizes, prefill killed", model="pangu-two-windows", decode_blocks=120,
                  extra={"chunk_tokens": 64}, kills=(Kill("prefill", 0.4),)),
    Configuration("latent attention, prefill killed", model="deepseek-v2", decode_blocks=80,
                  extra={"chunk_tokens": 64}, kills=(Kill("prefill", 0.4),)),
)
