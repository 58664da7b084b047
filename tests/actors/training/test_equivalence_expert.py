"""Ranks that share the experts of a mixture learn what one process learns with all of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.distributed import checkpoint as dcp

from actors.training import engine
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout
from app.bench.gang import Gang
from tests.actors.training.equivalence import Trace, assert_equal, follow, mesh_settings
from tests.actors.training.small import HERE

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _config(workers: int = 1, adapter: str = "none", targets: Any = ATTENTION, **axes: Any) -> TrainConfig:
    parallel = {"workers": {"min": workers, "max": workers}, **axes}
    data_ranks = workers // axes.get("context", 1)
    sizes = {"learning_rate": 1e-3, "global_batch_size": 8, "micro_batch_size": 4 // data_ranks, "max_grad_norm": 1.0}
    learns = {"kind": adapter, "r": 4, "alpha": 8, "target_modules": targets}
    return mesh_settings(parallel=parallel, adapter=learns, optimizer=sizes)


@pytest.fixture(scope="module")
def alone(tiny_mixture: Path, rows: pa.Table) -> Trace:
    return follow(HERE, _config(), tiny_mixture, rows)[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_share_the_experts(
    gang: Gang, strategy: str, tiny_mixture: Path, rows: pa.Table, alone: Trace
) -> None:
    found, _ = gang.run(2, follow, _config(2, strategy=strategy, expert=2), tiny_mixture, rows)
    assert_equal(found[0], alone)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_pairs_share_them_each(gang: Gang, strategy: str, tiny_mixture: Path, rows: pa.Table, alone: Trace) -> None:
    found, *_ = gang.run(4, follow, _config(4, strategy=strategy, expert=2), tiny_mixture, rows)
    assert_equal(found[0], alone)


def test_experts_and_tokens_of_rows_are_shared_at_once(
    gang: Gang, tiny_mixture: Path, rows: pa.Table, alone: Trace
) -> None:
    found, *_ = gang.run(4, follow, _config(4, strategy="fsdp", expert=2, context=2), tiny_mixture, rows)
    assert_equal(found[0], alone)


def test_an_adapter_learns_beside_spread_experts(gang: Gang, tiny_mixture: Path, rows: pa.Table) -> None:
    alone, _ = follow(HERE, _config(adapter="lora"), tiny_mixture, rows)
    found, _ = gang.run(2, follow, _config(2, "lora", strategy="fsdp", expert=2), tiny_mixture, rows)
    assert found[0].weights
    assert not any("experts" in name for name in found[0].weights)
    assert_equal(found[0], alone)


def _saved(place: Place, config: TrainConfig, base: Path, folder: Path) -> list[str]:
    """Write the state of an engine; the names in it."""
    layout = Layout.of(config.parallel, place.world_size)
    state = engine.build(config, base, base.name, place, layout).state()
    dcp.save(state, checkpoint_id=folder)
    return sorted(state)


def test_a_checkpoint_of_spread_experts_is_one_of_whole_ones(gang: Gang, tiny_mixture: Path, tmp_path: Path) -> None:
    names, *_ = gang.run(4, _saved, _config(4, strategy="fsdp", expert=2), tiny_mixture, tmp_path)
    alone = engine.build(_config(), tiny_mixture, "tiny", HERE, Layout())
    wanted = {name: tensor.clone() for name, tensor in alone.state().items()}
    assert names == sorted(wanted)
    found = {name: torch.full_like(tensor, 7) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
