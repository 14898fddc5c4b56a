"""Makes a plan that fits: `make_plan`, then checks of memory, disk and devices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from simpletuner.annexes.figures import duration
from simpletuner.annexes.fitting.fit import STATE_ON_HOST, Change, check_fit, check_ways, choose
from simpletuner.annexes.fitting.show import MISSING_GPU
from simpletuner.budget import device as devices
from simpletuner.budget.budget import (
    Budget,
    check_decoding,
    free_batch,
    make_budget,
    remaining_seconds,
    steps_per_epoch,
    with_faster_previews,
    with_strips,
)
from simpletuner.budget.device import gigabytes
from simpletuner.budget.disk import check_disk, feature_costs, find_writings
from simpletuner.budget.outcomes import find_outcome
from simpletuner.config.precision import check_capability, multiplied
from simpletuner.config.sources import Arguments
from simpletuner.config.values import check_unset
from simpletuner.distributed.world import launched
from simpletuner.errors import ConfigError, Problem, Problems, Reading, counted, result_of, warning
from simpletuner.plan.build import Plan, make_plan
from simpletuner.plan.environment import existing, why_not_writable

FEATURE_SHARE = 0.2  # of the free disk space, at most, for features of techniques
FULL_SIZE = 1e9  # parameters; published transformers have at least 2e9, models of demos and tests far fewer
DAY = 86400.0
# Settings that need frozen weights, with their values in full fine-tunes.
FOR_LORA = {"enable_group_offload": False, "base_model_precision": "no_change"}
AUTO = {"offload": "auto"}


def ready_plan(arguments: Arguments) -> tuple[Plan, Budget]:
    """The plan and its budget; with `offload: auto` the plan has the chosen settings.

    Raises:
        ConfigError: lists all problems, including a run that does not fit.
    """
    problems, (plan, budget) = arguments.problems, weigh_plan(arguments)
    problems.extend(check_devices(plan.config.launch.local_processes))
    problems.extend(check_unset([*plan.config.publish, *plan.config.webhooks], fatal=True))
    problems.raise_if_fatal()
    return plan, budget


def check_devices(processes: int) -> Iterator[Problem]:
    """Check that there is a device for every process. Skipped under a launcher, which may expose only one."""
    count = devices.count_gpus()
    # 0 may mean that the driver does not respond, which torch reports.
    if 0 < count < processes and launched(os.environ) is None:
        gpus = counted(count, "GPU")
        message = f"{processes} processes need as many GPUs, but this machine has {gpus}."
        yield Problem("num_processes", message)


def weigh_plan(arguments: Arguments) -> tuple[Plan, Budget]:
    """Like `ready_plan`, but adds a run that does not fit to the problems of the arguments instead of raising.

    Raises:
        ConfigError: other problems prevent a plan.
    """
    try:
        plan, budget = arguments.problems.take(weigh(make_plan(arguments)))
    except ConfigError as error:
        raise ConfigError([_with_equivalent(each, arguments) for each in error.problems]) from None
    slow = list(check_gpu(plan, budget))
    arguments.problems.extend(slow)
    return replace(plan, warnings=[*slow, *plan.warnings]), budget


def _with_equivalent(problem: Problem, arguments: Arguments) -> Problem:
    """The problem; if a full fine-tune has a memory setting for LoRAs only, with settings that would fit instead."""
    if not problem.fatal or problem.where not in FOR_LORA:
        return problem
    ways: dict[str, Change] = {}
    for values in (AUTO, STATE_ON_HOST):
        change = Change({problem.where: FOR_LORA[problem.where], **values})
        settings = [*arguments.settings, *FOR_LORA.items(), *values.items()]
        with suppress(ConfigError):  # such as missing datasets, which the error already names
            plan, budget = result_of(weigh(make_plan(replace(arguments, settings=settings, problems=Problems()))))
            if plan.config.model.model_type == "full" and budget.device.is_gpu and budget.fits:
                ways.setdefault("{} on the device and {} on the host".format(*map(gigabytes, budget.peaks)), change)
    advice = "; or ".join(f"{change}, which takes {memory}" for memory, change in ways.items())
    if not ways:
        return problem
    remedy = next(iter(ways.values())).values
    return replace(problem, message=f"{problem.message} This would fit: {advice}.", remedy=remedy)


def weigh(plan: Plan) -> Reading[tuple[Plan, Budget]]:
    """The plan and its budget, with the choices of `offload: auto` and the other automatic settings."""
    offload = plan.config.offload
    device = devices.find_device(offload.plan_device_memory_gb, plan.output_dir, offload.plan_device)
    if plan.config.launch.num_processes > 1:
        device = devices.one_of_several(device, is_planned=offload.plans_elsewhere)
    budget = with_strips(make_budget(plan, device))
    plan = replace(plan, config=budget.config)
    # Before `offload: auto`, since its choice depends on whether features are cached.
    if sparing := _sparing(plan, budget):
        plan = replace(plan, config=plan.config.with_values(sparing, f"chosen by {', '.join(sparing)} auto"))
        budget = make_budget(plan, device)
    if plan.config.offload.offload == "auto":
        plan, budget = _chosen(plan, budget)
    budget = with_faster_previews(budget)
    plan = replace(plan, config=budget.config)
    judged = [*check_decoding(budget), *check_fit(budget), *check_ways(budget)]
    writings = [*find_writings(plan, budget)]
    judged += filter(None, (why_not_writable(each.what, each.folder) for each in writings))
    judged += check_disk(plan, writings)
    # Capabilities of another machine's GPU are unknown.
    if multiplied(plan.config.precision) and not offload.plans_elsewhere:
        judged += check_capability(plan.config.precision, devices.compute_capability())
    yield from judged
    return replace(plan, warnings=[*plan.warnings, *(problem for problem in judged if not problem.fatal)]), budget


def _sparing(plan: Plan, budget: Budget) -> dict[str, object]:
    """Settings that avoid storing features if the disk is too small for them."""
    kinds = (kind for technique in plan.techniques for kind in technique.features)
    sparing = {key: value for kind in kinds for key, value in kind.spared_by.items()}
    features = feature_costs(plan.spec, budget.listing).stored
    if not (features and sparing):
        return {}
    # The disk that holds the latents.
    return sparing if features > FEATURE_SHARE * shutil.disk_usage(existing(plan.datasets[0].latent_dir)).free else {}


def _chosen(plan: Plan, budget: Budget) -> tuple[Plan, Budget]:
    """The plan and its budget with the choice of `offload: auto`."""
    budget = choose(budget)
    if batch := free_batch(budget, steps_per_epoch(plan)):
        # Only proposed, since it changes results.
        advice = f"with train_batch_size {batch} a step would take as long: the GPU waits for the host"
        budget = replace(budget, decisions=[*budget.decisions, advice])
    chosen = replace(plan, config=budget.config)
    if budget.config.caching.vae_enable_tiling != plan.config.caching.vae_enable_tiling:
        # Tiled latents have separate cache entries, so the missing ones are listed again.
        budget = replace(make_budget(chosen, budget.device), decisions=budget.decisions)
    return chosen, budget


def check_gpu(plan: Plan, budget: Budget, *, yes: bool = False) -> Iterator[Problem]:
    """Warn about training a published model without a GPU; `train` refuses to without consent, if it takes days.

    Args:
        yes: consent was given on the command line.
    """
    device, seconds = budget.device, sum(remaining_seconds(plan, budget))
    if device.is_gpu or not seconds or budget.parts.transformer.parameters < FULL_SIZE:
        return
    why, advice = "no GPU can be used here", ""
    if device.idle:
        why, advice = f"torch cannot use the {device.idle} of this machine", " See docs/INSTALL.md."
        if not devices.torch_uses_gpus():
            why += ", since its CPU build is installed"
            advice = " Run pip uninstall torch, then pip install torch."
    if needs_consent(plan, budget) and not yes:
        advice += " To train on the CPU, run train --yes or set i_know_what_i_am_doing."
    time = f"about {duration(seconds)} on the CPU, {duration(budget.step_seconds)} a step"
    yield warning(MISSING_GPU, f"{why}: {time}.{advice}")


def needs_consent(plan: Plan, budget: Budget) -> bool:
    """Whether a run takes more than a day without `i_know_what_i_am_doing`."""
    return sum(remaining_seconds(plan, budget)) > DAY and not plan.config.run.i_know_what_i_am_doing


def on_cpu(plan: Plan, budget: Budget) -> Budget:
    """The budget of the same run on this machine's CPU, for when torch cannot use the planned GPU."""
    device = devices.find_device(output_dir=plan.output_dir)
    if device.is_gpu:
        device = devices.with_measured(devices.this_cpu(idle=device.name), plan.output_dir)
    return replace(budget, device=device, outcome=find_outcome(plan, budget.workload, device))
