"""Whose turn is next: the queue in front of an engine, with fair shares of tokens per key. Pure; time is passed in.

Start-time fair queueing (Goyal, Vin and Cheng 1996; with several in service at a time, SFQ(D) of Jin, Chase and Kaur
2004). Each key's requests stand in a line of their own. The head of a line has a start tag: the virtual time at which
it would start if every key got its share. The smallest tag goes next, and the key's next tag is later by tokens ÷
weight. A key that comes anew begins at the virtual time. That is the tag of the last that went, and moves on by what
was served ÷ the weights of all that wait (Bennett and Zhang 1997): else it would stand still for as long as every
request has a new key, and a key that comes twice would not get its second turn.

Unlike tags of the finish these need no known service rate, and an engine has none: it changes with what is batched.
Deficit round robin (Shreedhar and Varghese 1995) is as fair in the long run, but a key may send a whole quantum at
once, and a quantum must be as large as the largest request.

Nobody waits for what will not come. A request is refused at once when its key or the queue is full, or when the wait
it must expect, by the rate at which the engine has lately finished tokens, is longer than it may wait. A full queue
makes room for a key with a smaller share of it, at the cost of the last in the longest line (McKenney 1990).

`admission` puts futures and a clock around it.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

_RATE_MEMORY_S = 30.0
"""How far back the measured rate looks, in seconds of full load."""
_RATE_TRUSTED_S = 1.0
"""Full load must have been seen this long before anybody is refused by the rate."""
_KEYS_KEPT = 1024
"""Keys without a request that are remembered before those that owe nothing are forgotten."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many may run and wait."""

    max_running: int
    """… on each replica of the engine."""
    max_waiting: int
    max_waiting_per_key: int
    max_wait_s: float

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_waiting < 0 or self.max_waiting_per_key < 0 or self.max_wait_s < 0:
            raise ValueError(f"{self} lets nothing run, or has a limit below 0")


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DISPLACED = "displaced"
    """Its place was given to a key with a smaller share of the queue."""
    LATE = "late"
    """It has waited longer than it may."""
    OVER = "over"


@dataclass(slots=True, eq=False)
class Place:
    """One request in the queue or past it."""

    key: str
    tokens: int
    arrived_s: float
    state: State = State.WAITING


@dataclass(frozen=True, slots=True)
class Refused:
    """No place."""

    why: str
    """`key_full`, `full` or `wait`."""
    expected_wait_s: float


@dataclass(slots=True)
class _Line:
    """The requests of one key."""

    weight: float
    tag: float
    """Start tag of its head; without a head, the earliest for its next."""
    tokens: int = 0
    waiting: OrderedDict[int, Place] = field(default_factory=OrderedDict)
    """By identity: any of them may leave, in O(1)."""

    def put(self, place: Place) -> None:
        self.waiting[id(place)] = place
        self.tokens += place.tokens

    def drop(self, place: Place) -> None:
        del self.waiting[id(place)]
        self.tokens -= place.tokens


class FairQueue:
    """The lines of all keys, and how many run. Every method returns the places whose state it has changed."""

    def __init__(
        self,
        limits: Limits,
        *,
        weight: Callable[[str], float] = lambda _: 1.0,
        replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        """`replicas`: how many there are now; asked at every event, so that a new one is filled at the next."""
        self._limits = limits
        self._replicas = replicas
        self._weight = weight
        self._lines: dict[str, _Line] = {}
        self._heads: list[tuple[float, int, str]] = []
        """A heap of start tags. An entry whose tag is no longer its line's is passed over."""
        self._entries = 0
        self._keys_kept = _KEYS_KEPT
        self._now_tag = 0.0
        self._waiting_weight = 0.0
        self._running_tokens = 0
        self._rate = _Rate()
        self.running = 0
        self.waiting = 0

    def arrive(self, key: str, tokens: int, now_s: float) -> tuple[Place | Refused, list[Place]]:
        """A request of `tokens` (an estimate): it runs, waits, or is refused; and whom it has displaced."""
        place = Place(key, max(1, tokens), now_s)
        line = self._line(key)
        if not self._full and not self.waiting:
            line.tag = max(line.tag, self._now_tag)
            self._run(line, place, now_s)
            return place, []
        if len(line.waiting) >= self._limits.max_waiting_per_key:
            return Refused("key_full", self.expected_wait_s(key)), []
        expected_s = self.expected_wait_s(key)
        if expected_s > self._limits.max_wait_s:
            return Refused("wait", expected_s), []
        displaced: list[Place] = []
        if self.waiting >= self._limits.max_waiting:
            longest = self._longest_but(line, place.tokens)
            if longest is None:
                return Refused("full", self.expected_wait_s(key)), []
            last = next(reversed(longest.waiting.values()))
            self._take_out(longest, last, State.DISPLACED)
            displaced.append(last)
        if not line.waiting:
            line.tag = max(line.tag, self._now_tag)
            self._waiting_weight += line.weight
            self._push(key, line)
        line.put(place)
        self.waiting += 1
        return place, displaced

    def leave(self, place: Place, now_s: float, *, used: int | None = None) -> list[Place]:
        """A place is given up: it has finished, or whoever waited went away. At most one of the changed runs now.

        `used`: the tokens that it really took. What the estimate was off is charged to the key, or given back.
        """
        line = self._line(place.key)
        if place.state is State.WAITING:
            self._take_out(line, place, State.OVER)
            return []
        if place.state is not State.RUNNING:
            return []
        place.state = State.OVER
        self._rate.finished(place.tokens, now_s, full=self._full)
        self.running -= 1
        self._running_tokens -= place.tokens
        if used is not None:
            self._charge(place.key, line, (used - place.tokens) / line.weight)
        changed = self._next(now_s)
        if not self.waiting:
            # Nobody has to wait for anybody, so nobody owes anything: Goyal's rule for the end of a busy period.
            self._lines.clear()
            self._heads.clear()
        return changed

    def late(self, place: Place) -> None:
        """It has waited as long as it may."""
        if place.state is State.WAITING:
            self._take_out(self._lines[place.key], place, State.LATE)

    def expected_wait_s(self, key: str) -> float:
        """How long a request that came now would wait, if the engine goes on as it did. 0 while that is not known."""
        rate = self._rate.tokens_per_s
        if rate is None or not self._full:
            return 0.0
        line = self._lines.get(key)
        own, weight = (line.tokens, line.weight) if line else (0, self._weight(key))
        start = max(line.tag if line else 0.0, self._now_tag) + own / weight
        ahead = float(own)
        for other in self._lines.values():
            if other is not line and other.waiting:
                # What of the other line starts before us: its fair part until our tag, and no more than it has.
                ahead += min(other.tokens, max(0.0, start - other.tag) * other.weight)
        # And one of the running must end first.
        return (ahead + self._running_tokens / max(1, self.running)) / rate

    @property
    def _full(self) -> bool:
        return self.running >= self._limits.max_running * max(1, self._replicas())

    def _line(self, key: str) -> _Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= self._keys_kept:
                self._forget()
            weight = self._weight(key)
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"the weight of key {key!r} is {weight}, and must be above 0")
            line = self._lines[key] = _Line(weight, tag=self._now_tag)
        return line

    def _forget(self) -> None:
        """A line without requests whose tag is past says nothing that a new one would not."""
        self._lines = {key: line for key, line in self._lines.items() if line.waiting or line.tag > self._now_tag}
        self._keys_kept = max(_KEYS_KEPT, 2 * len(self._lines))

    def _run(self, line: _Line, place: Place, now_s: float) -> None:
        self._rate.passed(now_s, full=self._full)
        place.state = State.RUNNING
        self._now_tag = max(self._now_tag, line.tag)
        line.tag += place.tokens / line.weight
        self.running += 1
        self._running_tokens += place.tokens

    def _next(self, now_s: float) -> list[Place]:
        changed: list[Place] = []
        while self.waiting and not self._full:
            tag, _, key = heapq.heappop(self._heads)
            line = self._lines.get(key)
            if line is None or not line.waiting or line.tag != tag:
                continue
            place = next(iter(line.waiting.values()))
            self._drop(line, place)
            if now_s - place.arrived_s > self._limits.max_wait_s:
                place.state = State.LATE
            else:
                self._run(line, place, now_s)
                weights = self._waiting_weight + (0.0 if line.waiting else line.weight)
                self._now_tag += place.tokens / weights
            changed.append(place)
            if line.waiting:
                self._push(key, line)
        return changed

    def _take_out(self, line: _Line, place: Place, state: State) -> None:
        self._drop(line, place)
        place.state = state

    def _drop(self, line: _Line, place: Place) -> None:
        line.drop(place)
        self.waiting -= 1
        if not line.waiting:
            # Exactly 0 without anybody: sums of floats drift.
            self._waiting_weight = self._waiting_weight - line.weight if self.waiting else 0.0

    def _push(self, key: str, line: _Line) -> None:
        if len(self._heads) > 2 * self.waiting + _KEYS_KEPT:
            # Requests that came and went away left entries behind that nothing has passed over yet.
            heads = [(other.tag, name) for name, other in self._lines.items() if other.waiting]
            self._heads = [(tag, number, name) for number, (tag, name) in enumerate(heads)]
            heapq.heapify(self._heads)
        self._entries += 1
        heapq.heappush(self._heads, (line.tag, self._entries, key))

    def _charge(self, key: str, line: _Line, amount: float) -> None:
        line.tag += amount
        if line.waiting:
            self._push(key, line)

    def _longest_but(self, line: _Line, tokens: int) -> _Line | None:
        """The line that takes most of the queue for its weight, if that is more than `line` would take."""
        longest = max((other for other in self._lines.values() if other.waiting), key=_normal, default=None)
        if longest is None or _normal(longest) <= (line.tokens + tokens) / line.weight:
            return None
        return longest


@dataclass(slots=True)
class _Rate:
    """Tokens per second that the engine finishes while all its places are taken, with older seconds fading."""

    tokens: float = 0.0
    seconds: float = 0.0
    since_s: float | None = None

    def passed(self, now_s: float, *, full: bool) -> None:
        """Time up to `now_s`, in which the engine was `full` or not. Only full seconds tell what it can do."""
        if self.since_s is not None and full:
            passed_s = max(0.0, now_s - self.since_s)
            fading = math.exp(-passed_s / _RATE_MEMORY_S)
            self.tokens *= fading
            self.seconds = self.seconds * fading + passed_s
        self.since_s = now_s

    def finished(self, tokens: int, now_s: float, *, full: bool) -> None:
        self.passed(now_s, full=full)
        if full:
            self.tokens += tokens

    @property
    def tokens_per_s(self) -> float | None:
        if self.seconds < _RATE_TRUSTED_S or not self.tokens:
            return None
        return self.tokens / self.seconds


def _normal(line: _Line) -> float:
    return line.tokens / line.weight
