"""Tests which answers of a plain server are kept under one name."""

from pathlib import Path
from typing import Any

from kvferry_launch.testbed.reference import Reference

PROMPTS = [[1, 2, 3]]


def test_answers_are_kept_for_one_model_and_one_servers_settings(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def made(**settings: Any) -> Reference:
        return Reference(model, "0", **({"cache": tmp_path, "version": "1"} | settings))

    plain = made()
    path = plain._path(PROMPTS, 8)
    path.write_text('[{"tokens": [4], "margins": [0.5]}]')
    assert plain.cached(PROMPTS, 8)
    assert plain.generations(PROMPTS, 8)[0].tokens == [4]
    assert made(env={}).cached(PROMPTS, 8)
    assert not plain.cached(PROMPTS, 9)
    assert not plain.cached([[1, 2]], 8)
    for settings in ({"env": {"A": "1"}}, {"flags": ("--dtype", "float16")}, {"version": "2"}):
        assert not made(**settings).cached(PROMPTS, 8), settings
    names = {made(env=env)._path(PROMPTS, 8) for env in ({"A": "1"}, {"A": "2"}, {"A": "1", "B": "2"})}
    assert len(names) == 3
    assert made(env={"B": "2", "A": "1"})._path(PROMPTS, 8) in names
    (model / "config.json").write_text("{ }")
    assert not made().cached(PROMPTS, 8)
