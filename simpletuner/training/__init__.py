"""LoRA and full training: the loop and its step, optimizers, the moving average, checkpoints,
sharding.
"""
