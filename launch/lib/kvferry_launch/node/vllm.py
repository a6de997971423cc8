"""Makes the command line of a vLLM server, with the KV connector that the server loads. Uses only the standard library.
"""

import json
from dataclasses import dataclass
from typing import Any

API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
# vLLM's attention on CPUs needs a block size that is a multiple of 32.
CPU_FLAGS = ("--dtype", "float32", "--enforce-eager", "--block-size", "32")
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True)
class KvConnector:
    """A KV connector, with the name and module by which vLLM loads it.

    `port_env`: the environment variable in which the connector expects a free port, which no other server may use.
    None: the connector needs no port.
    """

    name: str
    module_path: str | None = None
    needs_controller: bool = False
    port_env: str | None = None

    def config(self, role: str, controller: str | None = None, engine_id: str | None = None,
               extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the value of --kv-transfer-config. It makes vLLM recompute KV that fails to load; by default, vLLM
        lets the request fail.
        """
        extra = dict(extra or {})
        if self.needs_controller and controller is not None:
            extra = {"controller": controller} | extra
        config: dict[str, Any] = {"kv_connector": self.name}
        if self.module_path is not None:
            config["kv_connector_module_path"] = self.module_path
        config |= {"kv_role": role, "kv_load_failure_policy": "recompute"}
        if engine_id is not None:
            config["engine_id"] = engine_id
        if extra:
            config["kv_connector_extra_config"] = extra
        return config


KVFERRY_CONNECTOR = KvConnector("KvFerryConnector", "kvferry.vllm", needs_controller=True)


def vllm_command(python: str, model: str, host: str, port: int, kv_config: dict[str, Any] | None = None,
                 flags: tuple[str, ...] = (), cpu: bool = True) -> list[str]:
    """Returns the command of one server. `flags` come last, so that they override the other flags."""
    command = [python, *API_SERVER, "--model", model, "--host", host, "--port", str(port), *(CPU_FLAGS if cpu else ())]
    if kv_config is not None:
        command += ["--kv-transfer-config", json.dumps(kv_config)]
    return [*command, *flags]
