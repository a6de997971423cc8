"""The versions of vLLM that are supported, what was tested of each, and what this package does for some versions only.

No other module of this package looks at vLLM's version.
"""

import logging
import re
from typing import TYPE_CHECKING, Any

import vllm

from kvferry._core import version
from kvferry.errors import refuse_to_start

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

INTERFACE_ONLY = "its interface was compared with what kvferry needs, but no server of this vLLM was tested"
PAIR_ONLY = "only a prefill and a decode server of this vLLM were tested"

# [version of vLLM] what the start line says about it
SERVED = {
    (0, 30): PAIR_ONLY,
    (0, 31): PAIR_ONLY,
    (0, 32): "all features of kvferry are available",
    (0, 33): INTERFACE_ONLY,
}


def check_version(found: str = vllm.__version__) -> None:
    """Checks vLLM's version. Errors: KvFerryError if this vLLM is older than all supported versions."""
    if (0, 0) < _numbers(found) < min(SERVED):
        refuse_to_start(f"this is vLLM {found}, which is too old; this version of kvferry works with vLLM {_served()}")


def start_line(found: str = vllm.__version__) -> tuple[int, str]:
    """Returns the level and the text of the line that the scheduler logs at start."""
    both = f"kvferry: version {version()} with vLLM {found}"
    if note := SERVED.get(_numbers(found)):
        return logging.INFO, f"{both}; {note}"
    return logging.WARNING, f"{both}, with which it was not checked and may fail; checked were vLLM {_served()}"


def config_revision(model: "ModelConfig") -> str | None:
    """Returns the revision of the Hugging Face configuration. Since vLLM 0.31 the weights may have another revision."""
    own: str | None = None if _numbers(vllm.__version__) == (0, 30) else model._hf_config_revision
    return own or model.revision


def hash_block_size(kv_cache_config: "KVCacheConfig") -> int | None:
    """Returns the number of tokens in a block that vLLM hashes; None if unknown, as before vLLM 0.32."""
    return None if _numbers(vllm.__version__) in ((0, 30), (0, 31)) else kv_cache_config.hash_block_size


def scheduler_spec(spec: "Any", context_ranks: int) -> "Any":
    """Returns the spec of a KV cache group with the number of tokens that vLLM's scheduler counts in a block: those on
    all decode context parallel ranks. Errors: KvFerryError before vLLM 0.32 if there are several such ranks.
    """
    if context_ranks == 1:
        return spec
    if _numbers(vllm.__version__) in ((0, 30), (0, 31)):
        refuse_to_start(f"--decode-context-parallel-size is {context_ranks}, which this version of kvferry serves with "
                        f"vLLM 0.32 or later; this is vLLM {vllm.__version__}")
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec

    return resolve_dcp_kv_cache_spec(spec, context_ranks)


def _numbers(found: str) -> tuple[int, int]:
    """Returns (0, 32) for 0.32.1.dev7+cpu, and (0, 0) for a build without a version."""
    parsed = re.match(r"(\d+)\.(\d+)", found)
    return (int(parsed[1]), int(parsed[2])) if parsed else (0, 0)


def _served() -> str:
    names = [".".join(map(str, numbers)) for numbers in sorted(SERVED)]
    return f"{', '.join(names[:-1])} and {names[-1]}"
