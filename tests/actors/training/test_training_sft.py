"""The loss is right: only where there is something to learn, and the same however the rows are cut."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from actors.training.attention import PACKED
from actors.training.batching import NO_LOSS, MicroBatch
from actors.training.objectives.sft import SftObjective, count_loss_tokens
from cluster.errors import ConfigError
from tests.actors.training.small import examples


@pytest.fixture(scope="module", params=["sdpa", PACKED])
def model(request: pytest.FixtureRequest, tiny_base: Path) -> Any:
    """With transformers' mask for packed rows, and with our attention that needs none."""
    return AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32, attn_implementation=request.param)


def summed(model: Any, batch: MicroBatch) -> torch.Tensor:
    return SftObjective(model, "fp32")(batch.input_ids, batch.labels, batch.position_ids)


def alone(ids: list[int], labels: list[int]) -> MicroBatch:
    return MicroBatch(torch.tensor([ids]), torch.tensor([labels]), torch.arange(len(ids))[None])


def pack(parts: list[tuple[list[int], list[int]]]) -> MicroBatch:
    return MicroBatch(
        torch.tensor([[token for ids, _ in parts for token in ids]]),
        torch.tensor([[label for _, labels in parts for label in labels]]),
        torch.cat([torch.arange(len(ids)) for ids, _ in parts])[None],
    )


def gradients(model: Any) -> list[torch.Tensor]:
    taken = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return taken


def test_packed_examples_do_not_see_each_other(model: Any) -> None:
    parts = examples(6, seed=3)
    together = summed(model, pack(parts))
    together.backward()
    packed_gradients = gradients(model)
    apart = torch.stack([summed(model, alone(*part)) for part in parts]).sum()
    apart.backward()
    assert together.item() == pytest.approx(apart.item(), rel=1e-5)
    for packed, unpacked in zip(packed_gradients, gradients(model), strict=True):
        torch.testing.assert_close(packed, unpacked, rtol=1e-4, atol=1e-5)


def test_without_restarting_positions_they_would_see_each_other(model: Any) -> None:
    """The test above can fail: positions that run on give another loss."""
    batch = pack(examples(6, seed=3))
    run_on = MicroBatch(batch.input_ids, batch.labels, torch.arange(batch.input_ids.shape[1])[None])
    assert abs(summed(model, batch).item() - summed(model, run_on).item()) > 1e-2


def test_it_is_the_cross_entropy_of_the_models_own_logits(model: Any, rows: pa.Table) -> None:
    batch = MicroBatch.from_arrow(rows)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    expected = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=NO_LOSS, reduction="sum"
    )
    assert summed(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert count_loss_tokens(batch) == int((batch.labels[:, 1:] != NO_LOSS).sum())


def test_no_example_is_asked_to_predict_the_next_ones_first_token(model: Any) -> None:
    everywhere = [(ids, list(ids)) for ids, _ in examples(4, seed=5)]
    batch = pack(everywhere)
    assert count_loss_tokens(batch) == sum(len(ids) - 1 for ids, _ in everywhere)
    apart = sum(summed(model, alone(*part)).item() for part in everywhere)
    assert summed(model, batch).item() == pytest.approx(apart, rel=1e-5)


def test_the_head_computes_no_logits_but_those_of_the_loss(model: Any, rows: pa.Table) -> None:
    batch = MicroBatch.from_arrow(rows)
    seen: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    summed(model, batch)
    hook.remove()
    assert seen == [(count_loss_tokens(batch), model.config.vocab_size)]


def test_a_batch_without_loss_gives_zero_and_a_gradient(model: Any) -> None:
    ids, labels = examples(1, seed=1)[0]
    loss = summed(model, alone(ids, [NO_LOSS] * len(labels)))
    loss.backward()
    assert loss.item() == 0
    model.zero_grad()


def test_a_model_that_reshapes_its_logits_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.config, "final_logit_softcapping", 30.0, raising=False)
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        SftObjective(model, "fp32")
