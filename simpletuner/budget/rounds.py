"""How often previews, evaluations and saves happen in a run, and how long the rest of it takes. Free of torch."""

from __future__ import annotations

from simpletuner.budget.budget import Budget
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import evaluated
from simpletuner.reporting.events import CACHING, EVALUATION, PREVIEWS, SAVING, Rounds


def steps_per_epoch(plan: Plan) -> float:
    """Optimizer steps of an epoch, as a fraction."""
    return plan.length.batches_per_epoch / plan.config.schedule.gradient_accumulation_steps


def find_rounds(plan: Plan, budget: Budget) -> dict[str, Rounds]:
    """Previews, evaluations, saves and re-encoding of new crops, by kind, with their expected duration."""
    validation, evaluation, checkpoints = plan.config.validation, plan.config.evaluation, plan.config.checkpoints
    epoch = steps_per_epoch(plan)
    rounds = {SAVING: Rounds(checkpoints.checkpoint_step_interval, at_end=True)}
    if plan.prompts:
        rounds[PREVIEWS] = Rounds(validation.validation_step_interval, round_seconds(plan, budget), at_end=True)
    if evaluated(plan):
        epochs = evaluation.eval_epoch_interval
        rounds[EVALUATION] = Rounds(evaluation.eval_steps_interval or epoch * (epochs or 1.0))
    if any(dataset.changes_each_epoch for dataset in plan.trained):
        rounds[CACHING] = Rounds(epoch)
    return rounds


def remaining_steps(plan: Plan) -> int:
    """Steps left for a session that starts now."""
    return max(0, plan.length.total_steps - (plan.resume.step if plan.resume else 0))


def preview_rounds(plan: Plan) -> int:
    """Rounds of previews left for a session that starts now, including that of the untrained model."""
    if not plan.prompts:
        return 0
    validation, total = plan.config.validation, plan.length.total_steps
    rounds = Rounds(validation.validation_step_interval, at_end=True)
    untrained = plan.resume is None and not validation.disable_benchmark
    return rounds.after(total - remaining_steps(plan), total) + untrained


def round_seconds(plan: Plan, budget: Budget) -> float:
    """Seconds of a round of previews, which processes divide among them unless they share the weights (FSDP2)."""
    launch = plan.config.launch
    previews = len(plan.prompts) * len(plan.sizes) * plan.config.validation.num_validation_images
    alone = previews if launch.is_sharded else -(-previews // launch.num_processes)
    return len(plan.prompts) * budget.preview_seconds * alone / max(previews, 1)


def remaining_seconds(plan: Plan, budget: Budget) -> tuple[float, float]:
    """Seconds of training and of previews left for a session that starts now."""
    return remaining_steps(plan) * budget.step_seconds, preview_rounds(plan) * round_seconds(plan, budget)
