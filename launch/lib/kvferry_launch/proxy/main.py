"""launch/proxy: parses the options, starts the proxy's HTTP server, and ends it at a signal."""

import argparse
import asyncio
import errno
import logging
import os
import re
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web

from kvferry_launch.proxy.app import FrontDoor, Options
from kvferry_launch.proxy.certificate import Certificate
from kvferry_launch.proxy.tenants import Tenants

if TYPE_CHECKING:
    from kvferry_launch.proxy.spans import Spans

DEFAULT_CONTROLLER = "http://127.0.0.1:14601"
OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TELL_EVERY_S = 60.0  # shortest time between two log lines about missing file descriptors

logger = logging.getLogger("kvferry.proxy")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="proxy", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="One OpenAI URL for the prefill and decode servers that a kvferry controller lists in one "
                    "namespace. Each request goes to the pair that the controller names, and the prefill server "
                    "pushes to the decode server while it computes. Servers need the connector's key `serves`; the "
                    "controller needs --http.")
    parser.add_argument("--host", default="127.0.0.1", help="address of the HTTP server")
    parser.add_argument("--port", type=int, default=8000, help="port of the HTTP server; 0 takes any free port")
    parser.add_argument("--tls-cert-file", default="", metavar="FILE",
                        help="certificate in PEM, followed by those that lead to its authority: clients then use HTTPS "
                        "(TLS 1.3); a renewed file is used within a second")
    parser.add_argument("--tls-key-file", default="", metavar="FILE",
                        help="private key in PEM, without a password, of the certificate in --tls-cert-file")
    parser.add_argument("--controller", default=DEFAULT_CONTROLLER, metavar="http[s]://HOST:PORT",
                        help="HTTP address of the controller; the controller's own option --http sets it. With https, "
                        "the variable SSL_CERT_FILE can name the authorities that are trusted instead of the system's")
    parser.add_argument("--namespace", default="default", help="kvferry namespace of the servers")
    parser.add_argument("--tries", type=int, default=3, help="number of pairs tried for a request whose servers fail")
    parser.add_argument("--without-prefill", choices=("decode", "refuse"), default="decode",
                        help="behaviour without a prefill server: decode servers compute prompts, or requests get 503")
    parser.add_argument("--first-token", choices=("prefill", "decode"), default="prefill",
                        help="server that samples the first token of a stream; with prefill, the decode server still "
                        "samples it if the answer might otherwise differ from a single server's")
    parser.add_argument("--transfer", choices=("push", "pull"), default="push",
                        help="push: prefill servers send KV to the decode server while they compute; pull: the decode "
                        "server fetches KV after the prefill server has answered")
    parser.add_argument("--prepare-from", type=int, default=0, metavar="TOKENS",
                        help="shortest prompt whose KV the decode server loads while it is pushed: the answer goes on "
                        "sooner, but a core of the decode server is busy while the prompt is computed; 0: no prompt")
    parser.add_argument("--cluster-key-file", metavar="FILE", default=os.environ.get("KVFERRY_CLUSTER_KEY_FILE", ""),
                        help="file with the deployment's key, which signs the decode server's address for the prefill "
                        "server and makes the token for the controller's HTTP API (default: the variable "
                        "KVFERRY_CLUSTER_KEY_FILE, now '%(default)s')")
    parser.add_argument("--tenant-header", default="", metavar="NAME",
                        help="HTTP header that tells tenants apart, such as Authorization: KV is shared only between "
                        "requests with the same value, requests without the header get status 401, and /metrics needs "
                        "the token of 'kvferry token'; needs a cluster key")
    parser.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS",
                        help="longest wait for the next byte from a server")
    parser.add_argument("--max-body", type=int, default=Options.body_bytes_max, metavar="BYTES",
                        help="longest request body; longer ones get status 413")
    parser.add_argument("--log-requests", action=argparse.BooleanOptionalAction, default=True,
                        help="log a line for each request: status, tokens, servers, and the time of each stage")
    parser.add_argument("--otlp-endpoint", default="", metavar="http://HOST:PORT",
                        help="OpenTelemetry collector that gets spans of each request over OTLP/HTTP, at /v1/traces "
                        "below this URL; without it, the variables OTEL_EXPORTER_OTLP_ENDPOINT and "
                        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT name the collector; if they are not set either, there are "
                        "no spans")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS",
                        help="time for running requests after SIGTERM or SIGINT; a second signal ends them")
    parsed = parser.parse_args(arguments)
    if not is_server(parsed.controller):
        parser.error(f"--controller is '{parsed.controller}', not http[s]://HOST:PORT")
    for name in ("host", "namespace"):
        if not getattr(parsed, name):
            parser.error(f"--{name} is empty; " + ("0.0.0.0 or :: stands for all addresses" if name == "host" else
                                                   "the servers' setting 'namespace' names one"))
    if not re.fullmatch(r"[A-Za-z0-9_-]{0,100}", parsed.tenant_header):
        parser.error(f"--tenant-header is '{parsed.tenant_header[:200]}', not the name of an HTTP header: up to 100 "
                     "letters, digits, '-' and '_'")
    if bool(parsed.tls_cert_file) != bool(parsed.tls_key_file):
        parser.error("HTTPS needs --tls-cert-file and --tls-key-file; only one of them is set")
    if not 0 <= parsed.port <= 65535:
        parser.error(f"--port is {parsed.port}, not a port from 0 to 65535")
    for name, least in (("tries", 1), ("max_body", 1), ("prepare_from", 0)):
        if (value := getattr(parsed, name)) < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if not 0 < parsed.request_timeout < float("inf"):
        parser.error(f"--request-timeout is {parsed.request_timeout}; it must be a number of seconds above 0")
    if not 0 <= parsed.grace < float("inf"):
        parser.error(f"--grace is {parsed.grace}; it must be a number of seconds from 0 on")
    return parsed


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_server(url: str) -> bool:
    """Returns True if requests can be sent to the URL: it has no user, no query and only printable ASCII characters."""
    return is_http(url) and re.fullmatch("[!-~]+", url) is not None and not re.search("[@?#]", url)


def options_of_member(key_file: str, pulls: bool = False, tenant_header: str = "") -> dict[str, Any]:
    """Returns the options that depend on the cluster key and on `pulls`. Exits if the key file is unusable, or if there
    is none although tenants need one.

    `pulls`: True if decode servers shall pull KV, so that prefill servers get no address to which they could push.
    `tenant_header`: the header that tells tenants apart; empty: there are no tenants.
    """
    no_push: dict[str, Any] = {"sign_push_target": lambda _: None} if pulls else {}
    if not key_file:
        if tenant_header:
            sys.exit("proxy: --tenant-header needs --cluster-key-file, because tenants' salts are made from the key")
        return no_push
    from kvferry.tickets import PUSH_TARGET, KeyFileError, signer_of

    try:
        signer = signer_of(key_file)
    except KeyFileError as error:
        sys.exit(f"proxy: {error}")
    return {"sign_push_target": lambda target: signer.signed(PUSH_TARGET, target),
            "controller_tokens": signer.http_tokens,
            "tenants": Tenants(tenant_header, signer.tenant_secret) if tenant_header else None} | no_push


def spans_to(endpoint: str, name_space: str) -> "Spans | None":
    """Returns the exporter of spans; None if neither `endpoint` nor OpenTelemetry's variables name a collector, or if
    OTEL_SDK_DISABLED forbids spans. Exits if the collector's address is unusable or if packages are missing.
    """
    named = {"--otlp-endpoint": endpoint} | {variable: os.environ.get(variable, "") for variable in OTLP_VARIABLES}
    source, url = next(((source, url) for source, url in named.items() if url), ("", ""))
    if not url or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if not is_http(url):
        sys.exit(f"proxy: {source} is '{url[:200]}', not http[s]://HOST:PORT")
    try:
        from kvferry_launch.proxy.spans import Spans
    except ModuleNotFoundError as error:
        sys.exit(f"proxy: spans can't be sent to {url} ({source}): {error}; install opentelemetry-sdk and "
                 f"opentelemetry-exporter-otlp-proto-http, or leave {source} out")
    return Spans(endpoint, name_space)


class LoopErrors:
    """Handles the errors that the event loop reports. If no file descriptor is left, asyncio tries to accept
    connections a hundred times a second, and would report each failure with a traceback.
    """

    def __init__(self) -> None:
        self._told_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told_at > TELL_EVERY_S:
            self._told_at = time.monotonic()
            logger.error("no file descriptors are left (%s; %d are allowed); new connections wait until others end",
                         error.strerror, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def certificate_of(arguments: argparse.Namespace) -> Certificate | None:
    """Returns the certificate for HTTPS, or None if the proxy serves plain HTTP. Exits if the files are unusable."""
    if not arguments.tls_cert_file:
        return None
    try:
        return Certificate(arguments.tls_cert_file, arguments.tls_key_file)
    except OSError as error:  # ssl.SSLError is a subclass of OSError
        sys.exit(f"proxy: '{arguments.tls_cert_file}' and '{arguments.tls_key_file}' are not a certificate and its "
                 f"private key without a password, in PEM: {error}")


async def serve(arguments: argparse.Namespace, spans: "Spans | None") -> None:
    more: dict[str, Any] = {"make_trace": spans.trace} if spans is not None else {}
    door = FrontDoor(Options(arguments.controller.rstrip("/"), arguments.namespace, arguments.tries,
                             arguments.without_prefill == "refuse", arguments.request_timeout,
                             arguments.max_body, arguments.log_requests, arguments.first_token == "prefill",
                             arguments.prepare_from,
                             **options_of_member(arguments.cluster_key_file, arguments.transfer == "pull",
                                                 arguments.tenant_header), **more))
    certificate = certificate_of(arguments)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if ending.is_set():
            sys.exit(1)
        ending.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    runner = door.runner(arguments.grace)
    await runner.setup()  # asks the controller, which may take CONTROLLER_TIMEOUT_S
    if ending.is_set():
        await runner.cleanup()
        return
    try:
        site = web.TCPSite(runner, arguments.host, arguments.port, reuse_address=True,
                           ssl_context=certificate.context if certificate else None)
        await site.start()
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the host name is empty or too long
        await runner.cleanup()
        reason = getattr(error, "strerror", None) or error
        sys.exit(f"proxy: can't listen on {arguments.host}:{arguments.port}: {reason}")
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"kvferry proxy listening on http{'s' if certificate else ''}://{host}:{runner.addresses[0][1]}", flush=True)
    renewing = loop.create_task(certificate.renew()) if certificate else None
    loop.set_exception_handler(LoopErrors())
    await ending.wait()
    if renewing is not None:
        renewing.cancel()
    logger.info("shutting down; running requests have %.0f s to end, and a second signal ends them now",
                arguments.grace)
    await runner.cleanup()


def main() -> None:
    arguments = parse()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a request needs a connection to the client and others
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    spans = spans_to(arguments.otlp_endpoint, arguments.namespace)
    try:
        asyncio.run(serve(arguments, spans))
    except KeyboardInterrupt:  # before serve() has taken over the signals
        sys.exit(130)
    finally:
        if spans is not None:
            spans.shutdown()
