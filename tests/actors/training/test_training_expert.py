"""Experts spread over ranks answer as one rank with all of them does, whoever gets how many tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from actors.training import adapter, expert
from actors.training.config import AdapterConfig, TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout
from actors.training.models import dense, moe, recipe
from actors.training.objectives.sft import SftObjective
from app.bench.gang import Gang
from cluster.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
FAMILIES = {"qwen3_moe": Qwen3MoeConfig, "olmoe": OlmoeConfig, "mixtral": MixtralConfig}


def _model(family: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES))


def _routed(name: str, rank: int) -> torch.Tensor:
    """The experts of rank 0's 5 and rank 1's 3 tokens."""
    routes = {
        "mixed": [[[0, 3], [1, 2], [3, 1], [0, 1], [2, 0]], [[3, 2], [0, 3], [2, 1]]],
        "all to one rank": [[[0, 1], [1, 0], [1, 0], [0, 1], [1, 0]], [[0, 1], [1, 0], [1, 0]]],
        "an expert without tokens": [[[0, 3], [0, 3], [3, 0], [0, 1], [1, 0]], [[3, 0], [0, 3], [1, 0]]],
    }
    return torch.tensor(routes[name][rank])


def _answer(module: Any, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weights and output of the tokens of `rank`, as if they were there."""
    chosen = _routed(name, rank)
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randn(len(chosen), 16, generator=draw).requires_grad_()
    weights = torch.rand(len(chosen), 2, generator=draw).requires_grad_()
    output = module(tokens, chosen, weights)
    output.square().sum().backward()
    return tokens, weights, output


def _deviation(place: Place, family: str, name: str) -> float:
    """From one rank with all experts and both ranks' tokens: of output and of all gradients, the largest."""
    _, alone = next(expert.modules(_model(family)))
    wanted = [_answer(alone, name, rank) for rank in range(2)][place.rank]
    model = _model(family)
    mesh = expert.mesh_of(Layout(replicate=2, expert=2), place.device)["expert"]
    (module,) = expert.spread(model, mesh)
    found = _answer(module, name, place.rank)
    pairs = [(found[2], wanted[2]), (found[0].grad, wanted[0].grad), (found[1].grad, wanted[1].grad)]
    for matrix in ("gate_up_proj", "down_proj"):
        # The mean over the group of what their tokens give, as for all other weights.
        pairs.append((getattr(module, matrix).grad.full_tensor() * 2, getattr(alone, matrix).grad))
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "mixed"),
        ("qwen3_moe", "all to one rank"),
        ("qwen3_moe", "an expert without tokens"),
        ("olmoe", "mixed"),
        ("mixtral", "mixed"),
    ],
)
def test_tokens_find_their_experts(gang: Gang, family: str, name: str) -> None:
    assert max(gang.run(2, _deviation, family, name)) < 1e-6


def test_each_family_has_its_recipe() -> None:
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert recipe(llama, Layout()) is dense.parallelize
    assert recipe(_model("mixtral"), Layout()) is moe.parallelize


class _Mesh:
    def __init__(self, size: int) -> None:
        self.size: Callable[[], int] = lambda: size


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama models have no experts"):
        expert.spread(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), _Mesh(2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="4 experts of this olmoe model cannot be shared by 3"):
        expert.spread(_model("olmoe"), _Mesh(3))  # type: ignore[arg-type]


def test_an_adapter_on_spread_experts_is_refused() -> None:
    adapted = adapter.attach(_model("qwen3_moe"), AdapterConfig(r=2), base_name="tiny", seed=0)
    objective = SftObjective(adapted, "fp32")
    with pytest.raises(ConfigError, match="adapter on fused experts"):
        moe.parallelize(objective, TrainConfig(), Layout(shard=2, expert=2), torch.device("cpu"), None)


def test_neighbours_among_the_data_ranks_hold_all_experts(gang: Gang) -> None:
    assert gang.run(4, _places, Layout(shard=4, expert=2))[0] == [[0, 1], [2, 3]]
    assert gang.run(4, _places, Layout(shard=2, context=2, expert=2))[0] == [[0, 2], [1, 3]]


def _places(place: Place, layout: Layout) -> list[list[int]]:
    ranks: list[list[int]] = expert.mesh_of(layout, place.device).mesh.tolist()
    return ranks
