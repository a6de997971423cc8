"""Tests launch/prefill, launch/decode, launch/controller and launch/quickstart: the exact commands, and one-line
errors.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch import paths
from kvferry_launch.node import start as node
from kvferry_launch.node.start import NodeError
from kvferry_launch.paths import REPO

PROBE = node.probe  # the fixture cpu_vllm replaces it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def cpu_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the probe of the interpreter by this answer, which a test may change."""
    found = {"cpu": "0.32.0", "vllm": "0.32.0", "kvferry": True}
    monkeypatch.setattr(node, "probe", lambda python: found)
    monkeypatch.setattr(node.preflight, "check_settings", lambda *_, **__: {})
    monkeypatch.delenv("KVFERRY_CONTROLLER", raising=False)
    return found


def command(kind: str, *words: str) -> tuple[list[str], dict[str, str]]:
    return node.engine_command(node.engine_parser(kind).parse_args(["--dry-run", *words]))


def config_of(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return found


def test_roles_follow_the_script_and_failed_loads_are_recomputed(model: Path) -> None:
    for kind, role, port in (("prefill", "kv_producer", 8100), ("decode", "kv_consumer", 8200)):
        assert config_of(command(kind, "--model", str(model))[0]) == {
            "kv_connector": "KvFerryConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"controller": "tcp://127.0.0.1:14600",
                                          "serves": f"http://127.0.0.1:{port}"}}


def test_the_controller_comes_from_the_flag_before_the_environment(model: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CONTROLLER", "tcp://a:1")
    from_environment = config_of(command("decode", "--model", str(model))[0])
    from_flag = config_of(command("decode", "--model", str(model), "--controller", "tcp://b:2")[0])
    assert from_environment["kv_connector_extra_config"]["controller"] == "tcp://a:1"
    assert from_flag["kv_connector_extra_config"]["controller"] == "tcp://b:2"


def test_extra_values_are_typed_and_words_after_the_dashes_come_last(model: Path) -> None:
    digits = 5000 * "9"  # too many digits for a number, so the value stays a string, which the connector refuses
    words, _ = command("prefill", "--model", str(model), "--extra", "chunk_tokens=128", "--extra", "path=shm",
                       "--extra", "save_decode_cache=false", "--extra", f"pool_bytes={digits}", "--advertise-host",
                       "10.0.0.7", "--engine-id", "p0", "--", "--max-model-len", "1024")
    assert words[-2:] == ["--max-model-len", "1024"]
    assert config_of(words)["engine_id"] == "p0"
    assert config_of(words)["kv_connector_extra_config"] == {
        "controller": "tcp://127.0.0.1:14600", "serves": "http://10.0.0.7:8100", "advertise_host": "10.0.0.7",
        "chunk_tokens": 128, "path": "shm", "save_decode_cache": False, "pool_bytes": digits}


def test_a_python_that_this_user_cannot_look_for_is_one_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may search every folder, so the reason here is a name that is too long.
    monkeypatch.setattr(node, "VENV_PYTHON", model / ("x" * 300))
    with pytest.raises(NodeError, match=r"can't check whether /.*x exists \(File name too long\); this user needs"):
        command("prefill", "--model", str(model))


def test_only_the_cpu_build_gets_cpu_flags(model: Path, cpu_vllm: dict[str, Any]) -> None:
    on_cpu, cpu_env = command("decode", "--model", str(model))
    cpu_vllm["cpu"] = None
    on_gpu, gpu_env = command("decode", "--model", str(model))
    assert "--enforce-eager" in on_cpu
    assert "--enforce-eager" not in on_gpu
    assert (cpu_env, gpu_env) == ({"VLLM_CPU_KVCACHE_SPACE": "1"}, {})


def test_a_python_without_kvferry_gets_the_build_on_its_path(model: Path, cpu_vllm: dict[str, Any]) -> None:
    cpu_vllm["kvferry"] = False
    assert command("decode", "--model", str(model))[1]["PYTHONPATH"].split(os.pathsep)[0].endswith("release/python")


@pytest.mark.parametrize(("words", "message"), [
    (["--model", "/no/such"], "--model /no/such is not a folder"),
    (["--model", "."], "is a folder without a config.json"),
    (["--model", "MODEL", "--kv-role", "boss"], "'boss', not one of kv_producer, kv_consumer, kv_both"),
    (["--model", "MODEL", "--controller", "b:2"], "'b:2', not tcp://HOST:PORT, stream://HOST:PORT"),
    (["--model", "MODEL", "--controller", "tcp://b:" + 5000 * "9"], "9', not tcp://HOST:PORT, stream://HOST:PORT"),
    (["--model", "MODEL", "--port", "70000"], "70000, not a port from 0 to 65535"),
    (["--model", "MODEL", "--extra", "chunk_tokens"], "'chunk_tokens', not KEY=VALUE"),
    (["--model", "MODEL", "surplus"], "'surplus' is not an option"),
    (["--model", ""], "--model is empty"),
    (["--model", "~no-such-user/x"], "--model ~no-such-user/x is not a folder"),
    (["--model", 300 * "x"], "x is not a folder (File name too long)"),
    (["--model", "MODEL", "--server", "a 'b"], "--server is 'a 'b', not a command line that a shell can split"),
    (["--model", "MODEL", "--extra", "a=" + 3000 * "["], "--extra a is nested too deeply"),
    (["--model", "MODEL", "--advertise-host", ""], "--advertise-host is empty"),
    (["--model", "MODEL", "--port", "0", "--host", "a..b"], "--host is 'a..b', not an address of this host"),
])
def test_bad_input_is_one_sentence_that_names_it(model: Path, words: list[str], message: str,
                                                 monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(NodeError) as caught:
        command("decode", *(str(model) if word == "MODEL" else word for word in words))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_port_0_becomes_one_that_stays_ours(model: Path) -> None:
    words, _ = command("decode", "--model", str(model), "--port", "0")
    port = int(words[words.index("--port") + 1])
    assert config_of(words)["kv_connector_extra_config"]["serves"] == f"http://127.0.0.1:{port}"
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", port))
    with socket.socket() as server:  # binds with the same options as vLLM
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()


@pytest.mark.parametrize(("words", "serves"), [
    (["--host", "10.1.2.3", "--port", "8300"], "http://10.1.2.3:8300"),
    (["--host", "0.0.0.0"], "http://127.0.0.1:8200"),  # this host's address on the route to the controller
    (["--host", "0.0.0.0", "--advertise-host", "10.1.2.3"], "http://10.1.2.3:8200"),
    (["--host", "0.0.0.0", "--advertise-host", "localhost"], "http://127.0.0.1:8200"),
    (["--host", "0.0.0.0", "--advertise-host", "no-such-host.invalid"], "http://no-such-host.invalid:8200"),
    (["--host", "0.0.0.0", "--advertise-host", "a..b"], "http://a..b:8200"),
    (["--host", "::1"], "http://[::1]:8200"),
    (["--extra", "serves=https://door"], "https://door"),
])
def test_routers_are_told_an_address_that_they_can_reach(model: Path, words: list[str], serves: str) -> None:
    found = node.engine_command(node.engine_parser("decode").parse_args(["--dry-run", "--model", str(model), *words]))
    assert config_of(found[0])["kv_connector_extra_config"]["serves"] == serves


@pytest.mark.parametrize(("route", "address"), [("10.9.8.7", "10.9.8.7"), (None, "127.0.1.1")])
def test_a_host_that_calls_itself_loopback_advertises_its_route(route: str | None, address: str, model: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    monkeypatch.setattr(node.serving, "own_address", lambda host, port: route)
    config = config_of(command("decode", "--model", str(model), "--advertise-host", "gpu7")[0])
    assert config["kv_connector_extra_config"]["advertise_host"] == address


@pytest.mark.parametrize("controller", [
    "tcp://c:1", "stream://c:1", "ipc://relative/path", "unix:///run/kvferry", "tcp://[::1]:14600",
    "tcp://a:1,stream://[fd00::2]:2,unix:///run/kvferry"])
def test_every_endpoint_of_a_controller_is_accepted_and_handed_on(controller: str, model: Path) -> None:
    config = config_of(command("prefill", "--model", str(model), "--controller", controller)[0])
    assert config["kv_connector_extra_config"]["controller"] == controller


@pytest.mark.parametrize("controller", [
    "", "c:1", "tcp://c", "tcp://c:0", "tcp://c:65536", "tcp://:1", "tcp://::1:14600", "tcp://a/b:1", "http://c:1",
    "unix://relative", "unix://\udcff", "unix://", "ipc://" + "x" * 108, "tcp://a:1,", "tcp://a:1,b:2"])
def test_what_is_not_an_endpoint_of_a_controller_is_refused(controller: str, model: Path) -> None:
    with pytest.raises(NodeError, match="--controller is"):
        command("prefill", "--model", str(model), "--controller", controller)


@pytest.mark.parametrize(("controller", "serves"), [
    ("tcp://far:1", "10.0.0.5"),
    ("tcp://[fd00::2]:1", "[fd00::5]"),
    ("unix:///run/kvferry", "10.0.0.9"),
    ("unix:///run/kvferry,tcp://far:1", "10.0.0.5"),
    ("tcp://127.0.0.1:1,stream://far:1", "10.0.0.5"),
    ("tcp://unknown:1,tcp://far:1", "10.0.0.5"),
    ("tcp://unknown:1", "10.0.0.9"),
    ("tcp://127.0.0.1:1", "127.0.0.1"),
    ("tcp://[::1]:1", "[::1]"),
])
def test_a_server_on_all_addresses_serves_at_a_routable_one(controller: str, serves: str, model: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"far": "10.0.0.5", "fd00::2": "fd00::5", node.serving.TEST_NET: "10.0.0.9", "127.0.0.1": "127.0.0.1",
              "::1": "::1"}
    monkeypatch.setattr(node.serving, "own_address", lambda host, port: routes.get(host))
    words, _ = command("decode", "--model", str(model), "--host", "0.0.0.0", "--controller", controller)
    assert config_of(words)["kv_connector_extra_config"]["serves"] == f"http://{serves}:8200"


def test_without_any_route_the_address_has_to_be_given(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.serving, "own_address", lambda host, port: None)
    with pytest.raises(NodeError, match="--advertise-host"):
        command("decode", "--model", str(model), "--host", "0.0.0.0", "--controller", "tcp://far:1")
    words, _ = command("decode", "--model", str(model), "--host", "0.0.0.0", "--controller", "unix:///run/kvferry")
    assert config_of(words)["kv_connector_extra_config"]["serves"] == "http://127.0.0.1:8200"


def test_the_controller_script_binds_to_tcp_and_ipc(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.preflight, "KVFERRY", sys.executable)
    for endpoint in ("tcp://[::]:0", f"ipc://{tmp_path}/socket"):
        monkeypatch.setattr(sys, "argv", ["launch/controller", "--dry-run", "--bind", endpoint])
        with pytest.raises(SystemExit):
            node.controller_main()
        assert f"--bind {shlex.quote(endpoint)}" in capsys.readouterr().out


@pytest.mark.parametrize(("is_installed", "remedy"), [
    (False, "build it with launch/setup"), (True, "install kvferry's wheel again"),
])
def test_without_a_binary_the_user_is_told_how_to_get_one(is_installed: bool, remedy: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "IS_INSTALLED", is_installed)
    monkeypatch.setattr(node.preflight, "kvferry_binary", lambda: None)
    monkeypatch.setattr(sys, "argv", ["launch/controller"])
    with pytest.raises(SystemExit) as ended:
        node.controller_main()
    assert str(ended.value).endswith(f"there is no kvferry binary at {paths.KVFERRY} or on PATH; {remedy}")


@pytest.mark.parametrize(("is_installed", "remedy"), [
    (False, "launch/setup builds it"), (True, "install its wheel there"),
])
def test_a_vllm_without_kvferry_is_told_with_what_to_do(is_installed: bool, remedy: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
echo '{"vllm": "1", "kvferry": null}'
""")
    python.chmod(0o755)
    monkeypatch.setattr(node, "IS_INSTALLED", is_installed)
    monkeypatch.setattr(node, "RELEASE", tmp_path)
    with pytest.raises(NodeError, match=f"has no kvferry; {remedy}"):
        PROBE(str(python))


def test_another_server_command_takes_the_place_of_vllms(model: Path) -> None:
    words, _ = command("decode", "--model", str(model), "--server", "conda run python -m x")
    assert words[:7] == ["conda", "run", "python", "-m", "x", "--model", str(model)]


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(NodeError, match=r"can't listen on 127\.0\.0\.1:\d+ .*choose another address or port"):
            node.check_port("127.0.0.1", taken.getsockname()[1])


def test_the_printed_command_is_the_one_that_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        node.become(["python", "-m", "x", '{"a": "b c"}'], {"A": "1 2"}, dry_run=True)
    assert ended.value.code == 0
    assert shlex.split(capsys.readouterr().out) == ["A=1 2", "python", "-m", "x", '{"a": "b c"}']


@pytest.mark.parametrize(("script", "words", "status", "message"), [
    ("prefill", ["--model", "/no/such"], 1, "launch/prefill: --model /no/such is not a folder"),
    ("controller", ["--bind", "nowhere"], 1, "launch/controller: --bind is 'nowhere', not tcp://HOST:PORT or ipc://PATH"),
    ("quickstart", ["--requests", "1"], 2, "--requests is 1, not 2 or more"),
    ("quickstart", ["--model", "/no/such"], 2, "--model /no/such is not a folder with a config.json"),
    ("quickstart", ["--json", "/no/such/file"], 2, "--json /no/such/file is in a folder that doesn't exist"),
])
def test_scripts_end_with_one_line_and_no_traceback(script: str, words: list[str], status: int, message: str) -> None:
    done = subprocess.run([sys.executable, str(REPO / "launch" / script), *words], capture_output=True, text=True,
                          check=False)
    assert done.returncode == status
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
