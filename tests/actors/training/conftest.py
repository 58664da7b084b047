"""A tiny Llama with random weights and packed rows for it: small enough for a whole run in a second."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.bench.gang import Gang
from tests.actors.training.pairs import write_embedder
from tests.actors.training.small import VOCABULARY, packed_rows

HERE = Path(__file__).parent
_GANG = Gang()
"""Starts with its first work."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only lose by threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gang() -> Gang:
    """Processes that make process groups over gloo, for what several ranks do without Ray."""
    return _GANG


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """After the last test of this folder, the gang ends.

    Each mesh leaves threads in it that wake up now and then, hundreds in the end: tests elsewhere shall not pay.
    """
    if nextitem is None or HERE not in nextitem.path.parents:
        _GANG.close()


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: 2 layers, grouped-query attention, tied embeddings, fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: 2 layers of 8 experts each, of which a token takes 2; many get none in a row of 24 tokens."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny-mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder without dropout, whose gradients are those of eval mode."""
    return write_embedder(tmp_path_factory.mktemp("embedder") / "tiny-embedder")


@pytest.fixture(scope="session")
def rows() -> pa.Table:
    """13 rows of 24 tokens: examples of 3 to 9 tokens, loss on the last third of each, padding at the end."""
    return packed_rows(13, length=24, seed=7)
