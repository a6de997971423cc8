"""Tests the recipes of CONTRIBUTING.md: they name few files, all of which exist and have room, and the hooks run
programs of this project.
"""

import ast
import re
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[1]
TEXT = (REPO / "CONTRIBUTING.md").read_text()
LAYERING = (REPO / "tests" / "layering_test.py").read_text()
# How many files a change of each kind may touch, tests and generated pages included.
FILES_MAX = {"a transport backend": 5, "a controller message": 5, "a setting": 3, "a command": 4,
             "a counter of the connector": 5, "a counter of the controller": 6, "a field of a node": 4}
# Lines that a file of a recipe must have left below its limit, so that the recipe does not begin with splitting it.
ROOM = 10


def rows_of(recipe: str) -> list[list[str]]:
    """Returns the names in the first column of the recipe's table, a list for each row. A row without names stands for
    a file that the recipe can't name.
    """
    section = TEXT.split(f"### Add {recipe}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:]
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def test_every_recipe_has_a_limit() -> None:
    assert re.findall(r"^### Add (.+)$", TEXT, re.MULTILINE) == list(FILES_MAX)


@pytest.mark.parametrize("recipe", FILES_MAX)
def test_a_recipe_names_few_files_and_all_of_them_exist(recipe: str) -> None:
    rows = rows_of(recipe)
    assert 2 <= sum(max(1, len(names)) for names in rows) <= FILES_MAX[recipe]
    for name in [name for names in rows for name in names]:
        folder = Path(name.split("NAME")[0]) if "NAME" in name else Path(name)
        assert (REPO / folder).exists(), name


@pytest.mark.parametrize("recipe", FILES_MAX)
def test_the_files_of_a_recipe_have_room_for_what_it_adds(recipe: str) -> None:
    limits = ast.literal_eval(re.findall(r"^LINES_MAX = (.+)$", LAYERING, re.MULTILINE)[0])
    tests_max = int(re.findall(r"^TEST_LINES_MAX = (\d+)", LAYERING, re.MULTILINE)[0])
    for name in [name for names in rows_of(recipe) for name in names if "NAME" not in name]:
        text = (REPO / name).read_text()
        most = tests_max if name.startswith("tests/") else limits.get(Path(name).suffix)
        if most is None or f"Over {most} lines, because " in text:
            continue
        assert len(text.splitlines()) <= most - ROOM, f"{name} has little room below its limit of {most} lines"


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
