"""The command line of launch/cluster."""

import argparse
import json
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from kvferry_launch.cluster import front, job, kubectl, kubernetes, leaving, mpi, slurm, status
from kvferry_launch.cluster.control import ask
from kvferry_launch.cluster.keys import repeated
from kvferry_launch.cluster.plan import ENGINE_ROLES, Planner
from kvferry_launch.cluster.schema import BACKENDS, SpecError
from kvferry_launch.cluster.spec import Spec, load, run_folder
from kvferry_launch.cluster.start import dry_run_of
from kvferry_launch.cluster.up import Deployment, wait_until_gone
from kvferry_launch.node import preflight
from kvferry_launch.paths import command_name

STOP_WITHIN_S = 120.0
POLL_S = 0.5
NAME = command_name("cluster")
EXAMPLES = f"""examples:
  {NAME} up deployment.yaml --dry-run
  {NAME} up deployment.yaml
  {NAME} scale deployment.yaml decode=3
"""


def main() -> NoReturn:
    arguments = make_parser().parse_args()
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        sys.exit(run(arguments))
    except SpecError as error:
        sys.exit(f"{NAME}: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"{NAME}: can't use {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES,
        description="Start, watch, scale and stop a whole prefill and decode deployment from one YAML file.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str, file: bool = True
                ) -> argparse.ArgumentParser:
        # argparse lists only the commands that have `help`. Internal commands get no `help`, so that users don't see
        # them.
        shown: dict[str, Any] = {"help": about} if about else {}
        made: argparse.ArgumentParser = commands.add_parser(name, description=about, **shown)
        made.set_defaults(run=run)
        if file:
            made.add_argument("file", type=Path, metavar="FILE", help="the deployment's YAML file")
            made.add_argument("--on", choices=BACKENDS,
                              help="where to run the deployment, instead of the value of 'on' in the file")
        return made

    made = command("up", up, "start a deployment and stay attached; Ctrl-C stops it")
    made.add_argument("--dry-run", action="store_true", help="print every command, host by host, without running it")
    made.add_argument("--json", action="store_true", help="print a JSON object for each change instead of lines")
    made.add_argument("--in-job", action="store_true", help=argparse.SUPPRESS)
    made = command("status", show_status, "print one line for each node of a running deployment")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made = command("scale", scale, "add nodes to a running deployment, or drain and remove nodes")
    made.add_argument("to", nargs="+", metavar="ROLE=N", help="new number of nodes of a role, as prefill=N or decode=N")
    made.add_argument("--no-wait", action="store_true", help="return without waiting until all nodes are ready")
    command("down", down, "stop a running deployment")
    command("render", render, "print the Kubernetes manifests or Slurm's sbatch file").add_argument(
        "--output", type=Path, metavar="FILE", help="write to this file instead of stdout")
    made = command("keys", change_keys, "on Kubernetes, make keys in Secrets for the pods that have none or, with an "
                   "option, change the keys there as kvferry keygen changes those in files")
    steps = made.add_mutually_exclusive_group()
    steps.add_argument("--revoke", action="append", default=[], metavar="NAME",
                       help="revoke the key of this member, such as a pod: remove it from the list of members; may be "
                       "repeated")
    steps.add_argument("--add-node", action="append", default=[], metavar="NAME",
                       help="make a key for a new member that is not a pod, in the Secret DEPLOYMENT-other-keys; may "
                       "be repeated")
    for name, about in (("--add", "step 1 of a rotation of the cluster key: add a new key"),
                        ("--switch", "step 2: use the new key"), ("--retire", "step 3: remove the former key")):
        steps.add_argument(name, action="store_const", const=name, dest="step", help=about)
    made.add_argument("--role", choices=("reader", "worker", "admin"),
                      help="with --add-node: the role, which decides what the new members may do")

    made = command("front", front.main, "", file=False)
    front.add_arguments(made)
    made = command("drain-node", leaving.drain_node, "", file=False)
    made.add_argument("names", nargs="+")
    for name in ("--url", "--controller", "--namespace"):
        made.add_argument(name, required=True)
    made.add_argument("--timeout", type=float, required=True)
    made = command("mpi-rank", mpi_rank, "")
    made.add_argument("--run", default="by-hand", dest="token")
    made.add_argument("--json", action="store_true")
    made = command("mpi-relay", lambda found: mpi.relay(found.folder, after_dashes(found.words)), "", file=False)
    made.add_argument("folder", type=Path)
    made.add_argument("words", nargs=argparse.REMAINDER)
    made = command("ask", ask_here, "", file=False)
    made.add_argument("folder", type=Path)
    made.add_argument("what")
    command("slurm-job", lambda found: slurm.submit_and_follow(load(found.file, "slurm")), "")
    return parser


def after_dashes(words: list[str]) -> list[str]:
    """Returns the words without the "--" before them, which some versions of argparse remove and others do not."""
    return words[1:] if words[:1] == ["--"] else words


def up(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, arguments.on)
    check_before(spec)
    if arguments.dry_run:
        print("\n".join(dry_run(spec)))
        return 0
    if spec.on == "kubernetes":
        return kubectl.up(spec, arguments.json)
    if spec.on == "slurm":
        if arguments.in_job:
            return Deployment(spec, arguments.json, slurm.job_hosts()).run()
        return job.run(spec, "slurm-job")
    if spec.on == "mpi":
        return job.run_mpi(spec, uuid.uuid4().hex[:12])
    return Deployment(spec, arguments.json).run()


def check_before(spec: Spec) -> None:
    """Checks the model and the settings of the roles before any server starts. Errors: SpecError.

    What only the servers' hosts can check, such as the key file, is not checked here.
    """
    is_path = spec.model.startswith(("/", ".", "~")) or spec.model.count("/") > 1
    if spec.on == "local" and is_path and not (Path(spec.model) / "config.json").exists():
        raise SpecError(f"model is '{spec.model}', not a folder with a config.json; a relative path starts at the "
                        "YAML file's folder or at the checkout")
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    for role in spec.roles.values():
        try:
            preflight.check_settings(sys.executable, {"namespace": spec.namespace} | role.extra,
                                     own | spec.env | role.env, with_key=False)
        except preflight.NodeError as error:
            raise SpecError(f"{role.name}.extra or env: {error}") from error


def dry_run(spec: Spec) -> list[str]:
    if spec.on == "kubernetes":
        return kubectl.dry_run(spec)
    if spec.on == "slurm":
        return slurm.dry_run(spec)
    if spec.on == "mpi":
        ranks = {f"rank-{rank}": f"RANK_{rank}_HOST" for rank in range(mpi.ranks_of(spec))}
        return [shlex.join(mpi.command(spec, "RUN")), "# rank 0 runs these commands on the ranks' hosts:",
                *dry_run_of(Planner(spec, ranks))]
    return list(dry_run_of(Planner(spec)))


def show_status(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, arguments.on)
    if spec.on == "kubernetes":
        return kubectl.status(spec, arguments.json)
    found = request(spec, {"do": "status"})
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{found['name']} on {found['on']}: {'ready' if found['ready'] else 'not ready'}"
          f"{', ' + found['url'] if found['url'] else ''}")
    print("\n".join(status.table(found["nodes"])))
    return 0


def scale(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, arguments.on)
    wanted: dict[str, int] = {}
    for word in arguments.to:
        role, _, number = word.partition("=")
        if role not in ENGINE_ROLES or not re.fullmatch(r"[0-9]{1,9}", number):
            raise SpecError(f"'{word}' is not prefill=N or decode=N with a whole number N of at most 9 digits")
        wanted[role] = int(number)
    if spec.on == "kubernetes":
        return kubectl.scale(spec, wanted)
    print(request(spec, {"do": "scale", "to": wanted})["text"], flush=True)
    view = status.StatusView(as_json=False)
    while not arguments.no_wait:
        found = request(spec, {"do": "status"})
        view.show(found["nodes"])
        settled = all(row["state"] in ("ready", "failed") for row in found["nodes"])
        if settled:
            view.show(found["nodes"], at_once=True)
            return 1 if found["failed"] else 0
        time.sleep(POLL_S)
    return 0


def change_keys(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, arguments.on)
    if spec.on != "kubernetes":
        raise SpecError(f"'on' is {spec.on}, but this command changes keys only on kubernetes, in Secrets; change the "
                        f"keys in {run_folder(spec)} with kvferry keygen")
    if arguments.role and not arguments.add_node:
        raise SpecError(f"--role is {arguments.role}, but --add-node, which names the members for it, is missing")
    flags = [arguments.step] if arguments.step else [*repeated("--revoke", arguments.revoke),
                                                     *repeated("--add-node", arguments.add_node)]
    return kubectl.keys(spec, [*flags, "--role", arguments.role] if arguments.role else flags)


def down(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, arguments.on)
    if spec.on == "kubernetes":
        return kubectl.down(spec)
    queued = slurm.running_job(spec) if spec.on == "slurm" else None
    if ask(run_folder(spec), {"do": "down"}) is None:
        if queued is None:
            raise SpecError(f"deployment '{spec.name}' is not up on this host, or does not answer; nothing was stopped")
        slurm.cancel(queued)
    if not wait_until_gone(run_folder(spec), STOP_WITHIN_S):
        raise SpecError(f"deployment '{spec.name}' was told to stop, but still runs after {STOP_WITHIN_S:.0f} s; its "
                        f"logs are in {spec.logs}")
    return 0


def render(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, arguments.on)
    if spec.on not in ("kubernetes", "slurm"):
        raise SpecError(f"'on' is {spec.on}; only kubernetes and slurm have files to print; choose one with --on")
    if spec.on == "slurm":
        spec.logs.mkdir(parents=True, exist_ok=True)  # sbatch does not create the folder of its output
    text = kubernetes.render(spec) if spec.on == "kubernetes" else slurm.sbatch_script(spec)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)
    return 0


def ask_here(arguments: argparse.Namespace) -> int:
    """Sends a request to the `up` process of this host and prints the answer.

    A launcher on another host starts this command here by srun, because the launcher can't connect to this host's Unix
    sockets.
    """
    try:
        answer = ask(arguments.folder, json.loads(arguments.what))
    except SpecError as error:  # `up` refused the request; that launcher raises the error again
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def mpi_rank(arguments: argparse.Namespace) -> int:
    spec = load(arguments.file, "mpi")
    rank, size = mpi.from_environment(mpi.RANK_NAMES), mpi.from_environment(mpi.SIZE_NAMES)
    if rank != 0:
        return mpi.serve_rank(spec, arguments.token, rank)
    try:
        return Deployment(spec, arguments.json, mpi.gather(spec, arguments.token, size), arguments.token).run()
    finally:
        mpi.end_ranks(spec, arguments.token)


def request(spec: Spec, what: dict[str, Any]) -> dict[str, Any]:
    """Sends a request to the running `up`, which may be inside a Slurm job, and returns the answer. Errors: SpecError.
    """
    answer = ask(run_folder(spec), what)
    if answer is None and spec.on == "slurm":
        answer = job.ask_inside(spec, what)
    if answer is None:
        raise SpecError(f"deployment '{spec.name}' is not up on this host, or does not answer; "
                        f"{NAME} up FILE starts it")
    return answer
