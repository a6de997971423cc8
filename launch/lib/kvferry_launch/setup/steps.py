"""launch/setup: runs every step that a checkout needs, and skips those whose results are there and up to date."""

import argparse
import fcntl
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry_launch.paths import BUILD, LOGS, MODELS, REPO, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup.build import PRODUCT, ensure_build
from kvferry_launch.setup.commands import SetupError, beside, run_logged
from kvferry_launch.setup.debian import ensure_debian_packages
from kvferry_launch.setup.venv import ensure_test_packages, ensure_venv, ensure_vllm


def ensure_toy_model(name: str = "toy") -> Path:
    """Makes the model build/models/<name>, unless the current toy_model.py made the one that is there. Errors:
    SetupError.
    """
    folder = MODELS / name
    maker = REPO / "launch/lib/kvferry_launch/testbed/toy_model.py"
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()
    stamp = folder / ".kvferry-maker"
    if not stamp.exists() or stamp.read_text() != digest:
        with Step(f"Toy model build/models/{name}") as step:
            run_logged(f"making the toy model {folder}",
                       [str(VENV_PYTHON), "-m", "kvferry_launch.testbed.toy_model", "--kind", name, "--maker", digest,
                        str(folder)], LOGS / "model.log", tick=step.update)
    return folder


def ensure(*, vllm: bool, tests: bool = False, build: bool = True, only: Sequence[str] = ()) -> None:
    """Runs every step whose result is missing or out of date. Waits while another process runs set-up in the same
    checkout. `only`: the CMake targets to build; empty: see ensure_build().

    Errors: SetupError. After Ctrl-C, the next call repeats the step that was interrupted.
    """
    BUILD.mkdir(exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    with (BUILD / ".setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running; this one waits until it has ended", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_debian_packages(tests)
        ensure_venv((3, 11) if vllm else (3, 10))

        def what_the_build_does_not_need() -> None:
            if tests:
                ensure_test_packages()
            if vllm:
                ensure_vllm()

        with beside(what_the_build_does_not_need):
            if build:
                ensure_build(tests, only)
        if vllm:
            ensure_toy_model()


def ensure_or_exit(**steps: Any) -> None:
    """Calls ensure(). After an error, prints the end of the failed command's output and one line, and exits with status
    1.
    """
    try:
        ensure(**steps)
    except SetupError as error:
        if error.tail:
            print(error.tail, file=sys.stderr)
        sys.exit(f"kvferry set-up: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch/setup", description="Install missing packages and build kvferry.")
    parser.add_argument("--quick", action="store_true",
                        help="leave out vLLM, the toy model and the C++ tests that tests/run --quick leaves out")
    parser.add_argument("--tests", action="store_true", help="also install the packages that only tests/run needs")
    arguments = parser.parse_args()
    start = time.monotonic()
    ensure_or_exit(vllm=not arguments.quick, tests=arguments.tests,
                   only=(*PRODUCT, "quick_tests") if arguments.quick and arguments.tests else ())
    print(f"set-up is complete ({time.monotonic() - start:.1f} s)")
