"""Tests which versions of vLLM are refused, served, or get a warning."""

import logging
import re
from pathlib import Path

import pytest
from kvferry import compat
from kvferry._core import KvFerryError

PACKAGE = Path(__file__).parents[2] / "connector/python/kvferry"


@pytest.mark.parametrize(("version", "note"), [
    ("0.32.0", "all features of kvferry are available"), ("0.32.1.dev7+gabc", "all features of kvferry are available"),
    ("0.30.2+cpu", compat.PAIR_ONLY), ("0.31.0", compat.PAIR_ONLY), ("0.33.0rc1", compat.INTERFACE_ONLY)])
def test_a_served_version_is_named_with_what_was_tested(version: str, note: str) -> None:
    compat.check_version(version)
    level, text = compat.start_line(version)
    assert level == logging.INFO
    assert re.fullmatch(rf"kvferry: version \S+ with vLLM {re.escape(version)}; {note}", text)


@pytest.mark.parametrize("version", ["0.99.0", "1.0.0rc1", "dev"])
def test_an_unknown_or_newer_version_gets_a_warning(version: str) -> None:
    compat.check_version(version)
    level, text = compat.start_line(version)
    assert level == logging.WARNING
    assert f"with vLLM {version}, with which it was not checked and may fail; checked were vLLM 0.30, " in text


@pytest.mark.parametrize("version", ["0.29.3", "0.9.1"])
def test_an_older_version_is_refused_with_the_versions_that_are_served(version: str,
                                                                       capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KvFerryError, match=rf"kvferry: this is vLLM {version}, which is too old; .* vLLM 0\.30, "):
        compat.check_version(version)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_the_interface_of_each_served_version_is_recorded() -> None:
    recorded = {path.stem for path in Path(__file__).with_name("interface").iterdir()}
    assert {".".join(map(str, numbers)) for numbers in compat.SERVED} <= recorded


def test_no_other_module_probes_for_versions() -> None:
    probes = {path.name: found for path in PACKAGE.glob("*.py") if path.name not in ("compat.py", "__init__.py")
              if (found := re.findall(r"__version\w*|\bhasattr\(|except \(?(?:ImportError|AttributeError)",
                                      path.read_text()))}
    assert probes == {}
