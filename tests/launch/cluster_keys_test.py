"""Tests that the launcher gives each node a key of its own, and what follows when a key is revoked or replaced."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import STANDINS, Deployment, eventually, marked
from handing_deployment import LOADED, REVOKED_WITHIN_S, Traffic
from kvferry_launch.cluster.keys import SETTLED_AFTER_S, Keys
from kvferry_launch.cluster.plan import Node, Place
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.paths import KVFERRY
from sshd import Sshd, why_not

KEYGEN = [str(KVFERRY), "keygen"]
HERE = Place("here", "127.0.0.1")
NODES = [Node("controller", "controller", HERE), Node("prefill-0", "prefill", HERE), Node("decode-0", "decode", HERE),
         Node("router", "router", HERE)]
PREFILL = NODES[1]


def keygen(folder: Path, *words: str) -> None:
    subprocess.run([*KEYGEN, *words, str(folder / "cluster.key")], check=True, capture_output=True)


def members(folder: Path) -> dict[str, str]:
    lines = (folder / "kvferry.members").read_text().splitlines()[1:]
    return {line.split()[0]: line.split()[1] for line in lines}


def test_each_run_makes_new_keys_and_keeps_the_cluster_key_and_members_of_others(tmp_path: Path) -> None:
    keys = Keys(tmp_path, KEYGEN)
    keys.begin(NODES)
    ours = {"prefill-0": "worker", "decode-0": "worker", "router": "reader"}
    assert members(tmp_path) == ours
    keygen(tmp_path, "--add-node", "dashboard", "--role", "reader")
    keys.add([Node("decode-1", "decode", HERE)])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"cluster.key", "kvferry.members", "dashboard.key", "decode-1.key",
                           *(f"{name}.key" for name in ours)}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.glob("*.key"))
    again = Keys(tmp_path, KEYGEN)
    again.begin(NODES)
    assert members(tmp_path) == {"dashboard": "reader"} | ours
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert before.keys() - after.keys() == {"decode-1.key"}
    assert {name for name in after if after[name] == before[name]} == {"cluster.key", "dashboard.key"}
    again.remove(PREFILL)
    again.remove(PREFILL)
    assert "prefill-0" not in members(tmp_path)
    assert not (tmp_path / "prefill-0.key").exists()


def test_only_a_whole_list_without_a_node_revokes_it(tmp_path: Path) -> None:
    keys = Keys(tmp_path, KEYGEN)
    keys.begin(NODES)
    file = tmp_path / "kvferry.members"
    whole = file.read_text()

    def is_revoked() -> bool:
        for _ in range(3):
            assert keys.look()
        return keys.is_revoked(PREFILL)

    without = "".join(line for line in whole.splitlines(True) if not line.startswith("prefill-0 "))
    for broken in ("", "kvferry members 1", without.rstrip("\n"), "something else\n"):
        file.write_text(broken)
        assert not is_revoked(), broken
    file.write_bytes(b"\xff\n")
    keys.look()
    assert not keys.is_revoked(PREFILL)
    file.unlink()
    assert not is_revoked()
    file.write_text(without)
    keys.look()
    assert not keys.is_revoked(PREFILL), "it may be being copied"
    assert is_revoked()
    assert not keys.is_revoked(NODES[0])
    file.write_text(whole)
    assert not is_revoked()
    time.sleep(SETTLED_AFTER_S)
    keys.look()
    assert not keys.look(), "nothing has changed for a while"


def test_a_host_is_sent_the_list_and_its_own_key_only(tmp_path: Path) -> None:
    keys = Keys(tmp_path, KEYGEN)
    keys.begin(NODES)
    for node, file in zip(NODES, ("cluster.key", "prefill-0.key", "decode-0.key", "router.key"), strict=True):
        sent = [(line.partition(" ")[0], bytes.fromhex(line.partition(" ")[2])) for line in keys.lines(node)]
        assert sent == [(kind, (tmp_path / name).read_bytes()) for kind, name in (("members", "kvferry.members"),
                                                                                  ("key", file))]
    keygen(tmp_path, "--revoke", "prefill-0")
    assert keys.lines(PREFILL) == []


def test_without_keygen_all_have_the_cluster_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path, [])
    keys.begin(NODES)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.key"]
    whole = (tmp_path / "cluster.key").read_bytes()
    assert {tuple(keys.lines(node)) for node in NODES} == {("members ", f"key {whole.hex()}")}
    keys.remove(PREFILL)
    assert not keys.is_revoked(PREFILL)
    assert keys.lines(PREFILL)


def test_a_keygen_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="can't change the nodes' keys: no key"):
        Keys(tmp_path, ["sh", "-c", "echo no key >&2; exit 1"]).begin(NODES)
    with pytest.raises(SpecError, match="/nonexistent/kvferry can't be run: No such file or directory"):
        Keys(tmp_path, ["/nonexistent/kvferry"]).begin(NODES)


class Server:
    """A prefill or decode server of the deployment, asked as handing_deployment.Process is."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self._url = deployment.rows()[name]["url"]

    def ask(self, question: dict[str, Any]) -> Any:
        with urllib.request.urlopen(self._url, data=json.dumps(question).encode(), timeout=20.0) as answer:
            return json.loads(answer.read())


@pytest.fixture(params=["local", "ssh"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Makes a deployment of real nodes, over ssh or not."""
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    server = [*Deployment(tmp_path).document["vllm"][:1], str(STANDINS / "node_server.py")]
    made: list[Deployment] = []

    def one(settings: dict[str, Any], **document: Any) -> Deployment:
        made.append(Deployment(tmp_path, **(settings | {"vllm": server} | document)))
        return made[-1]

    if request.param == "local":
        yield lambda **document: one({}, **document)
    else:
        if reason := why_not():
            pytest.skip(reason)
        (tmp_path / "sshd").mkdir()
        with Sshd(tmp_path / "sshd") as sshd:
            yield lambda **document: one(sshd.settings(), **document)
            for deployment in made:
                deployment.clean_up()
    for deployment in made:
        deployment.clean_up()


def status(deployment: Deployment, key_file: Path) -> dict[str, str] | None:
    """Returns the member of each node that the controller knows, or None if it refuses the key."""
    done = subprocess.run([KVFERRY, "status", "--json", "--controller", deployment.rows()["controller"]["url"],
                           "--cluster-key-file", key_file], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    return {node["engine_id"]: node["member"] for node in json.loads(done.stdout)["nodes"]}


def test_each_node_is_a_member_and_one_that_is_revoked_is_out_while_the_others_go_on(
        make: Callable[..., Deployment], tmp_path: Path) -> None:
    deployment = make(prefill={"replicas": 2}, restart=0)
    deployment.start_ready()
    folder = tmp_path / "run" / "tested"
    whole, stolen = folder / "cluster.key", tmp_path / "stolen"
    names = ["prefill-0", "prefill-1", "decode-0"]
    assert status(deployment, whole) == {name: name for name in names}
    for name in names:
        shown = {words for pid, words in marked(deployment.mark).items()
                 if f"/{name}.key\0" in environment(pid) + "\0" and "node_server.py --model" in words}
        assert len(shown) == 1
        assert f'"engine_id": "{name}"' in shown.pop()
    stolen.mkdir()
    for file in ("prefill-1.key", "kvferry.members"):
        shutil.copy2(folder / file, stolen)
    prefill, thief, decode = Server(deployment, "prefill-0"), Server(deployment, "prefill-1"), Server(deployment,
                                                                                                      "decode-0")
    with Traffic(prefill, decode) as traffic:
        traffic.goes_on()
        assert status(deployment, stolen / "prefill-1.key") is not None
        assert decode.ask({"decode": 30_001, "params": thief.ask({"prefill": 30_001})}) == {
            "loaded": LOADED, "right": True}
        keygen(folder, "--revoke", "prefill-1")
        time.sleep(REVOKED_WITHIN_S)
        assert status(deployment, whole) == {"prefill-0": "prefill-0", "decode-0": "decode-0"}
        assert status(deployment, stolen / "prefill-1.key") is None
        traffic.goes_on()
        eventually(lambda: deployment.rows()["prefill-1"]["state"] == "failed", deployment.text)
        assert deployment.rows()["prefill-1"]["detail"] == "its member key was revoked"
        assert "added prefill-2" in deployment.call("scale", "prefill=3", "--no-wait").stdout
        eventually(lambda: deployment.rows()["prefill-2"]["state"] == "ready", deployment.text)
        found = status(deployment, whole)
        assert found is not None
        assert found["prefill-2"] == "prefill-2"
        traffic.goes_on()
    assert traffic.failures == []
    assert traffic.num_computed == 0


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


def test_a_rotation_in_the_run_folder_reaches_all_nodes(make: Callable[..., Deployment], tmp_path: Path) -> None:
    deployment = make()
    deployment.start_ready()
    folder = tmp_path / "run" / "tested"
    former = tmp_path / "former"
    former.mkdir()
    for file in ("cluster.key", "kvferry.members"):
        shutil.copy2(folder / file, former)
    for step in ("--add", "--switch", "--retire"):
        keygen(folder, step)
        time.sleep(2 * REVOKED_WITHIN_S)
    assert status(deployment, former / "cluster.key") is None
    with Traffic(Server(deployment, "prefill-0"), Server(deployment, "decode-0")) as traffic:
        traffic.goes_on()
    assert traffic.failures == []
    assert status(deployment, folder / "cluster.key") == {"prefill-0": "prefill-0", "decode-0": "decode-0"}
