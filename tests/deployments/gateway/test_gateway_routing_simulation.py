"""The default policy against its two halves, under Zipf traffic. The baselines' figures are simulated too."""

import heapq
from dataclasses import replace

import pytest

from deployments.gateway.fleet import Ask
from deployments.gateway.routing import Affine
from tests.deployments.gateway.fleet_simulation import Arrival, LeastLoaded, PureAffinity, simulate, zipf_traffic


@pytest.mark.parametrize("exponent", [0.9, 1.2])
@pytest.mark.parametrize(("replicas", "requests"), [(8, 6000), (64, 14000)])
def test_affinity_within_a_bound_beats_both_of_its_halves(replicas: int, requests: int, exponent: float) -> None:
    traffic = list(
        zipf_traffic(replicas=replicas, adapters=1000, exponent=exponent, requests=requests, busy=0.6, seed=7)
    )
    ours = simulate(Affine(), replicas, traffic)
    loaded = simulate(LeastLoaded(), replicas, traffic)
    affine = simulate(PureAffinity(), replicas, traffic)
    assert ours.hit_rate > loaded.hit_rate + 0.15
    # Of what pure affinity hits, with replicas that are flooded, most is kept.
    assert ours.hit_rate > 0.8 * affine.hit_rate
    assert ours.p99_wait_s < affine.p99_wait_s / 5
    # Loads that are not made are time that is not spent: it waits less than the policy that looks at nothing else.
    assert ours.p99_wait_s < loaded.p99_wait_s
    starved, flooded = ours.shares()[0], ours.shares()[-1]
    assert starved > 0.3
    assert flooded < 1.5
    assert starved > affine.shares()[0]
    assert flooded < affine.shares()[-1]


def test_a_hot_adapters_copies_grow_and_shrink_again() -> None:
    """A third of 90 s in which half of all requests are for one adapter that is otherwise asked for now and then."""
    hot = "hot/1"
    background = list(zipf_traffic(replicas=8, adapters=1000, exponent=1.0, requests=3600, busy=0.35, seed=3))
    third_s = background[-1].at_s / 3
    seldom = [
        replace(one, ask=replace(one.ask, adapter=hot)) if number % 40 == 0 else one
        for number, one in enumerate(background)
    ]
    burst = [
        Arrival(one.at_s, Ask(hot, tokens=one.ask.tokens)) for one in background if third_s < one.at_s < 2 * third_s
    ]
    traffic = heapq.merge(seldom, burst, key=lambda one: one.at_s)
    copies = simulate(Affine(), 8, traffic, watched=hot).copies
    before = [number for at_s, number in copies if at_s < third_s]
    during = [number for at_s, number in copies if third_s < at_s < 2 * third_s]
    after = [number for at_s, number in copies if at_s > 2.5 * third_s]
    assert max(before) <= 3
    assert max(during) >= 5
    assert max(during) > max(before)
    assert after[-1] <= 3
    assert max(after) < max(during)
