"""`simpletuner train`: a run in one process or in several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.cli.plan import print_plan
from simpletuner.cli.server import PORT, open_page
from simpletuner.cli.settings import (
    ask_about,
    command_settings,
    logged_events,
    prepare_output,
    refuse_question,
    uncollected,
)
from simpletuner.distributed.world import World, launched
from simpletuner.errors import ConfigError, Interrupted, Problem, Problems, UserError, WriteError, counted

if TYPE_CHECKING:
    from simpletuner.annexes.publishing.uploads import Hub
    from simpletuner.budget.budget import Budget
    from simpletuner.cli.server import ServePage
    from simpletuner.config.sources import Arguments
    from simpletuner.planning.plans import Plan
    from simpletuner.reporting.events import EventStream, RunState
    from simpletuner.run.companions import Companion

    TakePage = Callable[[], ServePage]


def train(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", "--dry_run", help="Print the plan, start nothing.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Serve the web page of this run.")] = False,
    page_port: Annotated[
        int | None, typer.Option("--page-port", "--page_port", help="--page on this port instead of 8001.", max=65535)
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", "--no_auth", help="Let all local users use the page.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Allow a CPU run of days.")] = False,
    replay: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Repeat the failed step of FOLDER.")] = None,
    # Hidden, so that the help stays on one screen: `plan --help` shows them.
    device: Annotated[str | None, typer.Option("--device", hidden=True)] = None,
    device_memory: Annotated[str | None, typer.Option("--device-memory", "--device_memory", hidden=True)] = None,
) -> None:
    """Train with config/config.json, or another file.

    --config FILE uses that file, env=NAME uses config/NAME/config.json, example=NAME uses a packaged example.
    """
    port = page_port or (PORT if page else None)
    _check_flags(replay=replay is not None, dry_run=dry_run, page=port is not None, no_auth=no_auth)
    arguments = command_settings(context.args)
    if dry_run:
        ask_about(arguments, device, device_memory)
        print_plan(arguments)
        return
    refuse_question(device, device_memory)
    configure_torch()
    if replay is not None:
        _replay(replay, arguments)
        return
    flags = {f"--page-port={port}": port, "--no-auth": no_auth, "--yes": yes}
    command = ["train", *context.args, *(flag for flag, is_given in flags.items() if is_given)]
    _start(arguments, command, partial(open_page, port, no_auth=no_auth) if port else None, yes=yes)


def configure_torch() -> None:
    """Set environment variables that torch reads on import, unless the user has set them."""
    # Avoids fragmentation of GPU memory by buckets of many shapes.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch logs every connection attempt


def _check_flags(*, replay: bool, dry_run: bool, page: bool, no_auth: bool) -> None:
    for is_wrong, message in (
        (replay and (dry_run or page), "--replay cannot be combined with --dry-run or --page."),
        (no_auth and not page, "--no-auth needs --page: it lets other users of this machine use the page."),
    ):
        if is_wrong:
            raise UserError(message)


def _start(arguments: Arguments, command: list[str], take_page: TakePage | None, *, yes: bool) -> None:
    """Train in this process, which may be one of several, or launch the run's processes with the same command."""
    from simpletuner.annexes.fitting.ready import ready_plan

    if (place := launched(os.environ)) is not None:
        from simpletuner.annexes.processes.agreement import plan_together
        from simpletuner.annexes.processes.group import process_group

        with process_group(place, start_limit(arguments)) as world:
            budget = plan_together(world, lambda seed: ready_plan(arguments.with_seed(seed)))
            _train(world, agreed(budget, yes=yes), take_page, yes=yes)
        return
    with uncollected():
        budget = ready_plan(arguments)
    budget = agreed(budget, yes=yes)
    # The number of processes is part of the plan. Planning before the launch prints its problems once.
    if budget.config.launch.num_processes > 1:
        from simpletuner.annexes.processes.launching import start_processes

        start_processes(budget.config.launch, command)
    else:
        _train(World(), budget, take_page, yes=yes)


def agreed(budget: Budget, *, yes: bool) -> Budget:
    """The estimated plan, unless it would train for days on a CPU without consent. torch may find a GPU that the plan
    did not.

    Raises:
        ConfigError: consent is needed.
    """
    from simpletuner.annexes.fitting.ready import check_gpu, needs_consent, with_warnings

    slow = Problems()
    check_gpu(budget, slow)
    if slow:
        others = [warning for warning in budget.plan.warnings if warning not in slow]
        with uncollected():
            import torch

        # A GPU whose driver told the plan nothing, as in some containers.
        if torch.accelerator.is_available():
            return with_warnings(budget, others)
        if needs_consent(budget) and not yes:
            raise ConfigError(replace(warning, fatal=True) for warning in slow)
        consented = Problems()
        check_gpu(budget, consented, yes=yes)
        return with_warnings(budget, [*others, *consented])
    return budget


def start_limit(arguments: Arguments) -> float:
    """`start_timeout` of the configuration, or its default; configuration errors are reported later."""
    from simpletuner.config.launch import LaunchConfig
    from simpletuner.planning.build import resolve_layers

    try:
        layers, _ = arguments.layers(Problems())
        return resolve_layers(layers, Problems())[0].launch.start_timeout
    except ConfigError:
        return LaunchConfig().start_timeout


def _replay(folder: Path, arguments: Arguments) -> None:
    """Repeat a failed step; exits with 1 if it fails again."""
    from simpletuner.annexes.replay.failure import prepare

    failure, plan = prepare(folder, arguments)
    with logged_events(None) as events:
        with events.phase("Loading torch"), uncollected():
            from simpletuner.annexes.replay.autopsy import replay_step
        if replay_step(failure, plan, events):
            raise typer.Exit(1)


def _train(world: World, budget: Budget, take_page: TakePage | None, *, yes: bool) -> None:
    """Train in this process, and serve the page of the run."""
    from simpletuner.annexes.display.log import setup_logging
    from simpletuner.annexes.display.progress import shown_events
    from simpletuner.annexes.fitting.show import log_plan

    plan, serve_page = budget.plan, world.main_only(take_page) if take_page else None
    prepare_output(plan.output_dir)
    setup_logging(process=world.label)
    world.main_only(lambda: log_plan(budget))
    with ExitStack() as stack:
        events = stack.enter_context(recorded_events(plan, world, shown_events()))
        stack.enter_context(serve_page(plan.output_dir, events) if serve_page else nullcontext())
        run_checked(budget, events, world, yes=yes)


@contextmanager
def recorded_events(plan: Plan, world: World, shown: AbstractContextManager[EventStream]) -> Iterator[EventStream]:
    """Lock the output folder and yield a stream whose events are displayed, logged there and sent to webhooks.

    Only the main process does so; events of the other processes are dropped.
    """
    from simpletuner.annexes.payloads import EVENTS_FILE, EventLog, Payloads, last_id
    from simpletuner.distributed.requests import signals_as_interrupt
    from simpletuner.planning.lock import lock_output
    from simpletuner.reporting.events import EventStream, StateChanged

    def ended(message: str, code: int) -> None:
        from simpletuner.annexes.processes.group import print_error

        state: RunState = "interrupted" if code == Interrupted.exit_code else "failed"
        events.publish(StateChanged(state, events.step, plan.length.total_steps, message))
        stack.close()
        print_error(message, code)

    if not world.is_main:
        events = EventStream()
        events.subscribe("The watch", world.follow(events.stop, ended), ends_run=Exception)
        yield events
        return
    # Handle signals before taking the lock, which SIGTERM must release; take the lock before writing to the folder.
    with signals_as_interrupt(), ExitStack() as stack:
        stack.enter_context(lock_output(plan.output_dir, partial(last_id, plan.output_dir / EVENTS_FILE)))
        events, payloads = stack.enter_context(shown), Payloads()
        events.subscribe(EVENTS_FILE, EventLog(plan.output_dir, payloads), ends_run=WriteError)
        if plan.config.webhooks.hooks:
            from simpletuner.annexes.webhooks import delivered

            stack.enter_context(delivered(plan.config, plan.output_dir, events, payloads.job_id))
        events.subscribe("The watch", world.follow(events.stop, ended), ends_run=Exception)
        yield events


def run_checked(budget: Budget, events: EventStream, world: World, *, yes: bool) -> None:
    """Announce the run, make the checks that the plan could not, and train."""
    from simpletuner.annexes.fitting.ready import check_gpu, on_cpu
    from simpletuner.annexes.fitting.show import start_lines
    from simpletuner.annexes.publishing.uploads import open_hub
    from simpletuner.planning.entries import machine_folder
    from simpletuner.planning.length import length_key
    from simpletuner.reporting.events import StateChanged
    from simpletuner.run.companions import read_ledger

    plan = budget.plan
    _warn(events, plan.warnings)
    for decision in budget.decisions:
        events.say(f"offload auto: {decision}")
    ledger = world.main_only(lambda: read_ledger(plan.output_dir)) if plan.is_finished else None
    if plan.is_finished and ledger is None:
        done = counted(plan.length.total_steps, "step is done", "steps are done")
        more = f"To train longer, raise {length_key(plan)}; for another run, change output_dir."
        events.say(f"This run is finished: {done}. Results: {plan.output_dir}. {more}")
        return
    # Credentials without write access fail now instead of after hours of training.
    project, begun = plan.config.tracking.tracker_project_name, plan.resume.step if plan.resume else 0
    prepare = partial(open_hub, plan.config.publish, project, events)
    hub = world.main_only(prepare) if ledger is None or "uploads" in ledger.tasks else None
    if ledger:
        from simpletuner.run.train import finish_run

        events.say(f"Training is done, to step {ledger.step}. An earlier session has not finished: {ledger}.")
        finish_run(plan, ledger, events, open_companions(plan, hub, events, world))
        return
    events.publish(StateChanged("starting", begun, plan.length.total_steps, "\n".join(start_lines(budget))))
    keep_compiled(machine_folder(plan))
    # torch is imported after all checks that do not need it.
    with events.phase("Loading torch", stage="init_torch"), uncollected():
        import torch

        from simpletuner.models.adapter import load_adapter
        from simpletuner.run.train import announced_end, run_plan

        load_adapter(plan.spec)
    # nvidia-smi lists a GPU that this torch cannot use: a CPU wheel, or one for a newer driver.
    if budget.device.is_gpu and not torch.accelerator.is_available():
        budget = on_cpu(budget)
        slow = Problems()
        check_gpu(budget, slow)
        _warn(events, slow)
        with announced_end(plan, events, world):
            agreed(budget, yes=yes)
    run_plan(budget, events, open_companions(plan, hub, events, world), world)


def keep_compiled(folder: Path) -> None:
    """Set the caches of inductor and triton to subfolders of `folder`, unless the user has set them.

    By default inductor caches below /tmp, which rented machines lose; this default stays if `folder` is not writable.
    torch reads the variables when it compiles.
    """
    from simpletuner.planning.environment import why_not_writable

    if why_not_writable(folder) is not None:
        return
    for key, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(key, str((folder / name).absolute()))


def _warn(events: EventStream, warnings: Iterable[Problem]) -> None:
    from simpletuner.annexes.fitting.show import MISSING_GPU

    for warning in warnings:
        events.say(str(warning), warning=True, urgent=warning.where == MISSING_GPU)


def open_companions(plan: Plan, hub: Hub | None, events: EventStream, world: World) -> list[Companion]:
    """The companions of a run in this process, in the order in which they are called."""
    from simpletuner.annexes.replay.autopsy import Autopsy

    autopsy = Autopsy()
    events.subscribe("The report of failures", autopsy)  # early, because it records the phase
    # Reports, trackers and uploads belong to the main process; any process may fail and write an autopsy.
    return [autopsy, *(world.main_only(lambda: _companions_of_run(plan, hub, events)) or ())]


def _companions_of_run(plan: Plan, hub: Hub | None, events: EventStream) -> Iterator[Companion]:
    from simpletuner.annexes.outcome import Comparison
    from simpletuner.annexes.publishing.uploads import open_uploads
    from simpletuner.annexes.report.report import RunReport
    from simpletuner.config.trackers import PACKAGES, tracker_names

    if {"all", *PACKAGES} & {*tracker_names(plan.config.tracking.report_to)}:
        from simpletuner.annexes.trackers import Trackers

        yield Trackers(events)
    yield Comparison(events)
    yield RunReport(events)
    yield open_uploads(plan, hub, events)
