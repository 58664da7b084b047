"""What `evaluate` decides without an engine: whom the candidate meets, and what its answers cost."""

from dataclasses import replace
from pathlib import Path

import pytest

from actors.evaluation.config import BudgetConfig, GateConfig
from actors.evaluation.engine import Answered
from actors.evaluation.evaluate import Champion, choose_opponent, serving
from cluster.models import StoredModel

GATE = GateConfig(beats="champion")
CANDIDATE = Path("/candidate")


@pytest.fixture
def base(tmp_path: Path) -> StoredModel:
    return StoredModel("base", tmp_path / "base", "d" * 64, "causal-lm", "test", "t" * 64)


@pytest.fixture
def champion(tmp_path: Path, base: StoredModel) -> Champion:
    folder = tmp_path / "champion"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).touch()
    return Champion("triage/3", folder, base.digest)


def test_the_champion_is_met_where_there_is_one(base: StoredModel, champion: Champion) -> None:
    opponent = choose_opponent(GATE, champion, base, CANDIDATE)
    assert opponent.champion == champion
    assert "triage/3" in opponent.name


def test_without_a_champion_the_base_is_met(base: StoredModel) -> None:
    opponent = choose_opponent(GATE, None, base, CANDIDATE)
    assert (opponent.champion, opponent.described) == (None, "the base: there is no champion yet")


def test_a_gate_against_the_base_meets_the_base(base: StoredModel, champion: Champion) -> None:
    assert choose_opponent(GateConfig(beats="base"), champion, base, CANDIDATE).champion is None


def test_a_champion_of_other_weights_is_not_met_and_that_is_said(base: StoredModel, champion: Champion) -> None:
    opponent = choose_opponent(GATE, replace(champion, base_digest="e" * 64), base, CANDIDATE)
    assert opponent.champion is None
    assert "triage/3 belongs to other weights" in opponent.described


def test_a_champion_without_its_files_is_not_met_and_that_is_said(base: StoredModel, champion: Champion) -> None:
    (champion.path / "adapter_model.safetensors").unlink()
    opponent = choose_opponent(GATE, champion, base, CANDIDATE)
    assert opponent.champion is None
    assert "triage/3 lacks adapter_model.safetensors" in opponent.described


def test_a_champion_that_is_a_whole_model_is_met_whatever_base_it_comes_from(base: StoredModel, tmp_path: Path) -> None:
    """It has an engine of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").touch()
    champion = Champion("triage/3", folder, "e" * 64, whole=True)
    assert choose_opponent(GATE, champion, base, CANDIDATE).champion == champion
    (folder / "config.json").unlink()
    assert "triage/3 lacks config.json" in choose_opponent(GATE, champion, base, CANDIDATE).described


def test_a_champion_does_not_meet_itself(base: StoredModel, champion: Champion) -> None:
    opponent = choose_opponent(GATE, champion, base, champion.path)
    assert opponent.champion is None
    assert "itself" in opponent.described


BATCHES = [Answered(["a"], 3000, 1000, 2.0), Answered(["b"], 1500, 500, 1.0)]


def test_a_price_is_what_the_machine_costs_while_a_million_tokens_are_computed() -> None:
    gate = GateConfig(budget=BudgetConfig(usd_per_hour=3.6))
    found = serving(gate, BATCHES, [0.1, 0.4, 0.2])
    assert (found.prompt_tokens, found.generated_tokens, found.tokens_per_s) == (4500, 1500, 2000.0)
    # 500 s at $0.001 a second.
    assert found.usd_per_million_tokens == pytest.approx(0.5)
    assert (found.requests, found.p50_s, found.p99_s) == (3, 0.2, 0.4)


def test_without_a_price_of_the_machine_speed_is_measured_all_the_same() -> None:
    found = serving(GateConfig(), BATCHES, [0.1])
    assert found.tokens_per_s == 2000.0
    assert found.usd_per_million_tokens is None
