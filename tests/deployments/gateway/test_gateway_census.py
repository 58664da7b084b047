"""Health of all replicas: who answers, who is wrong, silent or being started. Never slow, never many questions."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cluster.errors import CapacityError, FlywheelError
from deployments.gateway.census import FORGOTTEN_AFTER_S, Census, Facts, Look, summary


def replica(name: str, **facts: Any) -> dict[str, Any]:
    return {"replica": name, "model": "smol", "running": 1, "adapters": ["triage/1"], "adapters_failed": {}, **facts}


LOST = CapacityError("The engine stopped before it could answer.")
FAULT = {"why": "Adapter triage/3 cannot be loaded: its files are missing.", "at": "2026-12-02T22:00:00+00:00"}


def test_all_replicas_are_shown_and_added_up() -> None:
    said = [replica("a", adapters_failed={"triage/3": FAULT}), replica("b", running=2, adapters=["other/1"])]
    found = summary(Look({"RUNNING": 2}, said))
    assert (found["status"], found["running"], found["model"], found["starting"]) == ("ok", 3, "smol", 0)
    assert found["adapters"] == ["other/1", "triage/1"]
    assert found["adapters_failed"] == {"triage/3": FAULT}
    assert found["replicas"] == said


@pytest.mark.parametrize(
    ("states", "said", "status", "missing", "starting"),
    [
        ({"RUNNING": 1, "STARTING": 1}, [replica("a")], "ok", None, 1),
        ({"RUNNING": 2}, [replica("a")], "degraded", 1, 0),
        ({"RUNNING": 2}, [replica("a"), LOST], "degraded", 1, 0),
        ({"RUNNING": 1, "STOPPING": 1}, [replica("a")], "ok", None, 0),
        ({"RUNNING": 1}, [LOST], "unavailable", 1, 0),
        ({"UPDATING": 1, "RECOVERING": 1}, [], "unavailable", None, 2),
        ({}, [replica("a")], "ok", None, 0),  # Serve did not say in time
    ],
)
def test_who_is_missing_wrong_or_starting(
    states: Mapping[str, int], said: list[Any], status: str, missing: int | None, starting: int
) -> None:
    found = summary(Look(states, said))
    assert (found["status"], found.get("missing"), found["starting"]) == (status, missing, starting)
    assert ("error" in found) == (status == "unavailable")


def test_one_that_is_wrong_says_why_beside_one_that_is_well() -> None:
    wrong = summary(Look({"RUNNING": 2}, [replica("a"), LOST]))["replicas"][1]
    assert wrong["error"]["message"] == LOST.message


def test_silence_is_borne_for_a_while() -> None:
    soon = summary(Look({"RUNNING": 1}, None), [replica("a")], age_s=3)
    assert (soon["status"], soon["replicas"][0]["silent_s"]) == ("degraded", 3)
    assert "within 2 s" in soon["silent"]
    late = summary(Look({"RUNNING": 1}, None), [replica("a")], age_s=FORGOTTEN_AFTER_S)
    assert (late["status"], late["replicas"]) == ("unavailable", [])
    assert late["error"]["message"]


class Cluster:
    """Replicas that answer when they are let."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = self.asked_serve = 0
        self.now = 100.0
        self.census = Census(self.ask, self.states, wait_s=0.05, clock=lambda: self.now)

    async def ask(self) -> Sequence[Facts | FlywheelError]:
        self.asked += 1
        await self.answers.wait()
        return [replica("a")]

    async def states(self) -> Mapping[str, int]:
        self.asked_serve += 1
        await self.answers.wait()
        return {"RUNNING": 1}


async def test_it_never_hangs_and_remembers_who_was_there() -> None:
    cluster = Cluster()
    assert (await cluster.census.look())["status"] == "ok"
    cluster.answers.clear()
    cluster.now += 5
    async with asyncio.timeout(2):
        found = await cluster.census.look()
    assert (found["status"], found["replicas"][0]["silent_s"]) == ("degraded", 5)
    cluster.answers.set()
    assert (await cluster.census.look())["status"] == "ok"


async def test_many_who_ask_at_once_are_one_question_and_one_who_leaves_harms_nobody() -> None:
    cluster = Cluster()
    cluster.answers.clear()
    asking = [asyncio.create_task(cluster.census.look()) for _ in range(50)]
    await asyncio.sleep(0)
    asking.pop(0).cancel()
    cluster.answers.set()
    found = await asyncio.gather(*asking)
    assert {each["status"] for each in found} == {"ok"}
    assert (cluster.asked, cluster.asked_serve) == (1, 1)
    await cluster.census.look()
    assert (cluster.asked, cluster.asked_serve) == (2, 1)  # the controller is not asked twice in a second
