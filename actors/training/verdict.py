"""Why a run lost its workers, in one line: which rank on which node, what happened, what it costs, which knob helps.

`judge…` are pure: facts in, a `Verdict` out. `failure_of` makes such a fact of what Ray Train hands over, and `explain`
is the driver's: the error a failed fit ends with. Does not know what the run was learning.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from actors.training import failures
from actors.training.control import Heartbeat
from actors.training.watchdog import Stuck
from cluster.errors import FlywheelError, TrainingError

Kind = Literal["oom", "node", "preempted", "killed", "mistake", "silent", "data", "error", "stuck", "room", "resize"]

_LESS_MEMORY: Final = (
    "Lower optimizer.micro_batch_size or data.max_length, set activation_checkpointing=true, "
    "or use parallel.strategy=fsdp."
)
_MEMORY: Final = ("out of memory", "outofmemory", "allocate memory")
_ORDER: Final[Sequence[str]] = (
    "oom",
    "node",
    "preempted",
    "killed",
    "silent",
    "mistake",
    "data",
    "error",
    "collateral",
)
"""Which of several failures the others follow from: a dead process, then a mistake, and last a broken connection."""


@dataclass(frozen=True)
class Failure:
    """What happened to one rank. `node` and `pid` are empty where they are not known."""

    rank: int
    kind: Kind | Literal["collateral"]
    text: str
    hint: str | None = None
    node: str = ""
    pid: int = 0
    mark: str = ""
    """What it has in common with the same failure of another attempt (`failures.fingerprint`)."""
    error: FlywheelError | None = None
    """Our own error, if it was one: a run that ends by it ends with it."""


@dataclass(frozen=True)
class Verdict:
    """One line and what to do about it. `mistake`: another try would end the same way."""

    kind: Kind
    line: str
    hint: str
    mistake: bool = False
    mark: str = ""
    error: FlywheelError | None = None

    def final(self) -> FlywheelError:
        """The error that a run ends with: a mistake is told as whoever found it said it."""
        if self.mistake and self.error is not None:
            return self.error
        return TrainingError(f"{self.line}.", hint=self.hint)


def failure_of(
    rank: int,
    error: BaseException,
    *,
    node: str = "",
    pid: int = 0,
    beat: Heartbeat | None = None,
    node_lost: bool = False,
    memory_kills: int | None = None,
) -> Failure:
    """What `error`, that Ray Train reports of `rank`, means. `beat` is the rank's last heartbeat.

    `memory_kills`: how many processes the kernel has killed for memory on that node since the group began; None: it
    cannot be known (nobody is left there).
    """
    cause = getattr(error, "cause", None)
    if isinstance(error, RayError) and isinstance(cause, Exception) and failures.is_mistake(cause):
        error = cause  # what user code in a task (of Ray Data) raised, or we did
    inner = getattr(error, "health_check_failure", error)
    dead = inner is not error  # Ray Train wraps what it finds instead of a living worker

    def made(kind: Kind | Literal["collateral"], text: str, hint: str | None = None) -> Failure:
        own = error if isinstance(error, FlywheelError) else None
        return Failure(rank, kind, text, hint, node, pid, failures.fingerprint(inner), own)

    if isinstance(inner, OutOfMemoryError):
        return made("oom", f"was killed by Ray, whose node ran out of memory{_held(beat)}", _LESS_MEMORY)
    if dead and (node_lost or isinstance(inner, NodeDiedError)) and not getattr(inner, "preempted", False):
        return made("node", "was lost with its node")
    if dead and isinstance(inner, RayActorError):
        if getattr(inner, "preempted", False):
            return made("preempted", "was lost: its node was taken away")
        if "node died" in str(inner).lower() or "its node has died" in str(inner):
            return made("node", "was lost with its node")
        if memory_kills:
            return made("oom", f"was killed: its node's memory limit was reached{_held(beat)}", _LESS_MEMORY)
        if "OutOfMemory" in str(inner) or "memory monitor" in str(inner).lower():
            return made("oom", f"was killed by Ray, whose node ran out of memory{_held(beat)}", _LESS_MEMORY)
        why = "no kill for memory was counted there" if memory_kills == 0 else "perhaps for memory"
        return made("killed", f"died: killed, or crashed in native code ({why}){_held(beat)}")
    if dead or type(inner).__name__ == "WorkerHealthCheckTimeoutError":
        return made("silent", f"did not answer any more: {first_line(inner)}")
    if isinstance(error, FlywheelError):
        return made("error" if error.retryable else "mistake", f"failed: {first_line(error)}", error.hint)
    said = first_line(error)
    text = f"failed: {type(error).__name__}{f': {said}' if said else ''}"
    if isinstance(error, RayError) and not failures.is_mistake(error):
        lost = "its data feed" if isinstance(error, RayActorError) else "what it had asked of Ray"
        return made("data", f"lost {lost}: {type(error).__name__}: {said}")
    if failures.is_collateral(error):
        return made("collateral", text)
    memory = any(sign in f"{type(error).__name__} {error}".lower() for sign in _MEMORY)
    hint = _LESS_MEMORY if memory else None
    return made("mistake" if failures.is_mistake(error) else "error", text, hint)


def judge(
    found: Iterable[Failure],
    *,
    workers: int,
    logs: str,
    elastic: bool = False,
    again: bool = False,
) -> Verdict:
    """The verdict on a group that failed. `again`: the same has ended an earlier attempt at the same step."""
    ordered = sorted(found, key=lambda each: (_ORDER.index(each.kind), each.rank))
    first = ordered[0]
    same = [each for each in ordered if each.kind == first.kind and _cause(each) == _cause(first)]
    kind: Kind = "error" if first.kind == "collateral" else first.kind
    mistake = kind == "mistake" or again
    where = _place(same)
    line = f"{ranks([each.rank for each in same])} of {workers}{where} {first.text}"
    if again:
        line += ", at the same step as before"
    hint = first.hint or {
        "killed": f"If memory ran out: {_LESS_MEMORY[0].lower()}{_LESS_MEMORY[1:]}",
        "node": "Set parallel.workers.min below max, and a run goes on with the nodes that are left."
        if not elastic
        else "Ray starts on the nodes that are left; bring the node back to grow again.",
        "preempted": "failures.preemptions says how often a run goes on after this.",
        "data": f"The feed is started again with the workers; if it dies again, see {logs}.",
    }.get(kind, f"See the workers' logs in {logs}.")
    return Verdict(kind, line, hint, mistake, first.mark, first.error)


def judge_stuck(stuck: Stuck, *, stuck_after_s: float, begin_within_s: float) -> Verdict:
    """The verdict on a group in which nothing moves."""
    if stuck.begun:
        hint = f"If a step may take so long, raise elastic.stuck_after_s above {stuck_after_s:g}."
    else:
        least = max(stuck_after_s, begin_within_s)
        hint = f"If imports, loading and the first step may take so long, raise elastic.begin_within_s above {least:g}."
    at = f"after step {stuck.step}, nothing for {stuck.for_s:.0f} s"
    if not stuck.suspects:
        line = f"All {stuck.workers} ranks wait for each other in a collective ({at})"
        return Verdict("stuck", line, "Is the network between the nodes whole? " + hint, mark="stuck: all")
    first = stuck.suspects[0]
    named = ranks([each.rank for each in stuck.suspects])
    others = stuck.workers - len(stuck.suspects)
    waits = f", and the other {others} wait for it" if others else ""
    place = f" on node {first.node} (process {first.pid})"
    verb = "is" if len(stuck.suspects) == 1 else "are"
    line = f"{named} of {stuck.workers}{place} {verb} stuck{waits} ({at}): {first.doing}"
    return Verdict("stuck", line, hint, mark=f"stuck: {named}: {first.doing.split(' (')[0]}")


def places(nodes: Iterable[Mapping[str, float]], per_worker: Mapping[str, float]) -> int:
    """How many workers of `per_worker` fit on `nodes` (total resources of each)."""
    needed = {name: amount for name, amount in per_worker.items() if amount > 0}
    return sum(
        int(min((node.get(name, 0.0) // amount for name, amount in needed.items()), default=0.0)) for node in nodes
    )


def judge_room(nodes: Sequence[Mapping[str, float]], per_worker: Mapping[str, float], *, wanted: int) -> Verdict | None:
    """The verdict on a cluster that can never hold `wanted` workers; None if it can."""
    found = places(nodes, per_worker)
    if found >= wanted:
        return None
    each = ", ".join(f"{amount:g} {name}" for name, amount in per_worker.items() if amount > 0)
    lacks = []
    for name, amount in per_worker.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if amount > 0 and there < amount * wanted:
            lacks.append(f"{amount * wanted - there:g} more {name}")
    missing = f"it lacks {' and '.join(lacks)}" if lacks else "no single node has enough for one more"
    line = (
        f"{wanted} training workers of {each} each cannot be placed: the {len(nodes)} nodes of the cluster have room "
        f"for {found}, {missing}"
    )
    return Verdict("room", line, "Lower parallel.workers.min, or give Ray more nodes.", mistake=True)


def cost(*, step: int, committed: int, ends: bool = False) -> str:
    """What a restart, or the end, costs in words."""
    lost = step - committed
    if lost <= 0:
        return f"nothing is lost: step {step} is committed" if step else "no step was done yet"
    steps = f"{lost} step{'s' if lost > 1 else ''} after the commit of step {committed}"
    return f"{steps} {'would be' if ends else 'will be'} trained again, no row is lost"


def explain(error: TrainingFailedError, *, workers: int, run_folder: Path) -> FlywheelError:
    """The error that the driver raises for a failed fit: the verdict that its controller reached, if it did."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        found = [failure_of(rank, cause) for rank, cause in error.worker_failures.items()]
        return judge(found, workers=workers, logs=str(run_folder)).final()
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, FlywheelError):
        return cause
    if "Startup" in type(cause).__name__:
        return TrainingError(
            f"{workers} training workers could not be placed: {first_line(cause)}",
            hint="Lower parallel.workers, or give Ray more CPUs or GPUs.",
        )
    return TrainingError(f"Ray Train stopped the run: {first_line(cause)}", hint=f"See the logs in {run_folder}.")


def ranks(numbers: Sequence[int]) -> str:
    """`Rank 1`, `Ranks 0-3 and 6`."""
    spans: list[list[int]] = []
    for rank in sorted(numbers):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    return f"Rank{'s' if len(numbers) > 1 else ''} {' and '.join(named) if len(named) < 3 else ', '.join(named)}"


def _cause(failure: Failure) -> str:
    """What is equal in two ranks' failures: what they raised, or what was done to them (but not how much they held)."""
    return failure.mark if failure.kind in ("mistake", "data", "error") else failure.text.split(";")[0]


def _place(same: Sequence[Failure]) -> str:
    nodes = sorted({each.node for each in same if each.node})
    if not nodes:
        return ""
    process = f" (process {same[0].pid})" if len(same) == 1 and same[0].pid else ""
    return f" on node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}{process}"


def _held(beat: Heartbeat | None) -> str:
    return f"; it held {beat.rss_bytes / (1 << 30):.1f} GiB" if beat is not None and beat.rss_bytes else ""


def first_line(error: BaseException) -> str:
    """The first line with words of what `error` says, without its full stop; empty if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else ""
