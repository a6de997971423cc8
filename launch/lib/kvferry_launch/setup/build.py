"""Configures and builds the CMake presets."""

import os
import re
from collections.abc import Sequence

from kvferry_launch.paths import BUILD, LOGS, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup.commands import run_logged

PRODUCT = ("kvferry", "_core", "kvferry_package")
"""The CMake targets that users need: the program, the extension module and the Python package."""


def ensure_build(tests: bool, only: Sequence[str] = ()) -> None:
    """Builds targets of the release preset: those in `only` or, if it is empty, all targets if `tests`, else PRODUCT.
    Errors: SetupError.
    """
    build_preset("release", only or ([] if tests else PRODUCT), [f"-DPython_EXECUTABLE={VENV_PYTHON}"])


def build_preset(preset: str, targets: Sequence[str], settings: Sequence[str]) -> None:
    """Configures build/<preset>, unless it was configured with the values of `settings` before, and builds the targets,
    or all targets if `targets` is empty. Ninja skips what is up to date. Errors: SetupError.
    """
    log, folder = LOGS / "build.log", BUILD / preset
    cache = folder / "CMakeCache.txt"
    values = [setting.partition("=")[2] for setting in settings]
    configured = (folder / "build.ninja").exists() and all(f"={value}\n" in cache.read_text() for value in values)
    if not configured:
        with Step(f"Configure build/{preset}") as step:
            run_logged(f"cmake --preset {preset}", ["cmake", "--preset", preset, *settings], log, tick=step.update)
    with Step(f"Build build/{preset}") as step:

        def on_line(line: str) -> None:
            counted = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
            if counted:
                step.update(int(counted[1]) / int(counted[2]), f"{counted[1]}/{counted[2]} {counted[3][-50:]}")

        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        named = ["--target", *targets] if targets else []
        run_logged(f"cmake --build --preset {preset}",
                   ["cmake", "--build", "--preset", preset, "-j", jobs, *named], log, on_line, tick=step.update)
