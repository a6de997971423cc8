"""Tests the checks of launch/prefill, launch/decode and `launch/cluster up` before vLLM starts, which takes a minute.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.cluster import cli, spec
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.node import preflight, start
from kvferry_launch.node.endpoints import Endpoint
from kvferry_launch.node.preflight import NodeError, check_memory, check_settings, wait_controller


def check(extra: dict[str, Any], **env: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return check_settings(sys.executable, extra, own | env, with_key=True)


def test_settings_are_checked_by_the_servers_interpreter(tmp_path: Path) -> None:
    assert check({}) == 1 << 30
    assert check({}, KVFERRY_POOL_BYTES="2MiB") == 2 << 20
    with pytest.raises(NodeError, match=r"^kv_connector_extra_config: unknown key 'pool_byte' "):
        check({"pool_byte": 1})
    with pytest.raises(NodeError, match=r"pool_bytes is 'many' \(from KVFERRY_POOL_BYTES\)"):
        check({}, KVFERRY_POOL_BYTES="many")
    key = tmp_path / "key"
    with pytest.raises(NodeError, match=f"cluster_key_file {key} can't be read"):
        check({"cluster_key_file": str(key)})
    assert check_settings(sys.executable, {"cluster_key_file": str(key)}, os.environ, with_key=False) > 0
    for other in ("true", "false", "/no/such/python"):
        assert check_settings(other, {"pool_byte": 1}, os.environ, with_key=True) == 0, "it has no kvferry to ask"


def test_a_kvferry_that_can_not_be_loaded_is_told_where_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "kvferry").mkdir()
    (tmp_path / "kvferry" / "__init__.py").write_text("raise ImportError('libzmq5 is missing')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert check_settings(sys.executable, {}, env, with_key=True) == 0
    with pytest.raises(NodeError, match="can't load kvferry: libzmq5 is missing"):
        check_settings(sys.executable, {}, env, with_key=True, needs_kvferry=True)


def test_a_pool_that_the_host_has_no_memory_for_is_refused() -> None:
    check_memory(1)
    with pytest.raises(NodeError, match=r"pool_bytes is 1152921504606846976, but only \d+ bytes of memory are free"):
        check_memory(1 << 60)


def test_one_controller_of_a_list_has_to_answer(tmp_path: Path) -> None:
    nobody = [Endpoint("127.0.0.1", 1), Endpoint("a..b", 1), Endpoint(path=str(tmp_path / "none"))]
    begin = time.monotonic()
    with pytest.raises(NodeError, match=r"no controller answers at tcp://127\.0\.0\.1:1,more within 0 s; start one"):
        wait_controller("tcp://127.0.0.1:1,more", nobody, within_s=0.3)
    assert time.monotonic() - begin < 3.0
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        wait_controller("", [*nobody, Endpoint("127.0.0.1", tcp.getsockname()[1])], within_s=0.3)
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        wait_controller("", [Endpoint(path=str(tmp_path / "socket"))], within_s=0.3)


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_dry_run_needs_no_controller(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(preflight, "wait_controller", lambda given, _: asked.append(given))
    parser = start.engine_parser("decode")
    words = ["--model", "x", "--server", "true", "--controller", "tcp://c:1,unix:///d", "--port", "0", *flags]
    start.engine_command(parser.parse_args(words))
    assert asked == ([] if flags else ["tcp://c:1,unix:///d"])
    with pytest.raises(NodeError, match="unknown key 'pool_byte'"):
        start.engine_command(parser.parse_args([*words, "--extra", "pool_byte=1"]))


@pytest.mark.parametrize(("document", "message"), [
    ({"decode": {"extra": {"pool_byte": 1}}}, "decode.extra: kv_connector_extra_config: unknown key 'pool_byte'"),
    ({"prefill": {"env": {"KVFERRY_PATH": "air"}}}, "prefill.extra: setting path is 'air' (from KVFERRY_PATH)"),
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
