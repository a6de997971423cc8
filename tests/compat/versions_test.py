"""Tests which pairs of versions run, and which packages an environment with another vLLM needs of its own."""

from version_pairs import pairs_of
from vllm_versions import Engine, unmet


def test_each_version_is_paired_with_itself_and_with_its_neighbours() -> None:
    old, middle, new = (Engine(version, "python") for version in ("1", "2", "3"))
    assert pairs_of([old, middle, new]) == [(old, old), (middle, middle), (new, new), (old, middle), (middle, old),
                                            (middle, new), (new, middle)]


def test_only_unmet_requirements_of_this_host_are_installed() -> None:
    present = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "numba": "0.65.0"}
    lines = ["torch==2.13.0+cpu", "Transformers<5.18.0,>=5.10.4", "numba==0.65.0", "x-y", "torchaudio",
             'pandas; extra == "bench"', 'other; platform_system == "Plan 9"']
    assert unmet(lines, present) == ["transformers<5.18.0,>=5.10.4", "x-y"]
