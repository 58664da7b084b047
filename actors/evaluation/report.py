"""The values that an evaluation leaves: readable by people, by the registry's log and by `--json`."""

from actors.evaluation.statistics import Interval
from cluster.config import Config


class Score(Interval):
    """One candidate on one suite: the share of right answers with Wilson's interval."""

    correct: int
    n: int


class GateVerdict(Config):
    """Whether an alias may move, and the arithmetic behind it in one sentence."""

    passed: bool
    reason: str


class EvaluationReport(Config):
    """One suite over base and candidate. `difference` is candidate − base on the same cases."""

    id: str
    suite: str
    n: int
    scores: dict[str, Score]
    difference: Interval
    verdict: GateVerdict
    answers_path: str
    """JSON lines: case, reference, and each candidate's answer, for whoever wants to know why."""
