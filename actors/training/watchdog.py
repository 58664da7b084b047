"""Which worker do the others wait for? Told from their last heartbeats and, where they answer, from their stacks. Pure.

In a data-parallel step most of the waiting happens inside `backward`, where no phase changes: the heartbeats say that
nothing moves, and only the stacks say who waits in a collective and who does not.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from actors.training.control import Heartbeat, Phase, Seen

_SILENT_BEATS: Final = 20
"""A worker that has missed so many heartbeats does not run: stopped, swapped out, or holding the interpreter's lock."""

_WAITS: Final = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "deepspeed/comm/",
    "actors/training/collective",
    "ray/train/",
)
"""Files whose innermost frame means: this worker waits for the others. (`backward` runs in C++ below graph.py.)"""

_TRAINING_THREAD: Final = "TrainingThread"


@dataclass(frozen=True)
class Frame:
    """A place in the code: where a worker's training thread is. `code` is the line itself."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def waits(self) -> bool:
        """Whether this is a place where one waits for other workers."""
        return any(part in self.file for part in _WAITS)

    def __str__(self) -> str:
        place = "/".join(self.file.split("/")[-2:])
        return f"{self.function} at {place}:{self.line}" + (f" ({self.code})" if self.code else "")


@dataclass(frozen=True)
class Stack:
    """What one worker's threads were doing: the innermost frames of its training thread, and all of it as text."""

    frames: tuple[Frame, ...]
    text: str

    @property
    def waits(self) -> bool:
        """Whether the training thread waits for other workers."""
        return any(frame.waits for frame in self.frames[-3:])


@dataclass(frozen=True)
class Suspect:
    """The worker that the others wait for."""

    rank: int
    node: str
    pid: int
    step: int
    phase: Phase
    doing: str


@dataclass(frozen=True)
class Stuck:
    """Nothing has moved for `for_s`. `suspects` are empty where all of them wait for each other.

    `begun`: every worker of the group has done a step.
    """

    for_s: float
    step: int
    workers: int
    suspects: tuple[Suspect, ...]
    begun: bool


def begun(seen: Seen) -> bool:
    """Whether every worker of the group has done its first step, so that imports, loading and compiling are over."""
    assert seen.group is not None
    beats = seen.heartbeats
    return all(rank in beats and "step" in beats[rank][0].marks for rank in range(len(seen.group.members)))


def is_stuck(seen: Seen, *, group_age_s: float, after_s: float, begin_s: float) -> bool:
    """Whether no worker of the group has got anywhere for `after_s`; until all have `begun`, for `begin_s` at least."""
    if seen.group is None or seen.waiting:
        return False
    return _idle_s(seen, group_age_s) > (after_s if begun(seen) else max(after_s, begin_s))


def _idle_s(seen: Seen, group_age_s: float) -> float:
    """How long the worker that moved last has stood still. None of them can have done so for longer than the group."""
    return min([group_age_s, *(beat.for_s + ago for beat, ago in seen.heartbeats.values())])


def blame(seen: Seen, stacks: Mapping[int, Stack], *, group_age_s: float, every_s: float) -> Stuck:
    """Who holds the others up: who does not answer, else who is behind, else who does not wait in a collective."""
    assert seen.group is not None
    members = seen.group.members
    beats = seen.heartbeats
    ranks = range(len(members))

    missing = [rank for rank in ranks if rank not in beats]
    silent = [rank for rank, (_, ago) in beats.items() if ago > _SILENT_BEATS * every_s]
    behind = _behind([beat for beat, _ in beats.values()])
    busy = [rank for rank in ranks if rank in stacks and not stacks[rank].waits]
    apart = [rank for rank in behind if beats[rank][0].phase not in ("collective", "checkpoint", "wait")]
    for suspected in (missing, silent, behind if len(behind) < len(beats) else [], busy, apart):
        if suspected and (len(suspected) < len(members) or len(members) == 1 or suspected is missing):
            break
    else:
        suspected = []

    def suspect(rank: int) -> Suspect:
        beat = beats[rank][0] if rank in beats else None
        node, pid = members[rank]
        if rank in missing:
            doing = "it has not begun"
        elif rank in silent:
            doing = f"its process has not answered for {beats[rank][1]:.0f} s (stopped?)"
        elif rank in stacks and stacks[rank].frames:
            doing = f"it is in {stacks[rank].frames[-1]}"
        else:
            doing = f"it is in the phase {beat.phase if beat else 'start'}"
        return Suspect(rank, node, pid, beat.step if beat else 0, beat.phase if beat else "start", doing)

    return Stuck(
        for_s=_idle_s(seen, group_age_s),
        step=seen.step,
        workers=len(members),
        suspects=tuple(suspect(rank) for rank in sorted(suspected)),
        begun=begun(seen),
    )


def _behind(beats: Sequence[Heartbeat]) -> list[int]:
    """Ranks with the fewest steps; all of them where they are level."""
    least = min((beat.step for beat in beats), default=0)
    return [beat.rank for beat in beats if beat.step == least]


def stack_here() -> Stack:
    """The stack of this process; run in a worker, whose main thread is free while its training thread is not."""
    import sys
    import threading

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames: tuple[Frame, ...] = ()
    text = []
    for ident, frame in sys._current_frames().items():
        summary = traceback.extract_stack(frame)
        name = names.get(ident, str(ident))
        if name.startswith(_TRAINING_THREAD):
            frames = tuple(Frame(each.filename, each.lineno or 0, each.name, each.line or "") for each in summary[-8:])
        text.append(f"Thread {name}:\n{''.join(traceback.format_list(summary))}")
    return Stack(frames, "\n".join(text))
