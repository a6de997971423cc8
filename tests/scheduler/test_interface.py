"""Tests that vLLM's connector interface is the one for which connector/python was written.

interface.txt has the signature of each method of vLLM's base class, and each function of vLLM that calls such methods,
with these methods in the order of the source. After a change, first adapt connector/python, then write the file again:
.venv/bin/python tests/scheduler/test_interface.py > tests/scheduler/interface.txt
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).with_name("interface.txt")


def methods() -> dict[str, str]:
    """Returns the signature of each method that a connector may have."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    found = {}
    for base in (KVConnectorBase_V1, SupportsHMA):
        for name, member in vars(base).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inspect.isfunction(function) and not name.startswith("_"):
                names = ", ".join(str(one).partition(":")[0] for one in inspect.signature(function).parameters.values())
                found[name] = f"({names})"
    return found


def calls(source: Path, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the functions of a module that call a KV connector, with the methods that each function calls."""
    tree = ast.parse(source.read_text())
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for function in owner.body:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found = sorted((node.lineno, node.col_offset, node.func.attr) for node in ast.walk(function)
                               if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                               and node.func.attr in known and receiver(node.func.value).endswith("connector"))
                if found:
                    name = function.name if owner is tree else f"{getattr(owner, 'name', '')}.{function.name}"
                    yield name, ", ".join(method for _, _, method in found)


def receiver(expression: ast.expr) -> str:
    """Returns the last name in an expression such as `self.connector`; "" for connectors of other things than KV."""
    name = expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
    return "" if name.startswith(("ec_", "aux_output_")) else name


def interface() -> dict[str, str]:
    import vllm

    known = methods()
    found = {f"method {name}": signature for name, signature in known.items()}
    root = Path(vllm.__file__).parent
    for source in sorted((root / "v1").rglob("*.py")):
        if "connector" in source.read_text():
            for name, called in calls(source, set(known)):
                found[f"{source.relative_to(root).as_posix()} {name}"] = called
    return found


def recorded() -> dict[str, str]:
    lines = (line.partition(": ") for line in RECORDED.read_text().splitlines())
    return {what: value for what, _, value in lines}


def test_no_method_and_no_call_differs_from_what_the_connector_was_written_against() -> None:
    before, now = recorded(), interface()
    changed = [f"{what}: was {before.get(what, 'not there')}, is {now.get(what, 'not there')}"
               for what in sorted(before.keys() | now.keys()) if before.get(what) != now.get(what)]
    assert not changed, "vLLM changed what connector/python is written against:\n" + "\n".join(changed)


def test_a_changed_call_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "runner.py"
    source.write_text("class Runner:\n def step(self):\n  self.kv_connector.wait_for_save()\n"
                      "  self.ec_connector.wait_for_save()\n  connector.get_finished(self.done())\n")
    assert dict(calls(source, {"wait_for_save", "get_finished"})) == {"Runner.step": "wait_for_save, get_finished"}


if __name__ == "__main__":
    for what, value in sorted(interface().items()):
        print(f"{what}: {value}")
