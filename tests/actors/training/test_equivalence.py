"""Whatever the mesh, the same seed and the same rows give the same run: losses, gradient norms, weights."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.training.config import TrainConfig
from tests.actors.training.equivalence import Trace, assert_equal, follow, mesh_settings
from tests.actors.training.small import HERE
from tests.gang import Gang


def parallel(workers: int, **axes: Any) -> TrainConfig:
    return mesh_settings(parallel={"workers": {"min": workers, "max": workers}, **axes})


@pytest.fixture(scope="module")
def alone(tiny_base: Path, rows: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One process."""
    return follow(HERE, mesh_settings(), tiny_base, rows, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_data_ranks_learn_what_one_process_learns(
    gang: Gang, strategy: str, tiny_base: Path, rows: pa.Table, alone: Trace, tmp_path: Path
) -> None:
    found, _ = gang.run(2, follow, parallel(2, strategy=strategy), tiny_base, rows, tmp_path)
    assert_equal(found, alone)
