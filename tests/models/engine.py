"""One vLLM engine in this process, with generated weights, with or without kvferry, and what it has loaded so far."""

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asks
from families import BLOCK, HIDDEN, IMAGE_SIDE, IMAGE_TOKENS, LAYERS, Family
from kvferry_launch.testbed import toy_model
from toy_weights import generate_weights

CHUNK = 64
DEFAULTS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "block_size": BLOCK, "max_model_len": 2048, "load_format": "dummy",
    "logprobs_mode": "processed_logprobs", "num_gpu_blocks_override": 192}


class Engine:
    """flags: vLLM's arguments, and under `kvferry` more settings of the connector. kvferry: the connector's settings;
    None: an engine without it.
    """

    def __init__(self, family: Family, flags: dict[str, Any], folder: Path, kvferry: dict[str, Any] | None,
                 engine_id: str = "") -> None:
        from vllm import LLM
        from vllm.v1.executor import multiproc_executor

        generate_weights()
        # forks have what was changed in this process; vLLM's platform for CPUs would spawn the ranks
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        self.family, self._folder = family, folder
        arguments = DEFAULTS | family.flags | flags
        if arguments["num_gpu_blocks_override"] == "few":
            arguments["num_gpu_blocks_override"] = family.few_blocks
        if "max_num_batched_tokens" in family.flags:
            arguments["max_num_batched_tokens"] = max(family.flags["block_size"], arguments["block_size"])
        storage = folder.parent / "storage" if arguments.pop("kv_transfer_config", None) else None
        settings = arguments.pop("kvferry", {})
        extra = kvferry and {"chunk_tokens": self._chunk(arguments["block_size"]), "pool_bytes": "64MiB",
                             **kvferry, **settings}
        if extra or storage:
            arguments["kv_transfer_config"] = transfer_config(extra, engine_id, storage)
        self.llm = LLM(str(folder), **arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        block = self.core.vllm_config.cache_config.block_size
        self.chunk: int = block if family.keeps_state else self._chunk(arguments["block_size"])
        self.hit_tokens = 1  # what kvferry loads, and what it saves of a prompt, are multiples of this number of tokens
        scheduler, self._preemptions, self._counted = self.core.scheduler, 0, Counter[str]()
        self._ferry: Any = None
        if kvferry is not None:
            self._ferry = getattr(scheduler.connector, "_connectors", [scheduler.connector])[0]._scheduler
            if family.keeps_state or self._ferry._order:
                self.hit_tokens = family.blocks_in_one * block
            self._ferry._stats.take = self._count(self._ferry._stats.take)
        preempt = scheduler._preempt_request

        def preempted(*arguments: Any, **named: Any) -> Any:
            self._preemptions += 1
            return preempt(*arguments, **named)

        scheduler._preempt_request = preempted

    def _chunk(self, block: int) -> int:
        return self.family.blocks_in_one * max(CHUNK, block)

    def inputs(self, prompts: list[list[int]], images: int = 0, **fields: Any) -> list[Any]:
        """Returns the prompts as vLLM takes them. In models with images, a long prompt has an image in place of its
        first tokens, in which the first chunk ends; other `images` are other pictures.
        """
        from vllm.inputs import TokensPrompt

        found = [TokensPrompt(prompt_token_ids=prompt, **fields) for prompt in prompts]
        for number, one in enumerate(found):
            if self.family.has_images and len(one["prompt_token_ids"]) > IMAGE_TOKENS:
                one["prompt_token_ids"] = one["prompt_token_ids"][IMAGE_TOKENS:]
                one["multi_modal_data"] = {"image": picture(images + number)}
        return found

    def generate(self, prompts: list[list[int]], params: list[Any], lora_request: Any = None, **fields: Any
                 ) -> list[Any]:
        found: list[Any] = self.llm.generate(self.inputs(prompts, **fields), params, use_tqdm=False,
                                             lora_request=lora_request)
        return found

    def generate_and_abort(self, prompts: list[list[int]], params: Any, steps: int) -> list[Any]:
        """Aborts every other request after `steps` steps. Returns the outputs of the other requests in order."""
        engine, found = self.llm.llm_engine, {}
        for number, one in enumerate(self.inputs(prompts)):
            engine.add_request(f"{number}", one, params.clone())
        done = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = output
            done += 1
            if done == steps:
                engine.abort_request([f"{number}" for number in range(1, len(prompts), 2)])
        return [found[f"{number}"] for number in range(0, len(prompts), 2)]

    def adapter(self, number: int) -> Any:
        from vllm.lora.request import LoRARequest

        path = self._folder.parent / f"adapter-{number}"
        if not path.exists():
            layers = [self.family.adapter_layers.format(layer) for layer in range(LAYERS)]
            toy_model.make_adapter(path, number, layers, HIDDEN, self.family.adapter, asks.LORA_RANK)
        return LoRARequest(f"adapter-{number}", number, str(path))

    def reset(self) -> None:
        """Empties vLLM's own prefix cache."""
        if self.core.vllm_config.cache_config.enable_prefix_caching:
            assert self.llm.reset_prefix_cache(), "vLLM's prefix cache can't be emptied, so blocks are still in use"

    def phase(self, ask: Callable[[], list[asks.Spoken]], at_least: int = 0, at_most: int | None = None
              ) -> dict[str, Any]:
        """Returns the answers, what kvferry loaded for them, and which number of tokens it should have loaded."""
        self.reset()
        before, preemptions = self._counters(), self._preemptions
        answers = asks.as_json(ask())
        after = self._counters()
        return {"answers": answers, "loaded": after["loaded_tokens_total"] - before["loaded_tokens_total"],
                "resumed": after["resumed_hit_tokens_total"] - before["resumed_hit_tokens_total"],
                "pushed": after["received_chunks_total"],  # also before the phase, which begins when all has come
                "preempted": self._preemptions - preemptions, "at_least": at_least, "at_most": at_most}

    def _counters(self) -> Counter[str]:
        """Returns the connector's counters since the engine's start."""
        if self._ferry is not None:
            self._ferry.take_stats()
        return self._counted.copy()

    def _count(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Adds up what the connector reports to vLLM, which takes each growth once."""

        def counted(metrics: dict[str, float]) -> Any:
            stats = take(metrics)
            for name, value in stats.reduce().items():
                self._counted[name] += int(value)
            return stats

        return counted


def transfer_config(extra: dict[str, Any] | None, engine_id: str, storage: Path | None) -> Any:
    """Returns vLLM's configuration of kvferry; with `storage`, of MultiConnector with another connector, beside kvferry
    or alone.
    """
    from vllm.config import KVTransferConfig

    ours: dict[str, Any] = {
        "kv_connector": "KvFerryConnector", "kv_connector_module_path": "kvferry.vllm",
        # an engine that converts what it loads may not save
        "kv_role": "kv_consumer" if "chunk_dtype" in (extra or {}) else "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    if storage is None:
        return KVTransferConfig(**ours, **{"engine_id": engine_id} if engine_id else {})
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"shared_storage_path": str(storage)}}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
                            kv_connector_extra_config={"connectors": [ours, other] if extra else [other]})


def picture(seed: int) -> Any:
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), numpy.uint8))


def write_model(family: Family, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.config))
    toy_model.write_tokenizer(folder)
    if family.has_images:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<image>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "processor_config.json").write_text(json.dumps({
            "processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS}))
        (folder / "preprocessor_config.json").write_text(json.dumps({
            "image_processor_type": "BlipImageProcessor", "size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE}}))
    return folder
