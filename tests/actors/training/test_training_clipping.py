"""One norm over parameters that lie in different ways, each number counted once, and all clipped by it."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from actors.training import mesh
from actors.training.clipping import clip
from actors.training.engine import Place
from actors.training.layout import Layout
from app.bench.gang import Gang
from tests.actors.training.equivalence import whole


class Net(torch.nn.Module):
    """A matrix by columns, one by rows, and one that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 6), torch.nn.Linear(6, 8)
        self.plain = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.plain(self.down(self.up(x))).square().sum()


def clipped(place: Place, layout: Layout, strategy: str, max_norm: float) -> tuple[float, list[torch.Tensor]]:
    """The norm, and the whole gradients after it, of equal data on every rank. Work for `Gang.run`."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 8)
    if place.world_size > 1:
        ranks = mesh.build(layout, place.device)
        if layout.tensor > 1:
            cut = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(net, ranks["tensor"], cut, src_data_rank=None)
        if layout.data > 1:
            fully_shard(net, mesh=mesh.shards(ranks, strategy))
    net(x).backward()
    norm = clip(net.parameters(), max_norm)
    return norm.item(), [whole(parameter.grad) for parameter in net.parameters() if parameter.grad is not None]


LAYOUTS = {
    "ddp": [Layout(replicate=2, tensor=2)],
    "fsdp": [Layout(shard=4), Layout(shard=2, tensor=2), Layout(tensor=2)],
    "hsdp": [Layout(replicate=2, shard=2)],
}


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_mixed_mesh_clips_as_one_process(gang: Gang, max_norm: float) -> None:
    norm, gradients = clipped(Place(0, 1, torch.device("cpu")), Layout(), "ddp", max_norm)
    for strategy, cases in LAYOUTS.items():
        for layout in cases:
            for found, parts in gang.run(layout.world_size, clipped, layout, strategy, max_norm):
                assert found == pytest.approx(norm, rel=1e-6)
                torch.testing.assert_close(parts, gradients, rtol=1e-5, atol=1e-7)


def test_one_process_clips_as_torch_does() -> None:
    net = Net()
    net(torch.randn(5, 8)).backward()
    twin = copy.deepcopy(net)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    torch.testing.assert_close(clip(net.parameters(), 0.5), torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def stage(place: Place) -> float:
    """Rank 0 has a gradient of norm 3, rank 1 of 4."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 3.0 + place.rank)
    clip([weight], 1.0, across=torch.distributed.group.WORLD)
    return float(weight.grad)


def test_stages_of_a_pipeline_share_one_norm(gang: Gang) -> None:
    assert gang.run(2, stage) == pytest.approx([0.6, 0.8], rel=1e-6)
