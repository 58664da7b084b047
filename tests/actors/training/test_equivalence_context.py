"""Ranks that share each row learn what one process learns from whole rows: losses, gradient norms, weights."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from app.bench.gang import Gang
from tests.actors.training.equivalence import Trace, assert_equal, follow, mesh_settings
from tests.actors.training.small import HERE, packed_rows


@pytest.fixture(scope="module")
def odd_rows() -> pa.Table:
    """Rows of 23 tokens, which two ranks cannot share without padding."""
    return packed_rows(13, length=23, seed=7)


@pytest.fixture(scope="module")
def alone(tiny_base: Path, odd_rows: pa.Table) -> Trace:
    return follow(HERE, mesh_settings(), tiny_base, odd_rows)[0]


def test_two_ranks_share_each_row(gang: Gang, tiny_base: Path, odd_rows: pa.Table, alone: Trace) -> None:
    config = mesh_settings(parallel={"workers": {"min": 2, "max": 2}, "context": 2})
    for found, _ in gang.run(2, follow, config, tiny_base, odd_rows):
        assert_equal(found, alone)


def test_rows_and_tokens_are_shared_at_once(gang: Gang, tiny_base: Path, odd_rows: pa.Table, alone: Trace) -> None:
    config = mesh_settings(parallel={"workers": {"min": 4, "max": 4}, "strategy": "fsdp", "context": 2})
    found, *_ = gang.run(4, follow, config, tiny_base, odd_rows)
    assert_equal(found[0], alone)


def test_all_weights_learn_from_parts_of_rows_too(gang: Gang, tiny_base: Path, odd_rows: pa.Table) -> None:
    full: dict[str, Any] = {"adapter": {"kind": "none"}, "steps": 6, "activation_checkpointing": True}
    shared = {"workers": {"min": 2, "max": 2}, "strategy": "fsdp", "context": 2}
    alone, _ = follow(HERE, mesh_settings(**full), tiny_base, odd_rows)
    found, _ = gang.run(2, follow, mesh_settings(**full, parallel=shared), tiny_base, odd_rows)
    assert_equal(found[0], alone)
