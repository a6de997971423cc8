"""Tests HTTPS on Kubernetes: the controller and the proxy run with the commands and the Secrets of their pods, and are
asked as probes ask. The proxy must reach the controller, also after the renewal of its certificate.
"""

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import ask, make_certificate
from deployment import eventually
from kvferry_launch.cluster import kubernetes, spec
from kvferry_launch.paths import KVFERRY, LAUNCH, REPO
from kvferry_launch.process import free_port
from pods import Object, Pod

SECRETS = {"controller": "for-controller", "router": "for-clients"}
REACHED = "kvferry_proxy_controller_up 1"


def templates_of(source: str, **ports: int) -> dict[str, Object]:
    """Returns the spec of each component's pods in the launcher's manifests or those of the Helm chart. The ports are
    those of the controller, its HTTP API and the router.
    """
    if source == "launcher":
        document: Any = {"name": "tested", "model": "org/model", "on": "kubernetes",
                         "controller": {"port": ports["port"], "http": ports["http"]},
                         "router": {"kind": "proxy", "port": ports["router"]},
                         "kubernetes": {"image": "vllm:1", "path": str(REPO), "controller_tls_secret": "for-controller",
                                        "router_tls_secret": "for-clients"}}
        objects = list(yaml.safe_load_all(kubernetes.render(spec.make(document, Path("tested.yaml")))))
    else:
        helm = pytest.importorskip("helm_python", reason="launch/setup --tests installs it")
        with helm.Chart.load(LAUNCH / "deploy" / "helm" / "kvferry") as chart:
            rendered = chart.render({
                "model": "org/model", "path": str(REPO),
                "controller": {"port": ports["port"], "http": ports["http"], "state": "none",
                               "tlsSecret": "for-controller"},
                "router": {"port": ports["router"], "tlsSecret": "for-clients"}}, name="tested", namespace="serving")
        objects = [one for name, text in rendered.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    return {one["metadata"]["name"].removeprefix("tested-"): one["spec"]["template"]["spec"] for one in objects
            if one and one["kind"] in ("StatefulSet", "Deployment")}


def secret(folder: Path, name: str) -> dict[str, bytes]:
    """Makes a certificate, and returns the Secret's files as cert-manager writes them for one that signs itself."""
    certificate, key = make_certificate(folder, name, "tested-controller")
    return {"tls.crt": certificate.read_bytes(), "tls.key": key.read_bytes(), "ca.crt": certificate.read_bytes()}


@pytest.fixture
def running() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(pod: Pod, running: contextlib.ExitStack, log: Path, *words: str) -> "subprocess.Popen[bytes]":
    assert pod.start().returncode == 0
    # A pod reaches the controller by the name of its Service; here that name has no address.
    words = (*words, *(word.replace("//tested-controller:", "//127.0.0.1:") for word in pod.command()[1:]))
    process = running.enter_context(subprocess.Popen(
        words, stdout=log.open("wb"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=os.environ | pod.env(pod.container)))
    running.callback(process.terminate)
    return process


@pytest.mark.parametrize("source", ["launcher", "chart"])
def test_pods_and_their_probes_speak_https(tmp_path: Path, running: contextlib.ExitStack, source: str) -> None:
    keygen = [KVFERRY, "keygen"]
    subprocess.run([*keygen, "cluster.key"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([*keygen, "--add-node", "tested-router", "--role", "reader", "cluster.key"], cwd=tmp_path,
                   check=True, capture_output=True)
    ports = {name: free_port() for name in ("port", "http", "router")}
    secrets = {"tested-cluster-key": {"cluster.key": (tmp_path / "cluster.key").read_bytes()},
               "tested-router-keys": {"tested-router.key": (tmp_path / "tested-router.key").read_bytes()},
               "tested-members": {"kvferry.members": (tmp_path / "kvferry.members").read_bytes()},
               **{name: secret(tmp_path, name) for name in SECRETS.values()}}
    templates = templates_of(source, **ports)
    pods = {name: Pod(tmp_path / name, templates[name], f"tested-{name}-0", secrets) for name in SECRETS}
    controller, router = pods["controller"], pods["router"]
    assert f"https://tested-controller:{ports['http']}" in router.container["command"]
    process = start(controller, running, tmp_path / "controller.log", str(KVFERRY))
    start(router, running, tmp_path / "proxy.log", sys.executable, str(LAUNCH / "proxy"))

    for probe in ("readinessProbe", "livenessProbe"):
        eventually(lambda probe=probe: controller.probed(probe) == 200, (tmp_path / "controller.log").read_text)
    eventually(lambda: router.probed("readinessProbe") == 503, (tmp_path / "proxy.log").read_text)
    assert router.probed("livenessProbe") == 200, "no server is there, which a restart of the proxy does not mend"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{ports['router']}/health", timeout=10.0)

    def metrics() -> str:
        return ask(f"https://127.0.0.1:{ports['router']}/metrics", tmp_path / "for-clients.crt")[1]

    eventually(lambda: REACHED in metrics(), (tmp_path / "proxy.log").read_text)
    assert secrets["for-controller"]["tls.key"] not in router.seen()
    assert secrets["for-clients"]["tls.key"] not in controller.seen()

    renewed = secret(tmp_path, "for-controller")
    controller.update("tls", renewed)
    eventually(lambda: controller.probed("readinessProbe") == 200
               and "read the certificate" in (tmp_path / "controller.log").read_text())
    process.terminate()  # which also ends the connections that were made with the former certificate
    assert process.wait(20.0) == 0
    start(controller, running, tmp_path / "controller.log", str(KVFERRY))
    eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in (tmp_path / "proxy.log").read_text())
    assert REACHED not in metrics()
    router.update("controller-ca", renewed)
    eventually(lambda: REACHED in metrics(), (tmp_path / "proxy.log").read_text)


def test_other_authorities_in_the_environment_stay() -> None:
    document: Any = {"name": "tested", "model": "org/model", "on": "kubernetes", "router": {"kind": "proxy"},
                     "env": {"SSL_CERT_FILE": "/mine.crt"},
                     "kubernetes": {"image": "vllm:1", "controller_tls_secret": "for-controller"}}
    router = kubernetes.router(spec.make(document, Path("tested.yaml")))[-1]["spec"]["template"]["spec"]
    given = {one["name"]: one["value"] for one in router["containers"][0]["env"]}
    assert given["SSL_CERT_FILE"] == "/mine.crt"
    assert "controller-ca" not in {one["name"] for one in router["volumes"]}
