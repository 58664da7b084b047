"""LoRA training on Ray Train: `controller` is the driver's side, `loop` the workers'."""
