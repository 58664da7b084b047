"""To which lengths a vector may be cut, and how."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.errors import ConfigError, RequestError
from deployments.embedding.matryoshka import cut, offered, require, said_by

CARD = """---
tags:
- loss:MatryoshkaLoss
---
* Loss: MatryoshkaLoss with these parameters:
  ```json
  {
      "loss": "MultipleNegativesRankingLoss",
      "matryoshka_dims": [
          384,
          256,
          128
      ],
      "matryoshka_weights": [1, 1, 1]
  }
  ```
"""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", json.dumps({"matryoshka_dimensions": [256, 128]}), (256, 128)),
        ("config_sentence_transformers.json", json.dumps({"matryoshka_dims": [64]}), (64,)),
        ("README.md", CARD, (384, 256, 128)),
        ("README.md", "# No losses", ()),
        ("config.json", json.dumps({"matryoshka_dimensions": "all"}), ()),
        ("config.json", "[1]", ()),
        ("config.json", "{", ()),
        ("other.json", "{}", ()),
    ],
)
def test_the_models_own_files_say_it(tmp_path: Path, name: str, content: str, said: tuple[int, ...]) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert said_by(tmp_path) == said


@pytest.mark.parametrize(
    ("said", "wanted", "known"),
    [
        ((), None, (384,)),
        ((384, 256, 64), None, (384, 256, 64)),
        ((768, 256), None, (384, 256)),
        ((256,), (128, 32), (384, 128, 32)),
        ((256,), (), (384,)),
    ],
)
def test_the_settings_replace_what_the_model_says(said: Any, wanted: Any, known: tuple[int, ...]) -> None:
    assert offered(384, said, wanted) == known


def test_no_vector_grows() -> None:
    with pytest.raises(ConfigError, match="names 512, but the model's vectors have 384"):
        offered(384, (), (512,))


@pytest.mark.parametrize("known", [(384,), (384, 64)])
def test_other_lengths_are_refused_and_the_known_ones_named(known: tuple[int, ...]) -> None:
    require(None, known, "m")
    require(384, known, "m")
    with pytest.raises(RequestError, match="; it has 384") as caught:
        require(65, known, "m")
    assert (caught.value.status, caught.value.param) == (400, "dimensions")


def test_the_head_is_normalised() -> None:
    vectors = np.array([[3, 4, 12], [0, 0, 1]], dtype=np.float32)
    short = cut(vectors, 2)
    np.testing.assert_allclose(short, [[0.6, 0.8], [0, 0]], atol=1e-7)
    assert short.dtype == np.float32
    assert cut(vectors, 3) is cut(vectors, None) is vectors
