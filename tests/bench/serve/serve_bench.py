"""tests/bench/serve/run: the same load through a plain server, a kvferry pair and a NixlConnector pair."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import handover
from deployments import LOG_FOLDER, NAMES, NIXL, NIXL_FOLDER, PLOT_FOLDER, Deployment, install, running
from kvferry_launch.process import ProcessError
from kvferry_launch.progress import Step
from kvferry_launch.testbed import toy_model

# The command `vllm` asks for the version of a distribution that the CPU build does not have.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FIGURES = {"ttft_ms_p50": "p50_ttft_ms", "ttft_ms_p99": "p99_ttft_ms", "itl_ms_p50": "p50_itl_ms",
           "itl_ms_p99": "p99_itl_ms", "output_tokens_per_s": "output_throughput"}


def bench_serve(deployment: Deployment, model: Path, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of `vllm bench serve`, after two requests with prompts of their own that warm up.

    vllm's own --num-warmups sends the first measured prompt, which is then a prefix hit for kvferry alone.
    Errors: ProcessError when it fails or a request of its does.
    """
    one_bench(deployment, model, length, options, num_requests=2, seed=length + 1)
    told = one_bench(deployment, model, length, options, num_requests=options.requests, seed=length)
    return {ours: round(told[theirs], 1) for ours, theirs in FIGURES.items()}


def one_bench(deployment: Deployment, model: Path, length: int, options: argparse.Namespace, num_requests: int,
              seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", BENCH, "--backend", "openai", "--base-url", deployment.front, "--model",
                   str(model), "--dataset-name", "random", "--random-input-len", str(length), "--random-output-len",
                   str(options.output_tokens), "--num-prompts", str(num_requests), "--max-concurrency",
                   str(options.concurrency), "--num-warmups", "0", "--ignore-eos", "--temperature", "0", "--seed",
                   str(seed), "--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--disable-tqdm",
                   "--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False,
                             env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
        (LOG_FOLDER / f"{deployment.name}-{length}.log").write_text(ran.stdout + ran.stderr)
        result = Path(folder) / "result.json"
        if ran.returncode != 0 or not result.exists():
            raise ProcessError(f"vllm bench serve failed; its log is {LOG_FOLDER}/{deployment.name}-{length}.log")
        told: dict[str, Any] = json.loads(result.read_text())
    if told["completed"] != num_requests:
        raise ProcessError(f"{deployment.name}: {told['completed']} of {num_requests} requests were answered")
    return told


def run(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Adds to `rows` as it goes, so that what was measured before an error or Ctrl-C is not lost."""
    model = toy_model.kept(options.model)
    for name in options.only:
        with Step(name) as step, running(name, model) as deployment:
            handed = handover.measure(deployment, options.lengths, options.repeat)
            for length, times in zip(options.lengths, handed, strict=True):
                step.update(len(rows) % len(options.lengths) / len(options.lengths), f"{length} tokens")
                rows.append({"deployment": name} | times | {
                    f"serve_{key}": value for key, value in bench_serve(deployment, model, length, options).items()})


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """Errors: ProcessError when matplotlib can't be had."""
    install(PLOT_FOLDER, "matplotlib")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.json"
        source.write_text(json.dumps(rows))
        subprocess.run([sys.executable, str(Path(__file__).with_name("serve_plot.py")), str(source), str(target)],
                       env=os.environ | {"PYTHONPATH": str(PLOT_FOLDER)}, check=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = {"deployment": "deployment", "prompt_tokens": "prompt", "prefill_ms": "prefill ms",
             "handover_ms": "hand-over ms", "ttft_ms": "TTFT ms", "door_first_ms": "1st token",
             "door_second_ms": "2nd", "serve_ttft_ms_p50": "TTFT p50",
             "serve_ttft_ms_p99": "p99", "serve_itl_ms_p50": "ITL p50", "serve_itl_ms_p99": "p99",
             "serve_output_tokens_per_s": "tokens/s"}
    print("\none request at a time (medians): asked directly, then through the front door | vllm bench serve, ms")
    print("| " + " | ".join(heads.values()) + " |")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(str(row.get(key, "-")) for key in heads) + " |")
    for length in sorted({row["prompt_tokens"] for row in rows}):
        found = {row["deployment"]: row.get("handover_ms") for row in rows if row["prompt_tokens"] == length}
        for name in ("kvferry", "kvferry-pull"):
            if name in found and "nixl" in found:
                print(f"{length} tokens: {name} hands over in {found[name] / found['nixl']:.2f} of NIXL's time")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/bench/serve/run",
        description="Serve one model by a plain vLLM server, a kvferry pair (pushed; pulled behind vllm-router) and "
                    "a NixlConnector pair, on the same two cores; compare TTFT, ITL, throughput and the hand-over.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NAMES),
                        help=f"of {', '.join(NAMES)}; commas between (default: all)")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048],
                        metavar="N,...", help="prompt tokens (default: 512,2048)")
    parser.add_argument("--model", default="wide", choices=toy_model.KINDS,
                        help="%(choices)s (default: wide, the KV bytes of an 8B model)")
    parser.add_argument("--requests", type=int, default=24, help="of each vllm bench serve run (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=2, help="of it (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, help="of each request of it (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="hand-overs measured (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    options = parser.parse_args()
    unknown = [name for name in options.only if name not in NAMES]
    if unknown:
        parser.error(f"--only names '{unknown[0]}', not one of {', '.join(NAMES)}")
    LOG_FOLDER.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    problem = None
    try:
        if "nixl" in options.only:
            install(NIXL_FOLDER, "--no-deps", *NIXL)
        run(options, rows)
    except ProcessError as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    if rows:
        print_table(rows)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1))
        if options.plot and problem is None:
            draw(rows, options.plot)
    if problem is not None:
        sys.exit(f"tests/bench/serve/run: {problem}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
