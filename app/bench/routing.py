"""`flywheel bench routing`: what it costs a gateway to choose a replica, for a large fleet under Zipf traffic.

No replica runs: the policy sees a fleet as it would be reported, and the requests that it places stay in flight until
later ones take their turn, so that every kind of choice comes up (holders that are loaded, second copies, the base).
"""

import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate
from statistics import quantiles

from app.bench.report import Bar, Report, Result, report
from cluster.progress import Progress, Sink
from deployments.gateway.fleet import Ask, Fleet, Replica
from deployments.gateway.routing import Affine

_BAR_US = 50.0
_BASE_SHARE = 0.1
_TOKENS = (20, 2000)


@dataclass(frozen=True)
class Size:
    """Replicas; adapters that are asked for, and how many of them each replica holds; requests of a run; runs."""

    replicas: int = 64
    adapters: int = 1000
    slots: int = 1000
    in_flight: int = 1024
    requests: int = 20_000
    runs: int = 5


def run(size: Size, sink: Sink) -> Report:
    """Place `size.requests` requests, `size.runs` times; the bar is on the median request's choice."""
    medians, tails, accounts = [], [], []
    reasons: Counter[str] = Counter()
    for number in range(size.runs):
        sink(Progress("bench", number, size.runs, "runs"))
        chosen_us, kept_us, why = _placed(size, seed=number)
        cuts = quantiles(chosen_us, n=100)
        medians.append(cuts[49])
        tails.append(cuts[98])
        accounts.append(quantiles(kept_us, n=2)[0])
        reasons += why
    sink(Progress("bench", size.runs, size.runs, "runs"))
    choice = Result.of("choose", "µs", medians)
    shares = [
        Result.of(f"share_{why}", "of requests", [count / reasons.total()]) for why, count in reasons.most_common()
    ]
    return report(
        "routing",
        size.runs,
        [choice, Result.of("choose_p99", "µs", tails), Result.of("account", "µs", accounts), *shares],
        [Bar.at_most(choice, _BAR_US)],
    )


def _placed(size: Size, *, seed: int) -> tuple[list[float], list[float], Counter[str]]:
    """Microseconds of each choice, and of the account of it (`sent` and `finished`); how often each reason came."""
    chance = random.Random(seed)
    names = [f"adapter-{rank}/1" for rank in range(size.adapters)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(size.adapters)))
    fleet = Fleet.of(
        Replica(
            f"replica-{number:03d}",
            slots=size.slots,
            resident=dict.fromkeys(chance.sample(names, min(size.slots, size.adapters)), 0),
        )
        for number in range(size.replicas)
    )
    policy = Affine()
    flying: deque[tuple[str, Ask]] = deque()
    chosen_us, kept_us = [], []
    reasons: Counter[str] = Counter()
    for number, name in enumerate(chance.choices(names, cum_weights=weights, k=size.requests)):
        adapter = None if chance.random() < _BASE_SHARE else name
        ask = Ask(adapter, prefix=f"You are helper {number % 50}. " * 20, tokens=chance.randint(*_TOKENS))
        began = time.perf_counter_ns()
        choice = policy.choose(ask, fleet)
        chosen = time.perf_counter_ns()
        fleet = fleet.sent(choice.replica, ask)
        flying.append((choice.replica, ask))
        if len(flying) > size.in_flight:
            fleet = fleet.finished(*flying.popleft())
        ended = time.perf_counter_ns()
        reasons[choice.why] += 1
        chosen_us.append((chosen - began) / 1e3)
        kept_us.append((ended - chosen) / 1e3)
    return chosen_us, kept_us, reasons
