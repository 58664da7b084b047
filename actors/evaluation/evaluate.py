"""Run a suite: the same cases to base, champion and candidate, in one engine, and the gate's verdict on the result.

The shell around `suites`, `statistics` and `gates`; it knows Ray. Who records the report, and which version is the
champion, is its caller's affair.
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
from actors.evaluation.config import EvaluateConfig, GateConfig
from actors.evaluation.engine import Answered, BatchEngine, worker_environment
from actors.evaluation.parity import Dtype, ParityVerdict
from actors.evaluation.report import EvaluationReport, Serving
from actors.evaluation.suites import Case
from cluster.errors import ConfigError, DependencyError, FlywheelError
from cluster.models import StoredModel
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home, write_atomically

BASE = "base"
CHAMPION = "champion"
_CASES_PER_BATCH = 128
_PARITY_CANDIDATES = 64
"""Cases among which the short ones are taken for the candidate's parity."""
_PROBED = 200
_PROBE_S = 4.0


@dataclass(frozen=True)
class Champion:
    """The version that the alias stands at now. `id` is `name/3`, `base_digest` that of the weights it is for."""

    id: str
    path: Path
    base_digest: str


def evaluate(
    config: EvaluateConfig,
    *,
    base: StoredModel,
    adapters: dict[str, Path],
    examples: Sequence[ChatExample],
    home: Home,
    champion: Champion | None = None,
    dtype: Dtype = "bfloat16",
    sink: Sink = silent,
) -> EvaluationReport:
    """Ask base, adapter and champion the same cases, greedily, and compare. Needs Ray.

    `adapters` is the candidate under the name that the report gives it; `dtype` should be that of the engine that
    will serve. A gate against the champion is one against the base where there is no champion, or none that this
    base can hold. Raises `ConfigError` for no cases or not exactly one adapter, `DependencyError` if the engine dies
    or does not compute the base as the trainer does. A candidate that it computes otherwise is a gate not passed.
    """
    asked = suites.cases(examples, limit=config.max_cases)
    if not asked:
        raise ConfigError("There is nothing to evaluate on.", hint="Give data.eval a source with held-out rows.")
    if len(adapters) != 1:
        raise ConfigError(f"A gate compares one candidate with what serves now, not {len(adapters)}.", hint="Name one.")
    (candidate,) = adapters
    if candidate in (BASE, CHAMPION):
        raise ConfigError(f"A candidate cannot be called {candidate!r}.", hint="Give it another name.")
    opponent = choose_opponent(config.gate, champion, base, adapters[candidate])
    held = dict(adapters)
    if opponent.champion is not None:
        held[CHAMPION] = opponent.champion.path
    found = _ask(config, base, held, candidate, asked, dtype, home, sink)
    right = {
        name: [suites.exact_match(answer, case.reference) for answer, case in zip(given, asked, strict=True)]
        for name, given in found.answers.items()
    }
    commonest = suites.most_frequent(asked)
    guessed = [suites.exact_match(commonest, case.reference) for case in asked]
    groups = [case.group for case in asked]
    gate = config.gate
    seed = statistics.seed_of(case.id for case in asked)
    differences = {
        name: statistics.paired_bootstrap(right[candidate], right[name], groups, gate.confidence, seed=seed)
        for name in right
        if name != candidate
    }
    rival = BASE if opponent.champion is None else CHAMPION
    cuts = gate.slices
    slices = gates.slices(cuts, gate.confidence, asked, right[candidate], right[rival]) if cuts else []
    verdict = gates.decide(
        gate,
        gates.Evidence(
            against=opponent.name,
            n=len(asked),
            groups=len(set(groups)),
            difference=differences[rival],
            slices=slices,
            parity=found.candidate_parity,
            serving=found.serving,
        ),
    )
    identity = f"eval-{uuid.uuid4().hex[:12]}"
    return EvaluationReport(
        id=identity,
        suite=config.suites[0],
        n=len(asked),
        groups=len(set(groups)),
        scores={name: statistics.score(results, groups, gate.confidence) for name, results in right.items()},
        most_frequent=statistics.score(guessed, groups, gate.confidence),
        champion=opponent.champion.id if opponent.champion else None,
        against=opponent.described,
        difference=differences[rival],
        differences=differences,
        slices=tuple(slices[: gates.SLICES_KEPT]),
        verdict=verdict,
        parity=str(found.parity),
        candidate_parity=str(found.candidate_parity),
        serving=found.serving,
        engine_start_s=round(found.engine_start_s, 1),
        answers_path=str(_keep(home, identity, asked, found.answers)),
    )


@dataclass(frozen=True)
class Opponent:
    """What a candidate is compared with: the champion, or the base where that is None."""

    champion: Champion | None
    name: str
    described: str


def choose_opponent(gate: GateConfig, champion: Champion | None, base: StoredModel, candidate: Path) -> Opponent:
    """The champion if the gate asks for it and `base` can hold it, else the base, with the reason."""
    if gate.beats == "base":
        return Opponent(None, "the base", "the base, as the recipe says")
    if champion is None:
        return Opponent(None, "the base", "the base: there is no champion yet")
    if champion.path == candidate:
        return Opponent(None, "the base", f"the base: the candidate is the champion {champion.id} itself")
    if champion.base_digest != base.digest:
        why = "belongs to other weights"
    elif lacking := [name for name in _ADAPTER_FILES if not (champion.path / name).is_file()]:
        why = f"lacks {' and '.join(lacking)}"
    else:
        return Opponent(champion, f"the champion {champion.id}", f"the champion {champion.id}")
    return Opponent(None, "the base", f"the base: the champion {champion.id} {why}")


_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class _Found:
    """What the engine gave: answers by candidate in the order of the cases, and what is known about the engine."""

    answers: dict[str, list[str]]
    parity: ParityVerdict
    candidate_parity: ParityVerdict
    serving: Serving
    engine_start_s: float


def _ask(
    config: EvaluateConfig,
    base: StoredModel,
    adapters: dict[str, Path],
    candidate: str,
    asked: list[Case],
    dtype: Dtype,
    home: Home,
    sink: Sink,
) -> _Found:
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    total = len(asked) * (1 + len(adapters))
    sink(Progress("evaluate", 0, total, "answers", note="the engine starts"))
    engine = (
        ray.remote(BatchEngine)
        .options(num_cpus=1, num_gpus=1 if gpu else 0, runtime_env={"env_vars": worker_environment(gpu=gpu)})
        .remote(base, adapters, home, dtype=dtype, gpu=gpu)
    )
    answers: dict[str, list[str]] = {name: [] for name in (BASE, *adapters)}
    batches: list[Answered] = []
    prompts = [case.prompt for case in asked]
    length = config.max_new_tokens
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
        began, done = monotonic(), 0
        for start in range(0, len(asked), _CASES_PER_BATCH):
            batch = prompts[start : start + _CASES_PER_BATCH]
            # One candidate after the other: its batches are timed, and nothing depends on who else was asked.
            for name in answers:
                given: Answered = ray.get(
                    engine.answer.remote(batch, [None if name == BASE else name] * len(batch), max_new_tokens=length)
                )
                answers[name] += given.texts
                batches += [given] if name == candidate else []
                done += len(batch)
                sink(Progress("evaluate", done, total, "answers", done / (monotonic() - began), "answers/s"))
        sink(Progress("evaluate", total, total, "answers", note="is it right with the candidate?"))
        candidate_parity: ParityVerdict = ray.get(
            engine.adapter_parity.remote(
                base, candidate, prompts[:_PARITY_CANDIDATES], config.gate.parity.max_mean_nats
            )
        )
        sink(Progress("evaluate", total, total, "answers", note="how fast is one answer?"))
        latencies: list[float] = ray.get(
            engine.latencies.remote(prompts[:_PROBED], candidate, max_new_tokens=length, within_s=_PROBE_S)
        )
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
    return _Found(answers, parity, candidate_parity, serving(config.gate, batches, latencies), start_s)


def serving(gate: GateConfig, batches: Sequence[Answered], latencies: Sequence[float]) -> Serving:
    """What answering took: `batches` of the candidate, and seconds of single requests."""
    prompt = sum(batch.prompt_tokens for batch in batches)
    generated = sum(batch.generated_tokens for batch in batches)
    rate = (prompt + generated) / sum(batch.seconds for batch in batches)
    hourly = gate.budget.usd_per_hour if gate.budget else None
    return Serving(
        requests=len(latencies),
        p50_s=round(statistics.percentile(latencies, 0.5), 4),
        p99_s=round(statistics.percentile(latencies, 0.99), 4),
        prompt_tokens=prompt,
        generated_tokens=generated,
        tokens_per_s=round(rate, 1),
        usd_per_hour=hourly,
        usd_per_million_tokens=None if hourly is None else hourly / 3600 / rate * 1e6,
    )


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
