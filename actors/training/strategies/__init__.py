"""The engines: `native` (DDP, FSDP2, HSDP with tensor, context and expert axes), `pipeline`, `zero` (DeepSpeed)."""
