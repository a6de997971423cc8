"""Tests the YAML of deployments: short files work, and each mistake gives one sentence that names the key, its value
and the allowed values.
"""

import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.cluster import spec
from kvferry_launch.cluster.plan import Planner
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.paths import REPO

SHORT = {"name": "demo", "model": "org/model"}


def made(document: Any, on: str | None = None) -> spec.Spec:
    return spec.make(document, Path("demo.yaml"), on)


def test_two_lines_are_a_deployment() -> None:
    found = made(SHORT)
    assert (found.on, found.namespace, found.restart) == ("local", "default", 3)
    assert {name: (role.replicas, role.kv_role, role.port) for name, role in found.roles.items()} == {
        "prefill": (1, "kv_producer", 0), "decode": (1, "kv_consumer", 0)}
    assert found.router["kind"] == "vllm-router"


def test_a_model_folder_is_found_from_the_file_and_a_name_stays(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text("{}")
    found = spec.make(SHORT | {"model": "models"}, tmp_path / "demo.yaml")
    assert found.model == str(tmp_path / "models")
    assert made(SHORT).model == "org/model"


def test_flags_of_parallelism_come_before_the_users_own() -> None:
    found = made(SHORT | {"prefill": {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4,
                                      "flags": ["--max-model-len", 8192]}})
    assert found.roles["prefill"].vllm_flags() == [
        "--tensor-parallel-size", "2", "--pipeline-parallel-size", "3", "--data-parallel-size", "4",
        "--max-model-len", "8192"]


@pytest.mark.parametrize(("change", "message"), [
    ({"name": None}, "name is missing; it must be a name of 1 to 40 lower-case letters, digits and dashes, with no "
                     "dash at its start or end"),
    ({"name": "Demo_1"}, "name is 'Demo_1', not a name of 1 to 40 lower-case letters, digits and dashes, with no dash "
                         "at its start or end"),
    ({"model": None}, "model is missing; it must be a string of at least one character, without zero bytes and "
                      "surrogates"),
    ({"model": 3}, "model is 3, not a string of at least one character, without zero bytes and surrogates"),
    ({"prefil": {}}, "'prefil' is not a key of a deployment; did you mean 'prefill'?"),
    ({"zzz": 1}, "'zzz' is not a key of a deployment; known keys are name, model, namespace, on, hosts, logs, "
                 "restart, ready_timeout_s, drain_timeout_s, vllm, env, controller, router, prefill, decode, ssh, "
                 "slurm, mpi, kubernetes"),
    ({"decode": {"replica": 2}}, "'replica' is not a key in decode; did you mean 'replicas'?"),
    ({"decode": 2}, "decode is 2, not a map; known keys are replicas, hosts, hosts_per_replica, tensor_parallel, "
                    "pipeline_parallel, data_parallel, kv_role, port, cores, flags, env, extra"),
    ({"decode": {"replicas": "two"}}, "decode.replicas is 'two', not a whole number from 0 to 1024"),
    ({"decode": {"replicas": True}}, "decode.replicas is True, not a whole number from 0 to 1024"),
    ({"decode": {"replicas": -1}}, "decode.replicas is -1, not a whole number from 0 to 1024"),
    ({"decode": {"kv_role": "boss"}}, "decode.kv_role is 'boss', not one of kv_producer, kv_consumer, kv_both"),
    ({"decode": {"port": 70000}}, "decode.port is 70000, not a port from 0 to 65535 (0: any free port)"),
    ({"decode": {"port": 8200, "replicas": 2}}, "decode.port is 8200, but 2 replicas share this host; use 0, so that "
                                                "each takes a free port"),
    ({"decode": {"cores": ["0"], "replicas": 2}}, "decode.cores has 1 entries, not one for each of 2 replicas"),
    ({"decode": {"flags": "--a"}}, "decode.flags is '--a', not a list of strings or numbers"),
    ({"decode": {"env": {"A B": "1"}}}, "decode.env is {'A B': '1'}, not a map of environment variables to strings "
                                        "or numbers"),
    ({"decode": {"extra": [1]}}, "decode.extra is [1], not a map of keys of kv_connector_extra_config to their values "
                                 "in JSON"),
    ({"decode": {"extra": {"a": date(2026, 1, 1)}}}, "decode.extra is {'a': datetime.date(2026, 1, 1)}, not a map of "
                                                     "keys of kv_connector_extra_config to their values in JSON"),
    ({"env": {"A": "x\0y"}}, "env is {'A': 'x\\x00y'}, not a map of environment variables to strings or numbers"),
    ({"vllm": ["a\0"]}, "vllm is ['a\\x00'], not a list of strings or numbers"),
    ({"model": "a\ud800"}, "model is 'a\\ud800', not a string of at least one character, without zero bytes and "
                           "surrogates"),
    ({"decode": {"extra": {"a": "\ud800"}}}, "decode.extra is {'a': '\\ud800'}, not a map of keys of "
                                             "kv_connector_extra_config to their values in JSON"),
    ({"decode": {"extra": {"a": float("inf")}}}, "decode.extra is {'a': inf}, not a map of keys of "
                                                 "kv_connector_extra_config to their values in JSON"),
    ({"model": "~no-such-user/x"}, "'~no-such-user/x' begins with ~ or ~USER, but no home folder of "
                                   "that user is known"),
    ({"decode": {"extra": {"serves": "x"}}}, "decode.extra.serves is given, but the launcher sets it; remove it"),
    ({"decode": {"hosts_per_replica": 2}}, "decode.hosts_per_replica is 2, but 'on' is local; only kubernetes can "
                                           "spread a replica over hosts"),
    ({"on": "cloud"}, "on is 'cloud', not one of local, ssh, slurm, mpi, kubernetes"),
    ({"on": "ssh"}, "hosts is missing; with 'on' ssh, list the hosts there, or in prefill.hosts and decode.hosts"),
    ({"on": "kubernetes"}, "kubernetes.image is missing; it must name an image with vLLM and kvferry's "
                           "wheel"),
    ({"on": "kubernetes", "kubernetes": {"image": "x"}, "decode": {"port": 9}},
     "decode.port is 9 and prefill.port is 0; they must be equal, because vllm-router looks for pods at one port only"),
    ({"kubernetes": {"router_tls_secret": "A"}},
     "kubernetes.router_tls_secret is 'A', not the name of a Secret: up to 253 lower-case letters, digits, dashes and "
     "dots, with a letter or digit at both ends"),
    ({"on": "kubernetes", "kubernetes": {"image": "x", "router_tls_secret": "a"}},
     "kubernetes.router_tls_secret is given, but router.kind is vllm-router; only proxy takes the certificate in a "
     "Secret"),
    ({"on": "kubernetes", "kubernetes": {"image": "x"}, "env": {"KVFERRY_HTTP_KEY_FILE": "k"}},
     "env.KVFERRY_HTTP_KEY_FILE is given, but on kubernetes the certificate is in a Secret, which "
     "kubernetes.controller_tls_secret names; remove it"),
    ({"on": "kubernetes", "kubernetes": {"image": "x"},
      "router": {"kind": "proxy", "flags": ["--tries", 2, "--tls-cert-file=a"]}},
     "router.flags has --tls-cert-file, but on kubernetes the certificate is in a Secret, which "
     "kubernetes.router_tls_secret names; remove it"),
    ({"hosts": ["a"]}, "hosts is given (at the top, or in prefill or decode), but 'on' is local; set 'on' to ssh, "
     "slurm or mpi, or remove hosts"),
    ({"on": "ssh", "hosts": "a"}, "hosts is 'a', not a list of host names, or a map of host names to the addresses "
                                  "at which other hosts reach them"),
    ({"on": "ssh", "hosts": ["-oProxyCommand=x"]}, "hosts is ['-oProxyCommand=x'], not a list of host names, or a map "
                                                   "of host names to the addresses at which other hosts reach them"),
    ({"on": "mpi", "decode": {"hosts": ["a"]}}, "decode.hosts is given, but mpi chooses the hosts; remove it"),
    ({"router": {"kind": "nginx"}}, "router.kind is 'nginx', not one of vllm-router, proxy, none"),
    ({"router": {"prot": 1}}, "'prot' is not a key in router; did you mean 'port'?"),
    ({"controller": {"http": -1}}, "controller.http is -1, not a port from 0 to 65535 (0: any free port)"),
    ({"slurm": {"time": 30}}, "slurm.time is 30, not a time limit as sbatch takes it, such as \"02:00:00\""),
    ({"mpi": {"ranks": 1}}, "mpi.ranks is 1, not a whole number from 2 to 10000"),
    ({"restart": -2}, "restart is -2, not a whole number from 0 to 1000"),
])
def test_each_mistake_is_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        made({key: value for key, value in (SHORT | change).items() if value is not None})
    assert str(caught.value) == message


@pytest.mark.parametrize(("text", "message"), [
    (b"- a\n- b\n", "the file is ['a', 'b'], not a map; known keys are name, model,"),
    (b"name: [\n", "is not YAML: while parsing"),
    (b"", "name is missing"),
    (b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
    (b"a: " + 5000 * b"[", "is nested too deeply"),
    (b"name: \0\n", "is not YAML: unacceptable character #x0000"),
    (b"name: a\nrestart: " + 5000 * b"9", f"is not YAML: '{40 * '9'}' is not a valid int in \"bad.yaml\", "
                                         "line 2, column 10"),
    (b"name: 2026-13-45\n", "is not YAML: '2026-13-45' is not a valid timestamp in"),
    (b"name: !!bool x\n", "is not YAML: 'x' is not a valid bool in"),
    (b"name: !!timestamp x\n", "is not YAML: 'x' is not a valid timestamp in"),
    (b"name: !!int \"\"\n", "is not YAML: '' is not a valid int in"),
    (b"name: a\nmodel: x\nname: b\n", "the key 'name' occurs twice in one map"),
    (b"name: a\nmodel: x\nprefill: {env: {A: 1, A: 2}}\n", "the key 'A' occurs twice in one map"),
    (b"name: a\nmodel: x\nhosts: [{a: 1, a: 2}]\n", "the key 'a' occurs twice in one map"),
])
def test_what_is_no_map_is_refused(text: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text)
    with pytest.raises(SpecError) as caught:
        spec.load(file)
    assert message in str(caught.value)


def test_a_map_may_change_what_it_merges(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text("name: a\nmodel: x\nprefill: &p {port: 7, replicas: 1}\ndecode: {<<: *p, port: 8}\n")
    assert {name: role.port for name, role in spec.load(file).roles.items()} == {"prefill": 7, "decode": 8}


def test_json_is_read_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = tmp_path / "deployment.json"
    for text, message in (('{"name": "a", "name": "b"}', "the key 'name' occurs twice"), ("{", "is not JSON: ")):
        file.write_text(text)
        with pytest.raises(SpecError, match=message):
            spec.load(file)
    file.write_text('{"name": "a", "model": "x"}')
    assert spec.load(file).name == "a"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SpecError, match=r"can't read /no/such\.yaml: No such file or directory"):
        spec.load(Path("/no/such.yaml"))


def test_the_local_example_can_be_scaled() -> None:
    planner = Planner(spec.load(REPO / "launch" / "examples" / "cluster" / "local.yaml"))
    nodes = planner.all()
    assert [planner.engine(role, nodes).name for role in ("prefill", "decode")] == ["prefill-1", "decode-1"]


def test_every_example_is_valid() -> None:
    examples = sorted((REPO / "launch" / "examples" / "cluster").glob("*.yaml"))
    assert [spec.load(example).on for example in examples] == ["kubernetes", "local", "mpi", "slurm", "ssh"]
