"""A wrong key or value names itself and the way out."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from cluster.config import Config, nearest, override, parse, read_yaml
from cluster.errors import ConfigError


class Inner(Config):
    learning_rate: float = 0.1
    kind: Literal["a", "b"] = "a"


class Outer(Config):
    name: str
    optimizer: Inner = Inner()
    registration: Inner | None = Field(default=None, alias="register")


def fault(settings: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, settings, source="test.yaml")
    return caught.value.message


def test_an_unknown_key_names_the_nearest() -> None:
    assert "optimiser: unknown key; did you mean 'optimizer'?" in fault({"name": "x", "optimiser": {}})


def test_an_unknown_inner_key_is_compared_with_its_own_section() -> None:
    assert "optimizer.learning_rat: unknown key; did you mean 'learning_rate'?" in fault(
        {"name": "x", "optimizer": {"learning_rat": 1}}
    )


def test_an_aliased_section_is_known_by_its_alias() -> None:
    message = fault({"name": "x", "register": {"knd": "a"}, "registr": {}})
    assert "register.knd: unknown key; did you mean 'kind'?" in message
    assert "registr: unknown key; did you mean 'register'?" in message


def test_a_key_near_to_nothing_lists_what_is_known() -> None:
    assert "known keys: name, optimizer, register" in fault({"name": "x", "zzzzqqq": 1})


def test_every_fault_is_listed_with_its_value() -> None:
    message = fault({"optimizer": {"learning_rate": "fast", "kind": "c"}})
    assert "name: required" in message
    assert "optimizer.learning_rate" in message
    assert "'fast'" in message
    assert "'c'" in message


def test_override_reads_values_as_yaml_and_leaves_its_input_alone() -> None:
    before = {"optimizer": {"learning_rate": 1.0}}
    after = override(before, ["optimizer.learning_rate=2e-4", "new.deep.list=[1, 2]", "flag=true"])
    assert after["new"] == {"deep": {"list": [1, 2]}}
    assert after["flag"] is True
    assert before == {"optimizer": {"learning_rate": 1.0}}


def test_override_reaches_into_lists_by_number() -> None:
    before = {"llm": [{"model": "a"}, {"model": "b"}], "ports": [1, 2]}
    after = override(before, ["llm.1.model=c", "llm.0.keep=[x]", "ports.1=3"])
    assert after == {"llm": [{"model": "a", "keep": ["x"]}, {"model": "c"}], "ports": [1, 3]}
    assert before == {"llm": [{"model": "a"}, {"model": "b"}], "ports": [1, 2]}


@pytest.mark.parametrize(
    "assignment", ["novalue", "=3", "a..b=3", "name.inner=3", "list.2=3", "list.-1=3", "list.model=3", "list.0.inner=3"]
)
def test_a_malformed_override_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        override({"name": "x", "list": [1, 2]}, [assignment])


@pytest.mark.parametrize(("text", "part"), [("- a\n- b\n", "list"), ("a: [", "not valid YAML"), ("", "NoneType")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_yaml(path)


def test_a_missing_file_and_a_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        read_yaml(tmp_path / "gone.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        read_yaml(tmp_path / "binary.yaml")


def test_nearest_is_silent_when_nothing_is_near() -> None:
    assert nearest("abc", ["xyz", "qqq"]) is None


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("steps: 1\nname: x\nsteps: 2\n")
    with pytest.raises(ConfigError, match="'steps' is given twice"):
        read_yaml(path)


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(path)
