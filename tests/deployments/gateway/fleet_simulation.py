"""A discrete-event simulation of a fleet of engines behind a policy: virtual time, real choices.

An engine runs `LANES` requests at a time and queues the rest in order. A request costs time by its tokens, and a load
if its adapter is in none of the engine's slots when it starts; the slots are an LRU, as vLLM's are. The policy sees
what engines would report at that moment.
"""

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count

from deployments.gateway.fleet import Ask, Fleet, Replica, name_digest
from deployments.gateway.routing import Choice, Policy

LANES = 8
SLOTS = 16
TOKENS_MEAN = 300
SECONDS_PER_TOKEN = 0.002
LOAD_S = 0.4


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    ask: Ask


def zipf_traffic(
    *, replicas: int, adapters: int, exponent: float, requests: int, busy: float, seed: int
) -> Iterator[Arrival]:
    """Poisson arrivals; `busy` is the share of the fleet's lanes that they fill, loads not counted."""
    chance = random.Random(seed)
    names = [f"adapter-{rank}/1" for rank in range(adapters)]
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(adapters)))
    per_s = busy * replicas * LANES / (TOKENS_MEAN * SECONDS_PER_TOKEN)
    at_s = 0.0
    for name in chance.choices(names, cum_weights=weights, k=requests):
        at_s += chance.expovariate(per_s)
        yield Arrival(at_s, Ask(name, tokens=_tokens(chance)))


def _tokens(chance: random.Random) -> int:
    return round(min(2000, max(20, chance.expovariate(1 / TOKENS_MEAN))))


@dataclass
class Engine:
    id: str
    loaded: OrderedDict[str, None] = field(default_factory=OrderedDict)
    running: int = 0
    waiting: deque[tuple[float, Ask]] = field(default_factory=deque)
    tokens: Counter[str] = field(default_factory=Counter)
    """In flight, by adapter."""
    in_use: Counter[str] = field(default_factory=Counter)
    work_s: float = 0.0

    def report(self) -> Replica:
        return Replica(
            self.id,
            slots=SLOTS,
            resident=dict.fromkeys(self.loaded, 0) | self.tokens,
            tokens_in_flight=self.tokens.total(),
            running=self.running,
            waiting=len(self.waiting),
        )

    def load(self, adapter: str) -> bool:
        """Whether the adapter had to be loaded."""
        missing = adapter not in self.loaded
        if missing and len(self.loaded) >= SLOTS:
            del self.loaded[next(name for name in self.loaded if not self.in_use[name])]
        self.loaded[adapter] = None
        self.loaded.move_to_end(adapter)
        return missing


@dataclass
class Outcome:
    waits_s: list[float] = field(default_factory=list)
    loads: int = 0
    work_s: dict[str, float] = field(default_factory=dict)
    copies: list[tuple[float, int]] = field(default_factory=list)
    """Engines that had the watched adapter, after each of its requests."""

    @property
    def hit_rate(self) -> float:
        return 1 - self.loads / len(self.waits_s)

    @property
    def p99_wait_s(self) -> float:
        return sorted(self.waits_s)[int(0.99 * len(self.waits_s))]

    def shares(self) -> list[float]:
        """Each engine's work over the mean."""
        mean = sum(self.work_s.values()) / len(self.work_s)
        return sorted(work / mean for work in self.work_s.values())


def simulate(policy: Policy, replicas: int, traffic: Iterable[Arrival], *, watched: str | None = None) -> Outcome:
    engines = {f"r{number}": Engine(f"r{number}") for number in range(replicas)}
    fleet, outcome = Fleet.of(engine.report() for engine in engines.values()), Outcome()
    ends: list[tuple[float, int, Engine, Ask]] = []
    numbers = count()

    def start(engine: Engine, now_s: float) -> None:
        while engine.waiting and engine.running < LANES:
            since_s, ask = engine.waiting.popleft()
            adapter = ask.adapter or ""
            loads = engine.load(adapter)
            engine.running += 1
            engine.in_use[adapter] += 1
            outcome.waits_s.append(now_s - since_s)
            outcome.loads += loads
            cost_s = ask.tokens * SECONDS_PER_TOKEN + loads * LOAD_S
            engine.work_s += cost_s
            heapq.heappush(ends, (now_s + cost_s, next(numbers), engine, ask))

    def end() -> None:
        nonlocal fleet
        now_s, _, engine, ask = heapq.heappop(ends)
        adapter = ask.adapter or ""
        engine.running -= 1
        engine.in_use[adapter] -= 1
        engine.tokens[adapter] -= ask.tokens
        if not engine.tokens[adapter]:
            del engine.tokens[adapter]
        start(engine, now_s)
        fleet = fleet.told(engine.report())

    for arrival in traffic:
        while ends and ends[0][0] <= arrival.at_s:
            end()
        engine = engines[policy.choose(arrival.ask, fleet).replica]
        engine.waiting.append((arrival.at_s, arrival.ask))
        engine.tokens[arrival.ask.adapter or ""] += arrival.ask.tokens
        start(engine, arrival.at_s)
        fleet = fleet.told(engine.report())
        if watched == arrival.ask.adapter:
            outcome.copies.append((arrival.at_s, sum(watched in one.loaded for one in engines.values())))
    while ends:
        end()
    outcome.work_s = {engine.id: engine.work_s for engine in engines.values()}
    return outcome


class LeastLoaded:
    """Looks at the load alone."""

    def choose(self, ask: Ask, fleet: Fleet) -> Choice:
        least = min(fleet.usable, key=lambda one: (one.tokens_in_flight, one.id))
        return Choice(least.id, "idle", len(fleet.usable))


class PureAffinity:
    """Looks at the adapter alone."""

    def choose(self, ask: Ask, fleet: Fleet) -> Choice:
        return Choice(fleet.usable[fleet.ranked(name_digest(ask.adapter or ""))[0]].id, "home", 1)
