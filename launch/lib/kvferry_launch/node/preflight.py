"""Checks the settings, the key file, the memory and the controller before a server starts, because the server itself
would report a mistake only a minute later. Standard library only.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry_launch.node.endpoints import Endpoint
from kvferry_launch.paths import command_name

CONTROLLER_WITHIN_S = 10.0  # equal to the time for which the connector waits for the controller
CONNECT_WITHIN_S = 2.0
# A program for the server's interpreter. It prints nothing if that interpreter can't load kvferry and need not do so.
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
        print(json.dumps({"error": f"{sys.executable} can't load kvferry: {error}"}))
except Exception as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"pool_bytes": config["pool_bytes"]}))
"""


class NodeError(Exception):
    """The node can't be started; the message is one sentence."""


def check_settings(python: str, extra: Mapping[str, Any], env: Mapping[str, str], with_key: bool,
                   needs_kvferry: bool = False) -> int:
    """Checks kvferry's settings and, if `with_key`, its key file, with the interpreter `python`; returns `pool_bytes`,
    or 0 if the interpreter can't be run, or can't load kvferry and `needs_kvferry` is false. `env`: the server's whole
    environment. Errors: NodeError.
    """
    asked = json.dumps({"extra": extra, "with_key": with_key, "needs_kvferry": needs_kvferry})
    try:
        done = subprocess.run([python, "-c", SETTINGS], input=asked, capture_output=True, text=True, check=False,
                              env=dict(env))
        found = json.loads(done.stdout)
    except (OSError, ValueError):
        return 0
    if "error" in found:
        raise NodeError(str(found["error"]).removeprefix("kvferry: "))
    return int(found["pool_bytes"])


def check_memory(pool_bytes: int) -> None:
    """Checks that this host has `pool_bytes` bytes of free memory. Errors: NodeError."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return
    if pool_bytes > free:
        raise NodeError(f"pool_bytes is {pool_bytes}, but only {free} bytes of memory are free; give less with --extra "
                        "pool_bytes=BYTES")


def wait_controller(given: str, endpoints: list[Endpoint], within_s: float = CONTROLLER_WITHIN_S) -> None:
    """Waits until a controller accepts a connection. `given`: the user's text, which the error quotes. Errors:
    NodeError.
    """
    deadline = time.monotonic() + within_s
    while not any(accepts(endpoint) for endpoint in endpoints):
        if time.monotonic() > deadline:
            raise NodeError(f"no controller answers at {given} within {within_s:.0f} s; start one with "
                            f"{command_name('controller')}, or name another with --controller")
        time.sleep(0.2)


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
