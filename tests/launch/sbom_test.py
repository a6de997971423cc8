"""Tests launch/sbom: it lists all build tools and all linked libraries, with their versions."""

import json
import re
import subprocess
import sys
from pathlib import Path

from kvferry_launch.paths import REPO
from kvferry_launch.setup import sbom
from kvferry_launch.setup.debian import debian_packages

LINKED = Path(sys.executable).resolve()  # this program is linked at least with libc


def test_the_list_has_each_package_once_with_its_version() -> None:
    done = subprocess.run([REPO / "launch" / "sbom", "--binary", LINKED], capture_output=True, text=True, check=True)
    bom = json.loads(done.stdout)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.5")
    assert bom["metadata"]["component"]["version"] == sbom.version_of_kvferry()
    purls = [component["purl"] for component in bom["components"]]
    assert len(purls) == len(set(purls))
    form = r"pkg:(deb/debian|pypi)/[a-z0-9.%B-]+@[^@?+]+(\?arch=\w+)?"
    assert [purl for purl in purls if not re.fullmatch(form, purl)] == []
    names = {component["name"] for component in bom["components"]}
    assert {"libzmq3-dev", "libucx-dev", "libssl-dev", "libc6", "pyyaml", "nanobind"} <= names
    assert not names & (set(debian_packages(tests=True)) - set(debian_packages(tests=False)))


def test_what_a_package_needs_is_listed_too() -> None:
    assert "iniconfig" in {component["name"] for component in
                           sbom.python_components([REPO / "launch" / "requirements.txt"])}  # pytest depends on it


def test_a_program_that_is_not_built_is_said_to_be_missing(tmp_path: Path) -> None:
    done = subprocess.run([REPO / "launch" / "sbom", "--binary", tmp_path / "none"], capture_output=True, text=True,
                          check=True)
    assert "does not exist; its libraries are not listed" in done.stderr
    assert json.loads(done.stdout)["components"]
