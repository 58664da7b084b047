"""One base or several in a config: what is written, what is meant, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import parse
from cluster.errors import ConfigError
from deployments.config import ServeConfig
from deployments.llm.config import LLMConfig

SMOL, LLAMA = {"model": "smol", "threads": 2}, {"model": "meta/Llama", "dtype": "float32"}


def serve(**settings: Any) -> ServeConfig:
    return parse(ServeConfig, settings, source="test")


@pytest.mark.parametrize(
    ("written", "names"),
    [
        (SMOL, ["smol"]),
        ([SMOL], ["smol"]),
        ([SMOL, LLAMA], ["smol", "llama"]),
        (LLMConfig(model="smol"), ["smol"]),
        (None, []),
        ([], []),
    ],
)
def test_one_base_is_a_mapping_and_several_are_a_list(written: Any, names: list[str]) -> None:
    config = serve(llm=written)
    assert [base.served_as for base in config.llm] == names
    dumped = config.model_dump(mode="json")
    assert isinstance(dumped["llm"], dict) == (len(names) == 1)
    assert ServeConfig.model_validate(dumped) == config


def test_so_are_embedders_and_the_first_keeps_its_name() -> None:
    minilm, e5 = {"model": "minilm", "dtype": "bfloat16"}, {"model": "intfloat/E5-small"}
    alone, two = serve(embedding=minilm), serve(embedding=[minilm, e5])
    assert alone.model_dump(mode="json")["embedding"]["model"] == "minilm"
    assert ServeConfig.model_validate(two.model_dump(mode="json")) == two
    named = {name: one.served_as for name, one in two.embedders.items()}
    assert named == {"embedding": "minilm", "embedding-e5-small": "e5-small"}
    assert two.embedders["embedding"] == alone.embedders["embedding"]


def test_deployments_are_named_after_their_bases_and_the_first_stays_what_it_was() -> None:
    alone, two = serve(llm=SMOL), serve(llm=[SMOL, LLAMA])
    assert list(alone.engines) == ["llm"]
    assert {name: base.served_as for name, base in two.engines.items()} == {"llm": "smol", "llm-llama": "llama"}
    assert two.engines["llm"] == alone.engines["llm"]


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"llm": [SMOL, SMOL]}, "llm.model 'smol'", "llm.model 'smol'"),
        ({"llm": [{"model": "a/Same"}, {"model": "b/same"}]}, "'a/Same'", "'b/same'"),
        ({"llm": [{"model": "tickets@champion"}, {"model": "tickets@candidate"}]}, "@champion", "@candidate"),
        ({"llm": SMOL, "embedding": {"model": "x/Smol"}}, "llm.model 'smol'", "embedding.model 'x/Smol'"),
        ({"embedding": [{"model": "a/M"}, {"model": "m@new"}]}, "embedding.model 'a/M'", "embedding.model 'm@new'"),
        ({"embedding": {"model": "a/M"}, "reranking": {"model": "b/m"}}, "embedding.model 'a/M'", "reranking.model"),
    ],
)
def test_two_models_of_one_name_are_refused_and_both_are_named(settings: Any, first: str, second: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(**settings)
    said = caught.value.message
    assert "would both be served as" in said
    assert said.index(first) <= said.rindex(second)


def test_what_only_the_registry_can_tell_apart_is_left_to_it() -> None:
    assert len(serve(llm=[{"model": "tickets/3"}, {"model": "words/3"}]).llm) == 2
    found = [
        LLMConfig(model="/versions/a", version="tickets/3"),
        LLMConfig(model="/versions/b", version="tickets/4"),
    ]
    with pytest.raises(ConfigError, match=r"'/versions/a'.*'/versions/b'.*'tickets'"):
        serve(llm=found)


@pytest.mark.parametrize(
    ("written", "where"), [({"modle": "smol"}, "llm.modle"), ([SMOL, {**LLAMA, "dtipe": "x"}], "llm.1.dtipe")]
)
def test_a_fault_is_named_where_it_was_written(written: Any, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(llm=written)
    assert f"{where}: unknown key; did you mean" in caught.value.message


def test_the_engine_of_a_model_is_the_one_that_serves_it_and_else_the_first(tmp_path: Path) -> None:
    config = serve(llm=[{"model": "tickets@champion"}, SMOL])
    assert [config.engine_of(model) for model in ("org/Smol", "tickets", "other")] == [
        config.llm[1],
        config.llm[0],
        config.llm[0],
    ]
    assert serve().engine_of("smol") is None
