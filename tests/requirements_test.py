"""Tests that launch/requirements.txt has all packages that the tests import without vLLM, because tests/run --quick
installs no others.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry_launch.paths import LAUNCH, REPO
from kvferry_launch.setup.venv import requirements

TREES = (LAUNCH / "lib", REPO / "tests")
NEED_VLLM = (REPO / "tests" / "vllm", REPO / "tests" / "scheduler")
# Functions import these files, and report which packages are missing.
IMPORTED_LATE = ("serve_plot.py", "spans.py", "otlp_collector.py")
MODULES = {"pyyaml": "yaml", "prometheus-client": "prometheus_client", "kubernetes-validate": "kubernetes_validate"}


def sources() -> list[Path]:
    return [path for tree in TREES for path in tree.rglob("*.py")
            if not set(NEED_VLLM) & set(path.parents) and path.name not in IMPORTED_LATE]


def imported(source: Path) -> Iterator[str]:
    """Yields the first part of the name of each module that `source` imports when it is loaded. Imports inside of
    functions do not count.
    """
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def test_quick_runs_import_only_what_is_installed_for_them() -> None:
    own = {path.stem for tree in TREES for path in tree.rglob("*.py")} | {"kvferry", "kvferry_launch"}
    installed = {MODULES.get(name, name) for name in requirements(LAUNCH / "requirements.txt")}
    missing = {(name, str(source.relative_to(REPO))) for source in sources() for name in imported(source)
               if name not in sys.stdlib_module_names | own | installed}
    assert not missing
