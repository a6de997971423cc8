"""launch/quickstart: the user's interpreter parses the arguments and runs the set-up. Then the interpreter of .venv
runs quickstart_job.py.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from kvferry_launch import setup
from kvferry_launch.paths import MODELS, VENV_PYTHON
from kvferry_launch.process import ProcessError

REQUESTS_MIN = 2  # a single request is never preempted


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="launch/quickstart",
        description="Install what is missing, build kvferry, run requests through a vLLM prefill server and a vLLM "
        "decode server that is short of memory, and compare every token with one plain vLLM server.")
    made.add_argument("--prepare-only", action="store_true", help="stop when everything is installed and built")
    made.add_argument("--requests", type=int, default=8, metavar="N",
                      help="number of requests, 8 at a time (default: 8)")
    made.add_argument("--model", type=Path, default=MODELS / "toy", metavar="PATH",
                      help="a model folder (default: a small random model, which this command makes)")
    made.add_argument("--json", type=Path, metavar="FILE", help="file for the table and the totals")
    return made


def arguments() -> argparse.Namespace:
    """Parses and checks the arguments. If one is wrong, prints the usage and the error, and exits with status 2."""
    made = parser()
    parsed = made.parse_args()
    if parsed.requests < REQUESTS_MIN:
        made.error(f"--requests is {parsed.requests}, not {REQUESTS_MIN} or more (a request alone is never preempted)")
    if parsed.model != MODELS / "toy" and not (parsed.model / "config.json").exists():
        made.error(f"--model {parsed.model} is not a folder with a config.json")
    if parsed.json is not None and not parsed.json.resolve().parent.is_dir():
        made.error(f"--json {parsed.json} is in a folder that doesn't exist")
    return parsed


def main() -> NoReturn:
    parsed = arguments()
    setup.ensure_or_exit(vllm=True)
    if parsed.prepare_only:
        print("everything is installed and built; launch/quickstart takes about a minute now")
        sys.exit(0)
    start_job = "from kvferry_launch.testbed.quickstart import job; job()"
    os.execv(VENV_PYTHON, [str(VENV_PYTHON), "-c", start_job, *sys.argv[1:]])


def job() -> NoReturn:
    """Runs in .venv after main(). A signal ends the job without a traceback and leaves no processes behind."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)
    try:
        from kvferry_launch.testbed import quickstart_job  # needs packages that set-up installs
        from kvferry_launch.testbed.preloaded import vllm_is_preloaded

        with vllm_is_preloaded():
            sys.exit(quickstart_job.run(arguments()))
    except ProcessError as error:
        sys.exit(f"launch/quickstart: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
