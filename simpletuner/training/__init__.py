"""LoRA and full training: loop, step, optimizers, moving average, checkpoints, sharding."""
