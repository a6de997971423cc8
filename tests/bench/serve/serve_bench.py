"""tests/bench/serve/run: sends the same load through a plain server, a kvferry pair and a NixlConnector pair."""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent
import aiohttp
import costs
import handover
import loads
from deployments import (
    CONTEXT,
    LOG_FOLDER,
    NAMES,
    NIXL,
    NIXL_FOLDER,
    NIXL_THREADS,
    PLOT_FOLDER,
    TRANSFERS,
    Deployment,
    Door,
    install,
    running,
)
from deployments import door as front_door
from kvferry_launch.process import ProcessError
from kvferry_launch.progress import Step
from kvferry_launch.testbed import toy_model

# Runs what `vllm bench serve` runs. The command `vllm` itself fails here, because it needs the version of a
# distribution that the CPU build does not have.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PROMPT_MAX = 8192  # tokens; the rest of CONTEXT is for answers
TURNS_MAX = 50  # of a session, whose last prompt still fits into CONTEXT
MANY = 100_000
PERCENTILE_SAMPLES = 100  # with fewer samples, p99 would be equal to the maximum


def tail(num_samples: int) -> tuple[str, int]:
    """Returns the name and the value of the highest percentile that so many samples can show."""
    return ("p99", 99) if num_samples >= PERCENTILE_SAMPLES else ("max", 100)


def bench_serve(url: str, label: str, model: Path, length: int, requests: int, options: argparse.Namespace
                ) -> dict[str, Any]:
    """Runs `vllm bench serve` once with new prompts, after a run with two other requests that warm up.

    vllm's own --num-warmups would send the first measured prompt, which would then be a prefix hit only for kvferry.
    Errors: ProcessError if the run or one of its requests fails.
    """
    one_bench(url, f"{label} warm-up", model, length, 2, options)
    told = one_bench(url, label, model, length, requests, options)
    row = {"serve_requests": requests, "serve_output_tokens_per_s": told["output_throughput"]}
    for kind, num_samples in (("ttft", requests), ("itl", requests * (options.output_tokens - 1))):
        name, percentile = tail(num_samples)
        row |= {f"serve_{kind}_ms_p50": told[f"p50_{kind}_ms"],
                f"serve_{kind}_ms_{name}": told[f"p{percentile}_{kind}_ms"]}
    return {name: round(value, 1) for name, value in row.items()}


def one_bench(url: str, label: str, model: Path, length: int, requests: int, options: argparse.Namespace
              ) -> dict[str, Any]:
    log = LOG_FOLDER / f"serve-{label.replace(' ', '-')}.log"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", BENCH, "--backend", "openai", "--base-url", url, "--model", str(model),
                   "--dataset-name", "random", "--random-input-len", str(length), "--random-output-len",
                   str(options.output_tokens), "--num-prompts", str(requests), "--max-concurrency",
                   str(options.concurrency), "--num-warmups", "0", "--ignore-eos", "--temperature", "0", "--seed",
                   str(random.SystemRandom().randrange(1 << 31)), "--percentile-metrics", "ttft,itl",
                   "--metric-percentiles", "50,99,100", "--disable-tqdm", "--save-result", "--result-dir", folder,
                   "--result-filename", "result.json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False,
                             env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
        log.write_text(ran.stdout + ran.stderr)
        result = Path(folder) / "result.json"
        if ran.returncode != 0 or not result.exists():
            raise ProcessError(f"vllm bench serve ended with status {ran.returncode}; its log is {log}")
        told: dict[str, Any] = json.loads(result.read_text())
    if told["completed"] != requests:
        raise ProcessError(f"{label}: only {told['completed']} of {requests} requests were answered; the log is {log}")
    return told


def rows_of(deployment: Deployment, door: Door, name: str, first_token: str, model: Path, options: argparse.Namespace
            ) -> Iterator[dict[str, Any]]:
    repeat, requests = options.repeat, options.requests
    if name in NIXL_THREADS:
        repeat, requests = min(repeat, options.nixl_requests), min(requests, options.nixl_requests)
    label = {"deployment": name, "first_token": first_token}
    for length in options.lengths if "random" in options.load else ():
        row = label | {"load": "random", "prompt_tokens": length} | handover.measure(
            deployment, door, name, length, repeat)
        expected = repeat if first_token == "prefill" else 0
        if row["first_of_prefill"] != expected:
            raise ProcessError(f"{name}: the prefill server sampled {row['first_of_prefill']} of {repeat} first "
                               f"tokens, not {expected}")
        if requests and name != "nixl-third-core":  # in nixl-third-core, two requests at a time would share a core
            row |= bench_serve(door.url, f"{name} {first_token} {length}", model, length, requests, options)
        yield row
    if "agent" in options.load:
        yield label | agent.measure(deployment, door, options.turns)


def run(options: argparse.Namespace, rows: list[dict[str, Any]], problems: list[str]) -> None:
    """Appends each row to `rows` as soon as it is measured, so that an error or Ctrl-C does not lose the earlier rows.
    An error of a NixlConnector pair goes to `problems`, and the next deployment is measured.
    """
    model = toy_model.kept(options.model)
    # "pushed" and "pulled" use the same pair.
    for pair, names in itertools.groupby(options.only, lambda name: "kvferry" if name in TRANSFERS else name):
        members = list(names)
        try:
            measure_pair(pair, members, model, options, rows)
        except (ProcessError, aiohttp.ClientError, TimeoutError) as error:
            if pair not in NIXL_THREADS:
                raise
            problems.append(f"{pair}: {reason(error)}")


def measure_pair(pair: str, members: list[str], model: Path, options: argparse.Namespace, rows: list[dict[str, Any]]
                 ) -> None:
    with Step(pair) as step, running(members[0], model) as deployment:
        for name in members:
            for first_token in options.first_token if name in TRANSFERS else ["decode"]:
                step.update(note=f"{name}, first token of {first_token}" if deployment.prefill else name)
                with front_door(deployment, name, first_token, options.prepare_from) as door:
                    for row in rows_of(deployment, door, name, first_token, model, options):
                        rows.append(row)


def reason(error: Exception) -> str:
    return f"a server did not answer in time; its log is in {LOG_FOLDER}" if isinstance(error, TimeoutError) \
        else str(error)


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """Draws the rows into the file `target`. Errors: ProcessError if matplotlib can't be installed."""
    install(PLOT_FOLDER, "matplotlib")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.json"
        source.write_text(json.dumps(rows))
        subprocess.run([sys.executable, str(Path(__file__).with_name("serve_plot.py")), str(source), str(target)],
                       env=os.environ | {"PYTHONPATH": str(PLOT_FOLDER)}, check=True)


HEADS = {"deployment": "deployment", "first_token": "1st token of", "prompt_tokens": "prompt", "repeat": "requests",
         "prefill_ms": "prefill ms", "first_token_after_prefill_ms": "1st token after it ms",
         "handover_ms": "hand-over ms", "ttft_ms": "TTFT ms", "second_token_ms": "2nd token ms", "step_ms": "step ms"}
SERVE_HEADS = {"deployment": "deployment", "first_token": "1st token of", "prompt_tokens": "prompt",
               "serve_requests": "requests", "serve_ttft_ms_p50": "TTFT p50 ms", "serve_ttft_ms_p99": "TTFT p99 ms",
               "serve_ttft_ms_max": "TTFT max ms", "serve_itl_ms_p50": "ITL p50 ms", "serve_itl_ms_p99": "ITL p99 ms",
               "serve_itl_ms_max": "ITL max ms", "serve_output_tokens_per_s": "tokens/s"}
AGENT_HEADS = {"deployment": "deployment", "first_token": "1st token of", "turns": "turns",
               "last_prompt_tokens": "last prompt", "repeated_share": "repeated", "from_kv_share": "from KV",
               "ttft_ms_turn_1": "TTFT of turn 1 ms", "ttft_ms_turn_2": "of turn 2 ms",
               "ttft_ms_last_turn": "of the last ms"}


COST_HEADS = {"compared": "compared", "prompt_tokens": "prompt", "rounds": "rounds",
              "ttft_ms_without": "TTFT ms without", "ttft_ms_with": "with", "ttft_ms_ratio": "ratio",
              "ttft_ms_quartiles": "quartiles", "tokens_per_s_without": "tokens/s without",
              "tokens_per_s_with": "with", "tokens_per_s_ratio": "ratio", "tokens_per_s_quartiles": "quartiles"}
LOAD_HEADS = {"prompt_tokens": "prompt", "rounds": "rounds", "loads": "loads",
              "itl_p50_ms_without": "ITL p50 ms without", "itl_p50_ms_cached": "cached", "itl_p50_ms_with": "with",
              "itl_p99_ms_without": "ITL p99 ms without", "itl_p99_ms_cached": "cached", "itl_p99_ms_with": "with",
              "itl_p99_ratio_without": "with / without", "itl_p99_ratio_cached": "with / cached"}


def print_table(title: str, heads: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table, if there are any, with only the columns for which a row has a value."""
    shown = [key for key in heads if any(key in row for row in rows)]
    if rows:
        print(f"\n{title}\n| " + " | ".join(heads[key] for key in shown) + " |\n|" + "---|" * len(shown))
    for row in rows:
        print("| " + " | ".join(str(row.get(key, "-")) for key in shown) + " |")


def print_tables(rows: list[dict[str, Any]]) -> None:
    random_rows = [row for row in rows if row["load"] == "random"]
    print_table("one request at a time, medians", HEADS, random_rows)
    seconds = [{**row, **row["seconds_per_request"]} for row in random_rows]
    parts = dict.fromkeys(part for row in random_rows for part in row["seconds_per_request"])
    print_table("seconds of processors for one of these requests", {key: HEADS[key] for key in list(HEADS)[:3]} |
                {part: part for part in parts}, seconds)
    print_table("vllm bench serve", SERVE_HEADS, [row for row in random_rows if "serve_requests" in row])
    print_table("an agent's session", AGENT_HEADS, [row for row in rows if row["load"] == "agent"])
    print_table("what kvferry costs", COST_HEADS, [row for row in rows if row["load"] == "costs"])
    print_table("what loads cost a stream", LOAD_HEADS, [row for row in rows if row["load"] == "loads"])


def names_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}' is not one of {', '.join(allowed)}")
        return names

    return parse


def within(least: int, most: int) -> Callable[[str], int]:
    """Returns a function that parses a whole number from `least` to `most`."""
    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} to {most}")
        return number

    return parse


def lengths_of(text: str) -> list[int]:
    return [within(1, PROMPT_MAX)(part) for part in text.split(",")]


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/bench/serve/run",
        description="Serve one model by a plain vLLM server, a kvferry pair (pushed and pulled, behind launch/proxy) "
                    "and NixlConnector pairs, on the same two cores; compare TTFT, the hand-over, ITL, throughput and "
                    "the processor time of each part.")
    parser.add_argument("--only", type=names_of(NAMES), default=list(NAMES), metavar="NAME,...",
                        help=f"deployments to measure: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--lengths", type=lengths_of, default=[128, 512, 2048], metavar="N,...",
                        help=f"prompt lengths in tokens, {PROMPT_MAX} at most (default: 128,512,2048)")
    parser.add_argument("--first-token", type=names_of(("prefill", "decode")), default=["prefill", "decode"],
                        metavar="NAME,...",
                        help="values of launch/proxy's --first-token to measure (default: prefill,decode)")
    parser.add_argument("--prepare-from", type=within(0, CONTEXT), default=0, metavar="TOKENS",
                        help="launch/proxy's --prepare-from (default: 0, no prompt)")
    parser.add_argument("--load", type=names_of(("random", "agent")), default=["random"], metavar="NAME,...",
                        help="kinds of requests: random (prompts of random tokens), agent (a session that grows) "
                             "(default: random)")
    parser.add_argument("--costs", action="store_true",
                        help="instead of --only: what saving all KV costs a server, what a pair adds to the time that "
                             "its prefill server alone needs for a first token, and what loads cost a stream of the "
                             "decode server; requests go by turns to both")
    parser.add_argument("--turns", type=within(2, TURNS_MAX), default=40, metavar=f"2..{TURNS_MAX}",
                        help="number of turns of the agent's session (default: %(default)s)")
    parser.add_argument("--model", default="wide", choices=toy_model.KINDS,
                        help="model to serve: %(choices)s (default: wide, which has the KV bytes of an 8B model)")
    parser.add_argument("--requests", type=within(0, MANY), default=24,
                        help="number of requests of each run of vllm bench serve; 0: no run (default: %(default)s)")
    parser.add_argument("--concurrency", type=within(1, MANY), default=2,
                        help="requests that vllm bench serve sends at the same time (default: %(default)s)")
    parser.add_argument("--output-tokens", type=within(2, CONTEXT - PROMPT_MAX), default=32,
                        help="tokens of an answer in vllm bench serve and with --costs (default: %(default)s)")
    parser.add_argument("--repeat", type=within(1, MANY), default=7,
                        help="number of requests that are sent one at a time (default: %(default)s)")
    parser.add_argument("--nixl-requests", type=within(1, MANY), default=4, metavar="N",
                        help="limit on --repeat and --requests for pairs with NIXL, whose requests may take a minute "
                             "each where its threads poll on the model's core (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which the rows are written as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="file to which a picture of the rows is drawn")
    options = parser.parse_args(words)
    if options.costs:
        options.only = []
        if options.plot or options.repeat < 2:
            parser.error("with --costs, --plot is not allowed, and --repeat must be at least 2")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    LOG_FOLDER.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        if any(name in NIXL_THREADS for name in options.only):
            install(NIXL_FOLDER, "--no-deps", *NIXL)
        run(options, rows, problems)
        if options.costs:
            costs.measure(toy_model.kept(options.model), options, rows)
            loads.measure(toy_model.kept(options.model), options, rows)
    except (ProcessError, aiohttp.ClientError, TimeoutError) as error:
        problems.append(reason(error))
    except KeyboardInterrupt:
        problems.append("interrupted by Ctrl-C; rows that were measured before are printed")
    if rows:
        print_tables(rows)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1))
        if options.plot and not problems:
            draw(rows, options.plot)
    if problems:
        sys.exit("\n".join(f"tests/bench/serve/run: {problem}" for problem in problems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
