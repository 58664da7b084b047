"""Run a suite: the same cases to base, champion and candidate, and the gate's verdict on the result.

Base and adapters answer in one engine; a whole model has an engine of its own, after that one has ended. The shell
around `suites`, `statistics` and `gates`; it knows Ray. Who records the report, and which version is the champion, is
its caller's affair.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.data.examples import ChatExample
from actors.data.rows import Message
from actors.evaluation import gates, statistics, suites
from actors.evaluation.config import EvaluateConfig, GateConfig
from actors.evaluation.engine import Answered, BatchEngine, worker_environment
from actors.evaluation.parity import Dtype, ParityVerdict
from actors.evaluation.report import EvaluationReport, Serving
from actors.evaluation.suites import Case
from cluster.errors import ConfigError, DependencyError, FlywheelError
from cluster.models import StoredModel, obtain
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
class Candidate:
    """What is to be measured: an adapter of the base, or a `whole` model. `name` is what the report calls it."""

    name: str
    path: Path
    whole: bool = False


@dataclass(frozen=True)
class Champion:
    """The version that the alias stands at now. `id` is `name/3`, `base_digest` that of the weights it comes from."""

    id: str
    path: Path
    base_digest: str
    whole: bool = False


def evaluate(
    config: EvaluateConfig,
    *,
    base: StoredModel,
    candidate: Candidate,
    examples: Sequence[ChatExample],
    home: Home,
    champion: Champion | None = None,
    dtype: Dtype = "bfloat16",
    sink: Sink = silent,
) -> EvaluationReport:
    """Ask base, candidate and champion the same cases, greedily, and compare. Needs Ray.

    `dtype` should be that of the engine that will serve. A gate against the champion is one against the base where
    there is no champion, or none that this base can hold. Raises `ConfigError` if there are no cases, `DependencyError`
    if the engine dies or does not compute the base as the trainer does. A candidate that it computes otherwise is a
    gate not passed.
    """
    asked = suites.cases(examples, limit=config.max_cases)
    if not asked:
        raise ConfigError("There is nothing to evaluate on.", hint="Give data.eval a source with held-out rows.")
    if candidate.name in (BASE, CHAMPION):
        raise ConfigError(f"A candidate cannot be called {candidate.name!r}.", hint="Give it another name.")
    opponent = choose_opponent(config.gate, champion, base, candidate.path)
    measured = [candidate]
    if opponent.champion is not None:
        measured.append(Candidate(CHAMPION, opponent.champion.path, opponent.champion.whole))
    found = _ask(config, base, measured, asked, dtype, home, sink)
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
        name: statistics.paired_bootstrap(right[candidate.name], right[name], groups, gate.confidence, seed=seed)
        for name in right
        if name != candidate.name
    }
    rival = BASE if opponent.champion is None else CHAMPION
    cuts = gate.slices
    slices = gates.slices(cuts, gate.confidence, asked, right[candidate.name], right[rival]) if cuts else []
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
    if not champion.whole and champion.base_digest != base.digest:
        why = "belongs to other weights"
    elif lacking := [name for name in _FILES[champion.whole] if not (champion.path / name).is_file()]:
        why = f"lacks {' and '.join(lacking)}"
    else:
        return Opponent(champion, f"the champion {champion.id}", f"the champion {champion.id}")
    return Opponent(None, "the base", f"the base: the champion {champion.id} {why}")


_FILES = {False: ("adapter_config.json", "adapter_model.safetensors"), True: ("config.json",)}
"""What a champion's folder must still hold, by whether it is a whole model."""


@dataclass(frozen=True)
class _Found:
    """What the engines gave: answers by candidate in the order of the cases, and what is known about the engines."""

    answers: dict[str, list[str]]
    parity: ParityVerdict
    candidate_parity: ParityVerdict
    serving: Serving
    engine_start_s: float
    """Of the one with the base."""


@dataclass
class _Asking:
    """The cases on their way through one engine after the other; `candidate` names whose answers are timed.

    Everybody's names are the report's. An engine knows an adapter by that name too, and the model itself as None.
    """

    config: EvaluateConfig
    asked: list[Case]
    candidate: str
    total: int
    sink: Sink
    answers: dict[str, list[str]] = field(default_factory=dict)
    batches: list[Answered] = field(default_factory=list)
    seconds: float = 0.0
    parity: ParityVerdict | None = None
    latencies: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        return sum(map(len, self.answers.values()))

    def tell(self, note: str) -> None:
        self.sink(Progress("evaluate", self.done, self.total, "answers", note=note))

    def ask(self, engine: Any, model: StoredModel, names: Mapping[str, str | None]) -> None:
        """All cases to each of `names`, as `engine` calls them; the candidate, if it is one of them, is looked at."""
        prompts = [case.prompt for case in self.asked]
        self.answers |= {name: [] for name in names}
        for start in range(0, len(prompts), _CASES_PER_BATCH):
            batch = prompts[start : start + _CASES_PER_BATCH]
            # One candidate after the other: its batches are timed, and nothing depends on who else was asked.
            for name, known in names.items():
                began = monotonic()
                given: Answered = ray.get(
                    engine.answer.remote(batch, [known] * len(batch), max_new_tokens=self.config.max_new_tokens)
                )
                self.seconds += monotonic() - began
                self.answers[name] += given.texts
                self.batches += [given] if name == self.candidate else []
                self.sink(Progress("evaluate", self.done, self.total, "answers", self.done / self.seconds, "answers/s"))
        if self.candidate in names:
            self._look(engine, model, names[self.candidate], prompts)

    def _look(self, engine: Any, model: StoredModel, known: str | None, prompts: list[list[Message]]) -> None:
        self.tell("is it right with the candidate?")
        few, allowed = prompts[:_PARITY_CANDIDATES], self.config.gate.parity.max_mean_nats
        self.parity = ray.get(engine.candidate_parity.remote(model, known, few, allowed))
        self.tell("how fast is one answer?")
        length = self.config.max_new_tokens
        self.latencies = ray.get(
            engine.latencies.remote(prompts[:_PROBED], known, max_new_tokens=length, within_s=_PROBE_S)
        )


def _ask(
    config: EvaluateConfig,
    base: StoredModel,
    measured: Sequence[Candidate],
    asked: list[Case],
    dtype: Dtype,
    home: Home,
    sink: Sink,
) -> _Found:
    """`measured`: the candidate, and the champion if there is one."""
    adapters = {one.name: one.path for one in measured if not one.whole}
    # Before any engine starts: a folder that cannot be loaded is refused here. Known by what the report calls it.
    whole = {one.name: replace(obtain(str(one.path), home), name=one.name) for one in measured if one.whole}
    asking = _Asking(config, asked, measured[0].name, len(asked) * (1 + len(measured)), sink)
    asking.tell("the engine starts")
    with _engine(base, adapters, home, dtype) as engine:
        start_s: float = ray.get(engine.start_s.remote())
        asking.tell("is the engine right?")
        parity: ParityVerdict = ray.get(engine.parity.remote(base, home))
        if not parity.passed:
            raise DependencyError(
                f"The engine does not compute what the trainer computes for {base.name}: {parity}.",
                hint="Nothing measured with it would mean anything. `flywheel doctor` checks vLLM and its plugin.",
                retryable=False,
            )
        asking.ask(engine, base, {BASE: None, **{name: name for name in adapters}})
    for name, model in whole.items():
        asking.tell(f"the engine of the {name} starts")
        with _engine(model, {}, home, dtype) as engine:
            asking.ask(engine, model, {name: None})
    assert asking.parity is not None
    return _Found(
        asking.answers, parity, asking.parity, serving(config.gate, asking.batches, asking.latencies), start_s
    )


@contextmanager
def _engine(model: StoredModel, adapters: dict[str, Path], home: Home, dtype: Dtype) -> Iterator[Any]:
    """An actor with a `BatchEngine`, for as long as the block runs; what goes wrong in it is a `DependencyError`."""
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    engine = (
        ray.remote(BatchEngine)
        .options(num_cpus=1, num_gpus=1 if gpu else 0, runtime_env={"env_vars": worker_environment(gpu=gpu)})
        .remote(model, adapters, home, dtype=dtype, gpu=gpu)
    )
    try:
        yield engine
    except (RayActorError, RayTaskError) as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, FlywheelError):
            raise error.cause from None
        raise DependencyError(
            f"The evaluation engine failed on {model.name}: {_reason(error)}",
            hint="`flywheel doctor` checks vLLM; the worker's log in Ray's log folder has the rest.",
            retryable=False,
        ) from None
    finally:
        ray.kill(engine)


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
