"""Tests launch/deploy: hadolint accepts the Dockerfile and systemd the units, the images have the linked libraries, and
the units start a controller and nodes.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from handing_deployment import REVOKED_WITHIN_S, Process, kill
from kvferry_launch.paths import KVFERRY, LAUNCH, RELEASE, REPO
from kvferry_launch.process import ManagedProcess, free_port
from kvferry_launch.testbed.servers import wait_healthy

DOCKERFILE = LAUNCH / "deploy" / "Dockerfile"
UNITS = sorted((LAUNCH / "deploy" / "systemd").iterdir())
# Highest allowed exposure of each unit, from 0 to 100, as systemd-analyze rates it.
EXPOSURE_MAX = {"kvferry-controller.service": 20, "kvferry-node@.service": 55}
IN_EVERY_DEBIAN = {"libc6", "libgcc-s1", "libstdc++6"}


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (env or {}))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- images ----
def stages() -> dict[str, str]:
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    return {name: stage for stage in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]
            for name in re.findall(r"^FROM \S+ AS (\S+)", stage)}


def test_hadolint_accepts_the_dockerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed; launch/setup --tests does it")
    run(hadolint, DOCKERFILE)


def needed_packages(binary: Path) -> set[str]:
    """Returns the Debian packages of the libraries that the binary itself names. Packages of further libraries are
    their dependencies.
    """
    direct = set(re.findall(r"NEEDED.*\[(lib.*)\]", run("readelf", "-d", binary)))
    paths = {name: str(Path(path).resolve()) for name, path in re.findall(r"(\S+) => (/\S+)", run("ldd", binary))}
    found = [paths[name] for name in direct]
    done = subprocess.run(["dpkg-query", "-S", *found, *(path.removeprefix("/usr") for path in found)],
                          # dpkg lists some libraries below /lib, others below /usr/lib.
                          capture_output=True, text=True, check=False)
    return {line.split(":")[0] for line in done.stdout.splitlines()} - IN_EVERY_DEBIAN


def test_images_have_the_libraries_that_are_linked_and_do_not_run_as_root() -> None:
    installed = set(re.findall(r"lib[a-z0-9.+-]+", re.search(r"install [^&]*", stages()["runtime"])[0]))
    needed = needed_packages(KVFERRY).union(*map(needed_packages, (RELEASE / "python" / "kvferry").glob("_core.*.so")))
    assert len(needed) > 5
    assert needed <= installed
    assert installed - needed == {"libgomp1", "libnuma1", "libucx0"}, "of vLLM, and loaded at run time"
    for final in ("controller", "node"):
        assert re.findall(r"^USER (.*)$", stages()[final], re.MULTILINE) == ["14600"]


def test_what_is_copied_is_there_and_the_context_leaves_out_what_is_made() -> None:
    copied = re.findall(r"--from=\S+ /opt/kvferry/(\S+)", DOCKERFILE.read_text())
    assert len(copied) == 5
    for name in copied:
        assert (REPO / name).exists(), name
    rooted = re.findall(r"^/(.*)/$", (REPO / ".gitignore").read_text(), re.MULTILINE)
    assert set((LAUNCH / "deploy" / "Dockerfile.dockerignore").read_text().split()) == {".git", *rooted}


# ---- units ----
@pytest.fixture
def here(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Yields copies of the units in which this checkout's paths replace those of an installation, and a folder that of
    the configuration.
    """
    found = {}
    (tmp_path / "etc").mkdir()
    for unit in UNITS:
        found[unit.name] = tmp_path / unit.name
        found[unit.name].write_text(unit.read_text().replace("/usr/local/bin/kvferry", str(KVFERRY))
                                    .replace("/opt/kvferry", str(REPO)).replace("/etc/kvferry", str(tmp_path / "etc")))
    yield found


def test_systemd_accepts_the_units(here: dict[str, Path]) -> None:
    assert set(here) == set(EXPOSURE_MAX)
    names = [str(path).replace("@.", "@prefill.") for path in here.values()]
    # The exit status is 0 even after an unknown key, but the output then names the key.
    assert run("systemd-analyze", "verify", "--man=no", *names) == ""
    for name, path in here.items():
        run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX[name]}", path)


def settings(unit: Path, key: str, **specifiers: str) -> list[str]:
    """Returns the words of all lines of a key, with `specifiers` as the values of systemd's specifiers."""
    text = " ".join(re.findall(rf"^{key}=-?(.*)$", unit.read_text(), re.MULTILINE))
    for name, value in specifiers.items():
        text = text.replace(f"%{name}", value)
    assert "%" not in text
    return shlex.split(text)


def environment(unit: Path, folder: Path, **more: str) -> dict[str, str]:
    places = {name: str(folder) for name in "SCdt"} | more
    return dict(word.split("=", 1) for word in settings(unit, "Environment", **places))


@contextlib.contextmanager
def controller_of(unit: Path, tmp_path: Path) -> Iterator[str]:
    """Runs the controller of the unit as systemd does. Yields the URL of its HTTP API and its endpoint."""
    http, port = free_port(), free_port()
    env = environment(unit, tmp_path)
    assert env["KVFERRY_BIND"].startswith("tcp://0.0.0.0:")
    # In place of the values that an operator sets in controller.env.
    env |= {"KVFERRY_BIND": f"tcp://127.0.0.1:{port}", "KVFERRY_HTTP": f"127.0.0.1:{http}"}
    run("install", "-m", "0400", tmp_path / "etc" / "cluster.key", tmp_path / "cluster.key")  # LoadCredential
    for folder in settings(unit, "RuntimeDirectory"):
        (tmp_path / folder).mkdir()
    run(*settings(unit, "ExecStartPre", d=str(tmp_path), t=str(tmp_path)))
    controller = ManagedProcess("unit", settings(unit, "ExecStart"), env, tmp_path / "log")
    controller.start()
    try:
        wait_healthy(controller, f"http://127.0.0.1:{http}/healthz", 20)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=10)
        yield f"tcp://127.0.0.1:{port}"
    finally:
        controller.stop()


def test_the_controllers_unit_runs_a_controller_with_key_and_state(here: dict[str, Path], tmp_path: Path) -> None:
    run(KVFERRY, "keygen", tmp_path / "etc" / "cluster.key")
    with controller_of(here["kvferry-controller.service"], tmp_path):
        assert (tmp_path / "kvferry" / "controller").is_dir()


def test_nodes_of_units_drain_themselves_and_no_other_and_a_revoked_one_is_out(
        here: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    etc, unit = tmp_path / "etc", here["kvferry-node@.service"]
    run(KVFERRY, "keygen", etc / "cluster.key")
    run(KVFERRY, "keygen", "--add-node", "prefill-host", "--add-node", "decode-host", etc / "cluster.key")
    assert (etc / "kvferry.members").stat().st_mode & 0o777 == 0o644, "the user kvferry reads the list that root made"
    for kind in ("prefill", "decode"):
        run("install", "-m", "0400", etc / f"{kind}-host.key", etc / f"{kind}.key")
    with contextlib.ExitStack() as ended:
        endpoint = ended.enter_context(controller_of(here["kvferry-controller.service"], tmp_path))
        for kind in ("prefill", "decode"):
            node = Process("handing_node.py", endpoint, environment(unit, tmp_path, i=kind)["KVFERRY_CLUSTER_KEY_FILE"],
                           f"{kind}-host.domain")
            ended.callback(kill, node.process)

        def drain(kind: str, of: str) -> subprocess.CompletedProcess[str]:
            env = environment(unit, tmp_path, i=kind) | {"KVFERRY_CONTROLLER": endpoint}  # of prefill.env
            return subprocess.run(settings(unit, "ExecStop", i=of, H="host.domain"), env=os.environ | env,
                                  capture_output=True, text=True, check=False, timeout=60)

        def nodes() -> dict[str, bool]:
            told = run(KVFERRY, "status", "--json", "--controller", endpoint, "--cluster-key-file", etc / "cluster.key")
            return {node["engine_id"]: node["leaving"] for node in json.loads(told)["nodes"]}

        assert "needs a key of the role admin" in drain("prefill", "decode").stderr
        assert nodes() == {"prefill-host.domain": False, "decode-host.domain": False}
        own = drain("prefill", "prefill")
        assert own.returncode == 0, own.stderr
        assert nodes() == {"prefill-host.domain": True, "decode-host.domain": False}
        run(KVFERRY, "keygen", "--revoke", "decode-host", etc / "cluster.key")
        time.sleep(REVOKED_WITHIN_S)
        assert nodes() == {"prefill-host.domain": True}


def test_no_command_of_a_unit_but_the_first_ones_uses_a_credential() -> None:
    # systemd gives credentials to ExecStartPre and ExecStart, and hides them from ExecStop where there is a sandbox.
    for unit in UNITS:
        text = unit.read_text()
        assert not ("ExecStop=" in text and "%d" in text), unit.name


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_nodes_unit_runs_a_server_and_drains_it(here: dict[str, Path], tmp_path: Path, kind: str) -> None:
    unit = here["kvferry-node@.service"]
    run(KVFERRY, "keygen", tmp_path / "etc" / f"{kind}.key")
    (tmp_path / "config.json").write_text("{}")
    words = settings(unit, "ExecStart", i=kind, H="host")
    words[words.index("${MODEL}")] = str(tmp_path)
    words[words.index("$FLAGS"):] = ["--max-model-len", "64"]
    told = run(words[0], "--dry-run", "--server", "vllm serve", *words[1:], env=environment(unit, tmp_path, i=kind))
    command = shlex.split(told.splitlines()[-1])
    assert command[-2:] == ["--max-model-len", "64"]
    assert f'"engine_id": "{kind}-host"' in told
    drain = settings(unit, "ExecStop", i=kind, H="host")
    assert drain[1:3] == ["drain", f"{kind}-host"]
    help_text = run(drain[0], "drain", "--help")
    assert all(word in help_text for word in drain if word.startswith("--"))
    assert float(settings(unit, "TimeoutStopSec")[0]) > float(drain[drain.index("--timeout") + 1])
