"""Runs the commands of the documents. Each line of an `sh` fence runs here or in a test that this file names, or this
file says why the line does not run.

Placeholders (MODEL, NODE, FILE, hosts, ports) get values of this host; everything else runs as the document says.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import documents, fenced_commands
from kvferry_launch.node import preflight
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR
from kvferry_launch.paths import KVFERRY, REPO
from kvferry_launch.process import free_port

DEADLINE_S = 60.0

# The beginnings of lines that another test runs, each with the path of that test and a phrase that the test contains.
RUN_ELSEWHERE = (
    ("launch/quickstart", "tests/vllm/test_quickstart.py", '"launch" / "quickstart"'),
    ("launch/wheel", "tests/launch/clean_install_test.py", '"launch" / "wheel"'),
    ("cmake --install build/release", "tests/launch/example_test.py", '"--install"'),
    ("cmake -S launch/examples/move_blocks", "tests/launch/example_test.py", "move_blocks"),
    ("cmake --build build/move_blocks", "tests/launch/example_test.py", "every byte is right"),
    ("launch/cluster up launch/examples/cluster/local.yaml", "tests/vllm/test_quickstart.py", "local.yaml"),
    ("curl -s http://127.0.0.1:8000/v1/completions", "tests/vllm/test_quickstart.py", '"curl "'),
    ("launch/cluster status", "tests/launch/cluster_local_test.py", '"status"'),
    ("launch/cluster scale", "tests/launch/cluster_local_test.py", '"scale"'),
    ("launch/cluster down", "tests/launch/cluster_local_test.py", '"down"'),
    ("launch/cluster keys", "tests/launch/cluster_pod_keys_test.py", '"--add-node", "grafana", "--role", "reader"'),
    ("kvferry controller --bind tcp://0.0.0.0:14600 --etcd", "tests/controller/faults/fleet.cpp", "--event-log"),
    ("kvferry controller --bind tcp://0.0.0.0:14600 --cluster-key-file", "tests/launch/proxy_https_test.py",
     '"--http-cert-file"'),
    ("SSL_CERT_FILE=ca.crt launch/proxy", "tests/launch/proxy_https_test.py", '"SSL_CERT_FILE"'),
    ("kvferry keygen --add", "tests/security/rotation_test.py", '"--add", "--switch", "--retire"'),
    ("kvferry keygen --switch", "tests/security/rotation_test.py", '"--add", "--switch", "--retire"'),
    ("kvferry keygen --retire", "tests/security/rotation_test.py", '"--add", "--switch", "--retire"'),
    ("kvferry keygen --add-node", "tests/security/members_test.py", '"--add-node'),
    ("kvferry keygen --revoke", "tests/security/members_test.py", '"--revoke'),
    ("kvferry explain", "tests/launch/cli/explain/explain_test.cpp", '"explain "'),
    ("kvferry top", "tests/launch/cli/check_cli.py", '"top", "--once"'),
    ("kvferry bench transfer", "tests/launch/bench_test.py", '"bench", "transfer"'),
    ("kvferry bench controller", "tests/launch/bench/controller/controller_bench_test.cpp",
     "ASmallRunGivesEveryFigure"),
    ("kvferry bench fleet", "tests/launch/bench/fleet/fleet_bench_test.cpp", "ASmallFleetGivesEveryFigure"),
    ("vllm-router", "tests/vllm/test_router.py", "vllm-router"),
    ("cmake --preset cuda", "tests/run", "cuda_toolkit"),
    ("tests/cluster/run", "tests/vllm/test_cluster.py", '"--quick"'),
    ("launch/proxy --otlp-endpoint", "tests/launch/proxy_tracing_test.py", '"--otlp-endpoint"'),
    ("vllm serve MODEL --otlp-traces-endpoint", "tests/vllm/test_tracing.py", "otlp_collector"),
    ("vllm serve MODEL --kv-events-config", "tests/vllm/test_kv_events.py", '"--kv-events-config"'),
)
NOT_RUN = {
    "tests/gpu/run": "needs a GPU",
    "kvferry bench connector --peers": "installs NIXL and LMCache from PyPI",
    "tests/bench/serve/run": "measures for half an hour, beside packages from PyPI",
    "tests/bench/proxy_bench.py": "measures for minutes",
}


class Desk:
    """A folder of an operator, with the checkout's `launch` and `build`, a cluster key, and the port of a controller
    with two nodes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("launch", "build", "connector"):
            (folder / name).symlink_to(REPO / name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        subprocess.run([KVFERRY, "keygen", folder / "cluster.key"], check=True, capture_output=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        path = [str(KVFERRY.parent), str(Path(sys.executable).parent), own["PATH"]]
        self.port = free_port()
        self.env = own | {"PATH": os.pathsep.join(path), "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"),
                          "KVFERRY_CONTROLLER": f"tcp://127.0.0.1:{self.port}",
                          "KVFERRY_CLUSTER_KEY_FILE": str(folder / "cluster.key")}

    def filled_in(self, line: str, **values: str) -> str:
        """Returns the line with this host's values in place of the placeholders."""
        values = {r"\bMODEL\b": "model", r"tcp://(0\.0\.0\.0|c):14600": f"tcp://127.0.0.1:{self.port}",
                  r"0\.0\.0\.0": "127.0.0.1"} | values
        for pattern, value in values.items():
            line = re.sub(pattern, value, line)
        return line

    def run(self, line: str) -> str:
        done = subprocess.run(["bash", "-c", line], cwd=self.folder, env=self.env, capture_output=True, text=True,
                              timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, f"{line}: status {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, line: str, says: str) -> Iterator[subprocess.Popen[str]]:
        """Runs a server in the background and waits until it prints a line with `says`. At the end, SIGTERM must end
        the server with status 0.
        """
        with subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            said = []
            try:
                while not said or not re.search(says, said[-1]):
                    said.append(process.stdout.readline())
                    assert said[-1], f"{line} ended: {''.join(said)}"
                yield process
            finally:
                process.terminate()
            assert process.wait(DEADLINE_S) == 0

    def node(self, name: str, api: ModuleType) -> Any:
        client = api.Client(self.env["KVFERRY_CONTROLLER"], engine_id=name, namespace="default", fingerprint="m",
                            cluster_key_file=self.env["KVFERRY_CLUSTER_KEY_FILE"])
        assert client.wait_registered(DEADLINE_S)
        return client


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def deployment(desk: Desk) -> Iterator[Desk]:
    """Runs the README's controller and the nodes NODE and `other`, which have the same four chunks."""
    sys.path.insert(0, str(REPO / "build" / "release" / "python"))
    api = pytest.importorskip("kvferry.controller")
    sys.path.pop(0)
    line = next(line for line in fenced_commands((REPO / "README.md").read_text()) if "controller --bind" in line)
    keys = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(4)]
    with (desk.running(desk.filled_in(line), "listening on"), desk.node("NODE", api) as node,
          desk.node("other", api) as other):
        node.publish(keys)
        other.publish(keys)
        yield desk


# ---- a function for each kind of line that runs here, chosen by the beginning of the line ----
ASKING = 'curl -H "Authorization: Bearer $(kvferry token)" http://c:14601/nodes'
Runner = Callable[[Desk, str], None]
RUNNERS: dict[str, Runner] = {}


def runs(*beginnings: str) -> Callable[[Runner], Runner]:
    def add(runner: Runner) -> Runner:
        RUNNERS.update(dict.fromkeys(beginnings, runner))
        return runner
    return add


@runs("kvferry keygen")
def keygen(desk: Desk, line: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=desk.folder))
    named = desk.run(f"unset KVFERRY_CLUSTER_KEY_FILE; cd '{folder}'; {line}; echo \"$KVFERRY_CLUSTER_KEY_FILE\"")
    key, = folder.iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    if "export" in line:
        assert named.splitlines()[-1] == str(key)


@runs("kvferry controller --bind tcp://0.0.0.0:14600")
def controller(desk: Desk, _: str) -> None:
    # the fixture deployment() has already started this controller
    assert desk.run("kvferry status").startswith(f"controller tcp://127.0.0.1:{desk.port},")


@runs("launch/controller")
def controller_script(desk: Desk, line: str) -> None:
    http = free_port()
    line = desk.filled_in(line, **{r":14601\b": f":{http}", rf":{desk.port}\b": f":{free_port()}"})
    with desk.running(line, "listening on"):
        if "--http" in line:
            assert json.loads(desk.run(ASKING.replace("c:14601", f"127.0.0.1:{http}")))["nodes"] == []


@runs("export KVFERRY_CLUSTER_KEY_FILE=cluster.key", ASKING)
def http_api(desk: Desk, line: str) -> None:
    """Runs the first line as it is. The second line runs against a controller, which controller_script() starts."""
    if line == ASKING:
        controller_script(desk, "launch/controller --bind tcp://0.0.0.0:14600 -- --http 0.0.0.0:14601")
    else:
        desk.run(line)


@runs("kvferry token")
def token(desk: Desk, line: str) -> None:
    said = {desk.run(one) for one in (re.sub(r" \[.*\]", "", line), re.sub(r"[\[\]]", "", line))}
    assert all(re.fullmatch(r"[0-9a-f]{64}\n", one) for one in said)
    assert len(said) == 1 + line.count("[")


def kv_config(words: list[str]) -> dict[str, object]:
    config: dict[str, object] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return config


@runs("launch/prefill", "launch/decode", "KVFERRY_CLUSTER_KEY_FILE=cluster.key launch/prefill")
def server_script(desk: Desk, line: str) -> None:
    """Runs the script with a stand-in for vLLM's server, because --dry-run needs vLLM too."""
    own, dashes, rest = desk.filled_in(line, **{r" \.\.\.": " --model model"}).partition(" -- ")
    said = desk.run(f"{own} --dry-run --server 'vllm serve'{dashes}{rest}").splitlines()
    words = shlex.split(said[-1])
    assert words[:2] == ["vllm", "serve"]
    assert words[-len(rest.split()):] == rest.split() or not rest
    config = kv_config(words)
    assert config["kv_role"] == ("kv_producer" if "prefill" in line else "kv_consumer")
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["controller"] == desk.env["KVFERRY_CONTROLLER"]
    for name, value in re.findall(r"--extra (\w+)=(\S+)", line):
        assert extra[name] == value


@runs("vllm serve MODEL --kv-transfer-config")
def vllm_by_hand(desk: Desk, line: str) -> None:
    """Does not start vLLM. Checks that the JSON is the same as that of the scripts, and that kvferry accepts its
    settings.
    """
    config = kv_config(shlex.split(line))
    assert config == KVFERRY_CONNECTOR.config("kv_producer", "tcp://HOST:14600")
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    env = desk.env | {"PYTHONPATH": str(REPO / "build" / "release" / "python")}
    assert preflight.check_settings(sys.executable, extra, env, with_key=True)


@runs("launch/proxy")
def proxy(desk: Desk, line: str) -> None:
    port = free_port()
    line = desk.filled_in(line, **{"--port 8000": f"--port {port}", "http://c:14601": f"http://127.0.0.1:{free_port()}",
                                   r"[\[\]]": "", "NAME": "default"})
    with (desk.running(line, "listening on"),
          urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer):
        assert b"kvferry_proxy_controller_up" in answer.read()


@runs("launch/cluster up", "launch/cluster render")
def cluster(desk: Desk, line: str) -> None:
    """Runs `up` with --dry-run. The examples have one file for each backend."""
    command, _, options = line.partition(" FILE ")
    backends = re.findall(r"\w+", re.search(r"--on ([\w|]+)", options)[1])
    for backend in backends:
        file = desk.folder / f"{backend}.yaml"
        example = (REPO / "launch" / "examples" / "cluster" / file.name).read_text()
        file.write_text(re.sub(r"^model: .*", f"model: {desk.folder}/model", example, flags=re.MULTILINE))
        if "render" in command:
            desk.run(f"{command} {file} --on {backend} --output {backend}.out")
            assert (desk.folder / f"{backend}.out").read_text()
        else:
            assert "prefill" in desk.run(f"{command} {file} --on {backend} --dry-run")


@runs("kvferry status", "KVFERRY_CLUSTER_KEY_FILE=cluster.key kvferry status")
def status(desk: Desk, line: str) -> None:
    said = desk.run(line)
    names = [node["engine_id"] for node in json.loads(said)["nodes"]] if "--json" in line else said
    assert "NODE" in names


@runs("kvferry drain", "kvferry clear", "kvferry quota")
def admin(desk: Desk, line: str) -> None:
    optional = re.search(r" \[(.*)\]", line)
    for said in [line] if optional is None else [line.replace(optional[0], ""), re.sub(r"[\[\]]", "", line)]:
        assert desk.run(said)
    if "--undo" in line:
        assert "drain" not in desk.run("kvferry status")


@runs("kvferry purge")
def purge(desk: Desk, line: str) -> None:
    """The deployment's nodes are not real, so they don't report that they have dropped the chunks."""
    said = desk.run(f"{line} --timeout 1 || [ $? = 1 ]")
    assert "node 'NODE' has not reported that it has dropped the chunks" in said


@runs("kvferry doctor")
def doctor(desk: Desk, line: str) -> None:
    """Runs the doctor on the deployment. It must report a fault, because the deployment's nodes are not real; this host
    may have faults too.
    """
    said = desk.run(desk.filled_in(line, HOST="127.0.0.1", **{":14600": f":{desk.port}"}) + " || [ $? = 1 ]")
    assert re.search(r"^\d+ checks, \d+ problems, \d+ hints$", said, re.MULTILINE)


@runs("kvferry doctor --security")
def doctor_of_security(desk: Desk, line: str) -> None:
    """Examines only the deployment's controller, because this host may run other processes of kvferry."""
    with desk.running(desk.filled_in("kvferry controller --bind tcp://127.0.0.1:0"), "listening on") as process:
        assert desk.run(f"{line} --pid {process.pid}").endswith("0 weaknesses\n")


@runs("PYTHONPATH=build/release/python python launch/examples/move_blocks.py")
def move_blocks(desk: Desk, line: str) -> None:
    assert "every byte is right" in desk.run(line)


# ---- the tests ----
def lines() -> list[tuple[str, str]]:
    return sorted({(str(path.relative_to(REPO)), line) for path in documents()
                   for line in fenced_commands(path.read_text())})


def beginning_of(line: str) -> str:
    """Returns the longest row of the tables above that the line begins with."""
    known = [*RUNNERS, *NOT_RUN, *(row[0] for row in RUN_ELSEWHERE)]
    return max((row for row in known if line.startswith(row)), key=len, default="")


@pytest.mark.parametrize(("document", "line"), lines())
def test_a_line_is_run_or_has_a_reason(document: str, line: str, request: pytest.FixtureRequest) -> None:
    beginning = beginning_of(line)
    assert beginning, f"{document}: '{line}' is neither run here, nor elsewhere, nor has it a reason"
    if beginning in RUNNERS:
        RUNNERS[beginning](request.getfixturevalue("deployment"), line)


@pytest.mark.parametrize(("beginning", "test", "phrase"), RUN_ELSEWHERE)
def test_the_test_that_runs_it_is_there(beginning: str, test: str, phrase: str) -> None:
    assert phrase in (REPO / test).read_text(), f"{test} does not seem to run '{beginning}'"


def test_no_row_is_left_of_a_line_that_is_gone() -> None:
    used = {beginning_of(line) for _, line in lines()}
    assert used == {*RUNNERS, *NOT_RUN, *(row[0] for row in RUN_ELSEWHERE)}
