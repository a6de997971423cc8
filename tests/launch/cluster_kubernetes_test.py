"""Tests the Kubernetes manifests: they are valid by Kubernetes' own schemas, and have the settings of the deployment's
file.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import STANDINS, Deployment, eventually
from kvferry_launch.cluster import kubernetes, spec
from kvferry_launch.paths import REPO

EXAMPLE = REPO / "launch" / "examples" / "cluster" / "kubernetes.yaml"
VERSION = "1.30"
MINIMAL = {"name": "demo", "model": "org/model", "on": "kubernetes", "kubernetes": {"image": "vllm:1"}}


def objects(document: dict[str, Any]) -> list[dict[str, Any]]:
    text = kubernetes.render(spec.make(document, Path("demo.yaml")))
    return [one for one in yaml.safe_load_all(text) if one]


def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def container(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = one["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("change", [
    {}, {"router": {"kind": "proxy"}}, {"router": {"kind": "none"}}, {"prefill": {"data_parallel": 2}},
    {"controller": {"state": "/state"}, "kubernetes": {"image": "vllm:1", "storage": "1Gi", "gpus": 0}},
    {"env": {"A": 1}, "decode": {"env": {"B": "x"}, "flags": ["--max-model-len", 1024], "replicas": 0}},
    {"router": {"kind": "proxy"},
     "kubernetes": {"image": "vllm:1", "controller_tls_secret": "a", "router_tls_secret": "b.example"}},
], ids=["least", "proxy", "no front door", "data parallel", "state", "env", "https"])
def test_manifests_are_valid(change: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in objects(MINIMAL | change):
        kubernetes_validate.validate(one, VERSION, strict=True)


def test_the_schemas_do_refuse_what_is_wrong() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    broken = by_name(objects(MINIMAL))["StatefulSet", "demo-decode"]
    container(broken)["imagee"] = container(broken).pop("image")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_the_example_spreads_a_replica_over_pods() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = by_name([one for one in yaml.safe_load_all(kubernetes.render(spec.load(EXAMPLE))) if one])
    group = found.pop(("LeaderWorkerSet", "chat-decode"))
    for one in found.values():
        kubernetes_validate.validate(one, VERSION, strict=True)
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["apiVersion"], group["spec"]["replicas"], template["size"]) == (
        "leaderworkerset.x-k8s.io/v1", 2, 2)
    # each part is a pod's template, for which Kubernetes has a schema
    for part in ("leaderTemplate", "workerTemplate"):
        kubernetes_validate.validate({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template[part]["spec"]}, VERSION,
            strict=True)
    leader = template["leaderTemplate"]["spec"]["containers"][0]
    worker = template["workerTemplate"]["spec"]["containers"][0]
    assert "--headless" in worker["command"]
    assert "--headless" not in leader["command"]
    assert worker["command"][worker["command"].index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)"


def test_a_server_knows_its_name_its_url_and_the_controller() -> None:
    decode = container(by_name(objects(MINIMAL | {"namespace": "blue"}))["StatefulSet", "demo-decode"])
    config = json.loads(decode["command"][decode["command"].index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "KvFerryConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute", "engine_id": "$(POD_NAME)", "kv_connector_extra_config": {
            "controller": "tcp://demo-controller:14600", "namespace": "blue", "serves": "http://$(POD_IP):8100",
            "advertise_host": "$(POD_IP)"}}
    assert [one["name"] for one in decode["env"]] == ["POD_NAME", "POD_IP", "KVFERRY_CLUSTER_KEY_FILE"]


@pytest.mark.parametrize("own_key", [False, True])
def test_pods_of_members_mount_their_keys_unless_the_file_names_one(own_key: bool) -> None:
    env = {"env": {"KVFERRY_CLUSTER_KEY_FILE": "/k"}} if own_key else {}
    found = objects(MINIMAL | env | {"router": {"kind": "proxy"}})
    pods = {one["metadata"]["name"].removeprefix("demo-"): one["spec"]["template"]["spec"] for one in found
            if one["kind"] in ("StatefulSet", "Deployment")}
    mounted = {"controller": ("cluster-key", "cluster.key"), "prefill": ("prefill-keys", "$(POD_NAME).key"),
               "decode": ("decode-keys", "$(POD_NAME).key"), "router": ("router-keys", "demo-router.key")}
    assert set(pods) == set(mounted)
    for name, pod in pods.items():
        given = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        assert given["KVFERRY_CLUSTER_KEY_FILE"] == ("/k" if own_key else "/etc/kvferry/own.key")
        secret, file = mounted[name]
        secrets = [one["secret"] for one in pod.get("volumes", []) if "secret" in one]
        assert secrets == ([] if own_key else [{"secretName": f"demo-{secret}", "defaultMode": 0o400},
                                               {"secretName": "demo-members", "defaultMode": 0o444}])
        inits = pod.get("initContainers", [])
        assert [one["volumeMounts"][0] for one in inits] == ([] if own_key else [
            {"name": "secret", "mountPath": "/secret/own.key", "subPathExpr": file, "readOnly": True}])
        assert all("install -m 0400 /secret/own.key /etc/kvferry/own.key" in one["command"][-1] for one in inits)
        assert not [one for one in pod["containers"][0].get("volumeMounts", []) if one["name"] == "secret"]
    door = container(by_name(objects(MINIMAL))["Deployment", "demo-router"])
    assert "volumeMounts" not in door, "vllm-router is no member"


@pytest.mark.parametrize(("change", "user", "size"), [
    ({}, 14600, "8Gi"), ({"user": 1000650000, "shared_memory": "512Mi"}, 1000650000, "512Mi")])
def test_no_pod_runs_as_root_and_servers_have_shared_memory(change: dict[str, Any], user: int, size: str) -> None:
    found = objects(MINIMAL | {"kubernetes": {"image": "vllm:1"} | change})
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found
            if one["kind"] in ("StatefulSet", "Deployment")}
    assert len(pods) == 4
    for name, pod in pods.items():
        assert pod["securityContext"] | {"runAsNonRoot": True, "runAsUser": user} == pod["securityContext"], name
        for one in [*pod.get("initContainers", []), *pod["containers"]]:
            assert one["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for role in ("prefill", "decode"):
        pod = pods[f"demo-{role}"]
        assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}} in pod["volumes"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(("ranks", "script"), [
    (1, 'kvferry drain "$POD_NAME" --force --controller tcp://demo-controller:14600 --namespace default --timeout 30'),
    (2, 'for rank in 0 1; do kvferry drain "${POD_NAME}_dp$rank" --force --controller tcp://demo-controller:14600 '
        "--namespace default --timeout 30 & done; wait"),
])
def test_a_pod_drains_itself_before_it_ends_and_has_the_time_to(ranks: int, script: str) -> None:
    found = by_name(objects(MINIMAL | {"drain_timeout_s": 30, "decode": {"data_parallel": ranks}}))
    decode = found["StatefulSet", "demo-decode"]
    assert container(decode)["lifecycle"]["preStop"]["exec"]["command"] == ["/bin/sh", "-c", script]
    assert decode["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 150


def test_the_router_finds_pods_by_the_labels_that_they_have() -> None:
    found = by_name(objects(MINIMAL))
    command = container(found["Deployment", "demo-router"])["command"]
    for role in ("prefill", "decode"):
        first = command.index(f"--{role}-selector") + 1
        asked = dict(word.split("=") for word in command[first:first + 3])
        assert asked == found["StatefulSet", f"demo-{role}"]["spec"]["template"]["metadata"]["labels"]
    account = found["Deployment", "demo-router"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert found["RoleBinding", "demo-router"]["subjects"][0]["name"] == account
    assert ("Role", "demo-router") not in by_name(objects(MINIMAL | {"router": {"kind": "proxy"}}))


POD = {"metadata": {"name": "tested-decode-0", "labels": {"app.kubernetes.io/component": "decode"}},
       "spec": {"nodeName": "host-7"},
       "status": {"podIP": "10.0.0.9", "phase": "Running", "startTime": "2026-01-01T00:00:00Z",
                  "containerStatuses": [{"ready": True, "restartCount": 2, "state": {"running": {}}}]}}


def test_kubectl_is_given_the_manifests_and_takes_them_back_at_ctrl_c(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STANDINS / "kubectl.py"} "$@"\n')
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "pods.json").write_text(json.dumps({"items": [POD]}))
    deployment = Deployment(tmp_path, on="kubernetes", kubernetes={"image": "vllm:1", "namespace": "serving"},
                            router={"kind": "vllm-router"})
    deployment.env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STANDIN": str(tmp_path)}
    deployment.start_ready()
    assert "tested-decode-0 host-7 decode ready 10.0.0.9" in deployment.text()
    assert "ready: http://tested-router.serving:8000 inside the cluster" in deployment.text()
    assert (tmp_path / "applied").read_text() == deployment.call("render").stdout
    assert deployment.call("status").stdout.splitlines()[1].startswith("tested-decode-0 host-7 decode ready 10.0.0.9")
    found = json.loads(deployment.call("status", "--json").stdout)
    (node,) = found.pop("nodes")
    assert (node["name"], node["state"], node["url"], node["restarts"]) == ("tested-decode-0", "ready", "10.0.0.9", 2)
    assert found == {"name": "tested", "on": "kubernetes", "ready": True, "url": "http://tested-router.serving:8000",
                     "pid": None, "host": None, "job": None, "failed": []}
    calls = (tmp_path / "calls").read_text()
    secrets = {file.stem for file in (tmp_path / "secrets").iterdir()}
    assert secrets == {f"tested-{kind}" for kind in ("cluster-key", "members", "prefill-keys", "decode-keys",
                                                     "router-keys")}
    assert calls.count("--namespace serving create -f -") == len(secrets)
    assert calls.rindex("create -f -") < calls.index("apply")
    deployment.call("scale", "decode=3")
    assert "--namespace serving scale statefulset/tested-decode --replicas=3" in (tmp_path / "calls").read_text()
    deployment.signal(2)
    assert deployment.wait_end() == 0
    eventually(lambda: not (tmp_path / "up").exists())
