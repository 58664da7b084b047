"""What an evaluation found: values that can be stored, sent and shown. Knows neither engines nor suites."""

from cluster.config import Config


class Interval(Config):
    """An estimate and the bounds that hold it at `confidence`."""

    value: float
    low: float
    high: float
    confidence: float


class Score(Interval):
    """One candidate on one suite: the share of right answers."""

    correct: int
    n: int


class GateVerdict(Config):
    """Whether an alias may move, and the arithmetic behind it in one sentence."""

    passed: bool
    reason: str


class EvaluationReport(Config):
    """One suite over base and candidate, by one engine whose parity with the trainer was checked first."""

    id: str
    suite: str
    n: int
    groups: int
    """Packages (or other groups) that the cases come from. Cases of one group are alike; the intervals know it."""
    scores: dict[str, Score]
    most_frequent: Score
    """Whoever always gave the commonest reference: what a candidate that learned only the form would score."""
    difference: Interval
    """Candidate - base on the same cases."""
    verdict: GateVerdict
    parity: str
    """What the parity check found, in one sentence."""
    engine_start_s: float
    answers_path: str
    """JSON lines: case, reference, and each candidate's answer, for whoever wants to know why."""
