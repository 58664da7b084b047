"""Run a suite: the same cases to base and candidate, in one engine, and the gate's verdict on the result.

The shell around `suites`, `statistics` and `gates`; it knows Ray. Who records the report is its caller's affair.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.data.examples import ChatExample
from actors.evaluation import gates, statistics, suites
from actors.evaluation.config import EvaluateConfig
from actors.evaluation.engine import BatchEngine, worker_environment
from actors.evaluation.parity import ParityVerdict
from actors.evaluation.report import EvaluationReport
from actors.evaluation.suites import Case
from cluster.errors import ConfigError, DependencyError, FlywheelError
from cluster.models import StoredModel
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home, write_atomically

BASE = "base"
_CASES_PER_BATCH = 64


def evaluate(
    config: EvaluateConfig,
    *,
    base: StoredModel,
    adapters: dict[str, Path],
    examples: Sequence[ChatExample],
    home: Home,
    sink: Sink = silent,
) -> EvaluationReport:
    """Ask base and adapter the same cases, greedily, and compare. Needs Ray.

    Raises `ConfigError` for no cases or not exactly one adapter, `DependencyError` if the engine dies or does not
    pass the parity check.
    """
    asked = suites.cases(examples, limit=config.max_cases)
    if not asked:
        raise ConfigError("There is nothing to evaluate on.", hint="Give data.eval a source with held-out rows.")
    if len(adapters) != 1:
        raise ConfigError(f"A gate compares one candidate with its base, not {len(adapters)}.", hint="Name one.")
    (candidate,) = adapters
    found = _ask(base, adapters, asked, config.max_new_tokens, home, sink)
    right = {
        name: [suites.exact_match(answer, case.reference) for answer, case in zip(given, asked, strict=True)]
        for name, given in found.answers.items()
    }
    commonest = suites.most_frequent(asked)
    guessed = [suites.exact_match(commonest, case.reference) for case in asked]
    groups = [case.group for case in asked]
    confidence = config.gate.confidence
    difference = statistics.paired_difference(right[candidate], right[BASE], groups, confidence)
    identity = f"eval-{uuid.uuid4().hex[:12]}"
    return EvaluationReport(
        id=identity,
        suite=config.suites[0],
        n=len(asked),
        groups=len(set(groups)),
        scores={name: statistics.score(results, groups, confidence) for name, results in right.items()},
        most_frequent=statistics.score(guessed, groups, confidence),
        difference=difference,
        verdict=gates.decide(config.gate, difference, len(asked)),
        parity=str(found.parity),
        engine_start_s=round(found.engine_start_s, 1),
        answers_path=str(_keep(home, identity, asked, found.answers)),
    )


@dataclass(frozen=True)
class _Found:
    """What the engine gave: answers by candidate in the order of the cases, and what is known about the engine."""

    answers: dict[str, list[str]]
    parity: ParityVerdict
    engine_start_s: float


def _ask(
    base: StoredModel, adapters: dict[str, Path], asked: list[Case], max_new_tokens: int, home: Home, sink: Sink
) -> _Found:
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    total = len(asked) * (1 + len(adapters))
    sink(Progress("evaluate", 0, total, "answers", note="the engine starts"))
    engine = (
        ray.remote(BatchEngine)
        .options(num_cpus=1, num_gpus=1 if gpu else 0, runtime_env={"env_vars": worker_environment(gpu=gpu)})
        .remote(base.path, adapters, gpu=gpu)
    )
    candidates: list[str | None] = [None, *adapters]
    answers: dict[str, list[str]] = {name or BASE: [] for name in candidates}
    try:
        start_s: float = ray.get(engine.start_s.remote())
        sink(Progress("evaluate", 0, total, "answers", note="is the engine right?"))
        parity: ParityVerdict = ray.get(engine.parity.remote(base, home))
        if not parity.passed:
            raise DependencyError(
                f"The engine does not compute what the trainer computes for {base.name}: {parity}.",
                hint="Nothing measured with it would mean anything. `flywheel doctor` checks vLLM and its plugin.",
                retryable=False,
            )
        began = monotonic()
        for start in range(0, len(asked), _CASES_PER_BATCH):
            batch = asked[start : start + _CASES_PER_BATCH]
            given = ray.get(
                engine.answer.remote(
                    [case.prompt for case in batch] * len(candidates),
                    [name for name in candidates for _ in batch],
                    max_new_tokens=max_new_tokens,
                )
            )
            for number, name in enumerate(candidates):
                answers[name or BASE] += given[number * len(batch) : (number + 1) * len(batch)]
            done = (start + len(batch)) * len(candidates)
            sink(Progress("evaluate", done, total, "answers", done / (monotonic() - began), "answers/s"))
    except (RayActorError, RayTaskError) as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, FlywheelError):
            raise error.cause from None
        raise DependencyError(
            f"The evaluation engine failed on {base.name}: {_reason(error)}",
            hint="`flywheel doctor` checks vLLM; the worker's log in Ray's log folder has the rest.",
            retryable=False,
        ) from None
    finally:
        ray.kill(engine)
    return _Found(answers, parity, start_s)


def _keep(home: Home, identity: str, asked: list[Case], answers: dict[str, list[str]]) -> Path:
    lines: list[dict[str, Any]] = [
        {
            "case": case.id,
            "prompt": case.prompt[-1]["content"],
            "reference": case.reference,
            "answers": {name: given[number] for name, given in answers.items()},
        }
        for number, case in enumerate(asked)
    ]
    path = home.evaluations / f"{identity}.jsonl"
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def _reason(error: RayActorError | RayTaskError) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1]}" if lines else type(cause).__name__
