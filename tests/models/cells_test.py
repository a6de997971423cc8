"""Tests how cells are judged, and that the table in the document is the one of the code. No vLLM runs."""

import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import markdown_table
import pytest
from cells import Cell, Outcome, blind, judged, moved, without_kvferry
from families import FAMILIES
from features import features_of


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


def near(lead: float, *tokens: int) -> dict[str, Any]:
    return {"tokens": list(tokens), "margins": [0.5] * (len(tokens) - 1) + [lead], "values": []}


ROUNDED = {"plain": phase(near(0.2, 1, 2), near(0.5, 3, 4))}


def test_kv_of_another_type_may_turn_a_near_token() -> None:
    found = judged({"handed over": phase(near(0.3, 1, 7), near(0.9, 3, 4))}, ROUNDED, 0.25)
    assert found == Cell(Outcome.RIGHT, "right: 2 requests, 1 preempted, 64 tokens from KV, 1 rounded to other tokens")


@pytest.mark.parametrize(("wrong", "says"), [
    (near(0.5, 3, 7), "request 1: token 1 is 7, the reference has 4"),
    (near(0.5, 3), "request 1: token 1 is None"),
])
def test_kv_of_another_type_may_turn_no_other_token(wrong: dict[str, Any], says: str) -> None:
    found = judged({"handed over": phase(near(0.2, 1, 2), wrong)}, ROUNDED, 0.25)
    assert found.outcome is Outcome.WRONG
    assert says in found.text


@pytest.mark.parametrize(("other", "by"), [
    ((near(0.2, 1, 2), near(0.5, 3, 4)), 0.0), ((near(0.3, 1, 2), near(0.1, 3, 4)), 0.4),
    ((near(0.9, 1, 7), near(0.5, 3, 4)), 0.2), ((near(0.2, 1, 2), near(0.9, 7, 4)), 0.5)])
def test_tokens_may_turn_as_far_as_the_type_moves_them_in_vllm_alone(other: tuple[Any, ...], by: float) -> None:
    assert moved(ROUNDED, {"plain": phase(*other)}) == pytest.approx(by)


@pytest.mark.skipif(find_spec("torch") is None, reason="KV is in tensors")
def test_kv_that_differs_or_is_missing_is_found(tmp_path: Path) -> None:
    import kv_content
    import torch

    whole = {"[1, 2]": [torch.rand(2, 4, 2, 8), torch.rand(2, 4, 1, 16)]}
    kv_content.write(whole, tmp_path / "kv")

    def complaint(layer: int, tokens: int, value: float) -> str:
        other = {"[1, 2]": [one.clone() for one in whole["[1, 2]"]]}
        other["[1, 2]"][layer][:, :tokens] = value
        return kv_content.complaint_about(other, tmp_path / "kv")

    assert complaint(1, 0, 2.0) == complaint(1, 2, torch.nan) == ""
    assert complaint(1, 1, 2.0) == "32 of 128 elements of layer 1 are not those of the other engine"
    assert complaint(0, 4, torch.nan) == "only 0 of 128 elements of layer 0 are in both engines"
    assert kv_content.complaint_about({}, tmp_path / "kv") == "KV of 0 prompts instead of 1"

    rounded = {"[1, 2]": [one.to(torch.float8_e4m3fn).float() for one in whole["[1, 2]"]]}
    assert kv_content.complaint_about(rounded, tmp_path / "kv", torch.float8_e4m3fn) == ""
    assert "elements of layer 0 are not those" in kv_content.complaint_about(rounded, tmp_path / "kv")
    assert "elements of layer 0 are not those" in kv_content.complaint_about(whole, tmp_path / "kv", torch.float8_e5m2)


def test_a_tie_is_no_excuse_where_types_are_equal() -> None:
    tied = {"plain": phase(near(0.0, 1, 2))}
    assert judged({"loaded": phase(near(0.0, 1, 7))}, tied).outcome is Outcome.WRONG


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
        name: features_of(name) for name in FAMILIES}
    cells = [cell for row in found.values() for cell in row.values()]
    assert [cell for cell in cells if cell.outcome is Outcome.WRONG] == []
    assert [cell for cell in cells if cell.outcome is Outcome.NOT_IN_VLLM and cell != without_kvferry(cell.text)] == []
    assert markdown_table.totals(found) in markdown_table.TABLE.read_text()
