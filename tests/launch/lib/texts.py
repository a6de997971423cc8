"""Converts between text and tokens of the toy model, for /v1/completions, through which routers forward requests."""

from collections.abc import Sequence
from typing import Any

from kvferry_launch.testbed.client import FREQUENCY_PENALTY, VllmClient


def text_of(tokens: Sequence[int]) -> str:
    """Returns the text that the toy model's tokenizer turns into these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def completion_body(prompt: str, max_tokens: int) -> dict[str, Any]:
    """Returns the body of a /v1/completions request with the same sampling as `VllmClient.generate`."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "frequency_penalty": FREQUENCY_PENALTY,
            "ignore_eos": True, "skip_special_tokens": False}


async def complete_text(client: VllmClient, prompt: str, max_tokens: int) -> str:
    """Returns the text that continues `prompt`. Errors: RequestError."""
    answer = await client.post("/v1/completions", completion_body(prompt, max_tokens))
    return str(answer["choices"][0]["text"])
