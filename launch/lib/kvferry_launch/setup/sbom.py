"""Lists the packages that kvferry is built from and runs with, with their versions, as CycloneDX 1.5 JSON."""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvferry_launch.paths import LAUNCH, REPO
from kvferry_launch.setup.debian import debian_packages

Component = dict[str, Any]


def version_of_kvferry() -> str:
    found = re.search(r"project\(kvferry VERSION ([0-9.]+)", (REPO / "CMakeLists.txt").read_text())
    assert found is not None
    return found[1]


def debian_components(names: Iterable[str]) -> list[Component]:
    """Returns a component for each of these Debian packages that is installed."""
    form = "${Package}\t${Version}\t${Architecture}\t${db:Status-Status}\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form, *names], capture_output=True, text=True, check=False)
    rows = sorted({tuple(line.split("\t")[:3]) for line in listed.stdout.splitlines() if line.endswith("\tinstalled")})
    return [{"type": "library", "name": name, "version": version,
             "purl": f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={arch}"} for name, version, arch in rows]


def linked_packages(binary: Path) -> set[str]:
    """Returns the Debian packages that contain the shared libraries which a program loads."""
    listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    libraries = {str(Path(path).resolve()) for path in re.findall(r"=> (/\S+)", listed)}
    # dpkg may list a library under the path that it had before /lib became a link to /usr/lib.
    names = sorted(libraries | {path.removeprefix("/usr") for path in libraries})
    owners = subprocess.run(["dpkg-query", "-S", *names], capture_output=True, text=True, check=False).stdout
    return {line.split(":")[0] for line in owners.splitlines() if ": /" in line}


def python_components(requirements: Iterable[Path]) -> list[Component]:
    """Returns a component for each installed Python package that the files name, or that one of these packages requires
    directly or through others.
    """
    todo = [re.split(r"[<>=!~;\[ ]", line.strip(), maxsplit=1)[0] for path in requirements
            for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, str] = {}
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version
        todo += [re.split(r"[<>=!~;\[( ]", line, maxsplit=1)[0] for line in distribution.requires or ()
                 if "extra ==" not in line]
    return [{"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{quote(version)}"}
            for name, version in sorted(found.items())]


def bill_of_materials(binary: Path | None, vllm: bool) -> dict[str, Any]:
    """Returns the CycloneDX document. `binary`: the program whose shared libraries are listed; None: it is not built.
    `vllm`: whether vLLM and the packages that it requires are listed.
    """
    version = version_of_kvferry()
    debian = set(debian_packages(tests=False)) | (linked_packages(binary) if binary else set())
    requirements = [LAUNCH / "requirements.txt", *([LAUNCH / "requirements-vllm.txt"] if vllm else [])]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {"type": "application", "name": "kvferry", "version": version,
                                   "purl": f"pkg:generic/kvferry@{version}"}},
        "components": debian_components(debian) + python_components(requirements),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="launch/sbom", description="Print what kvferry is built of, with versions, as CycloneDX JSON: the Debian "
        "packages of the build, those whose libraries the program links, and the Python packages of .venv.")
    parser.add_argument("--binary", type=Path, default=REPO / "build" / "release" / "bin" / "kvferry",
                        help="the built program whose libraries are listed (default: build/release/bin/kvferry)")
    parser.add_argument("--vllm", action="store_true", help="also list vLLM and the packages that it needs")
    arguments = parser.parse_args()
    binary = arguments.binary if arguments.binary.exists() else None
    if binary is None:
        print(f"launch/sbom: the program {arguments.binary} does not exist; its libraries are not listed (launch/setup "
              "builds build/release/bin/kvferry)", file=sys.stderr)
    json.dump(bill_of_materials(binary, arguments.vllm), sys.stdout, indent=1)
    print()
