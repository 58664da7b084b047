"""The bench of routing on a small fleet: what it counts, and that a bar is judged."""

from typing import Any

import pytest

from app.bench.report import Report
from app.bench.routing import Size, run

SMALL = Size(replicas=4, adapters=30, slots=3, in_flight=40, requests=600, runs=2)


@pytest.fixture(scope="module")
def found() -> Report:
    return run(SMALL, lambda _: None)


def test_every_kind_of_choice_comes_up_and_is_counted_once(found: Report) -> None:
    shares = {each.name: each.median for each in found.results if each.name.startswith("share_")}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    # A fleet with fewer slots than adapters, and more load than calm: holders, newcomers and the base.
    assert {"share_resident", "share_prefix"} < shares.keys()
    assert shares.keys() & {"share_spread", "share_spill", "share_home", "share_crowded"}


def test_the_bar_is_on_the_median_choice(found: Report) -> None:
    figures: dict[str, Any] = {each.name: each for each in found.results}
    (bar,) = found.bars
    assert bar.name == "choose"
    assert bar.met == (figures["choose"].median <= bar.bar)
    assert 0 < figures["choose"].median <= figures["choose_p99"].median
