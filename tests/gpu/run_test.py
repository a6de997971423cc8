"""Tests how tests/gpu/run runs its programs, and the reports that it makes of their output; needs no GPU."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
PROFILE = """
 Function _ZN7kvferry4coldEv:
  REG:38 STACK:0 SHARED:512 LOCAL:0 CONSTANT[0]:900 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN7kvferry3hotEv:
  REG:96 STACK:0 SHARED:512 LOCAL:0 CONSTANT[0]:900 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture(scope="module")
def run() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_run", str(HERE / "run"))
    spec = importlib.util.spec_from_loader("gpu_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def step(run: ModuleType, command: list[str], kind: str = "text", limit_s: float = 30) -> object:
    return run.Step("the program", kind, command, limit_s)


def test_a_program_that_hangs_is_killed_with_its_children_and_named(run: ModuleType) -> None:
    # the child keeps the output open, so that a run that kills only its parent would go on waiting
    code, output = run.run(step(run, ["sh", "-c", "echo begun; sleep 600 & sleep 600"], limit_s=0.5))
    assert code == 124
    assert "begun" in output
    assert "the program hung: killed after 0 s" in output


def test_what_fails_is_counted_and_what_needs_a_gpu_is_named(run: ModuleType) -> None:
    report = run.Report()
    for code, output in ((0, "fine"), (1, "wrong bytes"), (77, "the program: needs a GPU: none")):
        run.say_text(report, step(run, ["true"]), code, output)
    assert report.num_failed == 1
    assert report.skipped == ["the program: the program: needs a GPU: none"]
    run.say_checker(report, step(run, ["true"], "checker"), 9, "========= ERROR SUMMARY: 1 error")
    assert report.num_failed == 2
    assert "- the program: ERROR SUMMARY: 1 error" in report.lines


def test_kernels_are_listed_by_their_registers(run: ModuleType) -> None:
    report = run.Report()
    run.say_registers(report, step(run, ["true"], "registers"), 0, PROFILE)
    text = "\n".join(report.lines)
    assert text.index("REG:96") < text.index("REG:38")
    assert "_ZN7kvferry3hotEv" in text


def test_the_parts_are_printed_without_a_build() -> None:
    printed = subprocess.run([sys.executable, str(HERE / "run"), "--print"], capture_output=True, text=True, check=True,
                             timeout=60).stdout
    assert [line for line in printed.splitlines() if not line.startswith("#")] == [
        f"tests/gpu/run --part {part}" for part in (1, 2, 3, 4)]
    for name in ("gpu_kernels_test", "gpu_paths_bench", "gpu_store_bench", "gpu_node_pair", "gpu_nccl_pair",
                 "initcheck"):
        assert name in printed
