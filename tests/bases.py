"""A base model that costs little to make and to run, and is sure of what it says."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.models import TOKENIZER_FILES


def write_base(folder: Path, like: Path, *, seed: int) -> Path:
    """A tiny Llama that talks as `like` is talked to; equal seeds give equal weights. Greedy tokens lead by nats."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=49152,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        model.lm_head.weight *= 60
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (like / name).is_file():
            shutil.copyfile(like / name, folder / name)
    return folder
