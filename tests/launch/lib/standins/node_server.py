"""Replaces vLLM's API server in tests by a real node with memory in place of an engine, which hands prompts over: a
POST has a question of tests/security/handing_node.py.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "security"))
from handing_node import Node

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--kv-transfer-config", type=json.loads)
parser.add_argument("--model")
arguments = parser.parse_args()
CONFIG = arguments.kv_transfer_config
NODE = Node(CONFIG["kv_connector_extra_config"]["controller"], os.environ["KVFERRY_CLUSTER_KEY_FILE"],
            CONFIG["engine_id"])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(NODE.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def answer(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        pass


HTTPServer((arguments.host, arguments.port), Handler).serve_forever()
