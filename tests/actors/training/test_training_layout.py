"""Which rank stands where, who shares rows with whom, and which combinations are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.training.config import ParallelConfig, TrainConfig
from actors.training.layout import AXES, Layout

sizes = st.integers(min_value=1, max_value=3)


@given(st.builds(Layout, pipeline=sizes, replicate=sizes, shard=sizes, context=sizes, tensor=sizes))
def test_every_place_is_taken_once_and_every_share_has_one_reader(layout: Layout) -> None:
    places = [tuple(layout.place_of(rank)[axis] for axis in AXES) for rank in range(layout.world_size)]
    assert sorted(places) == sorted(set(places))
    shares: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        shares.setdefault(layout.data_rank(rank), []).append(rank)
    assert sorted(shares) == list(range(layout.data))
    assert layout.readers == tuple(min(shares[share]) for share in range(layout.data))
    assert all(layout.reader(rank) == min(ranks) for ranks in shares.values() for rank in ranks)


def test_neighbours_differ_in_the_tensor_axis() -> None:
    layout = Layout.of(config("fsdp", 8, tensor=2, pipeline=2), 8)
    assert (layout.pipeline, layout.shard, layout.tensor) == (2, 2, 2)
    assert [layout.place_of(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_ranks_draw_the_same_dropout_where_they_share_tokens_and_layers() -> None:
    tensor = Layout.of(config("ddp", 4, tensor=2), 4)
    assert [tensor.drawer(rank) for rank in range(4)] == [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0)]
    for axis in ("pipeline", "context"):
        layout = Layout.of(config("ddp", 2, **{axis: 2}), 2)
        assert layout.drawer(0) != layout.drawer(1)


def config(strategy: str, workers: int, **axes: object) -> ParallelConfig:
    return ParallelConfig.model_validate({"strategy": strategy, "workers": {"min": workers, "max": workers}, **axes})


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"strategy": "zero2", "tensor": 2}, "shards by data alone, without tensor 2"),
        ({"strategy": "fsdp", "offload": "cpu"}, "is ZeRO's"),
        ({"strategy": "fsdp", "replicate": 2}, "is hsdp's"),
        ({"strategy": "ddp", "schedule": "interleaved"}, "needs pipeline"),
        ({"strategy": "ddp", "expert": 2, "pipeline": 2}, "do not exchange tokens"),
        ({"strategy": "ddp", "context": 2, "pipeline": 2}, "whole sequences"),
        ({"strategy": "ddp", "expert": 2, "tensor": 2}, "whole on its rank"),
        ({"strategy": "fsdp", "tensor": 3}, "no multiple of 3"),
        ({"strategy": "fsdp", "tensor": 2, "workers": {"min": 2, "max": 4}}, "one by one"),
    ],
)
def test_what_does_not_compose_is_refused_with_the_reason(axes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ParallelConfig.model_validate({"workers": {"min": 4, "max": 4}, **axes})


def test_an_odd_size_is_refused_and_not_taken_for_another() -> None:
    for size in (True, "two", 0, -2, 2.5, None):
        with pytest.raises(ValidationError, match=r"parallel.tensor|tensor"):
            ParallelConfig.model_validate({"tensor": size, "workers": {"min": 2, "max": 2}})
    for workers in ({"min": True}, {"max": 0}, {"min": 3, "max": 2}, 2):
        with pytest.raises(ValidationError):
            ParallelConfig.model_validate({"workers": workers})


def test_a_batch_that_workers_do_not_divide_is_told_what_they_would() -> None:
    with pytest.raises(ValidationError, match=r"not divisible by 3 data-parallel .* make it a multiple of 12"):
        TrainConfig.model_validate(
            {
                "parallel": {"workers": {"min": 1, "max": 3}},
                "optimizer": {"global_batch_size": 4, "micro_batch_size": 2},
            }
        )
