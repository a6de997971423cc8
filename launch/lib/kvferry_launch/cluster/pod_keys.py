"""The keys of a deployment's pods on Kubernetes, which keeps them in Secrets: the controller has the cluster key, each
replica of the servers has a member key of its own, and the router's pods share a member key of the role reader.

| Secret | files | pods that mount it |
|---|---|---|
| NAME-cluster-key | cluster.key | the controller's pod |
| NAME-prefill-keys, NAME-decode-keys | POD.key, for the first pod of each replica | the servers' pods, each one file |
| NAME-router-keys | NAME-router.key | the router's pods, if the router is the proxy |
| NAME-members | kvferry.members, the list of members | all pods above, in which changes of the Secret appear |
| NAME-other-keys | MEMBER.key, for members that are no pods | none |
"""

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry_launch.cluster.keys import MEMBERS_HEAD, ROLES, names_in, repeated, run_keygen
from kvferry_launch.cluster.kubernetes import labels, secret_name, selector
from kvferry_launch.cluster.plan import ENGINE_ROLES
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Spec
from kvferry_launch.node.cluster_key import KEY_NAME, MEMBERS_NAME, ensure_key
from kvferry_launch.node.preflight import kvferry_binary
from kvferry_launch.paths import no_binary

SECRETS = ("cluster-key", "members", *(f"{role}-keys" for role in ROLES), "other-keys")
SEEN = "kvferry/members"  # annotation of a pod; when it changes, the kubelet updates the pod's Secrets at once
Files = dict[str, bytes]
Kubectl = Callable[..., str]


def members_of(spec: Spec, replicas: Mapping[str, int]) -> dict[str, str]:
    """Maps the name of each member to its role. Each replica of a server is a member with the name of its first pod.
    All pods of the router are one member, which is there even if the deployment's file has no router, because the Helm
    chart always starts routers.
    """
    names = {f"{spec.name}-{role}-{number}": ROLES[role] for role in ENGINE_ROLES for number in range(replicas[role])}
    return names | {f"{spec.name}-router": ROLES["router"]}


def replicas_of(spec: Spec) -> dict[str, int]:
    return {role: spec.roles[role].replicas for role in ENGINE_ROLES}


def secret_with(spec: Spec, file: str) -> str:
    """Returns the kind (an entry of SECRETS) of the Secret that has the file."""
    if file in (KEY_NAME, MEMBERS_NAME):
        return "cluster-key" if file == KEY_NAME else "members"
    found = re.fullmatch(rf"{re.escape(spec.name)}-(?:({'|'.join(ENGINE_ROLES)})-\d+|(router))\.key", file)
    return f"{found[1] or found[2]}-keys" if found else "other-keys"


def change(spec: Spec, kubectl: Kubectl, replicas: Mapping[str, int], flags: Sequence[str] = ()) -> list[str]:
    """Makes the cluster key if there is none. Then makes the keys that pods lack, and changes no key that a pod can
    use; or, if there are `flags`, runs `kvferry keygen` with these flags on the keys in the Secrets instead. Returns
    lines for the user. Errors: SpecError.
    """
    binary = kvferry_binary(sys.executable)
    if binary is None:
        raise SpecError(f"can't make the pods' keys: {no_binary()}")
    secrets = read(spec, kubectl)
    before = {file: base64.b64decode(data) for secret in secrets.values()
              for file, data in (secret.get("data") or {}).items()}
    # /dev/shm is in memory: if it can be used, no key is written to a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvferry-keys-", dir=memory) as name:
        folder = Path(name)
        write(folder, before)
        ensure_key(folder / KEY_NAME)
        told = step(binary, folder, flags) if flags else add_missing(binary, folder, members_of(spec, replicas))
        after = {file.name: file.read_bytes() for file in folder.iterdir()}
    after.setdefault(MEMBERS_NAME, MEMBERS_HEAD.encode())
    # The list of members is saved before the keys, because a pod can't use a key that is not in the list yet.
    for kind in sorted(SECRETS, key=lambda kind: kind != "members"):
        save(spec, kubectl, kind, secrets.get(secret_name(spec, kind)),
             {file: content for file, content in after.items() if secret_with(spec, file) == kind})
    if after[MEMBERS_NAME] != before.get(MEMBERS_NAME):
        told += tell_pods(spec, kubectl, after[MEMBERS_NAME])
    return told


def write(folder: Path, files: Files) -> None:
    for file, content in files.items():
        with os.fdopen(os.open(folder / Path(file).name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(content)


def keygen(binary: str, folder: Path, *flags: str) -> None:
    run_keygen([binary, "keygen", *flags, KEY_NAME], "pods", folder)


def step(binary: str, folder: Path, flags: Sequence[str]) -> list[str]:
    keygen(binary, folder, *flags)
    return [f"# kvferry keygen {' '.join(flags)}: done"]


def add_missing(binary: str, folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """Makes keys for the members that have none. Also makes a new key for a member that an interrupted run has left
    with a key but without a line in the list of members, or with a line but without a key.
    """
    list_file = folder / MEMBERS_NAME
    listed = names_in(list_file.read_text()) if list_file.exists() else []
    missing = [name for name in wanted if name not in listed or not (folder / f"{name}.key").exists()]
    for name in missing:
        (folder / f"{name}.key").unlink(missing_ok=True)
    if lost := [name for name in missing if name in listed]:
        keygen(binary, folder, *repeated("--revoke", lost))
    for role in sorted(set(wanted.values())):
        if names := [name for name in missing if wanted[name] == role]:
            keygen(binary, folder, *repeated("--add-node", names), "--role", role)
    return [f"# made keys for {', '.join(missing)}"] if missing else []


def read(spec: Spec, kubectl: Kubectl) -> dict[str, Any]:
    """Returns the deployment's Secrets by their names."""
    names = [secret_name(spec, kind) for kind in SECRETS]
    text = kubectl("get", "secret", *names, "--ignore-not-found", "-o", "json")
    found = json.loads(text) if text.strip() else {"items": []}
    return {one["metadata"]["name"]: one for one in found.get("items", [found])}


def save(spec: Spec, kubectl: Kubectl, kind: str, former: Any, files: Files) -> None:
    """Writes a Secret if its files differ from those of `former`, the Secret that read() found (None: there was none).
    kubectl fails if the Secret was changed or created since read(). A Secret without files is not created, so that pods
    which mount it wait until it has files.
    """
    data = {file: base64.b64encode(content).decode() for file, content in sorted(files.items())}
    if data == ((former or {}).get("data") or {}):
        return
    about = {"name": secret_name(spec, kind), "namespace": spec.raw["kubernetes"]["namespace"],
             "labels": labels(spec, "keys")}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": about, **(former or {}), "data": data}
    kubectl("replace" if former else "create", "-f", "-", text=json.dumps(secret))


def tell_pods(spec: Spec, kubectl: Kubectl, members: bytes) -> list[str]:
    """Makes kubelets update the list of members in the deployment's pods at once, instead of within two minutes.
    Returns lines for the user.
    """
    pods = json.loads(kubectl("get", "pods", "-l", selector(spec), "-o", "json"))
    names = [pod["metadata"]["name"] for pod in pods["items"]]
    try:
        if names:
            kubectl("annotate", "pods", *names, "--overwrite", f"{SEEN}={hashlib.sha256(members).hexdigest()[:16]}")
    except SpecError as error:  # for example, a pod was deleted since kubectl listed the pods
        return [f"# pods get the new list of members only within two minutes, as they could not be told of it: {error}"]
    return []
