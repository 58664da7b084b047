from dataclasses import replace
from pathlib import Path

import pytest

from actors.registry.snapshot import Route, Snapshot
from cluster.errors import RequestError
from deployments.gateway.models import Base, Encoder, Served, card, cards, embedder, generator, only_base, reranker

SERVED = Served((Base("smol", max_model_len=128),), embedders=(Encoder("minilm"),), started=7)


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


LONG = "x" * 300
# Names as people type them: what each means on `smol`, or the words that its refusal must hold.
TABLE = [
    ("smol", "smol"),
    ("smol:triage", "triage/1"),
    ("smol:triage@champion", "triage/1"),
    ("smol:triage@candidate", "triage/2"),
    ("smol:triage/2", "triage/2"),
    ("smol:triage/02", "name/version"),
    ("smol:triage/0", "name/version"),
    ("smol:triage/-1", "name/version"),
    ("smol:triage/1.0", "name/version"),
    ("smol:triage/1/2", "name/version"),
    ("smol:triage/9", "serves the versions 1, 2"),
    ("smol:triage/999999999", "serves the versions 1, 2"),
    ("smol:triage/9999999999", "name/version"),
    ("smol:triage/one", "name/version"),
    ("smol:triage/", "name/version"),
    ("smol:triage@", "name/version"),
    ("smol:triage@champion/1", "name/version"),
    ("smol:triage/1@champion", "name/version"),
    ("smol:triage@champion@champion", "name/version"),
    ("smol:triage@nobody", "has the aliases candidate, champion"),
    ("smol:triage@Champion", "has the aliases candidate, champion"),
    ("smol:triage@latest", "has the aliases candidate, champion"),
    ("smol:fresh", "no alias yet and the versions 1; ask for fresh/1, or promote one"),
    ("smol:fresh@champion", "no alias yet and the versions 1; ask for fresh/1, or promote one"),
    ("smol:fresh/1", "fresh/1"),
    ("smol:Triage", "Near it: triage"),
    ("smol:triag", "Near it: triage"),
    ("smol:zebra", "Registered: fresh, triage"),
    ("smol:", "name/version"),
    ("smol::triage", "Near it: triage"),
    ("smol:triage:1", "Near it: triage"),
    ("smol: triage", "Near it: triage"),
    ("smol:triage ", "Near it: triage"),
    ("smol:triage\n", "Near it: triage"),
    ("smol:trіage", "Near it: triage"),
    ("smol:ｔriage", "Near it: triage"),
    ("smol:triage/１", "name/version"),
    ("smol:triage/²", "name/version"),
    ("smol:../../etc/passwd", "name/version"),
    ("smol:triage\x00", "Near it: triage"),
    (f"smol:{LONG}", "Registered: fresh, triage"),
    ("smol ", "Did you mean 'smol'?"),
    (" smol", "Did you mean 'smol'?"),
    ("Smol", "Did you mean 'smol'?"),
    ("SMOL:triage", "Did you mean 'smol'?"),
    ("org/Smol", "Did you mean 'smol'?"),
    ("org/Smol:triage", "Did you mean 'smol'?"),
    ("smoll:triage", "Did you mean 'smol'?"),
    ("triage", "Served: smol, minilm"),
    ("triage@champion", "Served: smol, minilm"),
    ("minilm:triage", "Did you mean 'minilm'?"),
    (":triage", "Served: smol, minilm"),
    ("", "Served: smol, minilm"),
    (" ", "Served: smol, minilm"),
    ("😀", "Served: smol, minilm"),
    (LONG, "Served: smol, minilm"),
]


@pytest.mark.parametrize(("name", "expected"), TABLE)
def test_each_name_means_one_version_or_its_refusal_says_what_there_is(name: str, expected: str) -> None:
    known = snapshot(
        route("triage", 1), route("triage", 2), route("fresh", 1),
        aliases={"triage@champion": 1, "triage@candidate": 2},
    )  # fmt: skip
    try:
        assert generator(SERVED, known, name).version == expected
        return
    except RequestError as error:
        refused = error
    assert (refused.status, refused.code, refused.param) == (404, "model_not_found", "model")
    assert refused.message == f"The model {name!r} does not exist."
    assert expected in str(refused.hint)


def test_each_kind_of_model_answers_to_its_own_route() -> None:
    served = Served(
        (Base("smol"),), embedders=(Encoder("minilm"), Encoder("e5", registered="e5/3")), reranker=Encoder("cross")
    )
    assert [embedder(served, name).version for name in ("minilm", "e5")] == ["minilm", "e5/3"]
    assert reranker(served, "cross").version == "cross"
    assert [one["id"] for one in cards(served, Snapshot())] == served.names == ["smol", "minilm", "e5", "cross"]
    assert card(served, Snapshot(), "e5")["root"] == "e5/3"
    for ask, name, hint in (
        (reranker, "minilm", "'cross'"),
        (reranker, "smol:triage", "'cross'"),
        (embedder, "cross", "'minilm' or 'e5'"),
        (lambda of, name: generator(of, Snapshot(), name), "cross", "/v1/rerank"),
    ):
        with pytest.raises(RequestError) as caught:
            ask(served, name)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "model_not_supported", "model")
        assert hint in str(caught.value.hint)
    with pytest.raises(RequestError, match="'cros' does not exist") as unknown:
        reranker(served, "cros")
    assert "'cross'" in str(unknown.value.hint)


def test_the_only_base_needs_no_name_and_several_do() -> None:
    assert only_base(SERVED) == "smol"
    with pytest.raises(RequestError) as several:
        only_base(Served((Base("smol"), Base("llama"))))
    with pytest.raises(RequestError) as none:
        only_base(Served(embedders=(Encoder("minilm"),)))
    assert (several.value.status, several.value.param, none.value.status) == (400, "model", 404)
    assert "smol, llama" in str(several.value.hint)


def test_a_registered_model_that_is_served_beside_the_base_is_asked_for_by_its_own_name() -> None:
    known = snapshot(route("tickets", 3, kind="model"), aliases={"tickets@champion": 3})
    served = Served((Base("smol"), Base("tickets", part="llm-tickets", version="tickets/3")))
    assert generator(served, known, "tickets").version == "tickets/3"
    with pytest.raises(RequestError) as caught:
        generator(served, known, "smol:tickets")
    assert "ask for 'tickets'" in str(caught.value.hint)
