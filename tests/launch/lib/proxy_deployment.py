"""Runs launch/proxy with real vLLM servers of the toy model."""

import json
import re
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.tickets import signer_of
from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS, REPO
from kvferry_launch.process import ManagedProcess, free_port, stop_all
from kvferry_launch.testbed.servers import Controller, VllmServer, wait_healthy

TEST_LOGS = LOGS / "tests"
DEADLINE_S = 60.0
# if each of three servers were bound to one of two cores, two servers would starve each other for seconds
ANY_CORE = "nobind"
START_TIMEOUT_S = 600.0  # must be long, because three servers share two cores
PROXIED_CHUNK_TOKENS = 64  # chunk_tokens of the deployment that several tests share


@dataclass
class ProxyDeployment:
    """A prefill server, decode servers, a controller and the proxy on two cores. `extra`: settings of the connectors.
    `flags`, `env`: arguments and environment variables of the servers.
    `collector`: the URL to which proxy and servers export their spans over OTLP/HTTP; empty: no spans.
    """

    model: Path
    connector: KvConnector
    name: str = "proxy"
    num_decode: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    collector: str = ""
    proxy_flags: tuple[str, ...] = ()
    processes: list[ManagedProcess] = field(default_factory=list)

    def ensure_running(self) -> None:
        """Starts the deployment if it does not run yet."""
        if not self.processes:
            self.start()

    def start(self) -> None:
        self.http = f"127.0.0.1:{free_port()}"
        self.controller = Controller(f"{self.name}-controller", log_folder=TEST_LOGS,
                                     flags=("--state", "none", "--http", self.http),
                                     key_file=ensure_key(TEST_LOGS / f"{self.name}.key"))
        self.key = self.controller.member_env
        self.controller.start()
        self.processes.append(self.controller.process)
        self.controller.wait_ready()
        self.prefill = self.server("p0", "kv_producer")
        self.decodes = [self.server(f"d{number}", "kv_consumer") for number in range(self.num_decode)]
        self.url, self.proxy = self.start_proxy(self.name, *self.proxy_flags)
        for server in (self.prefill, *self.decodes):
            server.wait_ready(START_TIMEOUT_S)
        wait_healthy(self.proxy, f"{self.url}/health", DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        # the proxy's /health already answers when some servers are missing
        for role, number in (("kv_producer", 1), ("kv_consumer", self.num_decode)):
            while self.metric(rf'kvferry_proxy_nodes\{{role="{role}",state="ready"\}}') < number:
                assert time.monotonic() < deadline, f"the proxy has not found {number} {role}"
                time.sleep(0.1)

    def start_proxy(self, name: str, *flags: str) -> tuple[str, ManagedProcess]:
        """Starts a proxy, and returns its URL before it is ready."""
        port = free_port()
        command = [sys.executable, str(REPO / "launch" / "proxy"), "--port", str(port),
                   "--controller", f"http://{self.http}", "--otlp-endpoint", self.collector, *flags]
        proxy = ManagedProcess(name, command, self.key, TEST_LOGS / f"{name}.log")
        proxy.start()
        self.processes.append(proxy)
        return f"http://127.0.0.1:{port}", proxy

    def server(self, name: str, role: str) -> VllmServer:
        """Starts one server, and returns before the server is ready."""
        port = free_port()
        extra = {"serves": f"http://127.0.0.1:{port}"} | self.extra
        config = self.connector.config(role, self.controller.address, name, extra)
        flags = ("--otlp-traces-endpoint", f"{self.collector}/v1/traces") if self.collector else ()
        env = self.key | self.env | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        server = VllmServer(f"{self.name}-{name}", self.model, ANY_CORE, config, (*self.flags, *flags), env, port=port,
                            log_folder=TEST_LOGS)
        server.start()
        self.processes.append(server.process)
        return server

    def ask_controller(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.controller_text(path, body))
        return found

    def controller_text(self, path: str, body: dict[str, Any] | None = None) -> str:
        token = signer_of(str(self.controller.key_file)).http_token()
        request = urllib.request.Request(f"http://{self.http}{path}", data=json.dumps(body).encode() if body else None,
                                         headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["engine_id"]: node for node in self.ask_controller("/nodes")["nodes"]}

    def stop(self) -> None:
        stop_all(reversed(self.processes))

    def metric(self, pattern: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            found = re.search(rf"^{pattern} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0
