#!/usr/bin/env python3
"""Runs real vLLM with kvferry on one GPU: a plain engine, a prefill engine and a decode engine at the same time.

    python3 vllm_pair.py MODEL                compares the greedy tokens of the pair with those of the plain engine
    python3 vllm_pair.py MODEL --blocks 170 --tokens 120 --dtype float32
                                              the same with so few KV blocks that requests are preempted
    python3 vllm_pair.py MODEL --wide         measures hand-overs of 2k and 8k tokens of an 8B model's KV

MODEL is a folder with a model and its tokenizer, such as build/models/toy; --wide takes only the tokenizer. Needs vLLM
and kvferry. Exit 77: vLLM is missing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LENGTHS = (300, 700, 1500)
WIDE = {"num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128,
        "hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 16384}


def prompt(length: int, seed: int) -> list[int]:
    return [(7 * i + 13 * seed + (i * i) % 11) % 500 + 1 for i in range(length)]


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def engine(words: argparse.Namespace) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"model": words.model, "dtype": words.dtype, "seed": 0, "disable_log_stats": True,
                               "max_model_len": 12288 if words.wide else 2048, "gpu_memory_utilization": 0.2,
                               "async_scheduling": words.asynchronous, "enforce_eager": not words.graphs}
    if words.graphs:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if words.attention:
        options["attention_backend"] = words.attention
    if words.blocks:
        options["num_gpu_blocks_override"] = words.blocks
    if words.wide:
        options |= {"hf_overrides": WIDE, "load_format": "dummy", "max_num_batched_tokens": 12288,
                    "num_gpu_blocks_override": 2048}
    if words.with_kvferry:
        options["kv_transfer_config"] = {
            "kv_connector": "KvFerryConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"controller": words.controller, "chunk_tokens": 128, "pool_bytes": "4GiB",
                                          "advertise_host": "127.0.0.1"}}
    began = time.perf_counter()
    made = LLM(**options)
    say(f"engine started in {time.perf_counter() - began:.1f} s")
    return made


def generate(made: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = asked.get("params") or [None] * len(asked["prompts"])
    sampling = [SamplingParams(max_tokens=asked["tokens"], temperature=0.0, ignore_eos=True,
                               extra_args=None if one is None else
                               {"kv_transfer_params": {"kvferry_report": True, **one}}) for one in params]
    if asked.get("reset"):
        made.reset_prefix_cache()
    began = time.perf_counter()
    done = made.generate([{"prompt_token_ids": one} for one in asked["prompts"]], sampling, use_tqdm=False)
    took = time.perf_counter() - began
    return {"tokens": [list(one.outputs[0].token_ids) for one in done], "ms": 1000 * took,
            "params": [one.kv_transfer_params for one in done]}


def serve_lines(words: argparse.Namespace) -> None:
    """Serves as an engine in a process of its own: a line of JSON in, a line of JSON out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output goes to stderr
    made = engine(words)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(made, json.loads(line))), file=answers, flush=True)


class Engine:
    """An engine in a child process."""

    def __init__(self, words: argparse.Namespace, controller: str, with_kvferry: bool) -> None:
        given = [name for name in ("--asynchronous", "--graphs", "--wide") if getattr(words, name[2:])]
        command = [sys.executable, __file__, words.model, "--serve", "--controller", controller, "--attention",
                   words.attention, "--blocks", str(words.blocks), "--dtype", words.dtype,
                   *(["--with-kvferry"] if with_kvferry else []), *given]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.asked, self.answers = self.process.stdin, self.process.stdout
        line = self.answers.readline()
        if line.strip() != "ready":
            raise RuntimeError(f"the engine did not start: {line} (status {self.process.wait(60)})")

    def ask(self, prompts: list[list[int]], tokens: int, **more: Any) -> dict[str, Any]:
        self.asked.write(json.dumps({"prompts": prompts, "tokens": tokens, **more}) + "\n")
        self.asked.flush()
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"the engine ended (status {self.process.wait(60)})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def admissions(answer: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [(one or {}).get("kvferry_report", {}).get("admissions", []) for one in answer["params"]]


def loaded(answer: dict[str, Any]) -> list[int]:
    return [sum(row["loaded"] for row in rows) for rows in admissions(answer)]


def compare(words: argparse.Namespace, plain: Engine, prefill: Engine, decode: Engine) -> bool:
    """Prints, for several turns, whether the pair's tokens equal those of the plain engine."""
    all_equal = True
    for turn in range(words.turns):
        prompts = [prompt(length, 31 * turn + number) for number, length in enumerate(LENGTHS)]
        wanted = plain.ask(prompts, words.tokens, reset=True)["tokens"]
        again = plain.ask(prompts, words.tokens, reset=True)["tokens"]
        handed = prefill.ask(prompts, 1, params=[{"do_remote_decode": True}] * len(prompts))
        got = decode.ask(prompts, words.tokens, params=handed["params"])
        own = prefill.ask(prompts, words.tokens, params=[{}] * len(prompts), reset=True)
        for name, answer in (("pair", got), ("reloaded by the prefill engine", own)):
            num_equal = sum(a == b for a, b in zip(answer["tokens"], wanted, strict=True))
            all_equal &= num_equal == len(prompts)
            print(f"turn {turn}, {name}: {num_equal} of {len(prompts)} equal (plain again: {again == wanted}); loaded "
                  f"{loaded(answer)}, admissions {[len(rows) for rows in admissions(answer)]}, {answer['ms']:.1f} ms",
                  flush=True)
    return all_equal


def time_handovers(plain: Engine, prefill: Engine, decode: Engine) -> bool:
    """Prints how long the first token takes that the decode engine makes of KV from the prefill engine."""
    all_loaded = True
    for length in (2048, 8192):
        rows: dict[str, list[float]] = {"prefill": [], "decode": [], "one step": [], "plain prefill": []}
        for turn in range(6):
            prompts = [prompt(length + 1, length + turn)]
            computed = plain.ask(prompts, 1)
            cached = plain.ask(prompts, 1)
            handed = prefill.ask(prompts, 1, params=[{"do_remote_decode": True}])
            got = decode.ask(prompts, 1, params=handed["params"])
            all_loaded &= loaded(got) == [length]
            if turn > 0:
                for name, answer in zip(rows, (handed, got, cached, computed), strict=True):
                    rows[name].append(answer["ms"])
        print(f"{length} tokens: " + ", ".join(f"{name} {statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"
                                               for name, ms in rows.items()) + f" ms; loaded {loaded(got)}", flush=True)
    return all_loaded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--attention", default="", help="vLLM's attention backend, e.g. TRITON_ATTN")
    parser.add_argument("--asynchronous", action="store_true", help="with vLLM's asynchronous scheduling")
    parser.add_argument("--graphs", action="store_true", help="decode in CUDA graphs")
    parser.add_argument("--blocks", type=int, default=0, help="KV blocks of each engine")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--wide", action="store_true", help="measure hand-overs with an 8B model's KV")
    parser.add_argument("--controller", default="", help=argparse.SUPPRESS)
    for hidden in ("--with-kvferry", "--serve"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.serve:
        serve_lines(words)
        return 0
    try:
        import kvferry
        import vllm  # noqa: F401
    except ImportError as error:
        print(f"vllm_pair: needs vLLM and kvferry: {error}")
        return 77
    program = Path(os.environ.get("KVFERRY_PROGRAM") or Path(kvferry.__file__).parent / "bin" / "kvferry")
    controller = subprocess.Popen([program, "controller", "--bind", "tcp://127.0.0.1:0", "--state", "none"],
                                  stdout=subprocess.PIPE, text=True)
    engines: list[Engine] = []
    try:
        assert controller.stdout is not None
        endpoint = controller.stdout.readline().split()[-1]
        began = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            starts = [pool.submit(Engine, words, endpoint, with_kvferry) for with_kvferry in (False, True, True)]
            engines = [one.result() for one in starts]
        print(f"three engines after {time.perf_counter() - began:.1f} s", flush=True)
        is_good = time_handovers(*engines) if words.wide else compare(words, *engines)
        for one in engines:
            one.asked.close()
        for one in engines:
            one.process.wait(20)
    finally:
        controller.kill()
        for one in engines:
            one.process.kill()
    print("all right" if is_good else "FAILED", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
