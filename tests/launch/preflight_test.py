"""Tests the checks of launch/prefill, launch/decode and `launch/cluster up` before vLLM starts, which takes a minute.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.cluster import cli, spec
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.node import preflight, start
from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.node.endpoints import Endpoint
from kvferry_launch.node.preflight import (
    NodeError,
    check_memory,
    check_settings,
    kvferry_binary,
    model_name,
    wait_controller,
    why_not_join,
)
from kvferry_launch.testbed.servers import CONTROLLER_FLAGS, Controller, running_controller
from nodes_by_hand import Node

OWN = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}


def check(extra: dict[str, Any], **env: str) -> dict[str, Any]:
    return check_settings(sys.executable, extra, OWN | env, with_key=True)


def test_settings_are_checked_by_the_servers_interpreter(tmp_path: Path) -> None:
    assert check({}) == {"pool_bytes": 0, "namespace": "default", "cluster_key_file": ""}
    assert check({}, KVFERRY_POOL_BYTES="2MiB")["pool_bytes"] == 2 << 20
    with pytest.raises(NodeError, match=r"^kv_connector_extra_config: unknown key 'pool_byte' "):
        check({"pool_byte": 1})
    with pytest.raises(NodeError, match=r"pool_bytes is 'many' \(from KVFERRY_POOL_BYTES\)"):
        check({}, KVFERRY_POOL_BYTES="many")
    key = tmp_path / "key"
    with pytest.raises(NodeError, match=f"cluster_key_file {key} can't be read"):
        check({"cluster_key_file": str(key)})
    assert check_settings(sys.executable, {"cluster_key_file": str(key)}, os.environ, with_key=False)
    for other in ("true", "false", "/no/such/python"):
        assert check_settings(other, {"pool_byte": 1}, os.environ, with_key=True) == {}, "it has no kvferry to ask"


def test_a_kvferry_that_can_not_be_loaded_is_told_where_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "kvferry").mkdir()
    (tmp_path / "kvferry" / "__init__.py").write_text("raise ImportError('libzmq5 is missing')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert check_settings(sys.executable, {}, env, with_key=True) == {}
    with pytest.raises(NodeError, match="can't load kvferry: libzmq5 is missing"):
        check_settings(sys.executable, {}, env, with_key=True, needs_kvferry=True)


def test_a_pool_that_the_host_has_no_memory_for_is_refused() -> None:
    check_memory(1)
    with pytest.raises(NodeError, match=r"pool_bytes is 1152921504606846976, but only \d+ bytes of memory are free"):
        check_memory(1 << 60)


def test_one_controller_of_a_list_has_to_answer(tmp_path: Path) -> None:
    nobody = [Endpoint("127.0.0.1", 1), Endpoint("a..b", 1), Endpoint(path=str(tmp_path / "none"))]
    begin = time.monotonic()
    with pytest.raises(NodeError, match=r"no controller answers at tcp://127\.0\.0\.1:1,b,c within 0 s; start one"):
        wait_controller("tcp://127.0.0.1:1,b,c", nobody, str, within_s=0.3)
    assert time.monotonic() - begin < 3.0
    asked: list[str] = []

    def objects_to_tcp(text: str) -> str:
        asked.append(text)
        return "it has another key" * (text == "tcp")

    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        here = Endpoint("127.0.0.1", tcp.getsockname()[1])
        wait_controller("a,b,c,tcp,unix", [*nobody, here, Endpoint(path=str(tmp_path / "socket"))], objects_to_tcp, 0.3)
        assert asked == ["tcp", "unix"]
        with pytest.raises(NodeError, match=r"^it has another key$"):
            wait_controller("tcp", [here], objects_to_tcp, within_s=0.3)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Controller]:
    """A controller with a cluster key."""
    flags = (*CONTROLLER_FLAGS, "--stream", f"unix://{tmp_path}/stream")
    with running_controller("keyed", tmp_path, flags, ensure_key(tmp_path / "key")) as controller:
        yield controller


def why_not(controller: Controller, key: Path | str, model: str = "toy", engine_id: str = "p1",
            namespace: str = "default") -> str:
    settings = {"cluster_key_file": str(key), "namespace": namespace}
    env = OWN | {"KVFERRY_CONTROLLER": "tcp://replica-1:1,tcp://replica-2:1"}  # --controller has precedence
    return why_not_join(kvferry_binary(), settings, env, model, engine_id, controller.address)


def test_a_server_without_the_controllers_key_is_refused(keyed: Controller, tmp_path: Path) -> None:
    assert keyed.key_file is not None
    assert why_not(keyed, keyed.key_file) == ""
    assert "this process has no cluster key" in why_not(keyed, "")
    assert "must have the same key" in why_not(keyed, ensure_key(tmp_path / "other"))
    assert why_not_join(None, {"cluster_key_file": ""}, OWN, "toy", None, keyed.address) == "", "no command to ask with"
    assert why_not_join("/no/such/kvferry", {"cluster_key_file": ""}, OWN, "toy", None, keyed.address) == ""
    words = ["--model", "toy", "--server", "true", "--port", "0", "--controller", keyed.address]
    given = start.engine_parser("decode").parse_args([*words, "--extra", f"cluster_key_file={tmp_path}/other"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NodeError, match="must have the same key"):
        patch.setattr(preflight.wait_controller, "__defaults__", (0.0,))
        patch.setattr(start, "VENV_PYTHON", Path(sys.executable))
        start.engine_command(given)


def test_a_namespace_that_serves_another_model_is_refused(keyed: Controller, tmp_path: Path) -> None:
    assert keyed.key_file is not None
    node = Node(f"{tmp_path}/stream", "p0", "kv_producer", None)
    assert why_not(keyed, keyed.key_file, "/models/other/") == (
        f"namespace default of controller {keyed.address} serves the model toy (node p0), not other; choose another "
        "namespace with --extra namespace=NAME, or stop its nodes")
    assert why_not(keyed, keyed.key_file, "/hub/models--org--toy/snapshots/0f") == ""
    assert why_not(keyed, keyed.key_file, "other", engine_id="p0") == "", "it replaces p0"
    assert why_not(keyed, keyed.key_file, "other", namespace="mine") == ""
    assert why_not(keyed, keyed.key_file, "") == "", "the model is not known"
    node.close()


@pytest.mark.parametrize(("source", "name"), [("/a/toy/", "toy"), ("toy#0f12", "toy"), ("org/toy@main", "toy"),
                                              ("/hub/models--org--toy/snapshots/0f", "toy"), ("toy:Q4_K", "toy")])
def test_a_models_name_is_the_last_part_of_its_source(source: str, name: str) -> None:
    assert model_name(source) == name


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_dry_run_needs_no_controller(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(preflight, "wait_controller", lambda given, *_: asked.append(given))
    parser = start.engine_parser("decode")
    words = ["--model", "x", "--server", "true", "--controller", "tcp://c:1,unix:///d", "--port", "0", *flags]
    start.engine_command(parser.parse_args(words))
    assert asked == ([] if flags else ["tcp://c:1,unix:///d"])
    with pytest.raises(NodeError, match="unknown key 'pool_byte'"):
        start.engine_command(parser.parse_args([*words, "--extra", "pool_byte=1"]))


@pytest.mark.parametrize(("document", "message"), [
    ({"decode": {"extra": {"pool_byte": 1}}}, "decode.extra or env: kv_connector_extra_config: unknown key "
     "'pool_byte'"),
    ({"prefill": {"env": {"KVFERRY_PATH": "air"}}}, "prefill.extra or env: setting path is 'air' (from KVFERRY_PATH)"),
    ({"model": "./none"}, "model is './none', not a folder with a config.json"),
    ({"on": "ssh", "hosts": ["h"], "model": "/on/the/hosts"}, ""),
])
def test_up_checks_settings_and_the_models_folder(document: dict[str, Any], message: str, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    made = spec.make({"name": "a", "model": "x"} | document, tmp_path / "demo.yaml")
    monkeypatch.setattr(cli, "load", lambda *_: made)
    arguments = argparse.Namespace(file=made.file, on=None, dry_run=True, json=False)
    if message:
        with pytest.raises(SpecError) as caught:
            cli.up(arguments)
        assert message in str(caught.value)
        assert not capsys.readouterr().out
    else:
        assert cli.up(arguments) == 0
