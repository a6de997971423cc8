"""Reads a deployment's YAML file and checks it, including the rules that involve several keys."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry_launch.cluster import pod_tls
from kvferry_launch.cluster.schema import SpecError, check
from kvferry_launch.paths import REPO, STATE

LOCAL_HOSTS = {"localhost": "127.0.0.1"}


@dataclass(frozen=True)
class Role:
    """The settings of the prefill or of the decode role."""

    name: str
    replicas: int
    hosts: dict[str, str] | None
    hosts_per_replica: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    kv_role: str
    port: int
    cores: tuple[str, ...]
    flags: tuple[str, ...]
    env: dict[str, str]
    extra: dict[str, Any]

    def vllm_flags(self) -> list[str]:
        """Returns the vLLM flags that the role's settings give: the degrees of parallelism, then the user's flags,
        which override all flags before them.
        """
        sizes = (("--tensor-parallel-size", self.tensor_parallel),
                 ("--pipeline-parallel-size", self.pipeline_parallel),
                 ("--data-parallel-size", self.data_parallel))
        return [word for flag, size in sizes if size > 1 for word in (flag, str(size))] + list(self.flags)


@dataclass(frozen=True)
class Spec:
    """The content of a deployment's file. `raw` is the checked document with all keys, even those that only one value
    of `on` needs.
    """

    file: Path
    name: str
    model: str
    namespace: str
    on: str
    hosts: dict[str, str]  # maps a host's name to the address at which other hosts reach the host
    restart: int
    ready_timeout_s: int
    drain_timeout_s: int
    vllm: tuple[str, ...]
    env: dict[str, str]
    roles: dict[str, Role]
    raw: dict[str, Any]

    @property
    def router(self) -> dict[str, Any]:
        found: dict[str, Any] = self.raw["router"]
        return found

    @property
    def logs(self) -> Path:
        return self.resolve(self.raw["logs"]) if self.raw["logs"] else run_folder(self) / "logs"

    def resolve(self, path: str) -> Path:
        """Resolves a path that the deployment's file contains. A relative path starts at the file's folder."""
        return (self.file.parent / expanded(path)).resolve()


def load(file: Path, on: str | None = None) -> Spec:
    """Reads and checks the file. If `on` is given, it replaces the value of `on` in the file. Errors: SpecError."""
    try:
        document = parse(file, file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"can't read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    except RecursionError:
        raise SpecError(f"{file} is nested too deeply: Python can't read it") from None
    return make(document, file, on)


def parse(file: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        if file.suffix != ".json":
            raise SpecError(f"can't read {file}: this Python has no PyYAML, which launch/setup installs into .venv; "
                            "only a file that ends in .json can be read without it") from None
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: once(file, pairs))
        except ValueError as error:
            raise SpecError(f"{file} is not JSON: {error}") from error

    class Loader(yaml.SafeLoader):
        """Turns errors of other types, such as PyYAML's ValueError for a date with month 13, into YAMLErrors that name
        the value and its line.
        """

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                kind = str(node.tag).rpartition(":")[2]
                raise yaml.YAMLError(f"'{str(node.value)[:40]}' is not a valid {kind}{node.start_mark}") from error

    loader = None
    try:
        loader = Loader(text)
        loader.name = file.name  # the name of the file in PyYAML's error messages; the default is "<unicode string>"
        root = loader.get_single_node()
        check_keys(file, root, set())
        document = loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    finally:
        if loader is not None:
            loader.dispose()
    if isinstance(document, dict) and True in document:  # YAML 1.1 reads the key `on` as the boolean true
        document = {"on" if name is True else name: value for name, value in document.items()}
    return document


def check_keys(file: Path, node: Any, seen: set[int]) -> None:
    """Checks that no map in a YAML node has a key twice. Errors: SpecError.

    `seen`: the id() of each node that was checked already; an alias in the file refers to such a node.
    """
    if id(node) in seen or not isinstance(getattr(node, "value", None), list):
        return
    seen.add(id(node))
    pairs = [pair for pair in node.value if isinstance(pair, tuple)]
    once(file, [(key.value, value) for key, value in pairs if isinstance(key.value, str)])
    for child in [value for _, value in pairs] or node.value:
        check_keys(file, child, seen)


def once(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a map. Errors: SpecError if a key occurs twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise SpecError(f"{file}: the key '{name}' occurs twice in one map; remove one of the two")
        found[name] = value
    return found


def make(document: Any, file: Path, on: str | None = None) -> Spec:
    raw = check(document)
    backend = on or raw["on"]
    roles = {name: role(name, raw[name]) for name in ("prefill", "decode")}
    for one in roles.values():
        check_role(one, backend)
    hosts = host_map(raw["hosts"]) or {}
    if backend in ("mpi", "kubernetes"):
        for one in roles.values():
            if one.hosts:
                raise SpecError(f"{one.name}.hosts is given, but {backend} chooses the hosts; remove it")
    if backend == "local":
        if hosts or any(one.hosts for one in roles.values()):
            raise SpecError("hosts is given (at the top, or in prefill or decode), but 'on' is local; set 'on' to ssh, "
                            "slurm or mpi, or remove hosts")
        hosts = dict(LOCAL_HOSTS)
    if backend == "ssh" and not hosts and not all(one.hosts for one in roles.values()):
        raise SpecError("hosts is missing; with 'on' ssh, list the hosts there, or in prefill.hosts and decode.hosts")
    if backend == "kubernetes" and not raw["kubernetes"]["image"]:
        raise SpecError("kubernetes.image is missing; it must name an image with vLLM and kvferry's wheel")
    if backend == "kubernetes":
        pod_tls.check(raw)
    if backend == "kubernetes" and raw["router"]["kind"] == "vllm-router" and len(
            {one.port for one in roles.values()}) > 1:
        raise SpecError(f"decode.port is {roles['decode'].port} and prefill.port is {roles['prefill'].port}; they must "
                        "be equal, because vllm-router looks for pods at one port only")
    return Spec(file.resolve(), raw["name"], model_of(raw["model"], file), raw["namespace"], backend, hosts,
                raw["restart"], raw["ready_timeout_s"], raw["drain_timeout_s"], texts(raw["vllm"]),
                text_map(raw["env"]), roles, raw)


def role(name: str, raw: dict[str, Any]) -> Role:
    return Role(name, raw["replicas"], host_map(raw["hosts"]), raw["hosts_per_replica"], raw["tensor_parallel"],
                raw["pipeline_parallel"], raw["data_parallel"], raw["kv_role"], raw["port"], texts(raw["cores"]),
                texts(raw["flags"]), text_map(raw["env"]), raw["extra"])


def check_role(one: Role, backend: str) -> None:
    """Checks what the schema can't: rules that involve several keys, and the keys of `extra`. Errors: SpecError."""
    if one.cores and len(one.cores) < one.replicas:
        raise SpecError(f"{one.name}.cores has {len(one.cores)} entries, not one for each of {one.replicas} replicas")
    if one.port and one.replicas > 1 and backend == "local":
        raise SpecError(f"{one.name}.port is {one.port}, but {one.replicas} replicas share this host; use 0, so that "
                        "each takes a free port")
    if one.hosts_per_replica > 1 and backend != "kubernetes":
        raise SpecError(f"{one.name}.hosts_per_replica is {one.hosts_per_replica}, but 'on' is {backend}; "
                        "only kubernetes can spread a replica over hosts")
    for name in ("serves", "controller", "namespace", "advertise_host"):
        if name in one.extra:
            raise SpecError(f"{one.name}.extra.{name} is given, but the launcher sets it; remove it")


def model_of(model: str, file: Path) -> str:
    """Returns the absolute path of the model's folder if `model` is a folder with config.json, otherwise `model`
    unchanged. Errors: SpecError if `model` begins with "~" and there is no such user.

    A relative path starts at the folder of the deployment's file or, if that has no such folder, at the checkout.
    """
    for base in (file.resolve().parent, REPO):
        folder = base / expanded(model)
        if (folder / "config.json").exists():
            return str(folder.resolve())
    return model


def expanded(path: str) -> Path:
    """Returns the path with the user's home folder in place of "~". Errors: SpecError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SpecError(f"'{path}' begins with ~ or ~USER, but no home folder of that user is known") from error


def host_map(hosts: Any) -> dict[str, str] | None:
    if hosts is None:
        return None
    return dict(hosts) if isinstance(hosts, dict) else {name: name.rpartition("@")[2] for name in hosts}


def texts(words: list[Any]) -> tuple[str, ...]:
    return tuple(str(word) for word in words)


def text_map(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def run_folder(spec: Spec) -> Path:
    """Returns the folder with the socket, the state, the keys and, unless the file sets `logs`, the logs of a running
    deployment.
    """
    return Path(os.environ.get("KVFERRY_DEPLOYMENTS") or STATE / "deployments") / spec.name
