"""Runs a deployment on Kubernetes: applies the manifests with kubectl, shows the pods, deletes the objects at the end.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvferry_launch.cluster import pod_keys, pod_tls
from kvferry_launch.cluster import status as status_lines
from kvferry_launch.cluster.kubernetes import has_keys, manifests, render, selector
from kvferry_launch.cluster.plan import ENGINE_ROLES
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Spec
from kvferry_launch.process import noted_signals

POLL_S = 2.0


def kubectl(spec: Spec, *words: str) -> list[str]:
    raw = spec.raw["kubernetes"]
    context = ["--context", raw["context"]] if raw["context"] else []
    return ["kubectl", *context, "--namespace", raw["namespace"], *words]


def call(spec: Spec, *words: str, text: str | None = None) -> str:
    """Runs kubectl and returns its output. Errors: SpecError with kubectl's message."""
    try:
        done = subprocess.run(kubectl(spec, *words), input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SpecError(f"can't run kubectl ({error.strerror}); install it on this host and on PATH") from error
    if done.returncode != 0:
        raise SpecError(f"kubectl {words[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def dry_run(spec: Spec) -> list[str]:
    return [f"{shlex.join(kubectl(spec, 'apply', '-f', '-'))} <<'END'", *render(spec).splitlines(), "END"]


def up(spec: Spec, as_json: bool) -> int:
    """Makes the pods' keys, applies the manifests and shows the pods, until SIGINT, SIGTERM or an error; then deletes
    the objects of the manifests. If this process is killed, the objects stay until `down` deletes them.
    """
    ends = noted_signals(signal.SIGINT, signal.SIGTERM)
    view = status_lines.StatusView(as_json)
    is_told = False
    try:
        for line in ensure_keys(spec, pod_keys.replicas_of(spec)):
            view.say(line)
        for line in call(spec, "apply", "-f", "-", text=render(spec)).splitlines():
            view.say(f"# {line}")
        while not ends:
            rows = pods(spec)
            view.show(rows)
            is_ready = all_ready(rows)
            if is_ready and not is_told:
                view.say(f"ready: {front_of(spec)}")
            is_told = is_ready
            time.sleep(POLL_S)
    finally:
        view.say(f"deployment '{spec.name}' is stopping")
        down(spec)
    return 0


def ensure_keys(spec: Spec, replicas: Mapping[str, int]) -> list[str]:
    """Makes the keys that pods lack, unless 'env' names a key file for all pods. `down` keeps the Secrets with the
    keys, so every `up` uses the same keys. Returns lines for the user. Errors: SpecError.
    """
    return pod_keys.change(spec, partial(call, spec), replicas) if has_keys(spec) else []


def keys(spec: Spec, flags: Sequence[str]) -> int:
    """Makes the keys that pods lack or, if there are `flags`, runs `kvferry keygen` with these flags on the keys in the
    Secrets. Errors: SpecError.
    """
    if not has_keys(spec):
        raise SpecError("'env' names a key file for all pods (KVFERRY_CLUSTER_KEY_FILE), so there are no Secrets with "
                        "keys to change; without that variable each pod has a key of its own")
    for line in pod_keys.change(spec, partial(call, spec), pod_keys.replicas_of(spec), flags):
        print(line)
    return 0


def front_of(spec: Spec) -> str:
    url = front_url(spec)
    return f"{url} inside the cluster" if url else "there is no router, so clients use the URLs of the servers"


def front_url(spec: Spec) -> str:
    """Returns the router's URL inside the cluster; "" if there is no router."""
    routers = [one for one in manifests(spec) if one["kind"] == "Service"
               and one["metadata"]["name"] == f"{spec.name}-router"]
    if not routers:
        return ""
    name, space = routers[0]["metadata"]["name"], routers[0]["metadata"]["namespace"]
    scheme = pod_tls.scheme(spec.raw["kubernetes"]["router_tls_secret"])
    return f"{scheme}://{name}.{space}:{routers[0]['spec']['ports'][0]['port']}"


def all_ready(rows: Sequence[Mapping[str, Any]]) -> bool:
    return bool(rows) and all(row["state"] == "ready" for row in rows)


def pods(spec: Spec) -> list[dict[str, Any]]:
    """Returns a row for each pod. The rows have the same fields as the rows of nodes outside of Kubernetes."""
    found = json.loads(call(spec, "get", "pods", "-l", selector(spec), "-o", "json"))
    return [row(pod) for pod in found["items"]]


def row(pod: dict[str, Any]) -> dict[str, Any]:
    about, state = pod["metadata"], pod.get("status", {})
    containers = state.get("containerStatuses", [])
    is_ready = bool(containers) and all(one.get("ready") for one in containers)
    waits = [one["state"]["waiting"] for one in containers if "waiting" in one.get("state", {})]
    phase = "draining" if "deletionTimestamp" in about else "ready" if is_ready else str(
        state.get("phase", "Pending")).lower()
    detail = "; ".join(f"{one.get('reason', '')} {one.get('message', '')}".strip() for one in waits)
    return {"name": about["name"], "role": about["labels"].get("app.kubernetes.io/component", "-"),
            "host": pod.get("spec", {}).get("nodeName", ""), "state": phase, "url": state.get("podIP", ""),
            "pid": None, "since": state.get("startTime", "").rstrip("Z"),
            "restarts": sum(one.get("restartCount", 0) for one in containers), "detail": detail}


def status(spec: Spec, as_json: bool) -> int:
    rows = pods(spec)
    if as_json:  # with the fields of a deployment that runs elsewhere, though no process of a launcher belongs to it
        print(json.dumps({"name": spec.name, "on": spec.on, "ready": all_ready(rows), "url": front_url(spec),
                          "pid": None, "host": None, "job": None, "failed": [], "nodes": rows}, indent=2))
    else:
        print("\n".join(status_lines.table(rows)))
    return 0


def scale(spec: Spec, wanted: dict[str, int]) -> int:
    """Scales the roles' StatefulSets or LeaderWorkerSets. The keys of removed pods stay, because the preStop hook of a
    removed pod needs the pod's key to drain the pod's node.
    """
    # A role that is not in `wanted` counts as 0 pods here, so that none of its revoked members gets a new key.
    for line in ensure_keys(spec, dict.fromkeys(ENGINE_ROLES, 0) | wanted):
        print(line)
    for role in ENGINE_ROLES:
        if role in wanted:
            kind = "statefulset" if spec.roles[role].hosts_per_replica == 1 else "leaderworkerset"
            sys.stdout.write(call(spec, "scale", f"{kind}/{spec.name}-{role}", f"--replicas={wanted[role]}"))
    return 0


def down(spec: Spec) -> int:
    sys.stdout.write(call(spec, "delete", "--ignore-not-found", "-f", "-", text=render(spec)))
    return 0
