"""Makes a plan that fits: `plan_training`, then checks of memory, disk and devices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from simpletuner.annexes.fitting.fit import (
    STATE_ON_HOST,
    Change,
    check_fit,
    check_sharded_lora,
    choose,
)
from simpletuner.annexes.fitting.show import MISSING_GPU
from simpletuner.annexes.fitting.wasted_time import warn_of_waste
from simpletuner.atomic import nearest_existing, why_not_writable
from simpletuner.budget import device as devices
from simpletuner.budget import drivers
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
from simpletuner.budget.device import Device, gigabytes
from simpletuner.budget.disk import check_disk, feature_costs, find_writings
from simpletuner.budget.drivers import TITLES, Backend, Gpu
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.json_reader import check_unset
from simpletuner.config.precision import check_capability, multiplied
from simpletuner.config.sources import Arguments
from simpletuner.distributed.world import world_from_launcher
from simpletuner.errors import ConfigError, Kind, Problem, Problems, counted
from simpletuner.models.source import ModelSource
from simpletuner.planning.build import plan_training
from simpletuner.planning.plans import AnyPlan, Plan, SamplePlan
from simpletuner.reporting.wording import duration_text

FEATURE_SHARE = 0.2  # of the free disk space, at most, for features of techniques
# Parameters of a model that needs a GPU. Published transformers have at least 2e9, models of demos
# and tests far fewer.
FULL_SIZE = 1e9
DAY_SECONDS = 86400.0
# Settings that need frozen weights, with their values in full fine-tunes.
FOR_LORA = {"enable_group_offload": False, "base_model_precision": "no_change"}
AUTO = {"offload": "auto"}
# How the build of torch for a GPU is installed.
REINSTALL: Mapping[Backend, str] = {
    "cuda": " Run pip uninstall torch, then pip install torch.",
    "rocm": " Install torch's build for ROCm, see docs/INSTALL.md.",
    "xpu": " Install torch's build for XPU, see docs/INSTALL.md.",
    "mps": " Run pip uninstall torch, then pip install torch.",
}
CONSENT = "To train on the CPU, run train --yes or set i_know_what_i_am_doing."


def plan_that_fits(arguments: Arguments) -> Budget:
    """The plan with its estimate; with `offload: auto` the plan has the chosen settings.

    Raises:
        ConfigError: lists all problems, including a run that does not fit.
    """
    problems = arguments.problems
    budget = weigh_plan(arguments)
    check_devices(budget.config.launch.local_processes, problems)
    check_unset([*budget.config.publish, *budget.config.webhooks], problems, fatal=True)
    _check_downloads(budget.plan.source, problems)
    problems.raise_if_fatal()
    return budget


def _check_downloads(source: ModelSource, report: Problems) -> None:
    """Report models that are not on this machine, and that the hub lacks or cannot be asked for."""
    # Several parts may be at one location.
    absent = {part.location: part for part in source.parts.values() if part.local_folder() is None}
    for location, part in absent.items():
        absence = part.absence()
        if absence:
            report.error(part.key, f"{location!r} {absence}")


def check_devices(processes: int, report: Problems) -> None:
    """Check that there is a device for every process."""
    if world_from_launcher(os.environ) is not None:
        return  # a launcher may expose only one
    count = drivers.count_gpus()
    # 0 may mean that the driver does not respond, which torch reports.
    if 0 < count < processes:
        gpus = counted(count, "GPU")
        message = f"{processes} processes need as many GPUs, but this machine has {gpus}."
        report.error("num_processes", message)


def weigh_plan(arguments: Arguments) -> Budget:
    """Like `plan_that_fits`, but a run that does not fit only adds problems to the arguments.

    Raises:
        ConfigError: other problems prevent a plan.
    """
    try:
        budget = weigh(plan_training(arguments), arguments.problems, arguments.device)
    except ConfigError as error:
        problems = [_with_equivalent(problem, arguments) for problem in error.problems]
        raise ConfigError(problems) from None
    slow = Problems()
    check_gpu(budget, slow)
    wasteful = Problems()
    warn_of_waste(budget, wasteful)
    arguments.problems.extend([*slow, *wasteful])
    return with_warnings(budget, [*slow, *budget.plan.warnings, *wasteful])


def with_warnings(budget: Budget[AnyPlan], warnings: list[Problem]) -> Budget[AnyPlan]:
    """A budget whose plan has these warnings."""
    return replace(budget, plan=replace(budget.plan, warnings=warnings))


def _with_equivalent(problem: Problem, arguments: Arguments) -> Problem:
    """A problem; that of a LoRA's memory setting in a full fine-tune, with settings that fit."""
    if not problem.fatal or problem.where not in FOR_LORA:
        return problem
    ways: dict[str, Change] = {}
    for values in (AUTO, STATE_ON_HOST):
        settings = [*arguments.settings, *FOR_LORA.items(), *values.items()]
        try:
            plan = plan_training(replace(arguments, settings=settings, problems=Problems()))
            budget = weigh(plan, Problems(), arguments.device)
        except ConfigError:
            continue  # such as datasets that do not exist, which the error already names
        if budget.config.model.model_type == "full" and budget.device.is_gpu and budget.fits:
            on_device, on_host = budget.peaks
            memory = f"{gigabytes(on_device)} on the device and {gigabytes(on_host)} on the host"
            # The first of two that take the same memory.
            ways.setdefault(memory, Change({problem.where: FOR_LORA[problem.where], **values}))
    if not ways:
        return problem
    advice = "; or ".join(f"{change}, which takes {memory}" for memory, change in ways.items())
    first = next(iter(ways.values()))
    message = f"{problem.message} This would fit: {advice}."
    return replace(problem, message=message, remedy=first.values)


def weigh(plan: AnyPlan, report: Problems, asked: AskedDevice = HERE) -> Budget[AnyPlan]:
    """A plan with its estimate, and with what the automatic settings choose.

    Args:
        asked: the device that the plan is asked about.
    """
    device = devices.find_device(asked.device_memory, plan.output_dir, asked.device)
    if plan.config.launch.num_processes > 1:
        device = devices.one_of_several(device)
    budget = with_strips(make_budget(plan, device))
    # Before `offload: auto`, whose choice depends on whether features are cached.
    sparing = _settings_that_spare_the_disk(budget)
    if sparing:
        origin = f"chosen by {', '.join(sparing)} auto"
        budget = make_budget(budget.under(sparing, origin).plan, device)
    if plan.config.offload.offload == "auto":
        budget = _with_offload_chosen(budget)
    budget = with_faster_previews(budget)
    of_budget = Problems()
    check_vendor(device, of_budget)
    check_decoding(budget, of_budget)
    check_fit(budget, of_budget)
    check_sharded_lora(budget, of_budget)
    writings = list(find_writings(budget))
    for writing in writings:
        reason = why_not_writable(writing.folder)
        if reason:
            of_budget.error(writing.what, reason)
    check_disk(budget.plan, writings, of_budget)
    # The capability of another machine's GPU is unknown.
    if multiplied(budget.config.precision) and not asked.is_elsewhere:
        check_capability(budget.config.precision, drivers.compute_capability(), of_budget)
    report.extend(of_budget)
    warnings = [problem for problem in of_budget if not problem.fatal]
    return with_warnings(budget, [*budget.plan.warnings, *warnings])


def _settings_that_spare_the_disk(budget: Budget[SamplePlan]) -> dict[str, object]:
    """Settings that keep features off a disk that is too small for them."""
    sparing: dict[str, object] = {}
    for technique in budget.plan.techniques:
        for kind in technique.features:
            sparing.update(kind.spared_by)
    features = feature_costs(budget.parts.spec, budget.listing).stored
    if not features or not sparing:
        return {}
    latents = nearest_existing(budget.plan.datasets[0].latent_dir)
    fits = features <= FEATURE_SHARE * shutil.disk_usage(latents).free
    return {} if fits else sparing


def _with_offload_chosen(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """The budget with what `offload: auto` chooses."""
    chosen = cast("Budget[AnyPlan]", choose(budget))  # of the same plan, with other settings
    batch = None
    if isinstance(chosen.plan, Plan):
        batch = free_batch(chosen, steps_per_epoch(chosen.plan))
    if batch:
        advice = (
            f"with train_batch_size {batch} a step would take as long: the GPU waits for the host"
        )
        chosen = replace(
            chosen,
            decisions=[*chosen.decisions, advice],
            proposals={advice: {"train_batch_size": batch}},
        )
    if chosen.config.caching.vae_enable_tiling != budget.config.caching.vae_enable_tiling:
        # Tiled latents have separate cache entries, so the missing ones are listed again.
        chosen = replace(
            make_budget(chosen.plan, chosen.device),
            decisions=chosen.decisions,
            proposals=chosen.proposals,
        )
    return chosen


def check_gpu(budget: Budget, report: Problems, *, yes: bool = False) -> None:
    """Warn about a published model without a GPU.

    `train` refuses such a run if consent is needed and not given.

    Args:
        yes: consent was given on the command line.
    """
    device = budget.device
    seconds = sum(remaining_seconds(budget))
    if device.is_gpu or not seconds or budget.parts.transformer.parameters < FULL_SIZE:
        return
    reason = "no GPU was found"
    advice = ""
    if device.idle:
        reason = f"torch cannot use the {device.idle} of this machine"
        advice = " See docs/INSTALL.md."
        built_for = drivers.torch_backend()
        if not devices.torch_uses_gpus():
            reason += ", since its CPU build is installed"
            advice = REINSTALL[device.backend]
        elif built_for and built_for != device.backend:
            reason += f", since its {TITLES[built_for]} build is installed"
            advice = REINSTALL[device.backend]
    is_refused = needs_consent(budget) and not yes
    if is_refused:
        advice += f" {CONSENT}"
    time = f"about {duration_text(seconds)}, {duration_text(budget.step_seconds)} a step"
    kind: Kind | None = "consent" if is_refused else None
    report.warn(MISSING_GPU, f"{reason}. On the CPU this takes {time}.{advice}", kind=kind)


# What is known of training on GPUs that are not NVIDIA's; docs/INSTALL.md has a table.
LITTLE_TRIED: Mapping[Backend, str] = {
    "rocm": (
        "AMD's GPUs are expected to work, but nobody has tried; int8 and fp8 products are refused"
    ),
    "xpu": (
        "Intel's GPUs are expected to work, but nobody has tried; blocks are neither compiled nor "
        "streamed"
    ),
    "mps": (
        "Apple's GPUs are expected to work, but nobody has tried; blocks are neither compiled nor "
        "streamed, and previews in bf16 may differ from those of other machines"
    ),
}


def check_vendor(device: Device, report: Problems) -> None:
    """Warn about a GPU on which the program was not tried."""
    if device.is_gpu and device.backend in LITTLE_TRIED:
        experience = LITTLE_TRIED[device.backend]
        title = TITLES[device.backend]
        report.warn("device", f"{device.name} ({title}): {experience}. See docs/INSTALL.md.")


def needs_consent(budget: Budget) -> bool:
    """Whether a run takes more than a day, and its settings do not allow that."""
    if budget.config.run.i_know_what_i_am_doing:
        return False
    return sum(remaining_seconds(budget)) > DAY_SECONDS


def on_cpu(budget: Budget) -> Budget:
    """The budget of the same run on this machine's CPU, for when torch cannot use the GPU."""
    plan = budget.plan
    device = devices.find_device(output_dir=plan.output_dir)
    if device.is_gpu:
        gpu = Gpu(device.name, device.memory or 0.0, backend=device.backend)
        device = devices.with_measured(devices.this_cpu(gpu), plan.output_dir)
    return replace(budget, device=device)
