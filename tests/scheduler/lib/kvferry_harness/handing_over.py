"""Hands prompts over from one engine to another."""

import time
from typing import Any

from kvferry_harness.engine import Engine

REMOTE_DECODE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def hand_over(prefill: Engine, request_id: str, tokens: list[int]) -> dict[str, Any]:
    """Prefills a prompt. Returns the kv_transfer_params for the decode engine."""
    prefill.add(request_id, tokens, 1, params=REMOTE_DECODE)
    prefill.run()
    params = prefill.told[request_id].params
    assert params is not None
    return params


def run_patiently(engine: Engine, seconds: float = 20.0) -> None:
    """Does the same as run(), for lookups that wait for other nodes."""
    deadline = time.monotonic() + seconds
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
        if engine.log.of("lookup") and engine.log.of("lookup")[-1]["answer"] is None:
            time.sleep(0.002)
        assert time.monotonic() < deadline, f"hangs: {list(engine.scheduler.requests)}"
