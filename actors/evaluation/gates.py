"""Whether a candidate may take the alias. Pure: what was found in, a list of checks with their numbers out.

Each check can block by itself, and none can outweigh another: a candidate that is better on the whole and much
worse at one class, or better and not what the trainer made, does not pass.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from actors.evaluation import statistics
from actors.evaluation.config import BudgetConfig, GateConfig, SliceConfig
from actors.evaluation.parity import ParityVerdict
from actors.evaluation.report import Check, GateVerdict, Interval, Serving, Slice
from actors.evaluation.suites import Case, normalise

SLICES_KEPT = 50
_NAME_CHARS = 80
_NAMED = 3


@dataclass(frozen=True)
class Evidence:
    """What a gate decides on. `against` names what the candidate is compared with; `slices`: those looked at."""

    against: str
    n: int
    groups: int
    difference: Interval
    slices: Sequence[Slice]
    parity: ParityVerdict
    """The candidate's: the engine against the trainer's forward."""
    serving: Serving


def decide(gate: GateConfig, found: Evidence) -> GateVerdict:
    """Every check of `gate` on what was found.

    An interval at another confidence than the gate's is the caller's mistake: `ValueError`.
    """
    checks = [_metric(gate, found)]
    if gate.slices is not None:
        checks.append(_slices(gate.slices, found))
    checks.append(_parity(found.parity))
    if gate.budget is not None:
        checks += _budget(gate.budget, found.serving)
    return GateVerdict.of(*checks)


def slices(
    config: SliceConfig, confidence: float, cases: Sequence[Case], candidate: Sequence[bool], against: Sequence[bool]
) -> list[Slice]:
    """The slices with enough cases, the greatest loss first.

    The more slices are looked at, the likelier one of them looks bad by luck; so each interval is at
    1 - (1 - confidence) / number of slices (Bonferroni), and all of them hold together at `confidence`.
    Within a slice whole groups are resampled; a slice that is a group is asked about that group alone, so there
    its cases are.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for place, case in enumerate(cases):
        members[normalise(case.reference) if config.by == "label" else case.group].append(place)
    enough = {name: places for name, places in members.items() if len(places) >= config.min_cases}
    shared = 1 - (1 - confidence) / max(1, len(enough))
    found = []
    for name, places in enough.items():
        ours, theirs = [candidate[place] for place in places], [against[place] for place in places]
        groups = [cases[place].group for place in places] if config.by == "label" else places
        seed = statistics.seed_of(cases[place].id for place in places)
        found.append(
            Slice(
                name=name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…",
                n=len(places),
                groups=len(set(groups)),
                candidate=sum(ours) / len(places),
                against=sum(theirs) / len(places),
                difference=statistics.paired_bootstrap(ours, theirs, groups, shared, seed=seed),
            )
        )
    return sorted(found, key=lambda one: (one.difference.value, one.name))


def _metric(gate: GateConfig, found: Evidence) -> Check:
    """Pass only if the whole interval of the difference lies above zero: luck must not move an alias."""
    difference = found.difference
    if difference.confidence != gate.confidence:
        raise ValueError(f"interval at {difference.confidence}, gate at {gate.confidence}")
    fewest = statistics.fewest_groups(gate.confidence)
    passed = difference.low > 0
    if passed:
        judgement = "all of it lies above zero"
    elif found.groups < fewest:
        judgement = f"{_groups(found.groups)} cannot show a difference, it takes at least {fewest}"
    else:
        judgement = "it must lie above zero"
    return Check(
        name="metric",
        passed=passed,
        reason=f"{gate.metric} of the candidate minus that of {found.against} is {_signed(difference)} "
        f"on {found.n} cases of {_groups(found.groups)} at {100 * gate.confidence:g} %; {judgement}",
        details={
            "metric": gate.metric,
            "against": found.against,
            "n": found.n,
            "groups": found.groups,
            "difference": difference.model_dump(mode="json"),
        },
    )


def _slices(config: SliceConfig, found: Evidence) -> Check:
    """Block for a loss that is both greater than allowed and more than luck."""
    lost = [one for one in found.slices if one.difference.value < -config.max_drop and one.difference.high < 0]
    looked = f"{len(found.slices)} slices by {config.by} with {config.min_cases} cases or more"
    if lost:
        worst = "; ".join(
            f"{one.name!r} {one.against:.3f} → {one.candidate:.3f}, {_signed(one.difference)} on {one.n} cases"
            for one in lost[:_NAMED]
        )
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        reason = f"{len(lost)} of {looked} lost more than {config.max_drop:g} against {found.against}: {worst}{more}"
    elif found.slices:
        worst_one = found.slices[0]
        reason = (
            f"none of {looked} clearly lost more than {config.max_drop:g}; the worst is {worst_one.name!r} with "
            f"{_signed(worst_one.difference)} on {worst_one.n} cases"
        )
    else:
        reason = f"there are no slices by {config.by} with {config.min_cases} cases or more"
    return Check(
        name="slices",
        passed=not lost,
        reason=reason,
        details={
            "by": config.by,
            "max_drop": config.max_drop,
            "min_cases": config.min_cases,
            "looked_at": len(found.slices),
            "lost": [one.name for one in lost[:SLICES_KEPT]],
        },
    )


def _parity(parity: ParityVerdict) -> Check:
    return Check(
        name="parity",
        passed=parity.passed,
        reason=f"the engine with the candidate {'computes' if parity.passed else 'does not compute'} "
        f"what the trainer computes: {parity}",
        details={
            # JSON has no NaN, and an engine may well give it.
            "mean_nats": parity.mean_nats if math.isfinite(parity.mean_nats) else None,
            "max_nats": parity.max_nats if math.isfinite(parity.max_nats) else None,
            "tolerance_nats": parity.tolerance_nats,
            "sure_tokens": parity.continuations,
        },
    )


def _budget(budget: BudgetConfig, serving: Serving) -> list[Check]:
    checks = []
    if budget.p99_latency_s is not None:
        passed = serving.p99_s <= budget.p99_latency_s
        checks.append(
            Check(
                name="budget_latency",
                passed=passed,
                reason=f"p99 latency is {serving.p99_s:.3f} s over {serving.requests} requests, one at a time; "
                f"{budget.p99_latency_s:g} s {'is' if passed else 'would be'} allowed",
                details={"p99_s": serving.p99_s, "max_p99_s": budget.p99_latency_s, "requests": serving.requests},
            )
        )
    if budget.usd_per_million_tokens is not None:
        price = serving.usd_per_million_tokens
        if price is None:
            raise ValueError("a price is to be checked and none was measured")
        passed = price <= budget.usd_per_million_tokens
        checks.append(
            Check(
                name="budget_price",
                passed=passed,
                reason=f"a million tokens cost ${price:.4g} at {serving.tokens_per_s:.0f} tokens/s and "
                f"${budget.usd_per_hour:g} per hour; ${budget.usd_per_million_tokens:g} "
                f"{'is' if passed else 'would be'} allowed",
                details={
                    "usd_per_million_tokens": price,
                    "max_usd_per_million_tokens": budget.usd_per_million_tokens,
                    "usd_per_hour": budget.usd_per_hour,
                    "tokens_per_s": serving.tokens_per_s,
                },
            )
        )
    return checks


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _groups(number: int) -> str:
    return f"{number} group{'' if number == 1 else 's'}"
