"""The learning rate of every step, a function of the step alone."""

from __future__ import annotations

import math

from simpletuner.config.optimizers import OPTIMIZERS
from simpletuner.config.schema import OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig, base_lr: float, total_steps: int) -> float:
    """The learning rate of one optimizer step.

    A warm-up of w steps is linear: its first step has base_lr / w (no step is wasted at 0), step w
    has base_lr. From there, the scheduler runs over the remaining steps and reaches its end in the
    last step. Without a warm-up, the first step has the full rate. A warm-up at least as long as
    the run leaves no room for the scheduler.

    Args:
        step: number of earlier optimizer steps. Steps past the end keep the last rate.
        base_lr: the peak rate.
        total_steps: number of steps of the run.
    """
    warmup = config.lr_warmup_steps
    number = step + 1
    if number < warmup:
        return base_lr * number / warmup
    peak = max(warmup, 1)  # number of the step with the full rate
    remaining = total_steps - peak
    progress = 0.0
    if remaining > 0:
        progress = min((number - peak) / remaining, 1.0)
    return config.lr_end + (base_lr - config.lr_end) * decay_share(progress, config)


def decay_share(progress: float, config: OptimizerConfig) -> float:
    """The scheduler's rate as a share of the way from lr_end (0) to the peak (1).

    Args:
        progress: 0 at the peak, 1 in the last step.
    """
    if config.optimizer is not None and OPTIMIZERS[config.optimizer].schedule_free:
        return 1.0
    match config.lr_scheduler:
        case "linear":
            return 1 - progress
        case "cosine" | "cosine_with_warmup":
            return _half_cosine(progress)
        case "cosine_with_restarts":
            if progress >= 1:  # the bottom of the last cycle, not the peak of the next
                return 0.0
            return _half_cosine(config.lr_num_cycles * progress % 1)
        case "polynomial":
            return float((1 - progress) ** config.lr_power)
        case "sine":
            return _half_cosine(2 * config.lr_num_cycles * progress)
        case "constant" | "constant_with_warmup":
            return 1.0


def _half_cosine(progress: float) -> float:
    """1 at 0, 0 at 1, and back to 1 at 2."""
    return (1 + math.cos(math.pi * progress)) / 2
