"""How a fit ends that did not end by itself."""

from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayError

from actors.training.config import TrainConfig
from actors.training.fit import fit
from actors.training.ray_internals import Trainer
from cluster.errors import TrainingError


class Lost:
    """A trainer whose fit is ended by `error`, as Ray raises it where its controller's answer is awaited."""

    def __init__(self, error: RayError) -> None:
        self._error = error

    def fit(self) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ActorDiedError(), "The actor died unexpectedly before finishing this task"),
        (RayError("the GCS is gone.\nand more"), "the GCS is gone"),
        (RayError(), "RayError"),
    ],
)
def test_a_run_that_lost_its_controller_says_so_in_one_line(error: RayError, said: str) -> None:
    with pytest.raises(TrainingError) as caught:
        fit(cast(Trainer, Lost(error)), None, TrainConfig(), Path("runs/r"))
    assert caught.value.message == (
        f"The run lost the process that looks after its workers (Ray Train's controller): {said}."
    )
    assert "last checkpoint" in str(caught.value.hint)
    assert caught.value.__cause__ is None
