"""Checks the settings, the key file, the memory, the controller and the namespace before a server starts, because the
server itself would report a mistake only after about a minute. Uses only the standard library.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvferry_launch.node.cluster_key import KEY_ENV
from kvferry_launch.node.endpoints import Endpoint
from kvferry_launch.paths import KVFERRY, command_name

CONTROLLER_WITHIN_S = 10.0  # the connector waits for the controller for the same time
CONNECT_WITHIN_S = 2.0
STATUS_WITHIN_S = 10.0  # longer than `kvferry status` waits for an answer, which is 2 s
# A program for the server's interpreter. It prints three of the settings in effect or an error, as a JSON object. It
# prints nothing if the interpreter can't load kvferry and `needs_kvferry` is false.
SETTINGS = """
import json, sys
asked = json.load(sys.stdin)
try:
    from kvferry._core import check_config
    from kvferry.tickets import signer_of
    config = check_config(json.dumps(asked["extra"]))
    if asked["with_key"] and config["cluster_key_file"]:
        signer_of(config["cluster_key_file"])
except ImportError as error:
    if asked["needs_kvferry"]:
        print(json.dumps({"error": f"{sys.executable} can't load kvferry: {error}; install kvferry's wheel there, or "
                          "build kvferry with launch/setup"}))
except Exception as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({name: config[name] for name in ("pool_bytes", "namespace", "cluster_key_file")}))
"""


class NodeError(Exception):
    """The node can't be started; the message says why, in one sentence."""


def check_settings(python: str, extra: Mapping[str, Any], env: Mapping[str, str], with_key: bool,
                   needs_kvferry: bool = False) -> dict[str, Any]:
    """Checks kvferry's settings and, if `with_key`, the key file, in the interpreter `python`. Returns the values of
    `pool_bytes`, `namespace` and `cluster_key_file` that are in effect. Returns no values if the interpreter can't be
    run, or if it can't load kvferry and `needs_kvferry` is false. `env`: the server's whole environment. Errors:
    NodeError.
    """
    asked = json.dumps({"extra": extra, "with_key": with_key, "needs_kvferry": needs_kvferry})
    try:
        done = subprocess.run([python, "-c", SETTINGS], input=asked, capture_output=True, text=True, check=False,
                              env=dict(env))
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError):
        return {}
    if "error" in found:
        raise NodeError(str(found["error"]).removeprefix("kvferry: "))
    return found


def check_memory(pool_bytes: int) -> None:
    """Checks that this host has `pool_bytes` bytes of available memory, if /proc/meminfo says how much there is.
    Errors: NodeError.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return
    if pool_bytes > free:
        raise NodeError(f"pool_bytes is {pool_bytes}, but only {free} bytes of memory are free; give less with --extra "
                        "pool_bytes=BYTES")


def wait_controller(given: str, endpoints: list[Endpoint], why_not: Callable[[str], str],
                    within_s: float = CONTROLLER_WITHIN_S) -> None:
    """Waits until a controller accepts a connection and `why_not` has no objection to this controller. `given`: the
    user's text, which the error quotes. `why_not` gets one endpoint of this text, and returns an objection in one
    sentence, or "". All controllers are tried again until the time is over, because a controller may be busy, or the
    node that is the reason for an objection may be leaving. Errors: NodeError.
    """
    deadline = time.monotonic() + within_s
    while True:
        objection = ""
        for text, endpoint in zip(given.split(","), endpoints, strict=True):
            if accepts(endpoint) and not (objection := why_not(text)):
                return
        if time.monotonic() > deadline:
            raise NodeError(objection or f"no controller answers at {given} within {within_s:.0f} s; start one with "
                            f"{command_name('controller')}, or name another with --controller")
        time.sleep(0.2)


def kvferry_binary(python: str = "python3") -> str | None:
    """Returns the path of the program `kvferry`: in the build or the wheel, on PATH, or beside the interpreter
    `python`, where pip puts a wheel's programs. Returns None if there is none.
    """
    return (shutil.which(str(KVFERRY)) or shutil.which("kvferry")
            or shutil.which("kvferry", path=str(Path(shutil.which(python) or python).parent)))


def why_not_join(binary: str | None, settings: Mapping[str, Any], env: Mapping[str, str], model: str,
                 engine_id: str | None, endpoint: str) -> str:
    """Finds out from the controller at `endpoint`, with the command `binary`, whether this server could join its
    namespace. Returns, in one sentence, why it could not, or why the controller's status can't be queried; "" if
    nothing is known against it. `settings`: the result of check_settings(). `env`: the server's whole environment.
    `model`: the server's model; "" if it is not known.
    """
    if binary is None or not settings:
        return ""
    try:
        # The variable KVFERRY_CONTROLLER may name several replicas, but `kvferry status` accepts only one endpoint.
        own = {"KVFERRY_CONTROLLER": endpoint, KEY_ENV: settings["cluster_key_file"]}
        done = subprocess.run([binary, "status", "--json"], capture_output=True, text=True, check=False,
                              env=dict(env) | own, timeout=STATUS_WITHIN_S)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("kvferry: ")]
            return lines[-1].removeprefix("kvferry: ") if lines else ""
        nodes = json.loads(done.stdout)["nodes"]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    for node in nodes:
        serves = re.match(r"model=(\S+)", node["fingerprint"])
        if (node["namespace"] == settings["namespace"] and node["engine_id"] != engine_id and not node["leaving"]
                and model and serves and model_name(serves[1]) != model_name(model)):
            return (f"namespace {node['namespace']} of controller {endpoint} serves the model {model_name(serves[1])} "
                    f"(node {node['engine_id']}), not {model_name(model)}; choose another namespace with --extra "
                    "namespace=NAME, or stop its nodes")
    return ""


def model_name(source: str) -> str:
    """Returns the last part of a model's path or hub name, without the revision and the digest of weights that a
    fingerprint has behind it. For a path in the Hugging Face hub's cache, which ends in a commit, returns the model's
    name.
    """
    parts = [part for part in source.split("/") if part]
    hub = [part for part in parts if part.startswith("models--")]
    return re.split("[#@:]", hub[-1].rsplit("--", 1)[-1] if hub else (parts or [source])[-1])[0]


def accepts(endpoint: Endpoint) -> bool:
    try:
        if endpoint.path:
            with socket.socket(socket.AF_UNIX) as trial:
                trial.settimeout(CONNECT_WITHIN_S)
                trial.connect(os.fspath(endpoint.path))
        else:
            socket.create_connection((endpoint.host, endpoint.port), CONNECT_WITHIN_S).close()
    except (OSError, UnicodeError):
        return False
    return True
