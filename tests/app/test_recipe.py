"""A recipe composes its parts and sees what none of them can."""

from pathlib import Path

import pytest

from app import recipe as recipes
from cluster.errors import ConfigError


@pytest.mark.parametrize("name", sorted(recipes.shipped()))
def test_every_shipped_recipe_loads_under_its_own_name(name: str) -> None:
    assert recipes.load(name).name == name


def test_overrides_reach_the_parts() -> None:
    recipe = recipes.load("error-triage", ["optimizer.learning_rate=5e-5", "serve.gateway.port=8123"])
    assert recipe.optimizer.learning_rate == 5e-5
    assert recipe.serve is not None
    assert recipe.serve.gateway.port == 8123


def test_an_adapter_the_engine_could_not_load_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.r 32 is more than serve\.llm\.max_lora_rank 16"):
        recipes.load("error-triage", ["adapter.r=32"])


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size 5 is not divisible by 2 data-parallel workers"):
        recipes.load("error-triage", ["optimizer.global_batch_size=5"])


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("evaluate.suites=[]", "evaluate.suites"),
        ("adapter.target_modules=[]", "adapter.target_modules"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate"),
        ("elastic.stuck_after_s=.inf", "elastic.stuck_after_s"),
        ("elastic.resize_wait_s=1.0e+12", "elastic.resize_wait_s"),
        ("elastic.collective_timeout_s=1000000000000000", "elastic.collective_timeout_s"),
        ("parallel.threads_per_worker=1000000000", "parallel.threads_per_worker"),
        ("steps=99999999999999999999", "steps"),
        ("checkpoint.every_steps=99999999999999999999", "checkpoint.every_steps"),
        ("checkpoint.storage=s3:/bucket", "checkpoint.storage"),
        ("checkpoint.storage=s3://", "checkpoint.storage"),
        ("checkpoint.storage=gs://bucket/prefix", "checkpoint.storage"),
        ("checkpoint.storage=' '", "checkpoint.storage"),
        ("evaluate.gate.slices={by: color}", "evaluate.gate.slices.by"),
        ("evaluate.gate.slices={max_drop: -0.1}", "evaluate.gate.slices.max_drop"),
        ("evaluate.gate.parity={max_mean_nats: 0}", "evaluate.gate.parity.max_mean_nats"),
        ("evaluate.gate.budget={p99_latency: 2}", "p99_latency_s"),
        ("evaluate.gate.budget={usd_per_million_tokens: 2}", "needs usd_per_hour"),
    ],
)
def test_a_value_that_could_only_fail_later_is_refused_now(assignment: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        recipes.load("error-triage", [assignment])


def test_a_fault_of_the_whole_recipe_does_not_print_the_recipe() -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load("error-triage", ["adapter.r=32"])
    assert "(got" not in caught.value.message


def test_what_is_learned_is_measured_by_its_suite() -> None:
    with pytest.raises(ConfigError, match=r"cannot measure objective contrastive: set evaluate\.suites to \[retrieval"):
        recipes.load("code-search", ["evaluate.suites=[exact-match]", "evaluate.retrieval=null"])
    with pytest.raises(ConfigError, match=r"cannot measure objective sft: set evaluate\.suites to \[exact-match"):
        recipes.load("error-triage", ["evaluate.suites=[retrieval]"])


def test_negatives_are_for_who_contrasts() -> None:
    assert recipes.load("code-search", ["data.negatives={per_query: 1}"]).data.negatives is not None
    with pytest.raises(ConfigError, match=r"data\.negatives is set, but objective sft"):
        recipes.load("error-triage", ["data.negatives={}"])


def test_an_unknown_recipe_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load(tmp_path / "none.yaml")
    assert "none.yaml" in caught.value.message
    assert "error-triage" in str(caught.value.hint)


def test_a_gate_says_what_it_checks_and_a_part_of_it_can_be_left_out() -> None:
    gate = recipes.load("error-triage", ["evaluate.gate.slices=null"]).evaluate.gate
    assert (gate.beats, gate.slices, gate.budget) == ("champion", None, None)
    priced = recipes.load("error-triage", ["evaluate.gate.budget={usd_per_million_tokens: 2, usd_per_hour: 1.5}"])
    assert priced.evaluate.gate.budget is not None
