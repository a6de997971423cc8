"""What the controller's host runs before a node is stopped: `kvferry drain`, then a wait for its last request."""

import shutil
import subprocess

from kvferry_launch.node import serving
from kvferry_launch.paths import KVFERRY


def drain_node(names: list[str], url: str, controller: str, namespace: str, timeout_s: float) -> int:
    """1 where something went wrong; it is printed."""
    binary = str(KVFERRY) if KVFERRY.exists() else shutil.which("kvferry")
    if binary is None:
        print("there is no kvferry binary here or on PATH; build it with launch/setup", flush=True)
        return 1
    status = 0
    for name in names:
        status |= subprocess.run([binary, "drain", name, "--controller", controller, "--namespace", namespace,
                                  "--timeout", str(timeout_s)], check=False).returncode
    if not serving.wait_idle(url, timeout_s):
        print(f"requests still run at {url} after {timeout_s:.0f} s", flush=True)
        status = 1
    return min(status, 1)
