"""What the autoscaler is told, and what it decides; Serve's part of it is `tests/chaos/test_lifecycle_chaos.py`."""

import math
from types import SimpleNamespace

import pytest

from cluster.config import parse
from cluster.errors import ConfigError
from deployments.config import ServeConfig
from deployments.llm.config import LLMConfig, ReplicaRange
from deployments.llm.scaling import BELIEVED_S, FORGOTTEN_S, Demand, desired_replicas


def context(
    reports: dict[str, dict[str, float]] | None, *, target: int = 10, now: int = 1, queued: float = 0.0
) -> SimpleNamespace:
    """Serve's `AutoscalingContext`, as far as the policy looks: figures by replica are turned to replicas by figure."""
    metrics: dict[str, dict[str, float]] = {}
    for replica, figures in (reports or {}).items():
        for name, value in figures.items():
            metrics.setdefault(name, {})[replica] = value
    return SimpleNamespace(
        aggregated_metrics=metrics,
        total_queued_requests=queued,
        target_num_replicas=now,
        config=SimpleNamespace(target_ongoing_requests=target),
    )


@pytest.mark.parametrize(
    ("reports", "queued", "wanted"),
    [
        ({"a": {"in_hand": 10}}, 0, 1),
        ({"a": {"in_hand": 11}}, 0, 2),
        ({"a": {"in_hand": 10, "waiting:g": 25}}, 0, 4),  # a queue at the gateway is demand
        ({"a": {"in_hand": 10, "waiting:g": 25}, "b": {"in_hand": 10, "waiting:g": 20}}, 0, 5),  # … and one queue
        ({"a": {"in_hand": 10, "waiting:g": 20, "waiting:h": 10}}, 0, 4),  # two gateways have two
        ({"a": {"in_hand": 10}}, 5, 2),
        ({"a": {"in_hand": 0}, "b": {"in_hand": 0}}, 0, 1),
    ],
)  # fmt: skip
def test_the_whole_demand_counts_once(reports: dict[str, dict[str, float]], queued: float, wanted: int) -> None:
    assert desired_replicas(context(reports, queued=queued))[0] == wanted


def test_no_news_changes_nothing() -> None:
    assert desired_replicas(context(None, now=3))[0] == 3


def test_a_queue_is_told_until_it_is_old_and_then_told_as_over() -> None:
    demand = Demand()
    demand.heard("g", 30, 100.0)
    assert demand.figures(4, 101.0) == {"in_hand": 4.0, "waiting:g": 30.0}
    demand.heard("g", 2, 102.0)
    assert demand.figures(4, 103.0)["waiting:g"] == 2.0
    assert demand.figures(4, 102.0 + BELIEVED_S) == {"in_hand": 4.0, "waiting:g": 0.0}
    assert demand.figures(0, 102.0 + FORGOTTEN_S) == {"in_hand": 0.0}


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({"min": 0, "max": 2}, "half a minute"),
        ({"min": 3, "max": 2}, "max 2 is less than min 3"),
        (0, "greater than or equal to 1"),
    ],
)
def test_a_scale_that_serves_nobody_is_refused(replicas: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(LLMConfig, {"model": "m", "replicas": replicas}, source="test")


def test_a_target_that_no_replica_reaches_is_refused() -> None:
    settings = {"gateway": {"max_running": 16}, "llm": {"model": "m", "replicas": {"max": 2, "target_requests": 32}}}
    with pytest.raises(ConfigError, match=r"target_requests 32 is more than gateway\.max_running 16"):
        parse(ServeConfig, settings, source="test")


def test_the_defaults_scale_before_the_gateway_lets_requests_wait() -> None:
    scale, gateway = ReplicaRange(max=2), ServeConfig().gateway
    full = context({"a": {"in_hand": gateway.max_running}}, target=scale.target_requests)
    assert desired_replicas(full)[0] == math.ceil(gateway.max_running / scale.target_requests) > 1


def test_how_many_replicas_there_are_is_no_part_of_what_they_are() -> None:
    one = LLMConfig(model="m")
    assert one.build == LLMConfig(model="m", replicas=4).build == LLMConfig(model="m", replicas={"max": 2}).build
    assert one.build != LLMConfig(model="m", max_model_len=1024).build
