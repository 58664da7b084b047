"""Who stands where: the ranks of a run on the axes of parallelism. Pure arithmetic, without torch.

Five axes, the outermost first: pipeline, replicate, shard, context, tensor. Neighbouring ranks differ in the axis
that talks most, so that it lies inside one machine: tensor ranks exchange activations in every layer, pipeline
ranks once per micro-batch. Expert parallelism is no sixth axis: the experts are spread over ranks that differ in
their data, which is where the tokens to exchange are.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from actors.training.config import ParallelConfig
from cluster.errors import ConfigError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. `replicate` ranks hold equal weights, `shard` ranks a part of each, both with own data."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, world_size: int) -> "Layout":
        """The layout of `world_size` ranks; what the model's axes leave over is spread over data."""
        model = config.ranks_per_replica
        if world_size % model:
            raise ConfigError(
                f"{world_size} workers cannot be shared by groups of {model} (pipeline {config.pipeline} × context "
                f"{config.context} × tensor {config.tensor}).",
                hint="Make parallel.workers a multiple of that product.",
            )
        data = world_size // model
        base = cls(pipeline=config.pipeline, context=config.context, tensor=config.tensor, expert=config.expert)
        if data % config.expert:
            raise ConfigError(
                f"{data} data-parallel ranks cannot be shared by groups of {config.expert} that hold the experts.",
                hint="Make the number of data-parallel ranks a multiple of parallel.expert.",
            )
        if config.strategy == "ddp":
            return replace(base, replicate=data)
        if config.strategy != "hsdp":
            return replace(base, shard=data)
        if data % config.replicate:
            raise ConfigError(
                f"{data} data-parallel ranks cannot be shared by {config.replicate} replicas.",
                hint="Make the number of data-parallel ranks a multiple of parallel.replicate.",
            )
        return replace(base, replicate=config.replicate, shard=data // config.replicate)

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return (self.pipeline, self.replicate, self.shard, self.context, self.tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def data(self) -> int:
        """Different shares of the global batch."""
        return self.replicate * self.shard

    def place_of(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on every axis."""
        place = {}
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, place[axis] = divmod(rank, size)
        return place

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch `rank` works on."""
        place = self.place_of(rank)
        return place["replicate"] * self.shard + place["shard"]

    def drawer(self, rank: int) -> tuple[int, ...]:
        """What tells ranks apart that draw numbers of their own: those that share tokens and layers share them too."""
        place = self.place_of(rank)
        return self.data_rank(rank), place["context"], place["pipeline"]

    def reader(self, rank: int) -> int:
        """The rank that reads the rows of this rank's share: the lowest of those that work on it."""
        return self.data_rank(rank) * self.context * self.tensor

    @property
    def readers(self) -> tuple[int, ...]:
        """One rank for every share, in the order of the shares."""
        return tuple(share * self.context * self.tensor for share in range(self.data))


def layer_ranges(layers: int, stages: int) -> tuple[range, ...]:
    """Which layers each stage of a pipeline holds. Those left over go to the middle.

    The first stage has the embedding besides, the last one the output head, which is as much work as several layers.
    """
    if layers < stages:
        raise ConfigError(
            f"A model of {layers} layers cannot be cut into {stages} stages.",
            hint="Lower parallel.pipeline, or use parallel.schedule 1f1b, which needs one stage a rank, not two.",
        )
    each, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + each + (first <= stage < first + rest))
    return tuple(range(*bounds) for bounds in pairwise(ends))


def require_divisible(tensor: int, **sizes: int) -> None:
    """Refuse a tensor axis that does not divide these sizes of a model (its heads, the width of its MLP)."""
    odd = [f"{name} {size}" for name, size in sizes.items() if size % tensor]
    if odd:
        raise ConfigError(
            f"parallel.tensor {tensor} does not divide the model's {' and '.join(odd)}.",
            hint="Each tensor rank holds whole heads and equal parts of each matrix: lower parallel.tensor.",
        )
