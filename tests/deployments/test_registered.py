"""What `llm.model` and `embedding.model` mean where they may name a version of the registry."""

from pathlib import Path

import pytest

from actors.registry.snapshot import Kind, Route, Snapshot
from cluster.errors import ConfigError, FlywheelError, RequestError
from deployments import registered
from deployments.embedding.config import EmbeddingConfig
from deployments.llm.config import LLMConfig


def route(name: str, number: int, kind: Kind = "model") -> Route:
    return Route(name, number, kind, Path(name) / f"{number:012x}", f"{number:064x}", "owner/smol")


KNOWN = Snapshot.of_routes(
    [route("tickets", 2), route("tickets", 3), route("triage", 1, "adapter"), route("minilm", 1, "embedder")],
    {"tickets@champion": 2, "tickets@canary": 3, "minilm@champion": 1},
    root=Path("/home/versions"),
)


@pytest.mark.parametrize(
    ("reference", "version"),
    [("tickets", 2), ("tickets@champion", 2), ("tickets@canary", 3), ("tickets/3", 3)],
)
def test_a_registered_model_is_served_from_its_folder_under_its_name(reference: str, version: int) -> None:
    found = registered.resolved(LLMConfig(model=reference), KNOWN)
    assert (found.model, found.version) == (f"/home/versions/tickets/{version:012x}", f"tickets/{version}")
    assert found.served_as == "tickets"


@pytest.mark.parametrize("reference", ["minilm", "minilm/1"])
def test_so_is_a_registered_embedder(reference: str) -> None:
    found = registered.resolved(EmbeddingConfig(model=reference), KNOWN)
    assert (found.model, found.version) == ("/home/versions/minilm/000000000001", "minilm/1")
    assert found.served_as == "minilm"
    assert EmbeddingConfig(model="minilm@champion").served_as == "minilm"
    with pytest.raises(ConfigError, match=r"embedding\.model 'tickets/3' is the model tickets/3 .* not an embedder"):
        registered.resolved(EmbeddingConfig(model="tickets/3"), KNOWN)


@pytest.mark.parametrize("model", ["owner/smol", "smollm2-135m-instruct", "owner/3"])
def test_what_is_not_registered_stays_as_it_is(model: str) -> None:
    config = LLMConfig(model=model)
    assert registered.resolved(config, KNOWN) == config
    assert config.served_as == model.rpartition("/")[2]


@pytest.mark.parametrize(
    ("reference", "kind", "said", "hint"),
    [
        ("triage/1", ConfigError, "adapter triage/1 on owner/smol", "ask for smol:triage/1"),
        ("minilm/1", ConfigError, "embedder minilm/1", "Name a whole model"),
        ("tickets@nobody", RequestError, "does not exist", "canary, champion"),
        ("tickets/9", RequestError, "does not exist", "versions 2, 3"),
        ("ticket@champion", RequestError, "does not exist", "tickets"),
    ],
)
def test_what_cannot_be_served_is_named_with_the_way_out(
    reference: str, kind: type[FlywheelError], said: str, hint: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        registered.resolved(LLMConfig(model=reference), KNOWN)
    assert hint in str(caught.value.hint)


def test_the_registry_is_asked_only_for_what_may_be_its_own(tmp_path: Path) -> None:
    """Names of the store, hub ids and folders are served also while its database is away."""
    asked = {
        model: registered.may_be(LLMConfig(model=model))
        for model in ("tickets", "tickets@champion", "tickets/3", "smollm2-135m-instruct", "owner/smol", str(tmp_path))
    }
    assert [model for model, may_be in asked.items() if may_be] == ["tickets", "tickets@champion", "tickets/3"]
    assert not registered.may_be(LLMConfig(model="tickets", version="tickets/3"))
