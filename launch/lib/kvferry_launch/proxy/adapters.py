"""Finds the models that are LoRA adapters, because their prompts' KV is keyed by the adapter's name and path."""

import time
from collections.abc import Callable
from typing import Any

from kvferry_launch.proxy.http_client import HttpClient
from kvferry_launch.proxy.json_bodies import json_object

KEPT_S = 60.0  # age at which a list of models is queried again; an old list only makes the choice of servers worse
ASK_INTERVAL_S = 5.0  # shortest time between two queries for models that are not in the list
TIMEOUT_S = 1.0


class Adapters:
    """The adapters that servers list in /v1/models. The list is queried again if it is older than KEPT_S or, at most
    every ASK_INTERVAL_S, if it lacks a request's model.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._known: dict[str, dict[str, str]] = {}  # maps a model's name to the fields of its adapter
        self._asked_at = float("-inf")
        self._is_asking = False

    async def extras(self, model: Any, url: str, headers: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Returns the fields of `POST /pair` that describe the adapter `model`; no fields if `model` is not an adapter.

        `url`: the server that is queried. `headers`: returns the headers of the query. While one request waits for the
        server's answer, other requests use the previous answer.
        """
        if not isinstance(model, str) or not model:
            return {}
        age = time.monotonic() - self._asked_at
        if not self._is_asking and (age > KEPT_S or (model not in self._known and age > ASK_INTERVAL_S)):
            self._is_asking = True
            try:
                self._known = await self._ask(url, headers()) or self._known
            finally:
                self._asked_at, self._is_asking = time.monotonic(), False
        return self._known.get(model, {})

    async def _ask(self, url: str, headers: dict[str, str]) -> dict[str, dict[str, str]]:
        try:
            with await self._client.ask("GET", url, "/v1/models", headers, total_s=TIMEOUT_S) as answer:
                cards = (json_object(await answer.read()) or {})["data"] if answer.status == 200 else []
                return {str(card["id"]): _extras(card) for card in cards}
        except (OSError, KeyError, TypeError, AttributeError):
            return {}


def _extras(card: dict[str, Any]) -> dict[str, str]:
    """Returns the adapter's name and path from an entry of /v1/models. Returns no fields if the entry has no base
    model, because then it is not an adapter.
    """
    return {"lora_name": str(card["id"]), "lora_path": str(card["root"])} if card.get("parent") else {}
