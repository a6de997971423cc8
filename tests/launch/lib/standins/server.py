"""Replaces vLLM's API server in tests: answers with its own name, and dies or is slow if its flags say so."""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--kv-transfer-config", type=json.loads)
parser.add_argument("--model")
parser.add_argument("--die-at-start", action="store_true")
parser.add_argument("--stubborn", action="store_true", help="ignore what asks us to end")
arguments = parser.parse_args()
if arguments.die_at_start:
    sys.exit("RuntimeError: this model does not fit")
if arguments.stubborn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({"engine_id": arguments.kv_transfer_config["engine_id"], "pid": os.getpid(),
                     "model": arguments.model, "config": arguments.kv_transfer_config,
                     "cores": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
                     "key_file": os.environ.get("KVFERRY_CLUSTER_KEY_FILE")})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(0.01)
        self.do_GET()

    def answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
