"""CONTRIBUTING.md's recipes name files that exist, and the hooks run programs of this project."""

import re
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[1]
TEXT = (REPO / "CONTRIBUTING.md").read_text()
RECIPES = ("a transport backend", "a controller message", "a setting", "a command", "a metric", "a field of a node")
FILES_MAX = 9  # a new header and its source are two


def files_of(recipe: str) -> list[str]:
    """The first column of the recipe's table."""
    section = TEXT.split(f"### Add {recipe}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_few_files_and_all_of_them_exist(recipe: str) -> None:
    files = files_of(recipe)
    assert 2 <= len(files) <= FILES_MAX
    for name in files:
        folder = Path(name.split("NAME")[0]) if "NAME" in name else Path(name)
        assert (REPO / folder).exists(), name


def test_every_path_that_contributing_mentions_exists() -> None:
    for name in re.findall(r"`((?:transport|kernels|controller|connector|launch|tests)/[\w./]+)", TEXT):
        assert "NAME" in name or (REPO / name).exists(), name
    for name in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (REPO / name).exists(), name


def test_hooks_run_what_is_there() -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        for word in hook["entry"].split():
            assert not word.startswith("tests/") or (REPO / word).exists(), word
