"""The HTTP server of the proxy. It sends each request to a pair of a prefill and a decode server, or to a decode server
alone. If a server fails, it sends the request to other servers.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from kvferry_launch.proxy import bodies
from kvferry_launch.proxy.adapters import Adapters
from kvferry_launch.proxy.client_request import (
    ClientGoneError,
    ClientRequest,
    copied,
    error_response,
    forwarded,
)
from kvferry_launch.proxy.first_token import first_token, keeps_from_prefill, with_token_id
from kvferry_launch.proxy.http_client import HttpClient
from kvferry_launch.proxy.json_bodies import Body, BodyError, client_body, encode, json_object
from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.proxy.nodes import Choice, Nodes, NoPairError, ServerError
from kvferry_launch.proxy.request_log import RequestLog
from kvferry_launch.proxy.request_trace import RequestTrace
from kvferry_launch.proxy.server_calls import ServerCalls, counted
from kvferry_launch.proxy.tenants import NoTenantError, Tenants
from kvferry_launch.proxy.trace_context import TRACEPARENT, Headers
from kvferry_launch.proxy.waits import LostError

logger = logging.getLogger("kvferry.proxy")

TOKENIZE_TIMEOUT_S = 10.0
# Longest time from the opening of a client's connection, or from the end of a request, until the whole head of the next
# request has arrived. Load balancers usually keep idle connections for 60 s, and must be the first to close them.
CLIENT_IDLE_S = 75.0


@dataclass(frozen=True)
class Options:
    controller: str
    name_space: str = "default"
    tries: int = 3  # number of pairs that one request may use
    needs_prefill: bool = False
    request_timeout_s: float = 600.0  # longest wait for the next byte of a server's answer
    body_bytes_max: int = 8 << 20
    log_requests: bool = True
    first_token_of_prefill: bool = True
    prepare_from: int = 0  # shortest prompt for ServerCalls.preparing(), in tokens; 0: no prompt is prepared
    # Returns the signed form of the address to push to. If it returns None, the decode server pulls.
    sign_push_target: Callable[[Body], Body | None] = lambda target: target
    # Returns the tokens of the controller's HTTP API, one for each cluster key that is accepted. The first belongs to
    # the key in use; nodes.py sends it.
    controller_tokens: Callable[[], list[str]] = field(default=list, repr=False)
    tenants: Tenants | None = None  # None: clients choose their own cache_salt, if any
    # Makes the trace of a request, from its path and headers.
    make_trace: Callable[[str, Headers], RequestTrace] = RequestTrace


class FrontDoor:
    def __init__(self, options: Options) -> None:
        self._options = options
        self.metrics = Metrics()
        self.app = web.Application(client_max_size=options.body_bytes_max)
        self.app.add_routes([web.post(path, self._serve) for path in bodies.PATHS])
        self.app.add_routes([web.get("/v1/models", self._models), web.get("/health", self._health),
                             web.get("/livez", self._livez), web.get("/metrics", self._metrics)])
        self.app.cleanup_ctx.append(self._live)
        self._is_shutting_down = False
        self.app.on_shutdown.append(self._begin_shutdown)

    async def _begin_shutdown(self, _: web.Application) -> None:
        self._is_shutting_down = True

    async def _live(self, _: web.Application) -> AsyncIterator[None]:
        self._client = HttpClient(self._options.request_timeout_s, self.metrics.resent)
        self._adapters = Adapters(self._client)
        self.nodes = Nodes(self._client, self._options.controller, self._options.name_space, self.metrics,
                           self._options.needs_prefill, self._options.controller_tokens)
        self._servers = ServerCalls(self._client, self.metrics)
        await self.nodes.refresh()
        following = asyncio.create_task(self.nodes.run())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        self._client.close()

    def runner(self, grace_s: float) -> web.AppRunner:
        """Returns the HTTP server. `grace_s`: time that running requests have after the server's cleanup() has begun.
        """
        # If a client closes its connection, aiohttp cancels the handler, so that the handler's requests end too.
        return web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=grace_s,
                             keepalive_timeout=CLIENT_IDLE_S)

    # ---- requests of clients ----
    async def _serve(self, request: web.Request) -> web.StreamResponse:
        status = "cancelled"
        log = RequestLog(self.metrics, self._options.make_trace(request.path, request.headers))
        self.metrics.in_flight.inc()
        try:
            response = await self._through_pairs(request, log)
            status = str(response.status)
            return response
        except asyncio.CancelledError:
            self.metrics.cancelled.inc()
            raise
        except ClientGoneError:
            self.metrics.cancelled.inc()
            return web.Response()  # never sent, because the client has closed its connection
        finally:
            self.metrics.in_flight.dec()
            self.metrics.requests.labels(request.path, status).inc()
            log.end(status, self._is_shutting_down)
            if self._options.log_requests:
                logger.info("%s", log.line(request.path, status))

    async def _through_pairs(self, request: web.Request, log: RequestLog) -> web.StreamResponse:
        tenant = None
        if self._options.tenants is not None:
            try:
                tenant = self._options.tenants.tenant_of(request.headers)
            except NoTenantError as error:
                return error_response(401, str(error))
            log.tenant = tenant.name
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"the body has more than {self._options.body_bytes_max} bytes, the limit that "
                                  "--max-body sets")
        try:
            body, removed = bodies.from_client(client_body(raw))
            if tenant is not None:
                body = tenant.salted(body)
        except BodyError as error:
            return error_response(400, str(error))
        if removed:
            self.metrics.stripped_params.inc()
        one = ClientRequest(request, body, log)
        tokens = await self._tokens(one)
        log.num_tokens = len(tokens) if tokens is not None else None
        one.body = bodies.with_tokens(one.path, one.body, tokens)
        log.enter("pair")
        extras = await self._extras(one)
        failed: set[str] = set()
        failure: ServerError | None = None
        for attempt in range(self._options.tries):
            if attempt:
                log.enter("pair")
            try:
                choice = await self.nodes.choose(tokens, failed, extras)
            except NoPairError as error:
                log.failed(str(error))
                if failure is not None:
                    break
                self.metrics.unpaired.inc()
                return error_response(503, str(error))
            if bodies.is_batch(one.path, one.body):
                choice = Choice(None, choice.decode, "batch")
            try:
                return await self._through(one, choice, attempt)
            except ServerError as error:
                logger.warning("request %s: %s", one.request_id, error)
                log.failed(str(error))
                failure = error
                failed.add(error.node.engine_id)
                self.nodes.failed(error.node)
                self.metrics.retries.labels(error.kind).inc()
                if one.response is not None and not one.stream.can_go_on:
                    break
        assert failure is not None
        if one.response is not None:
            return await self._servers.broken_off(one, one.response, failure)
        return failure.answer or error_response(502, f"no server answered; the last one that was tried: {failure}")

    async def _through(self, one: ClientRequest, choice: Choice, attempt: int) -> web.StreamResponse:
        handed_over, first, keeps = None, None, "no prefill"
        one.log.tries(choice)
        push_to: Body | None = None
        preparation: Body | None = None
        if choice.prefill is not None:
            keeps = self._keeps_from_prefill(one)
            push_to = self._options.sign_push_target(choice.decode.push_to)
            is_prepared = 0 < self._options.prepare_from <= len(one.body["prompt"]) <= choice.decode.prepared_tokens_max
            if not keeps and push_to and is_prepared:
                preparation = bodies.preparation_body(one.body, push_to)
        with counted(choice), self._servers.preparing(choice.decode, one, preparation, attempt):
            if choice.prefill is None:
                self.metrics.skipped_prefills.labels(choice.reason).inc()
            else:
                one.log.enter("prefill", choice.prefill)
                body = bodies.prefill_body(one.path, one.body, push_to, one.log.trace.headers()[TRACEPARENT])
                if not keeps:
                    body = with_token_id(body)
                answer = await self._servers.whole(choice.prefill, "prefill", one, body, attempt)
                if answer.status != 200:
                    if one.response is not None:
                        raise ServerError(choice.prefill, "prefill", f"status {answer.status}")
                    return answer
                one.log.enter("hand_over", choice.decode)
                computed = json_object(answer.body) or {}
                handed_over = computed.get("kv_transfer_params")
                if not isinstance(handed_over, dict):
                    handed_over = None
                if not keeps and (first := first_token(computed)) is None:
                    keeps = "token"
            self.metrics.first_tokens.labels("decode" if keeps else "prefill", keeps).inc()
            body = bodies.decode_body(first.rest_body(one.body) if first else one.body, handed_over)
            if not one.body.get("stream"):
                one.log.enter("rest", choice.decode)
                return await self._servers.whole(choice.decode, "decode", one, body, attempt)
            if choice.prefill is None:
                one.log.enter("hand_over", choice.decode)
            return await self._servers.streamed(choice.decode, one, body, attempt, first)

    def _keeps_from_prefill(self, one: ClientRequest) -> str:
        if not self._options.first_token_of_prefill:
            return "option"
        return "retry" if one.response is not None else keeps_from_prefill(one.path, one.body)

    async def _models(self, request: web.Request) -> web.Response:
        reason = f"no server takes requests in namespace '{self._options.name_space}'"
        for node in self.nodes.usable("decode", set()) + self.nodes.usable("prefill", set()):
            try:
                with node.waits.wait(), await self._client.ask("GET", node.serves, "/v1/models",
                                                               forwarded(request.headers)) as answer:
                    return await copied(answer, node.waits.heard)
            except (OSError, LostError) as error:
                reason = f"server {node.engine_id} at {node.serves}: {type(error).__name__}: {error}"
                self.nodes.failed(node)
        return error_response(503, reason)

    async def _health(self, _: web.Request) -> web.Response:
        """Answers 200 if a decode server is ready and, with Options.needs_prefill, also a prefill server; else 503."""
        missing = [kind for kind in ("prefill", "decode") if not self.nodes.usable(kind, set())]
        if "decode" in missing or (missing and self._options.needs_prefill):
            return error_response(503, f"no {' and no '.join(missing)} server takes requests")
        return web.Response()

    async def _livez(self, _: web.Request) -> web.Response:
        """Answers 200: the proxy works, even if no server is ready and a restart of the proxy would not help."""
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        """Answers with the metrics. With tenants, the request needs a token of the controller's HTTP API: the metrics
        count the requests of all tenants, and no tenant may observe the others.
        """
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._options.tenants is not None and not any(
                hmac.compare_digest(f"Bearer {token}".encode(), given) for token in self._options.controller_tokens()):
            return error_response(401, "with tenants, /metrics needs the header 'Authorization: Bearer TOKEN' with the "
                                  "token that 'kvferry token' prints")
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    # ---- requests to servers and the controller ----
    async def _tokens(self, one: ClientRequest) -> list[int] | None:
        """Returns the prompt's tokens, or None if the request has neither a text nor a list of up to TOKENS_MAX
        (json_bodies.py) tokens, or if its text could not be tokenized. Without tokens, no KV of the prompt is looked up
        to choose the pair, and the pair's servers report errors in the request.
        """
        tokens = bodies.token_ids(one.path, one.body)
        question = bodies.tokenize_body(one.path, one.body)
        if tokens is not None or question is None:
            return tokens
        servers = self.nodes.usable("prefill", set()) + self.nodes.usable("decode", set())
        one.log.enter("tokenize")
        for node in sorted(servers, key=lambda node: node.in_flight)[: self._options.tries]:
            try:
                with node.waits.wait(), await self._client.ask("POST", node.serves, "/tokenize", one.headers(0),
                                                               encode(question), TOKENIZE_TIMEOUT_S) as answer:
                    if answer.status == 200:
                        found = (json_object(await answer.read()) or {}).get("tokens")
                        return found if isinstance(found, list) else None
                    if answer.status < 500:
                        return None
            except (OSError, LostError):
                self.nodes.failed(node)
        return None

    async def _extras(self, one: ClientRequest) -> dict[str, str]:
        """Returns the fields of `POST /pair`, besides the tokens, on which the prompt's KV depends."""
        extras: dict[str, str] = {}
        if servers := self.nodes.usable("decode", set()):
            extras |= await self._adapters.extras(one.body.get("model"), servers[0].serves, lambda: one.headers(0))
        if isinstance(salt := one.body.get("cache_salt"), str) and salt:
            extras["cache_salt"] = salt
        return extras
