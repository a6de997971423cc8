"""Replaces the router in tests: reads the list of workers from stdin, and sends each request to the next decode server.
"""

import argparse
import itertools
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
arguments, _ = parser.parse_known_args()
workers: dict[str, list[str]] = {"prefill": [], "decode": []}
turn = itertools.count()


def listen() -> None:
    for line in sys.stdin:
        workers.update(json.loads(line.removeprefix("workers ")))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/workers":
            return self.answer(200, json.dumps(workers).encode())
        known = all(workers.values())
        if self.path == "/health" or not known:
            return self.answer(200 if known else 503, b"{}")
        several = workers["decode"]
        url = several[next(turn) % len(several)]
        with urllib.request.urlopen(url, timeout=5.0) as upstream:
            return self.answer(200, upstream.read())

    def answer(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


threading.Thread(target=listen, daemon=True).start()
ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
