"""A run is only taken up on purpose, and only as the one it began as."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from actors.registry.facts import CheckpointFact, RunFact, RunStatus
from actors.registry.views import RunView
from actors.training.config import TrainConfig
from app import recipe as recipes
from app.pipelines.resume import MAY_CHANGE, flat, require_checkpoints, require_choice, taken_up
from cluster.errors import ConfigError, StateError


def settings(*assignments: str) -> dict[str, Any]:
    return recipes.load("error-triage", assignments).model_dump(mode="json", by_alias=True)


def view(status: RunStatus = "failed", run_id: str = "error-triage-1", **facts: Any) -> RunView:
    run = RunFact(
        **{
            "id": run_id,
            "name": "error-triage",
            "base": "smol",
            "base_digest": "b" * 64,
            "data_version": "errors@1",
            "recipe": settings(),
            "code_commit": "abc",
            **facts,
        }
    )
    step = CheckpointFact(id=f"{run_id}/step-40", run_id=run_id, step=40, path=Path("/x"))
    return RunView(run=run, status=status, verdict="", begun_at=datetime.now(UTC), checkpoints=(step,))


def take_up(*assignments: str, earlier: RunView | None = None, **facts: str) -> RunFact:
    given = {"name": "error-triage", "base_digest": "b" * 64, "data_version": "errors@1", **facts}
    return taken_up(earlier or view(), settings(*assignments), **given)


def test_an_unfinished_run_of_the_name_asks_for_a_choice() -> None:
    for status in ("failed", "stopped", "running"):
        with pytest.raises(ConfigError, match=rf"error-triage-1, which is {status} at step 40") as caught:
            require_choice("error-triage", [view(status)])  # type: ignore[arg-type]
        assert "--resume error-triage-1" in str(caught.value.hint)
        assert "--new" in str(caught.value.hint)


def test_a_completed_run_and_those_of_other_names_ask_for_none() -> None:
    require_choice("error-triage", [view("completed")])
    require_choice("another", [view("failed")])
    require_choice("error-triage", [])


def test_the_newest_of_several_is_offered() -> None:
    with pytest.raises(ConfigError, match=r"error-triage-2 \(and 1 more\)"):
        require_choice("error-triage", [view(run_id="error-triage-2"), view("completed", "x"), view("stopped")])


def test_a_run_goes_on_as_it_began() -> None:
    run = take_up()
    assert run == view().run


@pytest.mark.parametrize(
    "assignment",
    [
        "parallel.strategy=fsdp",
        "parallel.threads_per_worker=2",
        "optimizer.micro_batch_size=2",
        "activation_checkpointing=true",
        "compile=true",
        "checkpoint.every_steps=7",
        "failures.max=9",
        "elastic.stuck_after_s=60",
    ],
)
def test_what_decides_only_how_it_is_computed_may_change_and_is_kept(assignment: str) -> None:
    path, _, value = assignment.partition("=")
    changes = take_up(assignment).changes
    assert list(changes) == [path]
    assert changes[path].lower().endswith((f"→ {value}", f"→ {value}.0"))


def test_what_comes_after_training_may_change_without_a_word() -> None:
    assert take_up("evaluate.max_cases=3").changes == {}


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate: "),
        ("steps=77", "steps: .* → 77"),
        ("seed=5", "seed: 0 → 5"),
        ("adapter.r=2", "adapter.r: .* → 2"),
        ("checkpoint.storage=/elsewhere", "checkpoint.storage: None → /elsewhere"),
        ("precision=fp32", "precision: bf16 → fp32"),
        ("data.max_length=64", "data.max_length: .* → 64"),
    ],
)
def test_what_decides_the_weights_must_be_as_it_was(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        take_up(assignment)
    assert "--new" in str(caught.value.hint)
    assert "elastic" in str(caught.value.hint)


def test_other_files_and_other_data_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"seed: .*the base's files: bbbb.* → cccc.*the data version: errors@1 → e@2"):
        take_up("seed=5", base_digest="c" * 64, data_version="e@2")


def test_a_run_of_another_recipe_and_a_completed_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="name: error-triage → mine"):
        take_up(name="mine")
    with pytest.raises(ConfigError, match="completed"):
        take_up(earlier=view("completed"))


def test_a_run_of_which_no_checkpoint_is_left_does_not_begin_anew_in_silence() -> None:
    with pytest.raises(
        StateError, match=r"error-triage-1 has saved itself up to step 40, but /runs/x has no"
    ) as caught:
        require_checkpoints(view(), None, "/runs/x")
    assert "--new" in str(caught.value.hint)
    require_checkpoints(view(), 20, "/runs/x")
    require_checkpoints(view().model_copy(update={"checkpoints": ()}), None, "/runs/x")


def test_changes_add_up_over_several_resumes() -> None:
    earlier = view(changes={"code": "a → b"})
    assert list(take_up("failures.max=9", earlier=earlier).changes) == ["code", "failures.max"]


def test_what_may_change_is_there() -> None:
    names = flat(TrainConfig().model_dump(mode="json"))
    for each in MAY_CHANGE:
        assert any(path == each or path.startswith(f"{each}.") for path in names), each
