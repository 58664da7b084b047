"""The plan's memory is what a rank really takes, to 15 %, on a model of SmolLM2-135M's shape."""

from pathlib import Path

import pytest

from actors.training.memory import estimate
from actors.training.shape import Shape, read
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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("shape") / "base")


@pytest.fixture(scope="module")
def shape(base: Path) -> Shape:
    found = read(base)
    assert found == SMOLLM2_135M  # what the hand-worked figures are about
    return found


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_a_prediction_is_what_is_measured(case: Case, base: Path, shape: Shape) -> None:
    said = estimate(case.config(), shape, length=LENGTH).peak / 2**30
    assert said == pytest.approx(peak(case, base, LENGTH, steps=3), rel=TOLERANCE)


def test_the_bench_measures_every_strategy_with_and_without_checkpointing_and_offload() -> None:
    names = {case.name for case in CASES}
    assert set(names) >= {case.name for case in MEASURED}
    assert {"ddp-1-full-fp32-checkpointing", "zero2-2-full-fp32-offload"} <= names
