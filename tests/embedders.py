"""Encoders that cost little to make and to run: real architectures and files, untrained weights."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

WORDS = [
    "read",
    "sort",
    "parse",
    "the",
    "file",
    "a",
    "list",
    "of",
    "numbers",
    "and",
    "return",
    "none",
    "if",
    "value",
    "is",
    "not",
    "set",
    "raise",
    "query",
    "passage",
]
MAX_LENGTH = 64


def some_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Texts of up to so many words, some empty."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, longest))) for _ in range(count)]


def _write_tokenizer(folder: Path) -> int:
    """Words, and letters for what is none; returns the size of the vocabulary."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", *WORDS, *letters, *(f"##{one}" for one in letters)]
    vocabulary = list(dict.fromkeys(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=MAX_LENGTH).save_pretrained(folder)
    return len(vocabulary)


def tiny_bert(vocabulary: int, **settings: object) -> BertConfig:
    """Two layers, 32 wide."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_LENGTH,
        # Weights that are far apart, so that different texts have different vectors.
        initializer_range=0.3,
        **settings,
    )


def write_embedder(
    folder: Path,
    *,
    seed: int = 0,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    matryoshka: Sequence[int] = (),
) -> Path:
    """A sentence-transformers folder; equal seeds give equal weights."""
    torch.manual_seed(seed)
    bare = folder.with_name(f"{folder.name}-bare")
    BertModel(tiny_bert(_write_tokenizer(bare))).save_pretrained(bare)
    transformer = Transformer(str(bare))
    model = SentenceTransformer(
        modules=[transformer, Pooling(32), Normalize()],
        prompts=dict(prompts or {}),
        default_prompt_name=default_prompt,
        device="cpu",
    )
    model.save_pretrained(str(folder), create_model_card=False)
    if matryoshka:
        path = folder / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text(encoding="utf-8")), "matryoshka_dimensions": list(matryoshka)}),
            encoding="utf-8",
        )
    return folder


def write_cross_encoder(folder: Path, *, seed: int = 0, labels: int = 1) -> Path:
    """A cross-encoder as sentence-transformers saves it; equal seeds give equal weights."""
    torch.manual_seed(seed)
    bare = folder.with_name(f"{folder.name}-bare")
    BertForSequenceClassification(tiny_bert(_write_tokenizer(bare), num_labels=labels)).save_pretrained(bare)
    CrossEncoder(str(bare), device="cpu").save_pretrained(str(folder), create_model_card=False)
    return folder
