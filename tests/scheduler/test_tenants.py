"""Tests tenants, who are told apart by cache_salt: none can observe which prompts another has sent."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine
    from kvferry_harness.prober import Observed

MakeEngine = Callable[..., "Engine"]
PAIRS = 60  # without --tenant-pairs
AREA_OF_TIMES_MAX = 0.55
PLACES = pytest.mark.parametrize("elsewhere", [False, True], ids=["same engine", "another engine"])


def shown_areas(seen: list["Observed"], who: str) -> tuple[float, float]:
    """Prints and returns the areas under the curve of the tokens that were found, and of the times."""
    from kvferry_harness.prober import area_under_curve

    def of(value: Callable[["Observed"], float]) -> float:
        return area_under_curve(*([value(one) for one in seen if one.was_sent == was_sent]
                                  for was_sent in (True, False)))

    found = of(lambda one: one.num_local + one.num_external), of(lambda one: one.seconds)
    print(f"{len(seen)} prompts, {who}: area under the curve {found[0]:.3f} of tokens, {found[1]:.3f} of times")
    return found


@PLACES
def test_a_tenant_can_not_tell_which_prompts_another_has_sent(
        make_engine: MakeEngine, pytestconfig: pytest.Config, elsewhere: bool) -> None:
    from kvferry_harness.prober import probe

    asked = pytestconfig.getoption("--tenant-pairs")
    victims = make_engine()
    seen = probe(victims, make_engine() if elsewhere else victims, int(asked or PAIRS), "victim", "prober", seed=1)
    of_tokens, of_times = shown_areas(seen, "another tenant")
    assert {(one.num_local, one.num_external) for one in seen} == {(0, 0)}
    assert of_tokens == 0.5
    if asked:  # times are judged only on request, because they need many prompts
        assert of_times <= AREA_OF_TIMES_MAX


@PLACES
def test_the_same_tenant_can_tell(make_engine: MakeEngine, elsewhere: bool) -> None:
    """Otherwise the test above would prove nothing."""
    from kvferry_harness.prober import probe

    victims = make_engine()
    seen = probe(victims, make_engine() if elsewhere else victims, 12, "victim", "victim", seed=2)
    assert shown_areas(seen, "the same tenant")[0] == 1.0
    assert {one.num_local + one.num_external for one in seen if one.was_sent} == {99}
