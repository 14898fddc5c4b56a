"""Makes a plan that fits: `make_plan`, then the checks of memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

from simpletuner.annexes.fitting.fit import check_fit, choose
from simpletuner.annexes.fitting.no_gpu import check_gpu
from simpletuner.annexes.fitting.ways import check_ways
from simpletuner.budget.budget import PREVIEWS, Budget, estimate, make_budget, shortage
from simpletuner.budget.device import NCCL_BUFFERS, compute_capability, count_gpus, find_device
from simpletuner.budget.disk import check_disk, feature_costs, find_writings
from simpletuner.config.json_files import check_unset
from simpletuner.config.load import BY_SIZE, RunConfig, raise_if_fatal
from simpletuner.config.precision import check_capability, multiplied
from simpletuner.config.sources import Arguments
from simpletuner.distributed.world import launched
from simpletuner.errors import Problem
from simpletuner.models.cost import VaeLoad
from simpletuner.plan.build import Plan, make_plan
from simpletuner.plan.environment import existing

DECODING = "validation_decoding"
# torch's `upsample_nearest3d` on CUDA refused more (pytorch #144855), and since then counts them in 32 unsigned bits.
MOST_UPSAMPLED = 2**31
FEATURE_SHARE = 0.2  # of the free space, at most, for features of techniques


def ready_plan(arguments: Arguments, problems: list[Problem]) -> tuple[Plan, Budget]:
    """The plan and its budget; with `offload: auto` the plan has the chosen settings.

    Raises:
        ConfigError: with all problems at once, including a run that does not fit.
    """
    plan, budget = weigh_plan(arguments, problems)
    problems.extend(check_devices(plan.config.launch.local_processes))
    problems.extend(check_unset([*plan.config.publish, *plan.config.webhooks], fatal=True))
    raise_if_fatal(problems)
    return plan, budget


def check_devices(processes: int) -> Iterator[Problem]:
    """Each process needs a device of its own. A launcher may have shown each process only its own already."""
    devices = count_gpus()
    if 0 < devices < processes and launched(os.environ) is None:
        message = f"{processes} processes on this machine, which has {_count(devices)}; each needs one of its own."
        yield Problem("num_processes", message)


def _count(devices: int) -> str:
    return "1 GPU" if devices == 1 else f"{devices} GPUs"


def weigh_plan(arguments: Arguments, problems: list[Problem]) -> tuple[Plan, Budget]:
    """Like `ready_plan`, but a run that does not fit is only added to `problems`.

    Raises:
        ConfigError: other problems prevent a plan.
    """
    plan, budget = weigh(make_plan(arguments, problems), problems)
    slow = list(check_gpu(plan, budget))
    problems.extend(slow)
    return replace(plan, warnings=[*slow, *plan.warnings]), budget


def weigh(plan: Plan, problems: list[Problem]) -> tuple[Plan, Budget]:
    """The same for a plan that is there already."""
    device = find_device(plan.config.offload.plan_device_memory_gb, plan.output_dir)
    if plan.config.launch.num_processes > 1:
        device = replace(device, buffers=NCCL_BUFFERS)
    budget = with_strips(make_budget(plan, device))
    plan = replace(plan, config=budget.config)
    features = feature_costs(plan.spec, budget.listing).stored
    kinds = (kind for technique in plan.techniques for kind in technique.features)
    sparing = {key: value for kind in kinds for key, value in kind.spared_by.items()}
    if features and sparing and features > feature_room(plan):
        plan = replace(plan, config=plan.config.with_values(sparing, f"chosen by {', '.join(sparing)} auto"))
        budget = make_budget(plan, device)
    if plan.config.offload.offload == "auto":
        budget = choose(budget)
        chosen = replace(plan, config=budget.config)
        if budget.config.caching.vae_enable_tiling != plan.config.caching.vae_enable_tiling:
            # Tiled latents have separate cache entries, so the missing ones are listed again.
            budget = replace(make_budget(chosen, device), decisions=budget.decisions)
        plan = chosen
    found = [*check_decoding(budget), *check_fit(budget), *check_ways(budget)]
    found += [*check_disk(plan, find_writings(plan, budget)), *check_products_here(plan.config)]
    problems.extend(found)
    return replace(plan, warnings=[*plan.warnings, *(each for each in found if not each.fatal)]), budget


def with_strips(budget: Budget) -> Budget:
    """Decode previews in strips where `check_decoding` has doubts or they fit only so, unless the user chose how."""
    if budget.config.is_explicit(DECODING) or not budget.parts.spec.decodes_in_strips:
        return budget
    config = budget.config.with_values({DECODING: "strips"}, BY_SIZE)
    strips = estimate(config, budget.parts, budget.workload, budget.device, budget.listing)
    whole, lean = (
        any(shortage(each, budget.device) for each in found.phases if each.name == PREVIEWS)
        for found in (budget, strips)
    )
    only_so = whole and not lean and config.offload.offload != "auto"  # which has more to choose from
    return strips if only_so or any(check_decoding(budget)) else budget


def check_decoding(budget: Budget) -> Iterator[Problem]:
    """Whether previews are small enough for torch to decode them whole."""
    sizes = budget.workload.previews if budget.config.validation.validation_decoding == "whole" else ()
    loads = {each.label: VaeLoad(1, each.frames, each.width, each.height) for each in sizes}
    numbers = {label: budget.parts.cost.vae_upsampled(budget.parts.vae, load) for label, load in loads.items()}
    if large := [label for label, count in numbers.items() if count >= MOST_UPSAMPLED]:
        message = f"'whole': {', '.join(large)} upsamples 2**31 numbers or more, which kernels of torch get wrong;"
        yield Problem(DECODING, f"{message} strips and tiles do not.", fatal=False)


def check_products_here(config: RunConfig) -> Iterator[Problem]:
    """Whether this machine's GPU has the products that the settings ask for; of another machine's it is unknown."""
    if multiplied(config.precision) and config.offload.plan_device_memory_gb is None:
        yield from check_capability(config.precision, compute_capability())


def feature_room(plan: Plan) -> float:
    """Bytes that features may take on the disk with the latents."""
    return FEATURE_SHARE * shutil.disk_usage(existing(plan.datasets[0].latent_dir)).free
