"""Warns of lengths and intervals that are allowed, but whose consequence is rarely meant."""

from __future__ import annotations

from simpletuner.budget.budget import Budget, preview_rounds, remaining_seconds, remaining_steps
from simpletuner.errors import Problems, counted
from simpletuner.planning.length import length_key
from simpletuner.planning.plans import Plan
from simpletuner.reporting.wording import duration_text

MOST_PASSES = 2000  # over the data; small datasets are learned in some hundred
SHORT_INTERVAL = 5  # steps between checkpoints
MANY_SAVES = 50
MANY_ROUNDS = 10
LARGE_SHARE = 0.5  # of a run's time, for previews


def warn_of_waste(budget: Budget[Plan], report: Problems) -> None:
    """Warn of a run that repeats its data, saves or renders previews far too often."""
    plan = budget.plan
    if plan.is_finished:
        return
    _check_passes(plan, report)
    _check_saves(plan, report)
    _check_previews(budget, report)


def _check_passes(plan: Plan, report: Problems) -> None:
    """Warn if every file is trained thousands of times."""
    passes = plan.length.epochs
    if passes > MOST_PASSES:
        steps = counted(plan.length.total_steps, "step")
        report.warn(
            length_key(plan),
            f"{steps} are {passes:,} passes over the data. A LoRA learns a small dataset in some "
            "hundred passes, and only its flaws in many more.",
        )


def _check_saves(plan: Plan, report: Problems) -> None:
    """Warn if a checkpoint is saved every few steps."""
    config = plan.config
    interval = config.flat["checkpoint_step_interval"]
    if not interval or interval > SHORT_INTERVAL:
        return
    saves = remaining_steps(plan) // interval
    if saves < MANY_SAVES:
        return
    limit = config.flat["checkpoints_total_limit"]
    kept = f"all but the last {limit} are deleted again" if limit else "all of them are kept"
    report.warn(
        "checkpoint_step_interval",
        f"{interval} saves {saves:,} checkpoints, each of which stops training for a moment; "
        f"{kept}.",
    )


def _check_previews(budget: Budget[Plan], report: Problems) -> None:
    """Warn if the user's interval makes previews take most of the run."""
    plan = budget.plan
    key = "validation_step_interval"
    rounds = preview_rounds(plan)
    training, previews = remaining_seconds(budget)
    if not plan.config.is_explicit(key) or rounds < MANY_ROUNDS:
        return
    share = previews / (training + previews)
    if share > LARGE_SHARE:
        report.warn(
            key,
            f"{plan.config.flat[key]} renders {rounds:,} rounds of previews, which take "
            f"{duration_text(previews)}, {share:.0%} of the run. If it is unset, they take about a "
            "tenth.",
        )
