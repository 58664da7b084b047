"""Turns a quantised GGUF file into a Hugging Face folder: bfloat16 safetensors, config, tokenizer, template.

Run as a program, by path, in a process of its own: it takes some 1.5 GiB for 135M parameters and draws
progress bars on stderr, and the caller shall have neither. It imports nothing of Flywheel's.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def dequantise(packed: Path, folder: Path) -> None:
    """Write the model in the GGUF file `packed` into `folder`. About 15 s for 135M parameters."""
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    loaded = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    # transformers 5.19 refuses to save what it loaded from GGUF ("not serializable"), so the weights move
    # into a plain model. Delete when `loaded.save_pretrained` works after de-quantising.
    config = loaded.config
    del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)  # the trainer's own title of the run
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    for machine_specific in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.init_kwargs.pop(machine_specific, None)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():  # safetensors writes its files for the owner only
        path.chmod(0o644)


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
