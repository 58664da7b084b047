"""A real vLLM engine with adapters: right alone, right in a mixed batch, and what `evaluate` makes of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.data.examples import ChatExample
from actors.data.rows import Message
from actors.evaluation.config import BudgetConfig, EvaluateConfig, GateConfig
from actors.evaluation.engine import Answered, BatchEngine, worker_environment
from actors.evaluation.evaluate import Candidate, Champion, evaluate
from actors.evaluation.parity import TOLERANCE_NATS, Dtype, Observed, candidate_reference, compare, reference
from cluster.errors import ConfigError
from cluster.models import StoredModel, obtain
from cluster.progress import Progress
from cluster.session import Session
from cluster.storage import Home
from tests.adapters import write_adapter

pytestmark = pytest.mark.integration

QUESTIONS = (
    "Write a Python function that adds two numbers.",
    "List three prime numbers and explain why each is prime.",
    "What is the difference between a list and a tuple in Python?",
)
TOKENS = 12


@pytest.fixture(scope="module")
def base(home: Home) -> StoredModel:
    return obtain("smollm2-135m-instruct", home)


@pytest.fixture(scope="module")
def adapters(base: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two, of different ranks, which fill both slots of the engine: upstream then has no zero slot to hit."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, base.path, seed=seed, rank=rank, scale=0.15)
        for seed, (name, rank) in enumerate((("one", 8), ("two", 4)))
    }


@pytest.fixture(scope="module")
def engine(ray_session: Session, home: Home, base: StoredModel, adapters: dict[str, Path]) -> Iterator[Any]:
    actor = start(base, adapters, home)
    yield actor
    ray.kill(actor)


def start(model: StoredModel, adapters: dict[str, Path], home: Home, dtype: Dtype = "bfloat16") -> Any:
    environment = {"env_vars": worker_environment(gpu=False)}
    engine = ray.remote(BatchEngine).options(num_cpus=1, runtime_env=environment)
    return engine.remote(model, adapters, home, dtype=dtype)


def ask(engine: Any, candidates: list[str | None]) -> list[str]:
    """Every question to every candidate, interleaved, in one batch; answers by question, then candidate."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in candidates]
    answered: Answered = ray.get(
        engine.answer.remote(conversations, candidates * len(QUESTIONS), max_new_tokens=TOKENS)
    )
    return answered.texts


def test_the_engine_computes_what_the_trainer_computes(engine: Any, base: StoredModel, home: Home) -> None:
    verdict = ray.get(engine.parity.remote(base, home))
    assert verdict.passed, str(verdict)


def test_an_engine_that_computes_something_else_is_found_out(
    ray_session: Session, base: StoredModel, home: Home, tmp_path: Path
) -> None:
    """The same weights with another rotary base: fluent, and wrong."""
    folder = shutil.copytree(base.path, tmp_path / "wrong")
    config = json.loads((base.path / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"]["rope_theta"] /= 10
    (folder / "config.json").write_text(json.dumps(config))
    wrong = start(obtain(str(folder), home), {}, home)
    verdict = ray.get(wrong.parity.remote(base, home))
    ray.kill(wrong)
    assert not verdict.passed, str(verdict)


def test_in_a_mixed_batch_the_base_says_what_it_says_alone(engine: Any) -> None:
    """Both adapter slots are in use, which is when upstream answers the base's requests with an adapter."""
    alone = ask(engine, [None])
    together = ask(engine, [None, "one", "two", None])
    assert together[0::4] == together[3::4] == alone
    assert not set(together[1::4] + together[2::4]) & set(alone)


def test_in_a_mixed_batch_each_request_is_computed_by_its_own_model(engine: Any, base: StoredModel, home: Home) -> None:
    """By log-probabilities of the same tokens: near what the same model gives alone, far from what others give."""
    cases = reference(base, home).cases
    candidates = (None, "one", "two")
    alone = {name: ray.get(engine.observe.remote(cases, [name] * len(cases))) for name in candidates}
    mixed = ray.get(engine.observe.remote(cases * 3, [name for name in candidates for _ in cases]))
    for place, name in enumerate(candidates):
        own = mixed[place * len(cases) : (place + 1) * len(cases)]
        others = min(distance(own, alone[other]) for other in candidates if other != name)
        # Random adapters blow activations up, and the rounding with them; hence no fixed bound.
        assert distance(own, alone[name]) < others / 10, (distance(own, alone[name]), others)


def distance(left: list[Observed], right: list[Observed]) -> float:
    """Mean |Δ log p| in nats."""
    pairs = [
        pair
        for ours, theirs in zip(left, right, strict=True)
        for pair in zip(ours.logprobs, theirs.logprobs, strict=True)
    ]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def chats() -> list[list[Message]]:
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def test_an_adapter_is_computed_as_the_trainer_computes_it(
    ray_session: Session, base: StoredModel, adapters: dict[str, Path], home: Home
) -> None:
    """In float32, where nothing is put down to rounding. The same engine without it is found out at once."""
    exact = start(base, adapters, home, dtype="float32")
    verdict = ray.get(exact.candidate_parity.remote(base, "one", chats()))
    expected = candidate_reference(base, adapters["one"], chats())
    left_out = compare(expected, ray.get(exact.observe.remote(expected.cases)), "float32")
    swapped = compare(expected, ray.get(exact.observe.remote(expected.cases, ["two"] * len(expected.cases))), "float32")
    ray.kill(exact)
    assert verdict.passed, str(verdict)
    # More than rounding in any dtype could be taken for.
    assert left_out.mean_nats > TOLERANCE_NATS["bfloat16"], str(left_out)
    assert swapped.mean_nats > TOLERANCE_NATS["bfloat16"], str(swapped)


def test_single_requests_are_timed_one_by_one_until_time_is_up(engine: Any) -> None:
    timed = ray.get(engine.latencies.remote(chats() * 50, "one", max_new_tokens=2, within_s=1.0))
    assert 1 <= len(timed) < 150
    assert all(seconds > 0 for seconds in timed)


def test_evaluate_reports_everyone_and_keeps_every_answer(
    ray_session: Session, base: StoredModel, adapters: dict[str, Path], home: Home
) -> None:
    words = ("apple", "river", "stone", "cloud")
    examples = [
        ChatExample(
            word,
            [{"role": "user", "content": f"Say only this word: {word}"}, {"role": "assistant", "content": word}],
            f"group of {word}",
        )
        for word in words
    ]
    seen: list[Progress] = []
    budget = BudgetConfig(p99_latency_s=1e-6, usd_per_million_tokens=1e6, usd_per_hour=1.0)
    report = evaluate(
        EvaluateConfig(max_cases=3, max_new_tokens=8, gate=GateConfig(budget=budget)),
        base=base,
        candidate=Candidate("one", adapters["one"]),
        examples=examples,
        home=home,
        champion=Champion("words/1", adapters["two"], base.digest),
        sink=seen.append,
    )
    assert (report.n, report.groups, set(report.scores)) == (3, 3, {"base", "one", "champion"})
    assert report.scores["one"].correct == 0
    assert set(report.differences) == {"base", "champion"}
    assert report.difference == report.differences["champion"]
    assert (report.champion, report.against) == ("words/1", "the champion words/1")
    checks = {check.name: check for check in report.verdict.checks}
    assert not report.verdict.passed
    assert not checks["metric"].passed
    # Three cases of three groups prove nothing, either way.
    assert "3 groups cannot show" in checks["metric"].reason
    assert not checks["budget_latency"].passed
    assert checks["budget_price"].passed
    assert "sure tokens: 38 of 38" in report.parity
    assert "nats in the mean" in report.candidate_parity
    assert 0 < report.serving.p50_s <= report.serving.p99_s
    assert report.serving.generated_tokens > 0
    assert len(json.dumps(report.model_dump(mode="json"), allow_nan=False)) < 20_000
    lines = [json.loads(line) for line in Path(report.answers_path).read_text(encoding="utf-8").splitlines()]
    assert [set(line["answers"]) for line in lines] == [{"base", "one", "champion"}] * 3
    assert (seen[-1].done, seen[-1].total) == (9, 9)


def test_a_candidate_may_not_be_called_as_the_others(
    ray_session: Session, base: StoredModel, adapters: dict[str, Path], home: Home
) -> None:
    example = ChatExample("1", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "g")
    with pytest.raises(ConfigError, match="cannot be called 'champion'"):
        evaluate(
            EvaluateConfig(),
            base=base,
            candidate=Candidate("champion", adapters["one"]),
            examples=[example],
            home=home,
        )
