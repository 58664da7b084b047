"""A whole model goes an adapter's way: measured against its base, gated, registered, promoted, found by `serve`."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from actors.data.examples import ChatExample
from actors.data.rows import Message
from actors.data.version import DataVersion
from actors.registry.card import read as read_card
from actors.registry.client import RegistryClient
from actors.registry.facts import CheckpointFact, RunEnded, RunFact
from actors.training.controller import TrainingResult
from app import recipe as recipes
from app.pipelines import stages
from app.pipelines.serve import resolved
from app.pipelines.versions import verified
from cluster.models import obtain
from cluster.progress import silent
from cluster.session import Session
from cluster.storage import Home, digest_folder
from cluster.tracking import MemoryTracker
from tests.bases import write_base

pytestmark = pytest.mark.integration

NAME = "whole-words"
TOKENS = 4


def answers(folder: Path, chats: Sequence[list[Message]]) -> list[str]:
    """What the model in `folder` says greedily, by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    given = []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
        given.append(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return given


def test_a_whole_model_is_evaluated_registered_promoted_and_found(
    ray_session: Session, registry: RegistryClient, home: Home, tmp_path: Path
) -> None:
    talks = obtain("smollm2-135m-instruct", home).path
    base = obtain(str(write_base(tmp_path / "base", talks, seed=1)), home)
    trained = write_base(tmp_path / "export-step-2", talks, seed=2)
    chats: list[list[Message]] = [[{"role": "user", "content": f"Say word {number}."}] for number in range(8)]
    held_out = [
        ChatExample(str(number), [*chat, {"role": "assistant", "content": said}], f"group {number}")
        for number, (chat, said) in enumerate(zip(chats, answers(trained, chats), strict=True))
    ]
    version = DataVersion(
        name="words", digest="5" * 64, stage="tokens", shape="chat", parent=None, splits={}, quarantined={},
        dropped={}, config={}, fingerprint="", created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    stages.record_data(registry, version)
    registry.begin_run(RunFact(id="whole-1", name=NAME, base=base.name, base_digest=base.digest, recipe={}))
    step = CheckpointFact(id="whole-1/step-2", run_id="whole-1", step=2, path=tmp_path)
    registry.checkpoint(step)
    registry.end_run(RunEnded(run_id="whole-1", status="completed"))
    recipe = recipes.load(
        "error-triage",
        ["adapter.kind=none", f"register.name={NAME}", f"serve.llm.model={NAME}@champion", "serve.llm.dtype=float32",
         f"evaluate.max_new_tokens={TOKENS}"],
    )  # fmt: skip
    ground = stages.Ground(recipe, home, registry, MemoryTracker(), "memory", silent)
    data = stages.Data(version, version, held_out)
    result = TrainingResult("whole-1", 2, trained, step.id, 2.0, 1.0, 1.0, 1)

    report = stages.evaluate(ground, base, data, result)
    assert (report.scores["model"].correct, report.scores["base"].correct) == (8, 0)
    assert {check.name: check.passed for check in report.verdict.checks} == {
        "metric": True, "slices": True, "parity": True,
    }, report.verdict  # fmt: skip
    assert "sure tokens" in report.candidate_parity
    assert report.serving.generated_tokens > 0

    registration = stages.register(ground, base, data, result, report)
    made = registration.version
    assert (made.id, made.kind, made.base, made.base_digest) == (f"{NAME}/1", "model", base.name, base.digest)
    assert (made.adapter, made.dtype, made.tokenizer_digest) == (None, "float32", base.tokenizer_digest)
    assert registration.move is not None
    assert [model.kind for model in registry.list() if model.name == NAME] == ["model"]
    chain = [link.kind for link in registry.lineage(made.id)]
    assert chain == ["data", "run", "checkpoint", "evaluation", "version", "gate", "alias"]

    folder = home.versions / made.path
    assert digest_folder(folder) == made.digest
    assert read_card(folder).run_id == "whole-1"
    (whole,) = verified(home, made.id, silent)
    assert whole.key_id == made.signed_by
    assert LlamaForCausalLM.from_pretrained(folder).config.hidden_size == 64

    assert recipe.serve is not None
    (served,) = resolved(recipe.serve, home).llm
    assert (served.model, served.version, served.served_as) == (str(folder), f"{NAME}/1", NAME)
    assert obtain(served.model, home).digest == made.digest
