"""Keeps the servers of a namespace that the controller lists, and chooses those that serve a request."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvferry_launch.proxy.controller_answers import ControllerError, content_of
from kvferry_launch.proxy.http_client import HttpClient
from kvferry_launch.proxy.json_bodies import encode
from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.proxy.waits import Waits

logger = logging.getLogger("kvferry.proxy")

POLL_INTERVAL_S = 1.0
HEALTH_INTERVAL_S = 0.5
CONTROLLER_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 5.0
DROP_AFTER_S = 10.0  # longest use of a server that has not yet registered again with a restarted controller
# A server that the controller no longer lists may only be slow. So its running requests go on until the server has sent
# nothing for LOST_SILENCE_S or, if no other server takes requests, for up to COME_BACK_WITHIN_S.
LOST_SILENCE_S = 1.0  # time without a byte from the lost server, if other servers take requests
# Longest wait for a lost server to return, if no other server takes requests. A request shall wait less than 5 s after
# the controller has lost the server, of which up to POLL_INTERVAL_S pass before the proxy notices the loss.
COME_BACK_WITHIN_S = 3.5
PAIR_TOKENS_MAX = 1 << 20  # the controller's limit for `POST /pair`; longer prompts are placed by load alone
_ROLES = {"prefill": ("kv_producer", "kv_both"), "decode": ("kv_consumer", "kv_both")}


class NoPairError(Exception):
    """No server can take the request; the message says why."""


@dataclass(eq=False)
class Node:
    engine_id: str
    serves: str
    endpoint: str
    role: str
    draining: bool = False
    ready: bool = False  # True if /health has answered 200 since the last failure; nodes register before they listen
    in_flight: int = 0
    listed_at: float = 0.0  # time at which the proxy sent the request for the last list that has this node
    missed_at: float | None = None  # time of the controller's first list without this node; None: the list has it
    waits: Waits = field(default_factory=Waits)
    prepared_tokens_max: int = 0  # longest prompt for ServerCalls.preparing(), in tokens; 0: the node prepares none

    @property
    def push_to(self) -> dict[str, str]:
        return {"engine_id": self.engine_id, "endpoint": self.endpoint}


class ServerError(Exception):
    """A server did not answer, answered with an error status, or broke off its answer."""

    def __init__(self, node: Node, kind: str, reason: str, answer: web.Response | None = None) -> None:
        super().__init__(f"{kind} server {node.engine_id} at {node.serves}: {reason}")
        self.node, self.kind, self.answer = node, kind, answer


@dataclass(frozen=True)
class Choice:
    prefill: Node | None  # None: the decode server computes the prompt
    decode: Node
    reason: str = ""  # says why no prefill server is used; empty if one is used


@dataclass
class Nodes:
    """The servers of the namespace `name_space` that the controller lists. run() polls the controller, and never
    returns. While the controller is down, its last list is used.
    """

    client: HttpClient
    controller: str
    name_space: str
    metrics: Metrics
    needs_prefill: bool = False
    # Returns the tokens for the controller's HTTP API, of which the first is sent; empty: no token is sent.
    tokens: Callable[[], list[str]] = field(default=list, repr=False)
    known: dict[str, Node] = field(default_factory=dict)  # maps an engine id to the node
    controller_up: bool = False
    _trouble: str = ""  # the last error of a request to the controller
    _turn: int = 0
    _lost: list[Node] = field(default_factory=list)  # nodes that left `known`, but still have running requests
    _lost_at: float = -COME_BACK_WITHIN_S  # time at which a node was last removed from `known`

    async def run(self) -> None:
        await asyncio.gather(self._poll(), self._check_health())

    async def _poll(self) -> None:
        while True:
            await self.refresh()
            self.client.keep_only([self.controller, *(node.serves for node in self.known.values())])
            self._lost = [node for node in self._lost if node.waits]
            for node in self._lost:
                if self._can_serve:
                    node.waits.end_silent(LOST_SILENCE_S)
                else:
                    node.waits.end_silent(COME_BACK_WITHIN_S - POLL_INTERVAL_S, node.missed_at or 0.0)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def refresh(self) -> None:
        """Updates the nodes from the controller's list."""
        asked_at = time.monotonic()
        try:
            answer = await self._ask("GET", "/nodes", None)
            told = {str(entry["engine_id"]): entry for entry in answer["nodes"]
                    if entry.get("namespace") == self.name_space and entry.get("serves")}
        except (OSError, ControllerError, AttributeError, LookupError, TypeError) as error:
            self._lose_controller(error)  # the last three types mean that the answer is not a list of nodes
            return
        if not self.controller_up:
            logger.info("the controller at %s answers", self.controller)
        self.controller_up = True
        # A controller of an older release does not send uptime_ms. Then the proxy assumes that the controller has just
        # restarted.
        uptime_ms = answer.get("uptime_ms")
        started_at = time.monotonic() - uptime_ms / 1000 if isinstance(uptime_ms, int) else float("inf")
        self._take(told, asked_at, started_at)
        self._count()

    def _take(self, told: dict[str, dict[str, Any]], asked_at: float, started_at: float) -> None:
        there = {}
        for engine_id, entry in told.items():
            serves = str(entry["serves"]).rstrip("/")
            same = [node for node in (*self.known.values(), *self._lost)
                    if node.engine_id == engine_id and node.serves == serves]
            node = same[0] if same else Node(engine_id, serves, "", "")
            if node is not self.known.get(engine_id):
                logger.info("server %s (%s) has registered, and serves at %s", engine_id, entry.get("role"), serves)
            node.endpoint, node.role = str(entry.get("endpoint", "")), str(entry.get("role", ""))
            prepares = str(entry.get("prepared_tokens_max", ""))
            node.prepared_tokens_max = int(prepares) if prepares.isascii() and prepares.isdecimal() else 0
            if node.draining != bool(entry.get("draining")):
                node.draining = bool(entry.get("draining"))
                logger.info("server %s %s", engine_id,
                            "is being drained" if node.draining else "is no longer being drained")
            node.listed_at, node.missed_at = asked_at, None
            there[engine_id] = node
        served = {node.serves for node in there.values()}
        for engine_id in sorted(self.known.keys() - there.keys()):
            node = self.known[engine_id]
            if self._may_come_back(node, started_at) and node.serves not in served:
                there[engine_id] = node
            else:
                logger.info("the controller no longer lists server %s; it gets no new requests", engine_id)
                self._lost_at = time.monotonic()
        current = list(there.values())
        self._lost = [node for node in (*self._lost, *self.known.values()) if node not in current]
        for node in self._lost:
            node.ready = False
        self.known = there

    @staticmethod
    def _may_come_back(node: Node, started_at: float) -> bool:
        """Returns True if a server still gets requests although the controller does not list it: for DROP_AFTER_S, if
        the controller has restarted since its last list with the server, and if the server was ready and not draining.
        A controller that did not restart has dropped the server.
        """
        now = time.monotonic()
        node.missed_at = node.missed_at or now
        is_new_controller = started_at > node.listed_at
        return is_new_controller and node.ready and not node.draining and now - node.missed_at < DROP_AFTER_S

    async def _check_health(self) -> None:
        """Checks each server that isn't ready in a task of its own, so that a dead host does not delay other checks."""
        checks: dict[str, asyncio.Task[None]] = {}  # maps a server's URL to the check that is in progress
        try:
            while True:
                checks = {url: check for url, check in checks.items() if not check.done()}
                for node in self.known.values():
                    if not node.ready and node.serves not in checks:
                        checks[node.serves] = asyncio.create_task(self._check(node))
                await asyncio.sleep(HEALTH_INTERVAL_S)
        finally:
            for check in checks.values():
                check.cancel()

    async def _check(self, node: Node) -> None:
        with contextlib.suppress(OSError):
            with await self.client.ask("GET", node.serves, "/health", {}, total_s=HEALTH_TIMEOUT_S) as answer:
                node.ready = answer.status == 200
            if node.ready:
                logger.info("server %s at %s takes requests", node.engine_id, node.serves)
        self._count()

    def failed(self, node: Node) -> None:
        """Marks a node as failed. The node gets no new requests until its server's /health answers again."""
        if node.ready:
            logger.warning("server %s at %s failed; it gets no new requests until its /health answers",
                           node.engine_id, node.serves)
        node.ready = False
        self.client.drop(node.serves)

    def usable(self, kind: str, exclude: set[str]) -> list[Node]:
        """Returns the nodes, without those in `exclude`, that take new requests of a kind: "prefill" or "decode"."""
        return [node for node in self.known.values()
                if node.role in _ROLES[kind] and node.ready and not node.draining and node.engine_id not in exclude]

    @property
    def _can_serve(self) -> bool:
        return bool(self.usable("decode", set()) and (self.usable("prefill", set()) or not self.needs_prefill))

    async def _wait_usable(self, kind: str, exclude: set[str]) -> list[Node]:
        """Returns the usable nodes. If there is none, waits for one until COME_BACK_WITHIN_S after the last loss."""
        while not (found := self.usable(kind, exclude)) and time.monotonic() - self._lost_at < COME_BACK_WITHIN_S:
            await asyncio.sleep(HEALTH_INTERVAL_S / 5)
        return found

    async def choose(self, tokens: list[int] | None, exclude: set[str], extras: dict[str, str]) -> Choice:
        """Returns the servers that the controller names or, if it names none, the next pair in turn. Without a
        prefill server, returns the decode server with the fewest requests. Errors: NoPairError.
        """
        decodes = await self._wait_usable("decode", exclude)
        if not decodes:
            raise NoPairError(self._no_server("decode", exclude))
        prefills = self.usable("prefill", exclude)
        if not prefills and self.needs_prefill and not (prefills := await self._wait_usable("prefill", exclude)):
            raise NoPairError(self._no_server("prefill", exclude))
        if not prefills:
            return Choice(None, min(decodes, key=lambda node: node.in_flight), "no prefill server")
        if self.controller_up:
            choice = await self._ask_pair(tokens, exclude, extras)
            if choice is not None:
                return choice
        self._turn += 1
        prefill, decode = prefills[self._turn % len(prefills)], decodes[self._turn % len(decodes)]
        return Choice(None, decode, "one server") if prefill is decode else Choice(prefill, decode)

    async def _ask_pair(self, tokens: list[int] | None, exclude: set[str], extras: dict[str, str]) -> Choice | None:
        out = exclude | {node.engine_id for node in self.known.values() if not node.ready}
        loads = {node.engine_id: node.in_flight for node in self.known.values() if node.in_flight}
        asked = tokens if tokens and len(tokens) <= PAIR_TOKENS_MAX else []
        question = {"namespace": self.name_space, "token_ids": asked, "exclude": sorted(out), "loads": loads, **extras}
        try:
            answer = await self._ask("POST", "/pair", question)
            prefill, decode = (self.known.get(str(answer[kind]["engine_id"])) for kind in ("prefill", "decode"))
            skip_prefill = bool(answer["skip_prefill"])
        except OSError as error:
            self._lose_controller(error)
            return None
        except (ControllerError, LookupError, TypeError) as error:  # the last two: the answer names no pair
            self.metrics.controller_errors.inc()
            logger.warning("the controller chose no prefill and decode server for a request, so the proxy chooses "
                           "them itself: %s: %s", type(error).__name__, error)
            return None  # the controller's list may differ from `known`; choose() then takes a pair from `known`
        if decode is None or prefill is None:  # for example, the node joined after the last poll
            return None
        return Choice(None, decode, "cached") if skip_prefill else Choice(prefill, decode)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if tokens := self.tokens():
            headers["Authorization"] = f"Bearer {tokens[0]}"
        with await self.client.ask(method, self.controller, path, headers, encode(body) if body is not None else b"",
                                   CONTROLLER_TIMEOUT_S) as answer:
            return content_of(answer.status, await answer.read(), bool(tokens))

    def _lose_controller(self, error: Exception) -> None:
        self.metrics.controller_errors.inc()
        if self.controller_up or str(error) != self._trouble:
            logger.warning("no usable answer from the controller at %s (%s: %s); it is asked again each second, and "
                           "the %d servers known before are used", self.controller, type(error).__name__, error,
                           len(self.known))
        self.controller_up, self._trouble = False, str(error)
        self._count()

    def _no_server(self, kind: str, exclude: set[str]) -> str:
        there = [node for node in self.known.values() if node.role in _ROLES[kind]]
        states = Counter("draining" if node.draining else "failed for this request" if node.engine_id in exclude
                         else "not ready" for node in there)
        known = ", ".join(f"{count} {state}" for state, count in states.items())
        away = "" if self.controller_up else f"; no usable answer from the controller at {self.controller}"
        return (f"no {kind} server takes requests in namespace '{self.name_space}': "
                f"{known or 'none is registered with its URL (the setting serves)'}{away}")

    def _count(self) -> None:
        self.metrics.controller_up.set(self.controller_up)
        self.metrics.nodes.clear()
        states = Counter((node.role, "draining" if node.draining else "ready" if node.ready else "not ready")
                         for node in self.known.values())
        for (role, state), count in states.items():
            self.metrics.nodes.labels(role, state).set(count)
