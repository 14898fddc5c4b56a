"""Executes a checked plan with its companions; imports torch, so only after all other checks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from simpletuner.annexes.fitting.ready import check_gpu, on_cpu
from simpletuner.annexes.fitting.show import publish_warnings
from simpletuner.annexes.outcome import Comparison
from simpletuner.annexes.publishing.uploads import Hub, open_uploads
from simpletuner.annexes.replay.autopsy import Autopsy
from simpletuner.annexes.report.report import RunReport
from simpletuner.annexes.trackers import Trackers
from simpletuner.budget.budget import Budget
from simpletuner.cli.consent import with_consent
from simpletuner.config.trackers import PACKAGES, tracker_names
from simpletuner.distributed.world import World
from simpletuner.errors import Problems
from simpletuner.planning.plans import Plan
from simpletuner.reporting.events import EventStream
from simpletuner.run.companions import Companion, Ledger
from simpletuner.run.train import announced_end, finish_run, run_plan


def execute(
    budget: Budget, hub: Hub | None, events: EventStream, world: World, *, yes: bool
) -> None:
    """Train to the end of the plan, on the CPU if torch cannot use the planned GPU.

    Args:
        hub: the hub to upload to, in the main process.
        yes: consent to days on a CPU was given on the command line.
    """
    plan = budget.plan
    # nvidia-smi lists a GPU that this torch cannot use: a CPU wheel, or one for a newer driver.
    if budget.device.is_gpu and not torch.accelerator.is_available():
        budget = on_cpu(budget)
        slow = Problems()
        check_gpu(budget, slow)
        publish_warnings(events, slow)
        with announced_end(plan, events, world):
            with_consent(budget, yes=yes)
    run_plan(budget, events, open_companions(plan, hub, events, world), world)


def finish(plan: Plan, ledger: Ledger, hub: Hub | None, events: EventStream, world: World) -> None:
    """Complete what an earlier session has not finished after its last step."""
    events.notify(
        f"Training is done, to step {ledger.step}. An earlier session has not finished: {ledger}."
    )
    finish_run(plan, ledger, events, open_companions(plan, hub, events, world))


def open_companions(
    plan: Plan, hub: Hub | None, events: EventStream, world: World
) -> list[Companion]:
    """The companions of a run in this process, in the order in which they are called."""
    autopsy = Autopsy()
    events.subscribe("The report of failures", autopsy)  # early, because it records the phase
    companions: list[Companion] = [autopsy]  # in every process, since any may fail
    if world.is_main:
        companions += _companions_of_run(plan, hub, events)
    return companions


def _companions_of_run(plan: Plan, hub: Hub | None, events: EventStream) -> Iterator[Companion]:
    """The companions in the main process only: trackers, reports and uploads."""
    if {"all", *PACKAGES} & {*tracker_names(plan.config.tracking.report_to)}:
        yield Trackers(events)
    yield Comparison(events)
    yield RunReport(events)
    yield open_uploads(plan, hub, events)
