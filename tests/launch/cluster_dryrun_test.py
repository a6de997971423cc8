"""Tests `up --dry-run`: prints each command that `up` would run, host by host, and changes nothing."""

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deployment import CLUSTER
from kvferry_launch.cluster import cli, plan, spec
from kvferry_launch.cluster.plan import Found, Planner
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.start import Starter
from kvferry_launch.paths import REPO

SHORT: dict[str, Any] = {"name": "demo", "model": "org/model"}
KEYS = f"KVFERRY_CLUSTER_KEY_FILE={spec.run_folder(spec.make(SHORT, Path('/etc/demo.yaml')))}"
GUARD = "launch/lib/kvferry_launch/node/guard.py"


def lines(**document: Any) -> list[str]:
    return cli.dry_run(spec.make(SHORT | document, Path("/etc/demo.yaml")))


def commands(found: list[str]) -> dict[str, list[str]]:
    """Returns the words of each node's command."""
    named = {}
    for head, line in itertools.pairwise(found):
        if head.startswith("# ") and not line.startswith("#"):
            named[head.removeprefix("# ")] = shlex.split(line)
    return named


def own(words: list[str]) -> list[str]:
    """Returns the words of a command without the interpreter and the guard at its beginning."""
    cut = words[words.index("--") + 1:]
    return [word.removeprefix(f"{REPO}/") for word in cut if "python" not in word]


def test_local() -> None:
    found = commands(lines(decode={"replicas": 2, "cores": ["0", "1"], "flags": ["--max-model-len", 1024],
                                   "extra": {"chunk_tokens": 128}, "env": {"A": "b c"}}))
    assert list(found) == ["controller", "prefill-0", "decode-0", "decode-1", "router"]
    assert found["controller"][:2] == ["env", f"{KEYS}/cluster.key"]
    assert own(found["controller"]) == ["launch/controller", "--bind", "tcp://127.0.0.1:0", "--", "--http",
                                        "127.0.0.1:0", "--state", "none"]
    assert found["decode-1"][:4] == ["env", f"{KEYS}/decode-1.key", "VLLM_CPU_OMP_THREADS_BIND=1", "A=b c"]
    assert own(found["decode-1"]) == [
        "launch/decode", "--report", "--model", "org/model",
        "--controller", "tcp://127.0.0.1:PORT", "--host", "127.0.0.1", "--port", "0", "--engine-id", "decode-1",
        "--kv-role", "kv_consumer", "--extra", "namespace=default", "--extra", "chunk_tokens=128", "--",
        "--max-model-len", "1024"]
    assert found["router"][:2] == ["env", f"{KEYS}/router.key"]
    assert own(found["router"])[:3] == ["launch/cluster", "front", "--kind"]
    assert all(any(word.endswith(GUARD) for word in words) for words in found.values())


def test_each_node_has_its_own_key_and_that_of_the_spec_wins() -> None:
    own = ["cluster.key", "decode-0.key", "prefill-0.key", "router.key"]
    for backend in ("local", "mpi", "slurm", "ssh"):
        found = "\n".join(lines(on=backend, hosts=["a", "b"] if backend == "ssh" else None))
        assert sorted(re.findall(r"KVFERRY_CLUSTER_KEY_FILE=\S+/(\S+\.key)", found)) == own, backend
    words = commands(lines(env={"KVFERRY_CLUSTER_KEY_FILE": "/k"}))["prefill-0"]
    assert [word for word in words if word.startswith("KVFERRY_CLUSTER")] == ["KVFERRY_CLUSTER_KEY_FILE=/k"]
    ssh = {"on": "ssh", "hosts": ["a"], "ssh": {"path": "/opt/kv"}}
    assert sorted(re.findall(r"--key-file /opt/kv/build/deployments/demo/keys/(\S+)", "\n".join(lines(**ssh)))) == own
    assert "--key-file" not in "\n".join(lines(**ssh, env={"KVFERRY_CLUSTER_KEY_FILE": "/k"}))
    mixed = "\n".join(lines(**ssh, prefill={"env": {"KVFERRY_CLUSTER_KEY_FILE": "/p"}}))
    assert re.findall(r"--key-file (\S+)", mixed) == ["/opt/kv/build/deployments/demo/keys/cluster.key"] * 3
    assert "KVFERRY_CLUSTER_KEY_FILE=/p" in mixed


def test_it_says_that_failed_loads_are_recomputed() -> None:
    for backend in ("local", "slurm", "mpi"):
        assert any("kv_load_failure_policy is recompute" in line for line in lines(on=backend)), backend
    kubernetes = lines(on="kubernetes", kubernetes={"image": "x"})
    assert any("kv_load_failure_policy is recompute" in line for line in kubernetes)


def test_ssh_goes_round_the_hosts_and_quotes_for_the_shell_there() -> None:
    found = lines(on="ssh", hosts={"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, prefill={"replicas": 2},
                  decode={"replicas": 2, "extra": {"path": "a b"}}, ssh={"user": "serve", "path": "/opt/kv ferry",
                                                                       "options": ["-p", 2222]})
    assert [line for line in found if line.startswith("# ") and "(" in line and "kv_load" not in line] == [
        "# a (10.0.0.1)", "# b (10.0.0.2)", "# c (10.0.0.3)"]
    words = commands(found)["decode-1"]
    assert words[:1] + words[-7:-1] == ["ssh", "-p", "2222", "-l", "serve", "--", "a"]
    assert "BatchMode=yes" in words
    there = subprocess.run(["sh", "-c", words[-1].replace("cd ", "echo ").replace("exec ", "printf '%s\\n' ")],
                           capture_output=True, text=True, check=True).stdout.splitlines()
    assert there[0] == "/opt/kv ferry"
    assert there[1:7] == ["python3", f"/opt/kv ferry/{GUARD}", "--grace", "10", "--silence", "30"]
    assert there[there.index("--extra") + 3] == "path=a b"
    assert there[there.index("--advertise-host") + 1] == "10.0.0.1"
    assert there[there.index("--controller") + 1] == "tcp://10.0.0.1:PORT"


def test_an_installed_launcher_needs_no_checkout_here_or_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "OWN_TOOLS", plan.Tools("/env/bin/python", ""))
    module = ["-m", "kvferry_launch"]
    words = commands(lines())["controller"]
    assert words[2:6] == ["/env/bin/python", "-m", "kvferry_launch.node.guard", "--grace"]
    assert words[words.index("--") + 1:][:4] == ["/env/bin/python", *module, "controller"]
    there = shlex.split(commands(lines(on="ssh", hosts=["a"]))["decode-0"][-1])
    assert there[:4] == ["exec", "python3", "-m", "kvferry_launch.node.guard"]
    assert there[there.index("--key-file") + 1] == ".local/state/kvferry/deployments/demo/keys/decode-0.key"
    assert " ".join(["python3", *module, "decode", "--report"]) in " ".join(there)


def test_roles_have_hosts_of_their_own() -> None:
    found = lines(on="ssh", hosts=["door"], prefill={"hosts": ["p1", "p2"], "replicas": 3}, decode={"hosts": ["d1"]},
                  controller={"port": 14600})
    nodes = {}
    for line in found[2:]:
        if line.startswith("# "):
            nodes[line[2:]] = len(nodes)
    assert list(nodes) == ["door", "controller", "router", "p1", "prefill-0", "prefill-2", "p2", "prefill-1", "d1",
                           "decode-0"]
    assert "tcp://door:14600" in found[-1]


def test_slurm_shows_the_file_and_its_steps() -> None:
    found = lines(on="slurm", slurm={"partition": "gpu", "time": "1:00:00", "nodes": 2, "options": ["--exclusive"],
                                     "srun_options": ["--gpus=4"]})
    assert {"#SBATCH --partition=gpu", "#SBATCH --time=1:00:00", "#SBATCH --nodes=2", "#SBATCH --exclusive",
            "#SBATCH --job-name=kvferry-demo"} <= set(found)
    step = commands(found)["decode-0"]
    assert step[:5] == ["srun", "--job-name=decode-0", "--nodes=1", "--ntasks=1", "--nodelist=HOST1"]
    assert "--gpus=4" in step


def test_mpi_shows_the_mpirun_and_what_rank_0_orders() -> None:
    found = lines(on="mpi", hosts=["a", "b"], mpi={"options": ["--map-by", "node"]})
    assert found[0].startswith("mpirun -np 3 --host a:2,b:2 --map-by node ")
    assert found[0].endswith("mpi-rank /etc/demo.yaml --run RUN")
    assert {"rank-0", "rank-1", "rank-2"} <= {line.split()[1] for line in found if line.startswith("# rank")}


def test_kubernetes_shows_what_kubectl_gets() -> None:
    found = lines(on="kubernetes", kubernetes={"image": "x", "context": "prod"})
    assert found[0] == "kubectl --context prod --namespace default apply -f - <<'END'"
    assert found[-1] == "END"


@pytest.mark.parametrize("backend", ["local", "ssh", "slurm", "mpi", "kubernetes"])
def test_nothing_is_written(backend: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    example = (REPO / "launch/examples/cluster" / f"{backend}.yaml").read_text()
    file = tmp_path / "example.yaml"
    file.write_text(example.replace("build/models/toy", str(tmp_path)))
    done = subprocess.run([*CLUSTER, "up", str(file), "--dry-run"],
                          env=os.environ | {"KVFERRY_DEPLOYMENTS": str(tmp_path / "run")}, capture_output=True,
                          text=True, check=True)
    assert done.stdout
    assert {found.name for found in tmp_path.iterdir()} == {"config.json", "example.yaml"}


def test_each_entry_of_cores_is_one_nodes() -> None:
    planner = Planner(spec.make(SHORT | {"decode": {"cores": ["0", "1", "1"], "replicas": 3}}, Path("demo.yaml")))
    nodes = planner.all()
    assert [node.cores for node in nodes if node.role == "decode"] == ["0", "1", "1"]
    with pytest.raises(SpecError, match=r"decode.cores has 3 entries, and all .* in use; each node needs an entry of"):
        planner.engine("decode", nodes)
    assert planner.engine("decode", [node for node in nodes if node.name != "decode-1"]).cores == "1"


@pytest.mark.parametrize(("in_file", "outside", "of_controller"), [
    ("warn", None, "info"), (None, "off", "info"), ("debug", "off", "debug"), (None, None, None), (None, "info", None)])
def test_a_quiet_log_hides_no_address_of_the_controller(monkeypatch: pytest.MonkeyPatch, in_file: str | None,
                                                        outside: str | None, of_controller: str | None) -> None:
    monkeypatch.delenv("KVFERRY_LOG", raising=False)
    if outside:
        monkeypatch.setenv("KVFERRY_LOG", outside)
    planner = Planner(spec.make(SHORT | {"env": {"KVFERRY_LOG": in_file} if in_file else {}}, Path("demo.yaml")))
    controller, prefill, *_ = planner.all()
    assert planner.env(controller).get("KVFERRY_LOG") == of_controller
    assert planner.env(prefill).get("KVFERRY_LOG") == in_file


@pytest.mark.parametrize(("document", "hosts", "then"), [
    ({"hosts": ["a", "b", "c", "d"]}, "abcd", {"prefill": "b", "decode": "b"}),
    ({"prefill": {"replicas": 2, "hosts": ["a", "b"]}, "decode": {"replicas": 2, "hosts": ["a", "b"]}}, "abab",
     {"prefill": "b", "decode": "a"}),
    ({"hosts": ["a", "b"]}, "abab", {"prefill": "b", "decode": "b"}),
])
def test_a_server_takes_the_place_of_one_that_was_removed(document: dict[str, Any], hosts: str, then: dict[str, str]
                                                          ) -> None:
    least = {"on": "ssh", "prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    for role, host in then.items():
        planner = Planner(spec.make(SHORT | least | document, Path("demo.yaml")))
        nodes = planner.all()
        assert "".join(node.place.name for node in nodes if node.role in plan.ENGINE_ROLES) == hosts
        assert planner.engine(role, [node for node in nodes if node.name != "prefill-1"]).place.name == host


def test_a_restart_asks_for_the_port_that_the_others_know() -> None:
    planner = Planner(spec.make(SHORT, Path("demo.yaml")))
    controller, _, decode, router = planner.all()
    found = Found("tcp://127.0.0.1:5001", "http://127.0.0.1:5002")
    assert "tcp://127.0.0.1:5001" in planner.command(controller, found, 5001)
    assert "127.0.0.1:5002" in planner.command(controller, found, 5001)
    assert "tcp://127.0.0.1:0" in planner.command(controller, Found("", ""))
    for node in (decode, router):
        words = planner.command(node, found, 5003)
        assert words[words.index("--port") + 1] == "5003"
    assert "update_group=late" in planner.command(decode, found, None, "late")
    assert not any("update_group" in word for word in planner.command(decode, found))
    assert Starter(planner).start(decode.place, "x", ["y"])[-1] == "y"


@pytest.mark.parametrize(("words", "message"), [
    (["render", "slurm.yaml", "--output", "folder"], "can't use folder: Is a directory"),
    (["up", "logs.yaml"], "slurm.yaml: File exists"),
    (["scale", "logs.yaml", "decode=\u00b2"],
     "'decode=\u00b2' is not prefill=N or decode=N with a whole number N of at most 9 digits"),
])
def test_what_can_not_be_used_is_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "slurm.yaml").write_text("name: a\nmodel: x\non: slurm\n")
    (tmp_path / "logs.yaml").write_text("name: a\nmodel: x\nlogs: slurm.yaml\n")
    done = subprocess.run([*CLUSTER, *words], cwd=tmp_path, env=os.environ | {"KVFERRY_DEPLOYMENTS": str(tmp_path)},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("launch/cluster: ")
    assert done.stderr.endswith(message + "\n")
    assert done.stderr.count("\n") == 1
