import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.registry import card
from actors.registry.card import Card, describe
from cluster.errors import ConfigError


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_card_says_what_the_files_say(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Triage\n")
    found = describe(source, kind="adapter", base="smollm2-135m-instruct", tokenizer_digest="of the base")
    assert found.adapter is not None
    assert (found.adapter.rank, found.adapter.alpha, found.adapter.target_modules) == (4, 8, ("q_proj", "v_proj"))
    assert (found.dtype, found.licence) == ("float32", "apache-2.0")
    assert found.chat_template_digest == digest("{{ messages }}")
    assert found.tokenizer_digest == "of the base"


def test_a_models_own_tokenizer_outweighs_what_the_caller_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file({"w": np.ones(3, np.float16), "norm": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    found = describe(tmp_path, kind="model", base="b", tokenizer_digest="another", licence=None)
    assert found.tokenizer_digest not in ("another", "")
    assert (found.dtype, found.licence, found.adapter) == ("float16", "mit", None)
    # The template is the same one, wherever a version of transformers keeps it.
    assert found.chat_template_digest == digest("{{ messages }}")
    assert describe(tmp_path, kind="model", base="b", licence="own").licence == "own"


@pytest.mark.parametrize(
    "readme",
    ["", "# No front matter", "---\nlicense: [\n---\n", "---\n- a list\n---\n", "---\nlicense: 7\n---\n"],
)
def test_a_readme_that_names_no_licence_is_no_obstacle(make_adapter: Callable[..., Path], readme: str) -> None:
    source = make_adapter()
    (source / "README.md").write_text(readme)
    assert describe(source, kind="adapter", base="b").licence is None


def test_the_same_card_is_the_same_bytes(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    first = describe(source, kind="adapter", base="b", recipe={"b": 1, "a": {"d": [1, 2], "c": "é"}})
    second = describe(source, kind="adapter", base="b", recipe={"a": {"c": "é", "d": [1, 2]}, "b": 1})
    assert card.encode(first) == card.encode(second)
    assert b" " not in card.encode(first)
    assert card.decode(card.encode(first).decode()) == first


def test_a_recipe_that_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="recipe"):
        card.encode(Card(kind="adapter", base="b", dtype="float32", recipe={"rate": float("nan")}))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}'])
def test_what_is_no_card_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / card.CARD_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"flywheel\.json"):
        card.read(tmp_path)


def test_bfloat16_has_torchs_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    # numpy has no such dtype: two bytes a number, as the header says.
    header = json.dumps({"w": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    assert describe(tmp_path, kind="model", base="b").dtype == "bfloat16"
