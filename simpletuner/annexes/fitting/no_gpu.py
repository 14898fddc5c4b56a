"""Training a published model on a CPU is rarely intended: its duration, and why no GPU is used. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner.annexes.fitting.show import MISSING_GPU, duration
from simpletuner.budget import device as devices
from simpletuner.budget.budget import Budget, estimate
from simpletuner.budget.device import find_device, this_cpu, with_measured
from simpletuner.budget.rounds import remaining_seconds
from simpletuner.errors import Problem
from simpletuner.plan.build import Plan

FULL_SIZE = 1e9  # parameters: published transformers have 2e9 and more, those of demos and tests far fewer
DAY = 86400.0


def check_gpu(plan: Plan, budget: Budget) -> Iterator[Problem]:
    """A warning about a published model without a GPU; `train` refuses it if consent is needed."""
    device, seconds = budget.device, sum(remaining_seconds(plan, budget))
    if device.is_gpu or not seconds or budget.parts.transformer.parameters < FULL_SIZE:
        return
    why, advice = "no GPU can be used here", ""
    if device.idle:
        why, advice = f"torch cannot use the {device.idle} of this machine", " docs/INSTALL.md says what to do."
        if not devices.torch_uses_gpus():
            why, advice = (
                f"{why}, since its CPU build is installed",
                " Run pip uninstall torch, then pip install torch.",
            )
    if needs_consent(plan, budget):
        advice += " To train on the CPU, give --yes or set i_know_what_i_am_doing."
    time = f"about {duration(seconds)} on the CPU, {duration(budget.step_seconds)} a step"
    yield Problem(MISSING_GPU, f"{why}: {time}.{advice}", fatal=False)


def needs_consent(plan: Plan, budget: Budget) -> bool:
    """Whether a run takes more than a day, and its settings do not say that this is meant."""
    return sum(remaining_seconds(plan, budget)) > DAY and not plan.config.run.i_know_what_i_am_doing


def on_cpu(plan: Plan, budget: Budget) -> Budget:
    """The budget of the same run on this machine's processor, for when torch cannot use the planned GPU."""
    device = find_device(output_dir=plan.output_dir)
    if device.is_gpu:
        device = with_measured(this_cpu(idle=device.name), plan.output_dir)
    return estimate(budget.config, budget.parts, budget.workload, device, budget.listing)
