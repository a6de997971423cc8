"""A stand-in for an OpenTelemetry collector: takes OTLP over HTTP, as protobuf, and keeps the spans."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DEADLINE_S = 15.0


class Collector:
    """Listens while it is used in a `with` statement."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                collector.paths.add(self.path)
                for resource in told.resource_spans:
                    collector.services.add(text_attributes(resource.resource)["service.name"])
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def wait_for(self, name: str, count: int = 1) -> list[Any]:
        """Returns the spans with a name as soon as there are `count` of them."""
        deadline = time.monotonic() + DEADLINE_S
        while len(found := self.named(name)) < count:
            assert time.monotonic() < deadline, (name, sorted(span.name for span in self.spans))
            time.sleep(0.05)
        return found


def text_attributes(of: Any) -> dict[str, str]:
    return {one.key: one.value.string_value or str(one.value.int_value) for one in of.attributes}
