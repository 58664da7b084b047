"""Whether a candidate may take the alias. Pure: the paired difference in, a verdict with its numbers out."""

from actors.evaluation.config import GateConfig
from actors.evaluation.report import GateVerdict, Interval


def decide(gate: GateConfig, difference: Interval, n: int) -> GateVerdict:
    """Pass only if the whole interval of (candidate - base) lies above zero: luck must not move an alias.

    An interval at another confidence than the gate's is the caller's mistake: `ValueError`.
    """
    if difference.confidence != gate.confidence:
        raise ValueError(f"interval at {difference.confidence}, gate at {gate.confidence}")
    passed = difference.low > 0
    return GateVerdict(
        passed=passed,
        reason=(
            f"{gate.metric} of the candidate minus that of the {gate.beats} is {difference.value:+.3f} "
            f"[{difference.low:+.3f}, {difference.high:+.3f}] on {n} cases at {gate.confidence:.0%}; "
            f"{'all of it lies above zero' if passed else 'it must lie above zero'}"
        ),
    )
