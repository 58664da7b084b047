"""A tracker shows a run and never decides about one; the champion is whoever the alias stands at now."""

from pathlib import Path
from typing import cast

import pytest

from actors.data.version import DataVersion, SplitManifest
from actors.registry.client import RegistryClient
from actors.registry.facts import RunEnded, RunFact
from actors.registry.views import VersionView
from actors.training.fit import StoppedRun
from app import recipe as recipes
from app.pipelines import stages
from cluster.errors import ConfigError, DependencyError, RequestError, TrainingError
from cluster.models import StoredModel
from cluster.progress import silent
from cluster.storage import Home
from cluster.tracking import MemoryTracker, TrackedStatus


class AwayTracker(MemoryTracker):
    """A tracker whose server is down."""

    def begin_run(self, key: str, **_: object) -> str:
        raise DependencyError("MLflow does not answer")

    def end_run(self, run: str, status: TrackedStatus) -> None:
        raise DependencyError("MLflow does not answer")


class Ends:
    """The part of the registry's client that ending a run needs."""

    def __init__(self) -> None:
        self.heard: list[RunEnded] = []

    def end_run(self, fact: RunEnded) -> RunEnded:
        self.heard.append(fact)
        return fact


class Shows:
    """The part of the registry's client that finding the champion needs, while it has `error`."""

    def __init__(self, error: RequestError) -> None:
        self.asked: list[str] = []
        self._error = error

    def show(self, reference: str) -> VersionView:
        self.asked.append(reference)
        raise self._error


def ground(tracker: MemoryTracker, registry: Ends | Shows, tmp_path: Path, *settings: str) -> stages.Ground:
    recipe = recipes.load("error-triage", settings)
    return stages.Ground(recipe, Home(tmp_path), cast(RegistryClient, registry), tracker, "memory", silent)


def test_a_run_begins_and_ends_while_the_tracker_is_away(tmp_path: Path) -> None:
    registry = Ends()
    standing = ground(AwayTracker(), registry, tmp_path)
    assert stages.begin_tracking(standing, "run-1", {"steps": 3}, "abc") is None
    ended = RunEnded(run_id="run-1", status="completed", verdict="3 steps")
    stages.end_run(standing, "tracked", ended)
    stages.end_run(standing, None, ended)
    assert registry.heard == [ended, ended]


def test_a_tracker_that_is_there_gets_settings_and_end(tmp_path: Path) -> None:
    tracker, registry = MemoryTracker(), Ends()
    standing = ground(tracker, registry, tmp_path)
    run = stages.begin_tracking(standing, "run-1", {"optimizer": {"learning_rate": 0.1}}, "abc")
    assert run is not None
    stages.end_run(standing, run, RunEnded(run_id="run-1", status="stopped"))
    shown = tracker.run(run)
    assert shown.params["optimizer.learning_rate"] == "0.1"
    assert shown.status == "stopped"


def tokens(rows: int) -> DataVersion:
    return DataVersion(
        name="errors", digest="d" * 64, stage="tokens", shape="chat", parent=None,
        splits={"train": SplitManifest(rows=rows, groups=rows, files=())}, quarantined={},
        dropped={}, config={}, fingerprint="", created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


def test_data_with_too_few_rows_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    standing = ground(MemoryTracker(), registry := Ends(), tmp_path)
    base = StoredModel("smol", tmp_path, "b" * 64, "causal-lm", "here", "t" * 64)
    few = tokens(rows=2)
    with pytest.raises(ConfigError, match=r"2 rows, fewer than one global batch of 4"):
        stages.train(standing, base, stages.Data(few, few, []))
    assert registry.heard == []


def test_what_ended_a_run_is_told_also_when_the_registry_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that the registry has gone."""

    class Gone(Ends):
        def begin_run(self, fact: RunFact) -> RunFact:
            return fact

        def needed_checkpoints(self, run_id: str) -> dict[int, str]:
            return {}

        def end_run(self, fact: RunEnded) -> RunEnded:
            super().end_run(fact)
            raise DependencyError("The registry does not answer.")

    version = tokens(rows=400)
    prepared = stages.Data(version, version, [])

    def lost(*_: object, **__: object) -> None:
        raise TrainingError("Rank 1 of 2 died.")

    def interrupted(*_: object, **__: object) -> None:
        raise StoppedRun("stopped by SIGTERM after step 7, which is saved")

    registry = Gone()
    standing = ground(MemoryTracker(), registry, tmp_path)
    base = StoredModel("smol", tmp_path, "b" * 64, "causal-lm", "here", "t" * 64)
    monkeypatch.setattr(stages, "run_training", lost)
    with pytest.raises(TrainingError, match="Rank 1"):
        stages.train(standing, base, prepared)
    monkeypatch.setattr(stages, "run_training", interrupted)
    with pytest.raises(KeyboardInterrupt, match="after step 7"):
        stages.train(standing, base, prepared)
    assert [(ended.status, ended.verdict) for ended in registry.heard] == [
        ("failed", "Rank 1 of 2 died."),
        ("stopped", "stopped by SIGTERM after step 7, which is saved"),
    ]


def test_a_run_that_cannot_save_itself_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").write_text("no folder")
    monkeypatch.setattr(stages, "run_training", lambda *_, **__: pytest.fail("it has begun"))
    standing = ground(MemoryTracker(), Ends(), tmp_path, f"checkpoint.storage={tmp_path / 'disk'}")
    version = DataVersion(
        name="errors", digest="d" * 64, stage="tokens", shape="chat", parent=None,
        splits={"train": SplitManifest(rows=100, groups=1, files=())}, quarantined={},
        dropped={}, config={}, fingerprint="", created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    base = StoredModel("smol", tmp_path, "b" * 64, "causal-lm", "here", "t" * 64)
    with pytest.raises(ConfigError, match=r"No checkpoint can be saved in .*/disk/"):
        stages.train(standing, base, stages.Data(version, version, []))


def test_without_an_alias_there_is_no_champion(tmp_path: Path) -> None:
    registry = Shows(RequestError("no such alias", status=404))
    assert stages.champion(ground(MemoryTracker(), registry, tmp_path), "triage") is None
    assert registry.asked == ["triage@champion"]


def test_a_registry_that_refuses_is_not_taken_for_one_without_a_champion(tmp_path: Path) -> None:
    registry = Shows(RequestError("not allowed", status=403))
    with pytest.raises(RequestError, match="not allowed"):
        stages.champion(ground(MemoryTracker(), registry, tmp_path), "triage")


def test_a_gate_against_the_base_does_not_ask_for_the_champion(tmp_path: Path) -> None:
    registry = Shows(RequestError("no such alias", status=404))
    standing = ground(MemoryTracker(), registry, tmp_path, "evaluate.gate.beats=base")
    assert stages.champion(standing, "triage") is None
    assert registry.asked == []


def test_the_gate_measures_in_the_dtype_that_will_serve(tmp_path: Path) -> None:
    assert stages.serving_dtype(recipes.load("error-triage", ["serve.llm.dtype=float32"])) == "float32"
    assert stages.serving_dtype(recipes.load("error-triage", ["serve=null"])) == "bfloat16"


def test_a_recipe_may_be_measured_on_a_beir_folder(tmp_path: Path) -> None:
    """All of it is read before there is a run, so that a fault in it costs no training."""
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1", "text": "Snow is white."}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "What is white?"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    recipe = recipes.load("code-search", [f"evaluate.retrieval={{beir: {tmp_path}}}"])
    standing = stages.Ground(recipe, Home(tmp_path), cast(RegistryClient, Ends()), MemoryTracker(), "memory", silent)
    task = stages.held_out_search(standing, tokens(rows=1))
    assert (task.queries, task.judgements) == ({"q1": "What is white?"}, {"q1": {"d1": 1}})
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"There is no .*corpus\.jsonl"):
        stages.held_out_search(standing, tokens(rows=1))
