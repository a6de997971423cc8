"""Tests servers that convert the chunks that they load (chunk_dtype): on real vLLM, and what is refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry._core import KvFerryError
from kvferry.conversion import conversion, element_types, other_chunk_dtype
from kvferry.layout import CacheLayout
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.answers import Generation, first_mismatch
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.pair import Pair, PairSetup, own_cores, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.servers import VllmServer
from processor import has_fp8_kernels
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

PROMPTS = PromptSet(seed=11, count=8, tokens_min=150, tokens_max=300).prompts()
MAX_TOKENS = 16
# An answer's first token that differs from that of the plain server must have been nearly another one there. Rounding
# to 3 bits of mantissa, as fp8 does, moves logprobs further than rounding to 7.
MARGINS = {"float16": 0.1, "fp8": 0.5}
DECODE = {"float16": ("--dtype", "float16"), "fp8": ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")}


def plain_answers(name: str, toy: Path, flags: tuple[str, ...]) -> list[Generation]:
    """Returns the answers of a server without kvferry."""
    server = VllmServer(f"conversion-{name}-alone", toy, own_cores()[0], None, flags, log_folder=LOGS / "tests")

    async def ask() -> list[Generation]:
        async with VllmClient(server.url) as client:
            return [await client.generate(prompt, MAX_TOKENS) for prompt in PROMPTS]

    server.start()
    try:
        server.wait_ready()
        return asyncio.run(ask())
    finally:
        server.stop()


@pytest.mark.parametrize("to", DECODE)
def test_a_decode_server_answers_from_the_kv_of_a_bfloat16_server(to: str, kvferry_connector: KvConnector, toy: Path
                                                                  ) -> None:
    """Both servers have the setting, which says nothing new to the one with bfloat16. Answers may differ from those of
    a server of the decode server's type for half of the prompts, or for as many as those of a bfloat16 server do: fp8
    moves nearly all answers of this toy. tests/models compares the elements of K and V.
    """
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("AMX kernels interleave K and V of bfloat16, so chunks are whole blocks, which are not converted")
    if to == "fp8" and not has_fp8_kernels():
        pytest.skip("vLLM's fp8 KV cache needs AVX-512 or AMX")
    expected = plain_answers(to, toy, DECODE[to])
    others = plain_answers("bfloat16", toy, ("--dtype", "bfloat16")) if to == "fp8" else expected
    num_moved = sum(first_mismatch(*both) is not None for both in zip(expected, others, strict=True))
    pair = Pair(PairSetup(f"conversion-{to}", kvferry_connector, prefill_flags=("--dtype", "bfloat16"),
                          decode_flags=DECODE[to], extra={"chunk_dtype": "bfloat16", "chunk_tokens": 64}),
                toy, LOGS / "tests")
    try:
        pair.ensure_running()
        result = asyncio.run(pair_load(pair, PROMPTS, expected, MAX_TOKENS))
        assert not result.errors, result.complaints()
        wrong = [mismatch for mismatch in result.mismatches.values() if mismatch.margin > MARGINS[to]]
        assert not wrong, [str(mismatch) for mismatch in wrong]
        assert len(result.mismatches) <= max(num_moved, len(PROMPTS) // 2), result.complaints()
        loaded = [report.admissions[0].loaded for report in result.reports if report is not None]
        assert loaded == [len(prompt) - 1 for prompt in PROMPTS]
        assert pair.controller is not None
        told = {node["role"]: (node["conversion"], node["fingerprint"], node["chunks"])
                for node in pair.controller.nodes()}
        assert told["kv_producer"][0] == "" and told["kv_consumer"][0] == f"bfloat16 to {to}"
        assert told["kv_producer"][1] == told["kv_consumer"][1]
        assert "reads chunks that servers with --dtype bfloat16 computed" in pair.decode.process.log_text()
    finally:
        pair.stop()


# ---- no server runs ----
SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64}


def config(cache_dtype: str = "fp8", *, dtype: torch.dtype = torch.bfloat16, role: str = "kv_consumer",
           drafts: bool = False, scale: float = 1.0) -> Any:
    """Returns those parts of a VllmConfig that are read here."""
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=scale)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype), cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        kv_transfer_config=SimpleNamespace(kv_role=role),
        speculative_config=SimpleNamespace(uses_draft_kv_cache=lambda: drafts),
        compilation_config=SimpleNamespace(static_forward_context={"a": layer, "b": layer}))


def full(dtype: torch.dtype = torch.uint8) -> FullAttentionSpec:
    return FullAttentionSpec(**SHAPE, dtype=dtype)


def described(vllm_config: Any, *specs: Any, setting: str = "bfloat16", saves_draft_kv: bool = True) -> str:
    chunk_dtype = other_chunk_dtype(vllm_config, setting)
    return conversion(vllm_config, list(specs or [full()]), chunk_dtype, saves_draft_kv=saves_draft_kv)


def test_what_is_converted_is_described() -> None:
    assert described(config()) == described(config("fp8_e4m3")) == "bfloat16 to fp8"
    assert described(config("auto", dtype=torch.float16)) == "bfloat16 to float16"
    assert described(config("bfloat16", dtype=torch.float16)) == "bfloat16 of a model with another --dtype than float16"
    assert described(config("auto")) == described(config("bfloat16")) == ""
    assert described(config(), setting="") == ""
    assert described(config(drafts=True), saves_draft_kv=False) == "bfloat16 to fp8"


def state() -> kinds.MambaSpec:
    return kinds.MambaSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "a type that it doesn't know": (
        lambda: described(config("int8_per_token_head")),
        "can't convert chunks to KV of type int8_per_token_head; it can convert to float32, bfloat16, float16, fp8, "
        "fp8_e5m2"),
    "a prefill server": (lambda: described(config(role="kv_producer")),
                         "this server's KV is of type fp8 and its model of bfloat16, so it saves nothing"),
    "both roles": (lambda: described(config(role="kv_both")), "its kv_role is kv_both and must be kv_consumer"),
    "state": (lambda: described(config(), full(), state()), "layers with state, which this version can't convert"),
    "latents": (lambda: described(config(), kinds.MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=576, dtype=torch.uint8)), r"latent attention \(MLA\), whose KV this"),
    "a draft model": (lambda: described(config(drafts=True)), "a draft model, .*; set save_draft_kv to false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_a_sentence(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(KvFerryError, match=sentence):
        make()
    assert capfd.readouterr().err.count("kvferry: ") == 1


def types(vllm_config: Any, specs: dict[str, Any], layers: list[list[str]], chunk_dtype: str = "bfloat16"
          ) -> list[tuple[str, str]]:
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    plane = (0, 0, 0, 0, 0)
    layouts = [CacheLayout([(name, list(specs).index(name), plane, plane) for name in names], 2, 2, 64, 1, 3, 32)
               for names in layers]
    made = KVCacheConfig(num_blocks=3, kv_cache_tensors=[], kv_cache_groups=groups)
    return element_types(layouts, made, vllm_config, chunk_dtype)


def test_each_layout_has_the_type_of_its_layers() -> None:
    specs = {"a": full(), "b": full(torch.bfloat16)}
    assert types(config(), specs, [["a"], ["b"]]) == [("fp8_e4m3", "bfloat16"), ("bfloat16", "bfloat16")]
    assert types(config("fp8_e5m2"), specs, [["a"]]) == [("fp8_e5m2", "bfloat16")]
    assert types(config("auto"), {"a": full(torch.float16)}, [["a"]]) == [("float16", "bfloat16")]
    assert types(config(), specs, [["a"]], "") == []


def test_scales_and_mixed_types_are_refused() -> None:
    with pytest.raises(KvFerryError, match=r"layer a stores K and V as fp8 with the scales 1.0 and 0.5, and this"):
        types(config(scale=0.5), {"a": full()}, [["a"]])
    with pytest.raises(KvFerryError, match="KV of types bfloat16 and float16, which this version can't tell apart"):
        types(config(), {"a": full(torch.bfloat16), "b": full(torch.float16)}, [["a", "b"]])


def test_a_worker_refuses_state_with_the_same_sentence() -> None:
    with pytest.raises(KvFerryError, match="layers with state, which this version can't convert; leave chunk_dtype"):
        types(config(), {"a": full(torch.bfloat16), "b": state()}, [["a", "b"]])
    assert types(config(), {"a": state()}, [["a"]], "") == []
