"""The gateway's account of its replicas: what they reported, and what it has sent since."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import CapacityError
from deployments.gateway.fleet import Ask, Fleet
from deployments.gateway.handles import asked_of
from deployments.gateway.placement import SILENT_S, Dispatcher, Placement
from deployments.gateway.routing import Choice
from deployments.llm.protocol import Adapter, Build, Generation


class LeastLoaded:
    """A policy that shows what the fleet looks like."""

    def choose(self, ask: Ask, fleet: Fleet) -> Choice:
        if not fleet.usable:
            raise CapacityError("none")
        self.loads = {replica.id: replica.tokens_in_flight for replica in fleet.usable}
        return Choice(min(self.loads, key=lambda name: (self.loads[name], name)), "idle", len(self.loads))


def report(tokens: int = 0) -> dict[str, object]:
    return {"slots": 4, "resident": {}, "tokens_in_flight": tokens, "running": 0}


def test_what_is_sent_counts_until_it_is_over_or_reported() -> None:
    policy = LeastLoaded()
    dispatcher, ask = Dispatcher(policy), Ask(tokens=100)
    reports = {"a": report(), "b": report()}
    assert dispatcher.choose(ask, reports).replica == "a"
    with dispatcher.sent("a", ask):
        assert dispatcher.choose(ask, reports).replica == "b"
        assert policy.loads == {"a": 100, "b": 0}
        reports["b"] = report(700)
        assert dispatcher.choose(ask, reports).replica == "a"
        assert policy.loads == {"a": 100, "b": 700}
    dispatcher.choose(ask, reports)
    assert policy.loads == {"a": 0, "b": 700}


def candidate(name: str) -> Any:
    """A replica as Serve's router sees it, as far as a placement looks at one."""
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), replica_metadata={}, routing_stats=report())


def test_a_crowd_that_comes_at_once_is_spread_before_any_of_it_has_been_sent() -> None:
    dispatcher, replicas = Dispatcher(LeastLoaded()), [candidate("a"), candidate("b")]
    crowd = [Placement(dispatcher, Ask(tokens=10)) for _ in range(6)]
    for placement in crowd:
        placement.ranked(replicas)
    assert sorted(placement.tried[0] for placement in crowd) == ["a"] * 3 + ["b"] * 3


def test_a_choice_counts_once_and_no_longer_than_somebody_waits_for_it() -> None:
    policy = LeastLoaded()
    dispatcher, replicas = Dispatcher(policy), [candidate("a"), candidate("b")]
    placement = Placement(dispatcher, Ask(tokens=10))
    with placement.counted():
        for _ in range(3):
            assert [[one.replica_id.unique_id for one in tier] for tier in placement.ranked(replicas)] == [["a"], ["b"]]
        dispatcher.choose(Ask(), {"a": replicas[0].routing_stats, "b": replicas[1].routing_stats})
        assert policy.loads == {"a": 10, "b": 0}
    placement.ranked(replicas)  # Serve goes on looking
    dispatcher.choose(Ask(), {"a": replicas[0].routing_stats, "b": replicas[1].routing_stats})
    assert policy.loads == {"a": 0, "b": 0}


def test_a_replica_that_goes_takes_its_account_with_it() -> None:
    policy = LeastLoaded()
    dispatcher, ask = Dispatcher(policy), Ask(tokens=5)
    both, one = {"a": report(), "b": report(3)}, {"b": report(3)}
    dispatcher.choose(ask, both)
    with dispatcher.sent("a", ask):
        assert dispatcher.choose(ask, one).replica == "b"
    dispatcher.choose(ask, both)
    assert policy.loads == {"a": 0, "b": 3}
    with pytest.raises(CapacityError):
        dispatcher.choose(ask, {})


def test_requests_of_one_version_and_beginning_have_one_place() -> None:
    adapter = Adapter("triage/3", "/v", "0" * 64)
    asks = [
        asked_of(Generation("chat", {"messages": [{"role": "system", "content": "s" * 2000}, {"content": end}]}, "x"))
        for end in ("one", "two")
    ]
    assert asks[0].prefix == asks[1].prefix
    assert asked_of(Generation("chat", {"messages": []}, "x", adapter)).adapter == adapter.engine_name
    assert asked_of(Generation("completions", {"prompt": [1, 2, 3]}, "x", tokens=9)) == Ask(None, "[1, 2, 3]", 9)
    assert asked_of(Generation("detokenize", {"tokens": [1]}, "x")) == Ask()


def test_serve_repeats_old_reports_and_they_are_no_news() -> None:
    policy = LeastLoaded()
    dispatcher, ask = Dispatcher(policy), Ask(tokens=100)
    dispatcher.choose(ask, {"a": {**report(), "beat": 1}})
    with dispatcher.sent("a", ask):
        dispatcher.choose(ask, {"a": {**report(), "beat": 1}})  # another object, as after every long poll
        assert policy.loads == {"a": 100}
        dispatcher.choose(ask, {"a": {**report(7), "beat": 2}})
        assert policy.loads == {"a": 7}


def test_who_does_not_answer_is_passed_by_until_it_reports() -> None:
    dispatcher, ask = Dispatcher(LeastLoaded()), Ask()
    first = {"a": {**report(), "beat": 1}, "b": {**report(), "beat": 1}}
    assert dispatcher.choose(ask, first).replica == "a"
    dispatcher.doubt("a")
    assert dispatcher.live == 1
    assert dispatcher.choose(ask, {**first, "b": {**report(50), "beat": 2}}).replica == "b"
    assert dispatcher.choose(ask, {**first, "a": {**report(), "beat": 2}}).replica == "a"


def test_the_last_one_is_asked_even_if_it_is_doubted() -> None:
    dispatcher, ask = Dispatcher(LeastLoaded()), Ask()
    dispatcher.choose(ask, {"a": report(), "b": report()})
    dispatcher.doubt("a")
    dispatcher.doubt("b")
    assert dispatcher.choose(ask, {"a": dispatcher._reports["a"], "b": dispatcher._reports["b"]}).looked == 2


def test_who_reports_no_more_while_others_do_hangs() -> None:
    now = 0.0
    dispatcher, ask = Dispatcher(LeastLoaded(), clock=lambda: now), Ask()
    reports = {"a": {**report(), "beat": 1}, "b": {**report(90), "beat": 1}}
    assert dispatcher.choose(ask, reports).replica == "a"
    now = SILENT_S + 1
    assert dispatcher.choose(ask, reports).replica == "a"  # nobody has reported: that tells nothing of one
    assert dispatcher.choose(ask, {**reports, "b": {**report(90), "beat": 2}}).replica == "b"


def test_a_gateway_asks_those_it_was_deployed_with_and_never_another_model() -> None:
    mine, other, older = Build("smol", "1"), Build("large", "2"), Build("smol", "0")
    dispatcher = Dispatcher(build=mine)
    assert dispatcher.ours({"a": mine, "b": older, "c": other}) == {"a"}
    assert dispatcher.ours({"b": older, "c": other}) == {"b"}
    assert dispatcher.ours({"c": other, "d": None}) == set()
    assert Build.published({"url": "u", "secret": "s", **mine.publish()}) == mine
