"""The learning rate of every step, as a pure function: nothing to save, nothing to resume. No torch here."""

from __future__ import annotations

import math

from simpletuner.config.optimizers import is_schedule_free
from simpletuner.config.schema import OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig, base_lr: float, total_steps: int) -> float:
    """The rate of one optimizer step.

    The ramp of w warm-up steps is a straight line through 0 before the first step and `base_lr` in step w, so that
    step 1 of w trains with base_lr / w and no step is wasted at 0. From there the scheduler runs over the remaining
    steps and arrives in the last one. Without a warm-up the first step has the full rate. When the warm-up is as
    long as the run or longer, the ramp is all there is.

    Args:
        step: 0 for the first step, that is, the global step before the update. Steps past the end keep the end's rate.
        base_lr: the peak.
        total_steps: of the run.
    """
    warmup = config.lr_warmup_steps
    number = step + 1
    if number < warmup:
        return base_lr * number / warmup
    peak = max(warmup, 1)  # the step that has the full rate
    remaining = total_steps - peak
    progress = min((number - peak) / remaining, 1.0) if remaining > 0 else 0.0
    return config.lr_end + (base_lr - config.lr_end) * decay_share(progress, config)


def decay_share(progress: float, config: OptimizerConfig) -> float:
    """Where the rate is between lr_end (0) and the peak (1), after that share of the steps behind the warm-up.

    Args:
        progress: 0 at the peak, 1 in the last step.
    """
    if is_schedule_free(config.optimizer):
        return 1.0
    match config.lr_scheduler:
        case "linear":
            return 1 - progress
        case "cosine" | "cosine_with_warmup":
            return _half_cosine(progress)
        case "cosine_with_restarts":
            # Each cycle starts at the peak; the run ends at the bottom of the last one.
            return 0.0 if progress >= 1 else _half_cosine(config.lr_num_cycles * progress % 1)
        case "polynomial":
            return float((1 - progress) ** config.lr_power)
        case "sine":
            return _half_cosine(2 * config.lr_num_cycles * progress)
        case "constant" | "constant_with_warmup":
            return 1.0


def scaled_learning_rate(config: OptimizerConfig, base_lr: float, samples_per_step: int) -> float:
    """The peak after `lr_scale` (in proportion to the samples) or `lr_scale_sqrt` (to their square root).

    Args:
        samples_per_step: processes x accumulation x batch size.
    """
    if config.lr_scale:
        return base_lr * samples_per_step
    return base_lr * math.sqrt(samples_per_step) if config.lr_scale_sqrt else base_lr


def _half_cosine(progress: float) -> float:
    """1 at 0, 0 at 1, and back to 1 at 2."""
    return (1 + math.cos(math.pi * progress)) / 2
