"""Tests that vLLM's connector interface is one for which connector/python was written.

interface/VERSION.txt has, of one version of vLLM, the parameters of each method of the base class, the fields of what
the scheduler gives a connector, and each function of vLLM that calls methods of a connector, with these methods in the
order of the source. It is made from vLLM's sources alone, also of a version that can't run here. After a change, first
adapt connector/python, then write the file of that version:
.venv/bin/python tests/scheduler/test_interface.py [FOLDER of the vllm package; without it, the installed one]
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("interface")
CONNECTOR = Path(__file__).parents[2] / "connector/python/kvferry/vllm.py"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
# Classes whose fields the connector reads.
GIVEN = {"v1/core/sched/output.py": ("NewRequestData", "CachedRequestData", "KVConnectorBlockState", "SchedulerOutput"),
         "v1/kv_cache_interface.py": ("KVCacheConfig",),
         "v1/outputs.py": ("KVConnectorOutput",)}
CALLERS = ("v1", "model_executor/layers/attention")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def installed() -> Path:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def version_of(vllm: Path) -> str:
    """Returns the version without the patch number, for example 0.32."""
    found = re.search(r"__version__ = version = '(\d+\.\d+)", (vllm / "_version.py").read_text())
    assert found is not None, f"{vllm / '_version.py'} has no version"
    return found[1]


def classes(source: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}


def decorators(function: Function) -> set[str]:
    return {ast.unparse(one) for one in function.decorator_list}


def parameters(function: Function) -> str:
    """Returns the names of the parameters; one with a default has a `?` behind it."""
    given = function.args
    names = [one.arg for one in [*given.posonlyargs, *given.args]]
    for place in range(len(names) - len(given.defaults), len(names)):
        names[place] += "?"
    names += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    names += [one.arg + ("?" if default else "")
              for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"({', '.join(names)})"


def methods(of: ast.ClassDef) -> dict[str, str]:
    """Returns the parameters of each public method and property of a class, and whether it is abstract."""
    found = {}
    for function in of.body:
        if isinstance(function, Function) and not function.name.startswith("_"):
            kinds = decorators(function)
            found[function.name] = ("property" if "property" in kinds else parameters(function)) + (
                " abstract" if "abstractmethod" in kinds else "")
    return found


def calls(source: Path, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the functions of a module that call a KV connector, with the methods that each function calls."""
    tree = ast.parse(source.read_text())
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for function in owner.body:
            if isinstance(function, Function):
                found = sorted((node.lineno, node.col_offset, node.func.attr) for node in ast.walk(function)
                               if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                               and node.func.attr in known and receiver(node.func.value).endswith("connector"))
                if found:
                    name = function.name if owner is tree else f"{getattr(owner, 'name', '')}.{function.name}"
                    yield name, ", ".join(method for _, _, method in found)


def receiver(expression: ast.expr) -> str:
    """Returns the last name in an expression such as `self.connector`; "" for connectors of other things than KV."""
    if isinstance(expression, ast.Call) and receiver(expression.func) == "get_kv_transfer_group":
        return "kv_connector"
    name = expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
    return "" if name.startswith(("ec_", "aux_output_")) else name


def interface(vllm: Path) -> dict[str, str]:
    bases = classes(vllm / BASE)
    known = methods(bases["KVConnectorBase_V1"]) | methods(bases["SupportsHMA"])
    found = {f"method {name}": signature for name, signature in known.items()}
    for source, names in GIVEN.items():
        there = classes(vllm / source)
        for name in names:
            if name in there:
                fields = [node.target.id for node in there[name].body
                          if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
                found[f"fields {name}"] = ", ".join(fields)
    for folder in CALLERS:
        for path in sorted((vllm / folder).rglob("*.py")):
            if "connector" in path.read_text():
                for name, called in calls(path, set(known)):
                    found[f"{path.relative_to(vllm).as_posix()} {name}"] = called
    return found


def recorded(version: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in (RECORDED / f"{version}.txt").read_text().splitlines())
    return {what: value for what, _, value in lines}


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [f"{what}: was {before.get(what, 'not there')}, is {now.get(what, 'not there')}"
            for what in sorted(before.keys() | now.keys()) if before.get(what) != now.get(what)]


def versions() -> list[str]:
    return sorted((path.stem for path in RECORDED.glob("*.txt")), key=lambda name: [int(n) for n in name.split(".")])


def test_no_method_and_no_call_differs_from_what_the_connector_was_written_against() -> None:
    version = version_of(installed())
    assert version in versions(), f"vLLM {version} is installed, recorded are {', '.join(versions())}: {__doc__}"
    changed = differences(recorded(version), interface(installed()))
    assert not changed, f"vLLM {version} differs from what connector/python is written against:\n" + "\n".join(changed)


@pytest.mark.parametrize("version", versions())
def test_the_connector_has_what_each_version_demands_and_takes_what_it_passes(version: str) -> None:
    own = {function.name: function for function in classes(CONNECTOR)["KvFerryConnector"].body
           if isinstance(function, Function)}
    for what, signature in recorded(version).items():
        name = what.removeprefix("method ")
        if name == what:
            continue
        assert name in own or "abstract" not in signature, f"vLLM {version} demands {name}{signature}"
        if name in own and signature != "property":
            wanted = names_in(signature)
            got = names_in(parameters(own[name]))
            assert got[: len(wanted)] == wanted, f"vLLM {version} calls {name}({', '.join(wanted)}), not {got}"


def names_in(signature: str) -> list[str]:
    return [name.rstrip("?") for name in re.findall(r"[*\w]+\??", signature.removesuffix(" abstract"))]


def test_a_changed_call_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "runner.py"
    source.write_text("class Runner:\n def step(self):\n  self.kv_connector.wait_for_save()\n"
                      "  self.ec_connector.wait_for_save()\n  connector.get_finished(self.done())\n"
                      "  get_kv_transfer_group().wait_for_save()\n")
    assert dict(calls(source, {"wait_for_save", "get_finished"})) == {
        "Runner.step": "wait_for_save, get_finished, wait_for_save"}


def test_a_changed_method_is_named() -> None:
    before = {"method save": "(self, name)", "method load": "(self)", "runner.py step": "load, save"}
    now = {"method save": "(self, name, tensor?) abstract", "runner.py step": "save, load"}
    assert differences(before, now) == [
        "method load: was (self), is not there",
        "method save: was (self, name), is (self, name, tensor?) abstract",
        "runner.py step: was load, save, is save, load"]


def main(folder: Path) -> None:
    lines = sorted(f"{what}: {value}\n" for what, value in interface(folder).items())
    (RECORDED / f"{version_of(folder)}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else installed())
