"""Tests how cells are judged, and that the table in the document is the one of the code. No vLLM runs."""

import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import markdown_table
import pytest
from cells import Cell, Outcome, blind, judged, without_kvferry
from families import FAMILIES
from features import FEATURES


def answer(*tokens: int, values: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"tokens": list(tokens), "margins": [0.5] * len(tokens), "values": list(values)}


def phase(*answers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"answers": list(answers), "loaded": 64, "resumed": 0, "pushed": 0, "preempted": 1, "at_least": 64,
            "at_most": None} | changes


PLAIN = {"plain": phase(answer(1, 2, values=(0.5,)), answer(3))}
SAME = (answer(1, 2, values=(0.5,)), answer(3))


def test_equal_answers_are_right() -> None:
    found = judged({"computed": phase(*SAME, loaded=0, at_least=0), "loaded": phase(*SAME)}, PLAIN)
    assert found == Cell(Outcome.RIGHT, "right: 4 requests, 2 preempted, 64 tokens from KV")


@pytest.mark.parametrize(("wrong", "says"), [
    (phase(answer(1, 7, values=(0.5,)), answer(3)), "loaded: request 0: token 1 is 7, the reference has 2"),
    (phase(SAME[0], answer()), "request 1: token 0 is None"),
    (phase(SAME[0]), "1 answers instead of 2"),
    (phase(answer(1, 2, values=(0.7,)), answer(3)), "request 0: other logprobs"),
    (phase(answer(1, 2), answer(3)), "request 0: other logprobs"),
    (phase(*SAME, loaded=63), "63 tokens were loaded instead of at least 64"),
    (phase(*SAME, at_most=0), "64 tokens were loaded instead of at most 0"),
])
def test_what_is_not_right_is_wrong(wrong: dict[str, Any], says: str) -> None:
    found = judged({"computed": phase(*SAME), "loaded": wrong}, PLAIN)
    assert found.outcome is Outcome.WRONG
    assert says in found.text


def test_an_error_counts_as_vllms_own_only_if_vllm_alone_has_it() -> None:
    error = {"error": "ValueError: no"}
    assert judged(error, PLAIN) == Cell(Outcome.WRONG, "ValueError: no")
    assert judged(error, error) == Cell(Outcome.NOT_IN_VLLM, "ValueError: no")


@pytest.mark.parametrize("error", [
    "ValueError: To serve at least one request with the model's max seq len (288), (0.0 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.0 GiB).",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "VLLMValidationError: The prompt (length 1500) is longer than the maximum model length of 288."])
def test_an_engine_that_had_too_little_says_nothing_about_vllm(error: str) -> None:
    assert judged({"error": error}, {"error": error}).outcome is Outcome.WRONG


@pytest.mark.parametrize("error", [
    "ValueError: GPT2LMHeadModel does not support LoRA yet.", "AssertionError: CPU GDN attention requires BF16.",
    "ValueError: Failed to promote local KV cache specs to one unified type."])
def test_what_vllm_does_not_serve_is_its_own_limit(error: str) -> None:
    assert judged({"error": error}, {"error": error}) == Cell(Outcome.NOT_IN_VLLM, error)


def test_a_model_that_answers_other_prompts_the_same_is_found() -> None:
    assert not blind(PLAIN, {"plain": phase(answer(1, 2), answer(4))})
    assert blind(PLAIN, {"plain": phase(answer(1, 2), answer(3))})
    assert not blind({"error": "ValueError"}, {"plain": phase(*SAME)})
    assert not blind(PLAIN, {})


@pytest.mark.skipif(find_spec("vllm") is None, reason="the table names vLLM's release")
def test_the_table_keeps_what_another_run_wrote(tmp_path: Path) -> None:
    path, day = tmp_path / "TABLE.md", datetime.date(2026, 11, 25)
    path.write_text(f"# Title\n{markdown_table.BEGIN}{markdown_table.END}after\n")
    first = {"llama": {"float32": Cell(Outcome.RIGHT, "right: 1 requests"), "lora": Cell(Outcome.WRONG, "a | b")}}
    markdown_table.write(first, day, path)
    markdown_table.write({"llama": {"lora": Cell(Outcome.REFUSED, "kvferry: no")},
                          "gpt2": {"lora": Cell(Outcome.NOT_IN_VLLM, "ValueError: x")}}, day, path)
    text = path.read_text()
    assert markdown_table.read(text) == {
        "llama": {"float32": first["llama"]["float32"], "lora": Cell(Outcome.REFUSED, "kvferry: no")},
        "gpt2": {"lora": Cell(Outcome.NOT_IN_VLLM, "ValueError: x")}}
    assert "2 families, 2 features, 1 cells right, 1 refused, 0 wrong\n" in text
    assert text.startswith("# Title\n")
    assert text.endswith("after\n")


def test_the_document_has_each_cell_and_none_is_wrong() -> None:
    found = markdown_table.read(markdown_table.TABLE.read_text())
    assert {family: list(row) for family, row in found.items()} == {
        name: [feature for feature in FEATURES if family.has_images or not FEATURES[feature].of_images]
        for name, family in FAMILIES.items()}
    cells = [cell for row in found.values() for cell in row.values()]
    assert [cell for cell in cells if cell.outcome is Outcome.WRONG] == []
    assert [cell for cell in cells if cell.outcome is Outcome.NOT_IN_VLLM and cell != without_kvferry(cell.text)] == []
    assert markdown_table.totals(found) in markdown_table.TABLE.read_text()
