"""What counts as goodput. The engine's part is `tests/chaos/test_overload_chaos.py`."""

from collections import Counter

from app.bench.load import Answer
from app.bench.overload import Phase, Size, _report, counted

SIZE = Size(seconds=10.0, deadline_s=5.0)


def answer(took: float, tokens: int = 48, fault: str | None = None) -> tuple[float, Answer]:
    return 100.0 + took, Answer(100.0, (100.0 + took,), tokens, 10, fault)


def test_only_whole_answers_in_time_are_worth_anything() -> None:
    ends = [
        answer(1.0),
        answer(5.0),
        answer(5.1),
        answer(0.1, 0, "HTTP 429: {}"),
        answer(2.0, 30, "it ended without a finish_reason"),
    ]
    phase = counted(ends, Counter({True: 1}), SIZE, rate=3.0)
    assert phase.goodput == 2 * 48 / 10
    assert (phase.late, phase.refused, phase.refused_with_when) == (1, 1, 1)
    assert phase.faults == {"it ended without a finish_reason": 1}
    assert max(phase.answered_s) - 5.1 < 1e-6


def phase(goodput: float, **facts: object) -> Phase:
    settled = {"late": 0, "refused": 0, "refused_with_when": 0, "faults": Counter[str]()}
    return Phase(asked_per_s=1.0, goodput=goodput, answered_s=(1.0,), **{**settled, **facts})  # type: ignore[arg-type]


def test_the_ratio_is_of_the_best_that_was_seen_and_a_silent_429_misses_its_bar() -> None:
    found = _report(100.0, phase(80.0), phase(91.0, refused=4, refused_with_when=3), size=SIZE)
    bars = {bar.name: bar for bar in found.bars}
    assert (bars["goodput over the peak"].value, bars["goodput over the peak"].met) == (0.91, True)
    assert not bars["429 that say when to ask again"].met
    collapsed = _report(100.0, phase(80.0), phase(60.0, faults=Counter({"HTTP 500": 2})), size=SIZE)
    assert [bar.met for bar in collapsed.bars] == [False, True, False]
