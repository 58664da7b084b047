"""What a run is asked to do while it runs, and where each of its workers stands.

`Control` is the core: wishes, heartbeats, incidents; pure but for the clock it is given. `RunControl` is the Ray actor
around it, one per run, which the driver owns. `ControlLink` is a worker's end: a thread that tells and asks, so that a
step never waits for it. The loop adds up the workers' `votes` in a collective that it does anyway, and so all of them
act on a wish at the same step.

Knows neither what a step is made of nor how Ray Train restarts a group.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from cluster.errors import StateError

logger = logging.getLogger(__name__)

Phase = Literal["start", "data", "compute", "collective", "checkpoint", "wait"]
"""What a worker is doing. `wait`: it has made its checkpoint for a resize, and stands still."""

_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Wish(IntEnum):
    """What the workers are asked to do at their next step boundary; the larger one outweighs."""

    NONE = 0
    CHECKPOINT = 1
    """Write a checkpoint, and go on."""
    CHECKPOINT_AND_WAIT = 2
    """Write a checkpoint, have it committed, and stand still: the group is about to be restarted."""
    STOP = 3
    """Write a checkpoint, have it committed, and end the run; it can be taken up again."""


@dataclass(frozen=True)
class Heartbeat:
    """Where one worker stands. `step` counts optimizer steps done; `for_s`: how long it has been at this very point.

    `oom_kills` counts the processes that its node's memory limit has ended so far (None: not known there).
    """

    rank: int
    node: str
    pid: int
    step: int
    phase: Phase
    for_s: float
    rss_bytes: int = 0
    oom_kills: int | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    """Moments (`time.time`) at which this worker was first called, and had first: started, loaded, data, step."""


@dataclass(frozen=True)
class Order:
    """What a worker hears when it tells where it stands. A wish that it has done already keeps its number."""

    wish: Wish
    number: int


@dataclass(frozen=True)
class Group:
    """One set of workers between two restarts. `members`: (node, pid) by rank; times are `time.time`."""

    began_at: float
    members: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Incident:
    """Something that happened to a run: one line for a person. Times are `time.time`."""

    kind: str
    verdict: str
    hint: str
    at: float
    step: int
    """Steps that were done then."""
    lost_steps: int
    """Steps since the last commit: their rows are trained again, none is lost."""


@dataclass(frozen=True)
class Seen:
    """One look at a run. `heartbeats` hold, by rank, the last one and how long ago it came."""

    group: Group | None
    heartbeats: Mapping[int, tuple[Heartbeat, float]]
    committed: int
    """The newest step that a checkpoint is committed of; 0 if there is none."""
    step: int
    """The newest step that any worker has done."""
    wish: Wish
    incidents: tuple[Incident, ...]
    groups: tuple[Group, ...]
    marks: Mapping[str, float]
    """The marks of rank 0 in the present group."""
    memory_kills: Mapping[str, int]
    """How many processes each node's memory limit has ended since the group began."""

    @property
    def waiting(self) -> bool:
        """Whether every worker of the group has made its checkpoint and stands still."""
        group = self.group
        if group is None:
            return False
        standing = {rank for rank, (beat, _) in self.heartbeats.items() if beat.phase == "wait"}
        return standing >= set(range(len(group.members)))


class Control:
    """The core. `clock` is in seconds and only ever goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, committed: int = 0) -> None:
        """`committed`: the step of the checkpoint that the run goes on from; 0 if it begins."""
        self._clock = clock
        self._order = Order(Wish.NONE, 0)
        self._groups: list[Group] = []
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        self._committed = self._step = committed
        self._kills: dict[str, tuple[int, int]] = {}
        self._incidents: list[Incident] = []
        self._controller: Any = None

    def begin_group(self, group: Group) -> None:
        """A new set of workers; what was asked of the last one is asked no more, but for a stop."""
        self._groups.append(group)
        self._heartbeats, self._kills = {}, {}
        if self._order.wish is not Wish.STOP:
            self._order = Order(Wish.NONE, self._order.number)
        self._step = self._committed

    def beat(self, heartbeat: Heartbeat) -> Order:
        """Take a worker's heartbeat; the answer is what it is asked to do. One of an earlier group is not heard."""
        members = self._groups[-1].members if self._groups else ()
        known = heartbeat.rank < len(members) and members[heartbeat.rank] == (heartbeat.node, heartbeat.pid)
        if not known:
            return Order(Wish.NONE, 0)
        self._heartbeats[heartbeat.rank] = (heartbeat, self._clock())
        self._step = max(self._step, heartbeat.step)
        if heartbeat.oom_kills is not None:
            first, _ = self._kills.get(heartbeat.node, (heartbeat.oom_kills, 0))
            self._kills[heartbeat.node] = (first, heartbeat.oom_kills)
        return self._order

    def counted(self, node: str, oom_kills: int) -> None:
        """Take how many processes the memory limit of `node` has ended by now, of a node that has told it before."""
        if node in self._kills:
            self._kills[node] = (self._kills[node][0], oom_kills)

    def ask(self, wish: Wish) -> int:
        """Ask all workers; the number of the order. What is asked already, or outweighs it, stands."""
        if wish > self._order.wish:
            self._order = Order(wish, self._order.number + 1)
        return self._order.number

    def done(self, number: int) -> None:
        """The workers have done what order `number` asked."""
        if number == self._order.number:
            self._order = Order(Wish.NONE, number)

    def commit(self, step: int) -> None:
        """A checkpoint of `step` is committed."""
        self._committed = max(self._committed, step)

    def happened(self, incident: Incident) -> None:
        """Keep an incident."""
        self._incidents.append(incident)

    def see(self) -> Seen:
        """Where everything stands now."""
        now = self._clock()
        first = self._heartbeats.get(0)
        return Seen(
            group=self._groups[-1] if self._groups else None,
            heartbeats={rank: (beat, now - at) for rank, (beat, at) in self._heartbeats.items()},
            committed=self._committed,
            step=self._step,
            wish=self._order.wish,
            incidents=tuple(self._incidents),
            groups=tuple(self._groups),
            marks=dict(first[0].marks) if first else {},
            memory_kills={node: last - first for node, (first, last) in self._kills.items()},
        )


class RunControl(Control):
    """The Ray actor of one run. Made by `running`; ends with its driver."""

    def set_controller(self, handle: Sequence[Any]) -> None:
        """Keep the handle of Ray Train's controller, in a list so that Ray does not resolve it."""
        self._controller = handle

    def ready(self) -> bool:
        """Answers when the actor is up."""
        return True


def name_of(run_id: str) -> str:
    """The name of a run's actor in the driver's namespace."""
    return f"control:{run_id}"


@contextmanager
def running(run_id: str, *, committed: int = 0) -> Iterator[Any]:
    """The actor of `run_id`, which goes on after step `committed`, on this node, for as long as the block runs.

    Raises `StateError` if there is one already: somebody on this cluster trains this run now.
    """
    import ray
    from ray.exceptions import ActorAlreadyExistsError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    placed = ray.remote(RunControl).options(name=name_of(run_id), num_cpus=0, scheduling_strategy=here)
    try:
        actor = placed.remote(committed=committed)
    except ActorAlreadyExistsError:
        raise StateError(f"Run {run_id!r} is being trained here already.", hint="Wait for it, or stop it.") from None
    try:
        ray.get(actor.ready.remote())
        yield actor
    finally:
        ray.kill(actor)


class Link(Protocol):
    """A worker's end of the control, as the loop sees it."""

    def at(self, phase: Phase, step: int) -> None:
        """Say what this worker does now, after `step` steps."""

    def votes(self) -> tuple[float, ...]:
        """What this worker has been asked, to be added up over all ranks."""

    def agreed(self, votes: Sequence[float]) -> Wish:
        """What the sum of all votes says."""

    def done(self) -> None:
        """What was agreed on has been done."""

    def committed(self, step: int) -> None:
        """A checkpoint of `step` is durable."""

    def stand_still(self, step: int, timeout_s: float) -> None:
        """Wait for the end of this process, at most `timeout_s`."""


def agreed(votes: Sequence[float]) -> Wish:
    """The weightiest wish that anybody voted for."""
    return max((Wish(place) for place, count in enumerate(votes, 1) if count), default=Wish.NONE)


class Unlinked:
    """The link of a run that nobody controls."""

    def at(self, phase: Phase, step: int) -> None: ...

    def votes(self) -> tuple[float, ...]:
        return (0.0, 0.0, 0.0)

    def agreed(self, votes: Sequence[float]) -> Wish:
        return agreed(votes)

    def done(self) -> None: ...

    def committed(self, step: int) -> None: ...

    def stand_still(self, step: int, timeout_s: float) -> None: ...


TERMINATED = threading.Event()
"""Set once this process has been told to end (SIGTERM): by the operator of its node, or by who reclaims it."""


class ControlLink:
    """The link of a worker of Ray Train. Nothing here waits for the actor, but `close` and `stand_still`."""

    def __init__(self, control: Any, *, rank: int, node: str, every_s: float, called_at: float | None = None) -> None:
        """`called_at`: when (`time.time`) Ray Train called this worker, before its imports."""
        self._control = control
        self._rank, self._node, self._every_s = rank, node, every_s
        self._point: tuple[Phase, int, float] = ("start", 0, time.monotonic())
        self._marks: dict[str, float] = {"called": called_at or time.time(), "started": time.time()}
        self._order = Order(Wish.NONE, 0)
        self._handled = 0
        self._ended_once = False
        self._ended = threading.Event()
        self._news = threading.Event()
        self._outbox: list[tuple[str, tuple[Any, ...]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="control-link")
        self._thread.start()

    def at(self, phase: Phase, step: int) -> None:
        before = self._point
        self._point = (phase, step, time.monotonic())
        if "step" not in self._marks:
            if phase == "data":
                self._marks.setdefault("loaded", time.time())
            elif before[0] == "data":
                self._marks.setdefault("data", time.time())
            if step > before[1] and "loaded" in self._marks and before[0] != "start":
                self._marks["step"] = time.time()
                self._news.set()

    def votes(self) -> tuple[float, ...]:
        wish = self._order.wish if self._order.number > self._handled else Wish.NONE
        if TERMINATED.is_set() and not self._ended_once:
            wish = max(wish, Wish.CHECKPOINT)
        return tuple(float(wish == each) for each in (Wish.CHECKPOINT, Wish.CHECKPOINT_AND_WAIT, Wish.STOP))

    def agreed(self, votes: Sequence[float]) -> Wish:
        return agreed(votes)

    def done(self) -> None:
        if TERMINATED.is_set():
            self._ended_once = True
        self._handled = self._order.number
        self._send("done", self._order.number)

    def committed(self, step: int) -> None:
        self._send("commit", step)

    def stand_still(self, step: int, timeout_s: float) -> None:
        self.at("wait", step)
        self._news.set()
        self._ended.wait(timeout_s)

    def close(self) -> None:
        """Send what is left; the link is of no use afterwards."""
        self._ended.set()
        self._news.set()
        self._thread.join(timeout=5)

    def _send(self, what: str, *arguments: Any) -> None:
        self._outbox.append((what, arguments))
        self._news.set()

    def _run(self) -> None:
        import ray
        from ray.exceptions import RayError

        while True:
            ending = self._ended.is_set()
            self._news.clear()
            try:
                while self._outbox:
                    what, arguments = self._outbox[0]
                    ray.get(getattr(self._control, what).remote(*arguments), timeout=10)
                    self._outbox.pop(0)
                self._order = ray.get(self._control.beat.remote(self._heartbeat()), timeout=10)
            except RayError as error:
                logger.info("rank %d: the run's control does not answer: %s", self._rank, error)
            except Exception:
                # A thread that watches must not die silently; the run itself goes on without it.
                logger.exception("rank %d: the control link had an error", self._rank)
            if ending:
                return
            self._news.wait(self._every_s)

    def _heartbeat(self) -> Heartbeat:
        phase, step, since = self._point
        return Heartbeat(
            rank=self._rank,
            node=self._node,
            pid=os.getpid(),
            step=step,
            phase=phase,
            for_s=time.monotonic() - since,
            rss_bytes=_rss_bytes(),
            oom_kills=oom_kills(),
            marks=dict(self._marks),
        )


def _rss_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def oom_kills(own: Path = _OWN_CGROUPS, root: Path = _CGROUPS) -> int | None:
    """How many processes of this one's memory cgroup the kernel has killed for memory; None if that is not told here.

    Whatever limit was reached: the kernel counts a kill where the victim was. `own` and `root` are where Linux tells
    of cgroups; in a container without a namespace for them, `own` names a folder of the host's, and `root` is its own.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy, file = (root / "memory", "memory.oom_control") if controllers else (root, "memory.events")
        for folder in (hierarchy / path.lstrip("/"), hierarchy):
            try:
                counts = dict(each.split() for each in (folder / file).read_text().splitlines())
                return int(counts["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return None
