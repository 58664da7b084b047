from dataclasses import replace
from pathlib import Path

import pytest

from actors.registry.snapshot import Route, Snapshot
from cluster.errors import RequestError
from deployments.gateway.models import Base, Served, card, cards, embedder, generator

SERVED = Served((Base("smol", max_model_len=128),), embedder="minilm", started=7)


def route(name: str, version: int, *, kind: str = "adapter", base: str = "smol") -> Route:
    return Route(name, version, kind, Path("/versions") / name / str(version), f"{version:064x}", base)  # type: ignore[arg-type]


def snapshot(*routes: Route, aliases: dict[str, int] | None = None) -> Snapshot:
    return Snapshot.of_routes(routes, aliases or {})


TWO = snapshot(route("triage", 1), route("triage", 2), aliases={"triage@champion": 1, "triage@candidate": 2})


@pytest.mark.parametrize(
    ("name", "model", "version"),
    [
        ("smol", "smol", "smol"),
        ("smol:triage", "smol:triage/1", "triage/1"),
        ("smol:triage@champion", "smol:triage/1", "triage/1"),
        ("smol:triage@candidate", "smol:triage/2", "triage/2"),
        ("smol:triage/2", "smol:triage/2", "triage/2"),
    ],
)
def test_a_name_means_one_immutable_version(name: str, model: str, version: str) -> None:
    target = generator(SERVED, TWO, name)
    assert (target.model, target.version) == (model, version)
    assert (target.adapter is None) == (name == "smol")
    if target.adapter:
        assert target.adapter.version == version
        assert target.adapter.digest == TWO.models["triage"].versions[int(version[-1])].digest


@pytest.mark.parametrize(
    "name", ["smoll", "smol:", "smol:nope", "smol:triage@nobody", "smol:triage/9", "smol:triage/0", "other:triage", ""]
)
def test_a_name_that_nothing_answers_to_is_not_found(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        generator(SERVED, TWO, name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert repr(name) in caught.value.message


@pytest.mark.parametrize("other", [route("triage", 1, base="llama"), route("triage", 1, kind="embedder")])
def test_a_version_that_does_not_fit_the_base_is_neither_answered_nor_listed(other: Route) -> None:
    known = snapshot(other, aliases={"triage@champion": 1})
    with pytest.raises(RequestError) as caught:
        generator(SERVED, known, "smol:triage")
    assert caught.value.status == 404
    assert [one["id"] for one in cards(SERVED, known)] == ["smol", "minilm"]


def test_a_whole_model_beside_the_base_is_not_found_and_the_way_out_is_told() -> None:
    known = snapshot(route("tickets", 3, kind="model"), aliases={"tickets@champion": 3})
    with pytest.raises(RequestError) as caught:
        generator(SERVED, known, "smol:tickets")
    assert "serve.llm.model=tickets/3" in str(caught.value.hint)


def test_a_served_version_answers_with_its_number_and_takes_no_adapters_of_other_weights() -> None:
    """Not even if it was registered under the name of the base that it was trained from."""
    served = replace(SERVED, bases=(Base("smol", version="smol/2"),))
    assert (generator(served, TWO, "smol").model, generator(served, TWO, "smol").version) == ("smol", "smol/2")
    assert [one["id"] for one in cards(served, TWO)] == ["smol", "minilm"]
    with pytest.raises(RequestError):
        generator(served, TWO, "smol:triage")


def test_text_and_vectors_are_not_mixed_up() -> None:
    with pytest.raises(RequestError) as text:
        generator(SERVED, TWO, "minilm")
    with pytest.raises(RequestError) as vectors:
        embedder(SERVED, "smol:triage")
    assert (text.value.status, vectors.value.status) == (400, 400)
    assert "'minilm'" in str(vectors.value.hint)


def test_every_listed_name_resolves_to_its_root_and_only_adapters_have_a_parent() -> None:
    listed = {one["id"]: one for one in cards(SERVED, TWO)}
    adapters = {f"smol:triage{end}" for end in ("", "@champion", "@candidate", "/1", "/2")}
    assert set(listed) == {"smol", "minilm"} | adapters
    for name, one in listed.items():
        assert one["object"] == "model"
        assert card(SERVED, TWO, name) == one
        if name != "minilm":
            assert generator(SERVED, TWO, name).model == one["root"]
            assert one["parent"] == ("smol" if ":" in name else None)


def test_without_a_champion_the_bare_name_is_not_listed() -> None:
    known = snapshot(route("triage", 1))
    assert [one["id"] for one in cards(SERVED, known)] == ["smol", "smol:triage/1", "minilm"]
    with pytest.raises(RequestError) as caught:
        generator(SERVED, known, "smol:triage")
    assert "promote" in str(caught.value.hint)


def test_equal_version_ids_with_other_weights_are_other_models_to_the_engine() -> None:
    first = generator(SERVED, snapshot(route("triage", 1)), "smol:triage/1").adapter
    other = Route("triage", 1, "adapter", Path("/x"), "f" * 64, "smol")
    second = generator(SERVED, snapshot(other), "smol:triage/1").adapter
    assert first is not None
    assert second is not None
    assert first.engine_name != second.engine_name
