"""Compares the ways to train on several devices: DDP, DDP with streamed blocks, FSDP2. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.budget.budget import Budget, estimate, fits, gigabytes
from simpletuner.config.load import RunConfig
from simpletuner.config.schema import CHOSEN
from simpletuner.errors import Problem
from simpletuner.plan.checks import exclusions
from simpletuner.plan.launch import check_launch, check_offload

STREAMED = {"enable_group_offload": True, "group_offload_use_stream": True}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "DDP": {"fsdp_enable": False, "enable_group_offload": False},
    "DDP, streamed": {"fsdp_enable": False, **STREAMED},
    "FSDP2": {"fsdp_enable": True, "enable_group_offload": False},
}


@dataclass(frozen=True)
class Way:
    """A way to train on several devices.

    Attributes:
        budget: its estimate; None if the settings exclude it.
        reason: why they do.
    """

    name: str
    budget: Budget | None
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.budget is not None and fits(self.budget.phases, self.budget.device)

    @property
    def peaks(self) -> tuple[float, float]:
        """Most bytes of any phase on a device, and on the host of a machine."""
        if self.budget is None:
            return 0.0, 0.0
        phases, device = self.budget.phases, self.budget.device
        return max(each.device for each in phases), max(each.on_host(device) for each in phases)


def way_of(config: RunConfig) -> str:
    """The name of the way that the settings choose."""
    if config.launch.is_sharded:
        return "FSDP2"
    return "DDP, streamed" if config.offload.enable_group_offload else "DDP"


def find_ways(budget: Budget) -> list[Way]:
    """All ways, with the other settings of this run; none for a run of one process."""
    if budget.config.launch.num_processes == 1 or not budget.buckets:
        return []
    return [_try(budget, name) for name in WAYS if budget.device.is_gpu or not WAYS[name]["enable_group_offload"]]


def _try(budget: Budget, name: str) -> Way:
    if name == way_of(budget.config):
        return Way(name, budget)
    config = budget.config.with_values(WAYS[name], CHOSEN)
    problems = (*exclusions(config), *check_launch(config), *check_offload(config))
    excluded = [problem for problem in problems if problem.fatal]
    if excluded:
        return Way(name, None, f"{excluded[0].where} {excluded[0].message}")
    return Way(name, estimate(config, budget.parts, budget.workload, budget.device, budget.listing))


def check_ways(budget: Budget) -> Iterator[Problem]:
    """A warning of FSDP2 for a LoRA that DDP has room for."""
    if not budget.config.launch.is_sharded or budget.config.model.model_type != "lora":
        return
    for way in find_ways(budget):
        if way.fits and way.budget is not None and way.budget is not budget:
            message = (
                f"{way.name} fits too, and each process sends {gigabytes(way.budget.sent.total)} a step instead of "
                f"{gigabytes(budget.sent.total)}: FSDP2 gathers the whole model again and again to train a LoRA."
            )
            yield Problem("fsdp_enable", message, fatal=False)
            return
