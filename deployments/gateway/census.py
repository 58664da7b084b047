"""How every replica of a deployment is: what each says of itself, and what Serve says of those that say nothing.

`Census` asks, through two functions, so that it knows no Ray; `of_handle` makes them from a Serve handle. One look is
at work at a time, whoever asks meanwhile gets its answer, and none takes longer than `wait_s`: health is open to all.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.errors import FlywheelError
from deployments.calls import translated
from deployments.gateway.errors import problem

WAIT_S = 2.0
FORGOTTEN_AFTER_S = 30.0
"""A replica that a long step keeps from answering is still one that serves; not for ever."""
STATES_KEPT_S = 1.0
"""Serve's controller is asked no more often: it has the whole cluster to look after."""
RUNNING = "RUNNING"
STOPPING = "STOPPING"

Facts = Mapping[str, Any]
_TOGETHER = ("adapters", "adapters_kept")
_BY_NAME = ("adapters_failed", "keep_problems")


@dataclass(frozen=True)
class Look:
    """What was found at one moment. `said`: each replica's facts, or why it has none; None: not all answered."""

    states: Mapping[str, int]
    """How many replicas Serve has in each state, by its own words; empty if it did not say."""
    said: Sequence[Facts | FlywheelError] | None


def summary(look: Look, before: Sequence[Facts] = (), age_s: float = 0.0) -> dict[str, Any]:
    """Facts for health. `before`: what replicas said when all answered last, `age_s` ago.

    `status` is `ok`; `degraded` if some replica is missing, wrong or silent while others can answer; `unavailable`.
    """
    if look.said is None:
        told = [{**facts, "silent_s": round(age_s, 1)} for facts in before if age_s < FORGOTTEN_AFTER_S]
        status = "degraded" if told else "unavailable"
        trouble: dict[str, Any] = {"silent": f"Not every replica has answered within {WAIT_S:g} s."}
    else:
        good = [facts for facts in look.said if not isinstance(facts, FlywheelError)]
        told = [dict(problem(facts).body() if isinstance(facts, FlywheelError) else facts) for facts in look.said]
        missing = max(0, look.states.get(RUNNING, 0) - len(good))
        trouble = {"missing": missing} if missing else {}
        status = "unavailable" if not good else "ok" if len(good) == len(told) and not missing else "degraded"
    # Serve's other words are for its steps on the way to RUNNING.
    starting = sum(count for state, count in look.states.items() if state not in (RUNNING, STOPPING))
    answered = [facts for facts in told if "error" not in facts]
    merged: dict[str, Any] = {"running": sum(facts.get("running", 0) for facts in answered)}
    for name in _TOGETHER:
        merged[name] = sorted({each for facts in answered for each in facts.get(name, ())})
    for name in _BY_NAME:
        merged[name] = {key: value for facts in answered for key, value in facts.get(name, {}).items()}
    if model := next((facts["model"] for facts in answered if "model" in facts), None):
        merged["model"] = model
    if not answered:
        # As a part that does not answer says it: clients of health look for `error`.
        errors = [facts["error"] for facts in told]
        merged["error"] = errors[0] if errors else {"message": _nobody(starting), "code": "overloaded"}
    return {"status": status, "starting": starting, **trouble, **merged, "replicas": told}


def _nobody(starting: int) -> str:
    return "No replica has answered." if not starting else f"No replica has answered; {starting} being started."


class Census:
    """Looks at all replicas of one deployment."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Sequence[Facts | FlywheelError]]],
        states: Callable[[], Awaitable[Mapping[str, int]]],
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask`: what all replicas say. `states`: how many are in which of Serve's states. Either may be slow."""
        self._ask = ask
        self._states = states
        self._wait_s = wait_s
        self._clock = clock
        self._known: tuple[float, Mapping[str, int]] | None = None
        self._before: tuple[float, list[Facts]] = (0.0, [])
        self._looking: asyncio.Task[dict[str, Any]] | None = None

    async def look(self) -> dict[str, Any]:
        """As `summary`."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="census")
        # Shielded: one who hangs up must not take the answer from those who joined.
        return await asyncio.shield(self._looking)

    async def _look(self) -> dict[str, Any]:
        states, said = await asyncio.gather(self._known_states(), self._in_time(self._ask()))
        now = self._clock()
        if said is not None:
            self._before = (now, [facts for facts in said if not isinstance(facts, FlywheelError)])
        at, before = self._before
        return summary(Look(states, said), before, now - at)

    async def _known_states(self) -> Mapping[str, int]:
        now = self._clock()
        if self._known is None or now - self._known[0] >= STATES_KEPT_S:
            self._known = (now, await self._in_time(self._states()) or {})
        return self._known[1]

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._wait_s):
                return await answer
        except TimeoutError:
            return None


def of_handle(handle: DeploymentHandle, *, part: str) -> Census:
    """The census of the deployment behind a handle, whose replicas have a method `describe`."""

    async def ask() -> list[Facts | FlywheelError]:
        try:
            answers = await handle.broadcast("describe").results_async(timeout_s=WAIT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        except (RayError, RayServeException) as error:
            answers = [error]
        return [_heard(answer, part) for answer in answers]

    async def states() -> dict[str, int]:
        # Blocks for as long as the controller takes.
        application = (await asyncio.to_thread(serve.status)).applications.get(handle.app_name)
        deployment = application.deployments.get(handle.deployment_name) if application else None
        return {str(getattr(s, "value", s)): n for s, n in deployment.replica_states.items()} if deployment else {}

    return Census(ask, states)


def _heard(answer: Any, part: str) -> Facts | FlywheelError:
    if not isinstance(answer, BaseException):
        return dict(answer)
    error = translated(answer, part)
    return error if isinstance(error, FlywheelError) else FlywheelError("It failed to say how it is.")
