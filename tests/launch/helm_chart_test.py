"""Tests the Helm chart as Helm renders it: it is valid, refuses bad values, and has all that launch/cluster's manifests
have.
"""

import base64
import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvferry_launch.cluster import kubernetes, spec
from kvferry_launch.paths import KVFERRY, LAUNCH
from kvferry_launch.setup.sbom import version_of_kvferry
from pods import Pod, secrets_of

helm = pytest.importorskip("helm_python", reason="launch/setup --tests installs it")
CHART = LAUNCH / "deploy" / "helm" / "kvferry"
VERSION = "1.30"
ONLY_IN_THE_CHART = {"NetworkPolicy", "PodDisruptionBudget", "Secret"}
Object = dict[str, Any]


def chart(**values: Any) -> list[Object]:
    with helm.Chart.load(CHART) as loaded:
        rendered = loaded.render({"model": "org/model"} | values, name="demo", namespace="serving")
    return [one for name, text in rendered.items() if name.endswith(".yaml")
            for one in yaml.safe_load_all(text) if one]


def launcher(**document: Any) -> list[Object]:
    least: Object = {"name": "demo", "model": "org/model", "on": "kubernetes", "router": {"kind": "proxy"},
             "controller": {"state": "/var/lib/kvferry"},
             "kubernetes": {"image": f"kvferry-node:{version_of_kvferry()}", "namespace": "serving", "storage": "1Gi"}}
    more = {"kubernetes": least["kubernetes"] | document.pop("kubernetes", {})}
    text = kubernetes.render(spec.make(least | document | more, Path("demo.yaml")))
    return [one for one in yaml.safe_load_all(text) if one]


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def pods(objects: list[Object]) -> dict[str, Object]:
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in objects
            if one["kind"] in ("StatefulSet", "Deployment")}


def lacks(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Returns the paths at which `found` lacks something of `wanted`. Lists of words must be equal; maps may have more
    keys.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [where for name, value in wanted.items() for where in lacks(value, found.get(name), f"{path}.{name}")]
    if isinstance(wanted, list) and isinstance(found, list):
        if all(isinstance(one, dict) for one in wanted):
            return [where for number, one in enumerate(wanted)
                    for where in min((lacks(one, other, f"{path}[{number}]") for other in found), key=len)]
        if len(wanted) == len(found):
            return [where for number, one in enumerate(wanted)
                    for where in lacks(one, found[number], f"{path}[{number}]")]
    if isinstance(wanted, str) and wanted.startswith("{") and json.loads(wanted) == json.loads(found):
        return []
    return [] if str(wanted) == str(found) else [f"{path}: {wanted} is {found}"]


SERVER = {"replicas": 3, "port": 8300, "env": {"B": "x", "C": 1048576}, "extra": {"pool_bytes": "4GiB"},
          "flags": ["--max-model-len", 1048576]}
# The same settings in the deployment's file and in the chart's values.
CASES: dict[str, tuple[Object, Object]] = {
    "least": ({}, {}),
    "no state": ({"controller": {"state": "none"}}, {"controller": {"state": "none"}}),
    "servers": ({"prefill": SERVER | {"data_parallel": 2}, "decode": SERVER | {"tensor_parallel": 4}, "env": {"A": 7}},
                {"prefill": SERVER | {"dataParallel": 2}, "decode": SERVER | {"tensorParallel": 4}, "env": {"A": 7}}),
    "rest": ({"namespace": "blue", "drain_timeout_s": 30, "ready_timeout_s": 60, "vllm": ["vllm", "serve"],
              "controller": {"state": "/var/lib/kvferry", "port": 1, "http": 2},
              "router": {"kind": "proxy", "port": 9000, "flags": ["--tries", 2]}},
             {"namespace": "blue", "drainTimeoutSeconds": 30, "readyTimeoutSeconds": 60, "vllm": ["vllm", "serve"],
              "controller": {"port": 1, "http": 2}, "router": {"port": 9000, "flags": ["--tries", 2]}}),
    "https": ({"kubernetes": {"controller_tls_secret": "a", "router_tls_secret": "b.example"}},
              {"controller": {"tlsSecret": "a"}, "router": {"tlsSecret": "b.example"}}),
    "https with other authorities": ({"env": {"SSL_CERT_FILE": "/c"}, "kubernetes": {"controller_tls_secret": "a"}},
                                     {"env": {"SSL_CERT_FILE": "/c"}, "controller": {"tlsSecret": "a"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_chart_has_all_that_the_launchers_manifests_have(case: str) -> None:
    document, values = CASES[case]
    values = values | {"router": values.get("router", {}) | {"replicas": 1}}
    found, wanted = by_name(chart(**values)), by_name(launcher(**document))
    assert {kind for kind, _ in found.keys() - wanted.keys()} <= ONLY_IN_THE_CHART
    assert wanted
    assert [where for name, one in wanted.items() for where in lacks(one, found.get(name), "/".join(name))] == []


def test_the_comparison_sees_what_is_missing_or_different() -> None:
    wanted, found = (by_name(launcher())["StatefulSet", "demo-decode"] for _ in range(2))
    container = found["spec"]["template"]["spec"]["containers"][0]
    del container["lifecycle"]
    container["command"][4] = "org/other"
    container["env"].pop()
    container["command"][-1] = container["command"][-1].replace("recompute", "fail")
    assert len(lacks(wanted, found)) >= 4


@pytest.mark.parametrize("values", [
    *(values for _, values in CASES.values()),
    {"clusterKey": {"shared": True}},
    {"clusterKey": {"shared": True, "existingSecret": "mine"}, "imagePullSecrets": [{"name": "registry"}],
     "user": 1000650000,
     "decode": {"podSpec": {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}]}},
     "networkPolicy": {"clients": [{"podSelector": {}}], "monitoring": [{"namespaceSelector": {}}]},
     "controller": {"storageClass": "fast"}, "router": {"serviceType": "LoadBalancer"}},
    {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}}])
def test_manifests_are_valid(values: Object) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in chart(**values):
        kubernetes_validate.validate(one, VERSION, strict=True)


def test_helm_lints_the_chart_of_this_release() -> None:
    report = helm.lint(CHART, {"model": "org/model"}, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == version_of_kvferry()


@pytest.mark.parametrize(("values", "says"), [
    ({"model": ""}, "model"), ({"modle": "x"}, "modle"), ({"decode": {"replica": 2}}, "replica"),
    ({"prefill": {"replicas": -1}}, "replicas"), ({"router": {"port": "8000"}}, "port"),
    ({"controller": {"state": "here"}}, "state"), ({"user": 0}, "user"), ({"decode": {"kvRole": "decode"}}, "kvRole"),
    ({"router": {"tlsSecret": "A"}}, "tlsSecret"),
    ({"router": {"flags": ["--tls-cert-file", "x"]}}, "router.flags has --tls-cert-file.*router.tlsSecret names"),
    ({"env": {"KVFERRY_HTTP_CERT_FILE": "x"}}, "env.KVFERRY_HTTP_CERT_FILE.*controller.tlsSecret names")])
def test_bad_values_are_refused_by_their_name(values: Object, says: str) -> None:
    with pytest.raises(helm.HelmError, match=says):
        chart(**values)


def test_the_schema_knows_exactly_the_values_that_there_are() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(section: Object, values: Object, path: str) -> None:
        section = schema["$defs"][section["$ref"].split("/")[-1]] if "$ref" in section else section
        if "properties" in section:
            assert set(section["properties"]) - {"global"} == set(values), path  # Helm itself adds the value `global`
            for name, value in values.items():
                check(section["properties"][name], value, f"{path}.{name}")

    check(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")


def test_a_shared_key_is_the_pods_own_file_that_kvferry_accepts(tmp_path: Path) -> None:
    objects = chart(clusterKey={"shared": True})
    secret = by_name(objects)["Secret", "demo-cluster-key"]
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for name, template in pods(objects).items():
        assert template["securityContext"] | {"runAsNonRoot": True, "runAsUser": 14600} == template["securityContext"]
        pod = Pod(tmp_path / name, template, f"{name}-0", secrets_of(objects))
        assert pod.start().returncode == 0
        copy = Path(pod.env(pod.container)["KVFERRY_CLUSTER_KEY_FILE"])
        assert stat.S_IMODE(copy.stat().st_mode) == 0o400
        assert copy.read_bytes() == base64.b64decode(secret["data"]["cluster.key"])
        done = subprocess.run([KVFERRY, "token", "--cluster-key-file", copy], capture_output=True, text=True,
                              check=True)
        assert re.fullmatch(r"[0-9a-f]{64}\n", done.stdout)
    own = chart(clusterKey={"shared": True, "existingSecret": "mine"})
    assert not [one for one in own if one["kind"] == "Secret"]
    assert {pod["volumes"][0]["secret"]["secretName"] for pod in pods(own).values()} == {"mine"}


def test_without_a_shared_key_the_chart_makes_no_secret_and_only_the_controller_has_the_cluster_key() -> None:
    objects = chart()
    assert not [one for one in objects if one["kind"] == "Secret"]
    mounted = {name: [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
               for name, pod in pods(objects).items()}
    assert {name: secret["secretName"] for name, (secret, _) in mounted.items()} == {
        "demo-controller": "demo-cluster-key", "demo-prefill": "demo-prefill-keys", "demo-decode": "demo-decode-keys",
        "demo-router": "demo-router-keys"}
    assert all(members["secretName"] == "demo-members" and not members["optional"]
               for _, members in mounted.values())


def test_only_members_and_monitoring_reach_controller_and_servers() -> None:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    found = by_name(chart(networkPolicy={"monitoring": [monitoring]}))
    labels = found["Deployment", "demo-router"]["spec"]["template"]["metadata"]["labels"]
    for name in ("controller", "prefill", "decode"):
        policy = found["NetworkPolicy", f"demo-{name}"]["spec"]
        members, of_metrics = policy["ingress"]
        (peer,) = members["from"]
        assert set(peer) == {"podSelector"}
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
        assert "app.kubernetes.io/instance" in peer["podSelector"]["matchLabels"]
        assert of_metrics == {"ports": [{"port": "http"}], "from": [monitoring]}
    assert found["NetworkPolicy", "demo-router"]["spec"]["ingress"] == [{"ports": [{"port": "http"}], "from": []}]
    for (kind, name), one in found.items():
        if kind in ("NetworkPolicy", "PodDisruptionBudget"):
            chosen = (one["spec"].get("podSelector") or one["spec"]["selector"])["matchLabels"]
            assert chosen == next(pod["spec"]["template"]["metadata"]["labels"] for (of, its), pod in found.items()
                                  if its == name and of in ("StatefulSet", "Deployment"))
