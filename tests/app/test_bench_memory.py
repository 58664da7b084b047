"""The plan's memory is what a rank really takes, to 15 %, on a model of SmolLM2-135M's shape."""

from pathlib import Path

import pytest

from actors.training.memory import estimate
from actors.training.shape import read
from app.bench.memory import CASES, TOLERANCE, Case, model, peak
from tests.actors.training.test_training_memory import SMOLLM2_135M

pytestmark = pytest.mark.integration

LENGTH = 256
MEASURED = (
    Case("ddp"),
    Case("fsdp"),
    Case("zero2"),
    Case("zero3"),
    Case("fsdp", adapter="lora", precision="bf16", checkpointing=True),
)
ON_AXES = (
    Case("ddp", axis="pipeline"),
    Case("fsdp", axis="context"),
    Case("fsdp", axis="expert", mixture=True),
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The dense model and the mixture."""
    folder = tmp_path_factory.mktemp("shapes")
    return {mixture: model(folder / str(mixture), mixture=mixture) for mixture in (False, True)}


def test_the_hand_worked_figures_are_about_this_model(bases: dict[bool, Path]) -> None:
    assert read(bases[False]) == SMOLLM2_135M


@pytest.mark.parametrize(
    "case",
    [*MEASURED, *(pytest.param(case, marks=pytest.mark.chaos) for case in ON_AXES)],
    ids=lambda case: case.name,
)
def test_a_prediction_is_what_is_measured(case: Case, bases: dict[bool, Path]) -> None:
    base = bases[case.mixture]
    said = estimate(case.config(), read(base), length=LENGTH).peak / 2**30
    assert said == pytest.approx(peak(case, base, LENGTH, steps=3), rel=TOLERANCE)


def test_the_bench_measures_every_strategy_with_and_without_checkpointing_and_offload() -> None:
    names = {case.name for case in CASES}
    assert set(names) >= {case.name for case in (*MEASURED, *ON_AXES)}
    assert {"ddp-1-full-fp32-checkpointing", "zero2-2-full-fp32-offload", "ddp-3-full-fp32-tensor"} <= names
