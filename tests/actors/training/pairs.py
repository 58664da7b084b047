"""A tiny embedder with random weights, and rows of pairs for it: what the contrastive tests share."""

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from actors.training.batching import NO_LOSS

VOCABULARY = 64
DIMENSION = 32


def write_embedder(folder: Path, *, dropout: float = 0.0) -> Path:
    """A sentence-transformers folder: 2 BERT layers of 32, mean pooling, normalised; its words are w5 to w63."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIMENSION,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )
    inner = folder.with_name(f"{folder.name}-bert")
    BertModel(config).save_pretrained(inner)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, **{f"w{n}": n for n in range(5, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=32,
    )
    fast.save_pretrained(inner)
    transformer = Transformer(str(inner), max_seq_length=32)
    SentenceTransformer(modules=[transformer, Pooling(DIMENSION, "mean"), Normalize()], device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )
    return folder


def texts(count: int, *, seed: int = 0) -> list[str]:
    """Distinct texts of 2 to 7 words."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(f"w{draw.randrange(5, VOCABULARY)}" for _ in range(draw.randrange(2, 8)))] = None
    return list(found)


def packed(rows: Sequence[Sequence[str]], *, length: int = 48) -> pa.Table:
    """Rows of the feed: each is a query, its positive, its negatives, as `actors.data.pairs` packs them."""
    numbers: dict[str, int] = {}
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for text in row:
            encoded = [2, *(int(word[1:]) for word in text.split()), 3]
            ids += encoded
            labels += [numbers.setdefault(text, len(numbers))] * len(encoded)
            positions += range(len(encoded))
        gap = length - len(ids)
        columns["input_ids"].append(ids + [0] * gap)
        columns["labels"].append(labels + [NO_LOSS] * gap)
        columns["position_ids"].append(positions + [0] * gap)
    made = {name: pa.array(values, pa.list_(pa.int32())) for name, values in columns.items()}
    sample_ids = [[f"pair-{number}"] for number in range(len(rows))]
    return pa.table(made | {"sample_ids": sample_ids, "row": pa.array(range(len(rows)), pa.int64())})
