"""The schema of a deployment's YAML file: each key with its allowed values and its default. check() reports mistakes.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BACKENDS = ("local", "ssh", "slurm", "mpi", "kubernetes")
ROUTERS = ("vllm-router", "proxy", "none")
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # valid as a Kubernetes name and as a Slurm job's name
REPLICAS_MAX = 1024


class SpecError(Exception):
    """An error of launch/cluster, in one sentence. If the schema refuses a value in the deployment's file, the sentence
    names the key, the value and what is allowed.
    """


@dataclass(frozen=True)
class Key:
    """One key of the schema. `allowed` describes the values that `check` accepts. `default` is the value of a key that
    is not in the file; None stands for "no value".
    """

    allowed: str
    check: Callable[[Any], bool]
    default: Any = None
    required: bool = False


Section = Mapping[str, "Key | Section"]


def is_int(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_argument(text: str) -> bool:
    """Returns True if a process can get the text as an argument: it has no zero byte and no surrogate."""
    return not re.search("[\0\ud800-\udfff]", text)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and is_argument(value)


def is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and is_argument(str(value))


def is_words(value: Any) -> bool:
    return isinstance(value, list) and all(is_word(word) for word in value)


def is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(is_text(key) for key in value)


def is_json_map(value: Any) -> bool:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # YAML has values that JSON lacks, such as dates and maps that contain themselves
        return False
    return is_map(value) and is_argument(text) and "\\u0000" not in text


def is_env(value: Any) -> bool:
    return is_map(value) and all(is_word(one) and re.fullmatch(r"[A-Za-z_]\w*", name) for name, one in value.items())


def is_hosts(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(is_host(name) and is_host(address) for name, address in value.items())
    return isinstance(value, list) and bool(value) and all(is_host(name) for name in value)


def is_host(value: Any) -> bool:
    return is_text(value) and not value.startswith("-") and not re.search(r"\s", value)


def one_of(names: tuple[str, ...]) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(names)}", lambda value: value in names


def number(least: int, most: int, default: int | None = None) -> Key:
    return Key(f"a whole number from {least} to {most}", is_int(least, most), default)


def text(default: str | None = None, required: bool = False) -> Key:
    return Key("a string of at least one character, without zero bytes and surrogates", is_text, default, required)


def words(default: tuple[str, ...] = ()) -> Key:
    return Key("a list of strings or numbers", is_words, list(default))


def port() -> Key:
    return Key("a port from 0 to 65535 (0: any free port)", is_int(0, 65535), 0)


HOST = Key("a host's name or address, without spaces and without a dash at its start", is_host)
WORD = Key("a name without spaces and without a dash at its start", is_host)
SECRET = Key("the name of a Secret: up to 253 lower-case letters, digits, dashes and dots, with a letter or digit at "
             "both ends", lambda value: isinstance(value, str) and len(value) <= 253
             and re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", value) is not None)
HOSTS = Key("a list of host names, or a map of host names to the addresses at which other hosts "
            "reach them", is_hosts)
ENV = Key("a map of environment variables to strings or numbers", is_env, {})


def role(kv_role: str) -> Section:
    return {
        "replicas": number(0, REPLICAS_MAX, 1),
        "hosts": HOSTS,
        "hosts_per_replica": number(1, 64, 1),
        "tensor_parallel": number(1, 1024, 1),
        "pipeline_parallel": number(1, 1024, 1),
        "data_parallel": number(1, 1024, 1),
        "kv_role": Key(*one_of(KV_ROLES), kv_role),
        "port": port(),
        "cores": Key("a list of core lists such as \"0-3\", one for each replica", is_words, []),
        "flags": words(),
        "env": ENV,
        "extra": Key("a map of keys of kv_connector_extra_config to their values in JSON", is_json_map, {}),
    }


SCHEMA: Section = {
    "name": Key("a name of 1 to 40 lower-case letters, digits and dashes, with no dash at its start or end",
                lambda value: isinstance(value, str) and NAME.fullmatch(value) is not None, required=True),
    "model": text(required=True),
    "namespace": text("default"),
    "on": Key(*one_of(BACKENDS), "local"),
    "hosts": HOSTS,
    "logs": text(),
    "restart": number(0, 1000, 3),
    "ready_timeout_s": number(1, 86400, 1800),
    "drain_timeout_s": number(1, 86400, 600),
    "vllm": words(),
    "env": ENV,
    "controller": {"host": HOST, "port": port(), "http": port(), "state": text("none")},
    "router": {"kind": Key(*one_of(ROUTERS), "vllm-router"), "host": HOST, "port": port(), "flags": words(),
               "command": words()},
    "prefill": role("kv_producer"),
    "decode": role("kv_consumer"),
    "ssh": {"user": WORD, "options": words(), "path": text(), "python": text("python3")},
    "slurm": {"partition": WORD, "account": WORD, "time": Key(
        "a time limit as sbatch takes it, such as \"02:00:00\"",
        lambda value: isinstance(value, str) and re.fullmatch(r"[0-9:-]+", value) is not None),
        "nodes": number(1, 10000), "options": words(), "srun_options": words()},
    "mpi": {"options": words(), "ranks": number(2, 10000)},
    "kubernetes": {"namespace": text("default"), "image": text(), "gpus": number(0, 64, 1), "storage": text(),
                   "path": text("/opt/kvferry"), "python": text("python3"), "context": text(),
                   "user": number(1, 2**31 - 1, 14600), "shared_memory": Key(
        "a size in Mi, Gi or Ti, such as \"512Mi\" or \"8Gi\"",
        lambda value: isinstance(value, str) and re.fullmatch(r"[1-9][0-9]*[MGT]i", value) is not None, "8Gi"),
                   "controller_tls_secret": SECRET, "router_tls_secret": SECRET},
}


def check(document: Any, section: Section = SCHEMA, path: str = "") -> dict[str, Any]:
    """Returns the document with every default filled in. Errors: SpecError."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise SpecError(f"{path or 'the file'} is {shown(document)}, not a map; known keys are "
                        f"{', '.join(section)}")
    for name in document:
        if name not in section:
            raise SpecError(unknown(str(name), section, path))
    values: dict[str, Any] = {}
    for name, allowed in section.items():
        full = f"{path}.{name}" if path else name
        if not isinstance(allowed, Key):
            values[name] = check(document.get(name), allowed, full)
            continue
        value = document.get(name)
        if value is None:
            if allowed.required:
                raise SpecError(f"{full} is missing; it must be {allowed.allowed}")
            value = allowed.default
        elif not allowed.check(value):
            raise SpecError(f"{full} is {shown(value)}, not {allowed.allowed}")
        values[name] = value
    return values


def unknown(name: str, section: Section, path: str) -> str:
    where = f"in {path}" if path else "of a deployment"
    near = difflib.get_close_matches(name, list(section), n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys are {', '.join(section)}"
    return f"'{name}' is not a key {where}; {hint}"


def shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) and value.isprintable() else repr(value)
