"""Tests the keys of pods on Kubernetes: which Secret has which, what a pod of the rendered manifests can read, and that
it may do what it needs with its key at a real controller.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import STANDINS, Deployment
from handing_deployment import REVOKED_WITHIN_S, Process, kill
from kvferry_launch.cluster import kubernetes, spec
from kvferry_launch.paths import KVFERRY, LAUNCH
from pods import Object, Pod, put, secrets_of

DOCUMENT: Object = {"on": "kubernetes", "model": "org/model", "router": {"kind": "proxy"}, "env": {}, "vllm": [],
                    "prefill": {"replicas": 2}, "kubernetes": {"image": "vllm:1", "namespace": "serving"}}
KINDS = {"cluster-key": ["cluster.key"], "members": ["kvferry.members"],
         "prefill-keys": ["tested-prefill-0.key", "tested-prefill-1.key"], "decode-keys": ["tested-decode-0.key"],
         "router-keys": ["tested-router.key"]}


class Cluster:
    """A stand-in for a Kubernetes cluster with kubectl, and a deployment's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deployment = Deployment(folder, **DOCUMENT)
        kubectl = folder / "kubectl"
        kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STANDINS / "kubectl.py"} "$@"\n')
        kubectl.chmod(0o755)
        (folder / "pods.json").write_text(json.dumps({"items": [
            {"metadata": {"name": name, "labels": {}}} for name in ("tested-prefill-0", "tested-router-x7")]}))
        self.deployment.env |= {"PATH": f"{folder}:{os.environ['PATH']}", "STANDIN": str(folder)}

    def keys(self, *flags: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.deployment.call("keys", *flags, check=check)

    def secrets(self) -> dict[str, dict[str, bytes]]:
        found = secrets_of([json.loads(file.read_text()) for file in (self.folder / "secrets").iterdir()])
        return {name.removeprefix("tested-"): dict(files) for name, files in found.items()}

    def roles(self) -> dict[str, str]:
        lines = self.secrets()["members"]["kvferry.members"].decode().splitlines()[1:]
        return {line.split()[0]: line.split()[1] for line in lines}

    def calls(self, verb: str) -> list[str]:
        return re.findall(rf"--namespace serving ({verb}.*)", (self.folder / "calls").read_text())

    def pod(self, component: str, name: str, folder: str, templates: dict[str, Object], **labels: str) -> Pod:
        secrets = {f"tested-{kind}": files for kind, files in self.secrets().items()}
        return Pod(self.folder / folder, templates[component], name, secrets, **labels)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def manifests(**change: Any) -> list[Object]:
    document = DOCUMENT | {"name": "tested"} | change
    return [one for one in yaml.safe_load_all(kubernetes.render(spec.make(document, Path("tested.yaml")))) if one]


def templates_of(source: str) -> dict[str, Object]:
    """Returns the spec of each component's pods in the launcher's manifests or those of the Helm chart."""
    if source == "launcher":
        objects = manifests()
    else:
        helm = pytest.importorskip("helm_python", reason="launch/setup --tests installs it")
        with helm.Chart.load(LAUNCH / "deploy" / "helm" / "kvferry") as chart:
            rendered = chart.render({"model": "org/model"}, name="tested", namespace="serving")
        objects = [one for name, text in rendered.items() if name.endswith(".yaml")
                   for one in yaml.safe_load_all(text) if one]
    return {one["metadata"]["name"].removeprefix("tested-"): one["spec"]["template"]["spec"] for one in objects
            if one["kind"] in ("StatefulSet", "Deployment")}


def test_each_pod_has_a_key_and_no_key_changes_when_others_are_made(cluster: Cluster) -> None:
    assert "made keys for tested-prefill-0, tested-prefill-1, tested-decode-0, tested-router" in cluster.keys().stdout
    first = cluster.secrets()
    assert {kind: sorted(files) for kind, files in first.items()} == KINDS
    assert cluster.roles() == {"tested-prefill-0": "worker", "tested-prefill-1": "worker", "tested-decode-0": "worker",
                               "tested-router": "reader"}
    written = len(cluster.calls("create|replace"))
    assert written == len(KINDS)
    assert cluster.keys().stdout == ""
    assert len(cluster.calls("create|replace")) == written, "nothing is missing, so nothing is written"
    (cluster.folder / "up").touch()
    cluster.deployment.call("scale", "decode=3")
    later = cluster.secrets()
    assert sorted(later["decode-keys"]) == [f"tested-decode-{number}.key" for number in range(3)]
    assert later["decode-keys"]["tested-decode-0.key"] == first["decode-keys"]["tested-decode-0.key"]
    assert {kind for kind in KINDS if later[kind] != first[kind]} == {"members", "decode-keys"}
    scaled = (cluster.folder / "calls").read_text()
    assert scaled.rindex("replace -f -") < scaled.index("scale statefulset/tested-decode --replicas=3")
    assert len(cluster.calls("annotate pods tested-prefill-0 tested-router-x7 --overwrite kvferry/members=")) == 1
    assert not list(Path("/dev/shm").glob("kvferry-keys-*")), "no key stays on this host"
    assert not list((cluster.folder / "run").rglob("*.key"))


def test_a_revoked_pod_stays_out_until_keys_are_made_again(cluster: Cluster) -> None:
    cluster.keys()
    former = cluster.secrets()["prefill-keys"]["tested-prefill-1.key"]
    (cluster.folder / "up").touch()
    cluster.keys("--revoke", "tested-prefill-1")
    assert "tested-prefill-1" not in cluster.roles()
    assert sorted(cluster.secrets()["prefill-keys"]) == ["tested-prefill-0.key"]
    assert len(cluster.calls("annotate")) == 1, "so that kubelets look at once"
    cluster.deployment.call("scale", "decode=2")
    assert "tested-prefill-1" not in cluster.roles()
    assert "tested-decode-1" in cluster.roles()
    failed = cluster.keys("--revoke", "tested-prefill-1", check=False)
    assert failed.returncode == 1
    assert "there is no member 'tested-prefill-1'" in failed.stderr
    cluster.keys()
    assert cluster.secrets()["prefill-keys"]["tested-prefill-1.key"] != former


def test_members_that_are_no_pods_and_rotations(cluster: Cluster) -> None:
    assert cluster.keys("--role", "reader", check=False).returncode == 1
    cluster.keys()
    cluster.keys("--add-node", "grafana", "--role", "reader")
    assert cluster.roles()["grafana"] == "reader"
    assert list(cluster.secrets()["other-keys"]) == ["grafana.key"]
    first = cluster.secrets()
    for step, num_keys in (("--add", 2), ("--switch", 2), ("--retire", 1)):
        cluster.keys(step)
        found = cluster.secrets()
        assert {name: sorted(files) for name, files in found.items()} == KINDS | {"other-keys": ["grafana.key"]}
        assert found["members"] == first["members"], "members keep their own keys"
        for kind in ("prefill-keys", "decode-keys", "router-keys", "other-keys"):
            for name, content in found[kind].items():
                assert content.splitlines()[:2] == first[kind][name].splitlines()[:2]
                assert len(content.splitlines()) == 2 + num_keys
    assert cluster.secrets()["cluster-key"] != first["cluster-key"]


def test_what_an_interrupted_run_has_left_is_mended(cluster: Cluster) -> None:
    cluster.keys()
    file = cluster.folder / "secrets" / "tested-decode-keys.json"
    without = json.loads(file.read_text())
    key = without["data"].pop("tested-decode-0.key")
    file.write_text(json.dumps(without))
    assert "made keys for tested-decode-0\n" in cluster.keys().stdout, "it was in the list"
    assert json.loads(file.read_text())["data"]["tested-decode-0.key"] != key
    list_file = cluster.folder / "secrets" / "tested-members.json"
    list_file.unlink()
    cluster.keys()
    assert len(cluster.roles()) == 4


def test_a_change_beside_another_one_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.keys()
    kubectl = tmp_path / "kubectl"
    # Somebody else has changed the list between this run's reading and its writing.
    kubectl.write_text(kubectl.read_text().replace("exec", f"""case "$*" in *replace*)
        sed -i 's/"resourceVersion": "[0-9]*"/"resourceVersion": "77"/' {tmp_path}/secrets/tested-members.json;; esac
        exec"""))
    before = cluster.secrets()
    failed = cluster.keys("--revoke", "tested-prefill-0", check=False)
    assert failed.returncode == 1
    assert "kubectl replace failed: error: Operation cannot be fulfilled" in failed.stderr
    assert cluster.secrets() == before


def test_a_deployment_that_names_a_key_file_has_no_secrets(cluster: Cluster) -> None:
    cluster.deployment.document["env"] = {"KVFERRY_CLUSTER_KEY_FILE": "/k"}
    cluster.deployment.write()
    failed = cluster.keys(check=False)
    assert (failed.returncode, "'env' names a key file" in failed.stderr) == (1, True)
    assert not (cluster.folder / "secrets").exists()
    cluster.deployment.document |= {"on": "local", "kubernetes": {}}
    cluster.deployment.write()
    assert "this command changes keys only on kubernetes" in cluster.keys(check=False).stderr


@pytest.mark.parametrize("source", ["launcher", "chart"])
def test_a_pod_reads_its_own_key_and_no_other(cluster: Cluster, source: str) -> None:
    cluster.keys()
    templates, secrets = templates_of(source), cluster.secrets()
    keys = {file: content for files in secrets.values() for file, content in files.items() if file.endswith(".key")}
    for component, name, file in (("controller", "tested-controller-0", "cluster.key"),
                                  ("prefill", "tested-prefill-1", "tested-prefill-1.key"),
                                  ("decode", "tested-decode-0", "tested-decode-0.key"),
                                  ("router", "tested-router-6d4f-x7", "tested-router.key")):
        pod = cluster.pod(component, name, f"{source}-{name}", templates)
        started = pod.start()
        assert started.returncode == 0, started.stderr
        key_file = Path(pod.env(pod.container)["KVFERRY_CLUSTER_KEY_FILE"])
        assert key_file.read_bytes() == keys[file]
        assert key_file.stat().st_mode & 0o7777 == 0o400
        assert {other for other, content in keys.items() if content in pod.seen()} == {file}
        assert [mount.get("readOnly") for mount in pod.container["volumeMounts"]
                if mount["mountPath"].startswith("/etc/kvferry")] == [True, True]
        token = [KVFERRY, "token", "--cluster-key-file", key_file]
        assert subprocess.run(token, capture_output=True, check=False).returncode == 0
        assert templates[component]["automountServiceAccountToken"] is False


def test_a_pod_without_a_key_says_so_and_does_not_start(cluster: Cluster) -> None:
    cluster.keys()
    pod = cluster.pod("decode", "tested-decode-7", "late", templates_of("launcher"))
    for _ in range(2):
        started = pod.start()
        assert started.returncode == 1
        assert "this pod has no key yet: make one (launch/cluster keys), then delete this pod" in started.stderr
        assert not list((pod.folder / "volumes" / "key").iterdir())


def test_the_pods_of_a_replica_on_several_hosts_have_the_key_of_their_group(cluster: Cluster) -> None:
    group, = (one for one in manifests(decode={"hosts_per_replica": 2}) if one["kind"] == "LeaderWorkerSet")
    cluster.keys()
    parts = group["spec"]["leaderWorkerTemplate"]
    templates = {part: parts[f"{part}Template"]["spec"] for part in ("leader", "worker")}
    for part, name in (("leader", "tested-decode-0"), ("worker", "tested-decode-0-1")):
        pod = cluster.pod(part, name, part, templates, **{kubernetes.GROUP_LABEL: "0"})
        assert pod.start().returncode == 0
        env = pod.env(pod.container)
        key_file = Path(env["KVFERRY_CLUSTER_KEY_FILE"])
        assert key_file.read_bytes() == cluster.secrets()["decode-keys"]["tested-decode-0.key"]
        config = json.loads(pod.container["command"][pod.container["command"].index("--kv-transfer-config") + 1])
        assert config["engine_id"].replace("$(GROUP)", env["GROUP"]) == "tested-decode-0"


@pytest.fixture
def ended() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("source", ["launcher", "chart"])
def test_pods_serve_and_drain_themselves_and_one_that_is_revoked_is_out(
        cluster: Cluster, ended: contextlib.ExitStack, source: str) -> None:
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    cluster.keys()
    templates = templates_of(source)
    names = {"controller": "tested-controller-0", "prefill": "tested-prefill-0", "decode": "tested-decode-0"}
    pods = {component: cluster.pod(component, name, name, templates) for component, name in names.items()}
    for pod in pods.values():
        assert pod.start().returncode == 0
    key_files = {component: pod.env(pod.container)["KVFERRY_CLUSTER_KEY_FILE"] for component, pod in pods.items()}
    controller = subprocess.Popen(
        [KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--stream", "none", "--state", "none"],
        stdout=subprocess.PIPE, text=True, env=os.environ | pods["controller"].env(pods["controller"].container))
    ended.callback(kill, controller)
    assert controller.stdout is not None
    endpoint = re.findall(r"listening on (\S+)", controller.stdout.readline())[0]
    for component in ("prefill", "decode"):
        node = Process("handing_node.py", endpoint, key_files[component], names[component])
        ended.callback(kill, node.process)

    def drain(component: str, of: str) -> subprocess.CompletedProcess[str]:
        """Runs the preStop hook of a pod with its key; `of`: the name of the pod that it drains."""
        words = list(pods[component].container["lifecycle"]["preStop"]["exec"]["command"])
        words[-1] = words[-1].replace("tcp://tested-controller:14600", endpoint)
        env = pods[component].env(pods[component].container) | {
            "POD_NAME": of, "PATH": f"{KVFERRY.parent}:{os.environ['PATH']}"}
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)

    def nodes() -> dict[str, tuple[str, bool]]:
        done = subprocess.run([KVFERRY, "status", "--json", "--controller", endpoint, "--cluster-key-file",
                               key_files["controller"]], capture_output=True, text=True, check=True)
        return {node["engine_id"]: (node["member"], node["leaving"]) for node in json.loads(done.stdout)["nodes"]}

    other = drain("prefill", "tested-decode-0")
    assert other.returncode != 0
    assert ("the command 'drain' needs a key of the role admin, but the sender has the key of member "
            "'tested-prefill-0' (role worker)") in other.stderr
    assert nodes() == {name: (name, False) for name in ("tested-prefill-0", "tested-decode-0")}
    own = drain("prefill", "tested-prefill-0")
    assert own.returncode == 0, own.stderr
    assert "node 'tested-prefill-0' can be stopped" in own.stdout
    assert nodes()["tested-prefill-0"] == ("tested-prefill-0", True)

    cluster.keys("--revoke", "tested-decode-0")
    for pod in pods.values():  # as kubelets do when they look at the Secret again
        put(pod.folder / "volumes" / "members", cluster.secrets()["members"], 0o444)
    time.sleep(REVOKED_WITHIN_S)
    assert set(nodes()) == {"tested-prefill-0"}
