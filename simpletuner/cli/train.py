"""`simpletuner train`: a run in one process or in several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.annexes.display.log import setup_logging
from simpletuner.annexes.display.progress import shown_events
from simpletuner.annexes.fitting.plan_text import log_plan
from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.annexes.fitting.show import MISSING_GPU, publish_warnings, start_lines
from simpletuner.annexes.payloads import EVENTS_FILE, EventLog, Payloads, last_id
from simpletuner.annexes.processes.agreement import plan_in_every_process
from simpletuner.annexes.processes.group import print_error, process_group
from simpletuner.annexes.processes.launching import start_processes
from simpletuner.annexes.publishing.uploads import open_hub
from simpletuner.annexes.replay.failure import prepare
from simpletuner.atomic import why_not_writable
from simpletuner.budget.budget import Budget
from simpletuner.cli.consent import with_consent
from simpletuner.cli.next_step import print_next_step
from simpletuner.cli.plan import print_plan
from simpletuner.cli.process import configure_torch, without_gc
from simpletuner.cli.settings import (
    command_settings,
    logged_events,
    prepare_output,
    refuse_asked_device,
    set_asked_device,
)
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand
from simpletuner.config.launch import LaunchConfig
from simpletuner.config.sources import Arguments
from simpletuner.distributed.requests import signals_as_interrupt
from simpletuner.distributed.world import World, world_from_launcher
from simpletuner.errors import ConfigError, Interrupted, Problems, UserError, WriteError, counted
from simpletuner.planning.build import resolve_layers
from simpletuner.planning.entries import machine_folder
from simpletuner.planning.length import length_key
from simpletuner.planning.lock import lock_output
from simpletuner.planning.plans import Plan
from simpletuner.reporting.events import EventStream, RunState, StateChanged
from simpletuner.run.companions import read_ledger

if TYPE_CHECKING:
    from simpletuner.cli.server import Page  # see `make_page`

app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def train(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--dry_run", help="Print the plan, start nothing.")
    ] = False,
    page: Annotated[bool, typer.Option("--page", help="Serve the web page of this run.")] = False,
    page_port: Annotated[
        int | None,
        typer.Option(
            "--page-port", "--page_port", help="--page on this port instead of 8001.", max=65535
        ),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", "--no_auth", help="Let all local users use the page.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Allow a CPU run of days.")] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Repeat the failed step of FOLDER.")
    ] = None,
    # Hidden, so that the help stays on one screen: `plan --help` shows them.
    device: Annotated[str | None, typer.Option("--device", hidden=True)] = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", "--device_memory", hidden=True)
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", hidden=True)] = False,
) -> None:
    """Train with config/config.json, or another file.

    --config FILE uses that file, env=NAME uses config/NAME/config.json, example=NAME uses a
    packaged example.
    """
    has_page = page or bool(page_port)
    _check_flags(replay=replay is not None, dry_run=dry_run, page=has_page, no_auth=no_auth)
    arguments = command_settings(context.args)
    if dry_run:
        set_asked_device(arguments, device, device_memory)
        print_plan(arguments, verbose=verbose)
        return
    if verbose:
        raise UserError("--verbose is for the plan: add --dry-run.")
    refuse_asked_device(device, device_memory)
    configure_torch()
    if replay is not None:
        _replay(replay, arguments)
        return
    run_page = make_page(page_port, no_auth=no_auth) if has_page else None
    command = ["train", *context.args]
    if run_page is not None:
        command.append(f"--page-port={run_page.port}")
    if no_auth:
        command.append("--no-auth")
    if yes:
        command.append("--yes")
    _start(arguments, command, run_page, yes=yes)


def _check_flags(*, replay: bool, dry_run: bool, page: bool, no_auth: bool) -> None:
    if replay and (dry_run or page):
        raise UserError("--replay cannot be combined with --dry-run or --page.")
    if no_auth and not page:
        raise UserError("--no-auth needs --page: it lets other users of this machine use the page.")


def make_page(port: int | None, *, no_auth: bool) -> Page:
    """The page of the run, not yet opened; `port` is 8001 by default."""
    # The web server takes 0.2 s to import, and most runs have no page.
    from simpletuner.cli.server import PORT, Page

    return Page(port or PORT, no_auth=no_auth)


def _start(arguments: Arguments, command: list[str], page: Page | None, *, yes: bool) -> None:
    """Train in this process, or launch the run's processes with the same command."""
    place = world_from_launcher(os.environ)
    if place is not None:  # this process is one of several

        def plan_with_seed(seed: int | None) -> Budget:
            return plan_that_fits(arguments.with_seed(seed))

        with process_group(place, start_limit(arguments)) as world:
            budget = plan_in_every_process(world, plan_with_seed)
            _train(world, with_consent(budget, yes=yes), page, yes=yes)
        return
    with without_gc():
        budget = plan_that_fits(arguments)
    budget = with_consent(budget, yes=yes)
    # The number of processes is part of the plan. Planning before the launch prints its problems
    # once.
    if budget.config.launch.num_processes > 1:
        start_processes(budget.config.launch, command)
    else:
        _train(World(), budget, page, yes=yes)


def start_limit(arguments: Arguments) -> float:
    """`start_timeout` of the configuration; its default if there are errors, reported later."""
    try:
        layers, _ = arguments.layers(Problems())
        config, _ = resolve_layers(layers, Problems())
    except ConfigError:
        return LaunchConfig().start_timeout
    return config.launch.start_timeout


def _replay(folder: Path, arguments: Arguments) -> None:
    """Repeat a failed step; exits with 1 if it fails again."""
    failure, plan = prepare(folder, arguments)
    with logged_events(None) as events:
        with events.phase("Loading torch"), without_gc():
            # At the wall: torch comes with it, so only after the plan is checked.
            from simpletuner.annexes.replay.autopsy import replay_step
        if replay_step(failure, plan, events):
            raise typer.Exit(1)


def _train(world: World, budget: Budget, page: Page | None, *, yes: bool) -> None:
    """Train in this process; the main one serves the page of the run."""
    plan = budget.plan
    if page is not None:
        world.main_only(page.open)
    prepare_output(plan.output_dir)
    setup_logging(process=world.label)
    world.main_only(lambda: log_plan(budget))
    with ExitStack() as stack:
        events = stack.enter_context(recorded_events(plan, world, shown_events()))
        if page is not None:
            stack.enter_context(page.serving(plan.output_dir, events))
        run_checked(budget, events, world, yes=yes)
    world.main_only(lambda: print_next_step(plan.output_dir))


@contextmanager
def recorded_events(
    plan: Plan, world: World, shown: AbstractContextManager[EventStream]
) -> Iterator[EventStream]:
    """Lock the output folder; events are displayed, logged there and sent to webhooks.

    Only the main process does so; events of the other processes are dropped.

    Args:
        shown: a stream that the display has subscribed to.
    """

    def on_ended(message: str, code: int) -> None:
        """Record why another process ends this one, since no exception will."""
        state: RunState = "interrupted" if code == Interrupted.exit_code else "failed"
        events.publish(StateChanged(state, events.step, plan.length.total_steps, message))
        stack.close()
        print_error(message, code)

    if not world.is_main:
        events = EventStream()
        events.subscribe("The watch", world.follow(events.stop, on_ended), ends_run=Exception)
        yield events
        return
    # Handle signals before taking the lock, which SIGTERM must release; take the lock before
    # writing to the folder.
    with signals_as_interrupt(), ExitStack() as stack:
        last_event = partial(last_id, plan.output_dir / EVENTS_FILE)
        stack.enter_context(lock_output(plan.output_dir, last_event))
        events = stack.enter_context(shown)
        payloads = Payloads()
        events.subscribe(EVENTS_FILE, EventLog(plan.output_dir, payloads), ends_run=WriteError)
        if plan.config.webhooks.hooks:
            # The client of webhooks takes 0.1 s to import, and most runs have none.
            from simpletuner.annexes.webhooks import delivered

            config = plan.config
            project = config.tracking.tracker_project_name
            stack.enter_context(
                delivered(config.webhooks, project, plan.output_dir, events, payloads.job_id)
            )
        events.subscribe("The watch", world.follow(events.stop, on_ended), ends_run=Exception)
        yield events


def run_checked(budget: Budget, events: EventStream, world: World, *, yes: bool) -> None:
    """Announce the run, make the checks that the plan could not, and train."""
    plan = budget.plan
    urgent = [warning for warning in plan.warnings if warning.where == MISSING_GPU]
    publish_warnings(events, urgent)
    ledger = None  # what an earlier session has left to do after its last step
    if plan.is_finished:
        ledger = world.main_only(lambda: read_ledger(plan.output_dir))
        if ledger is None:
            done = counted(plan.length.total_steps, "step is done", "steps are done")
            more = f"To train longer, raise {length_key(plan)}; for another run, change output_dir."
            events.notify(f"This run is finished: {done}. Results: {plan.output_dir}. {more}")
            return
    hub = None
    # Credentials without write access fail now instead of after hours of training.
    if ledger is None or "uploads" in ledger.tasks:
        project = plan.config.tracking.tracker_project_name
        hub = world.main_only(lambda: open_hub(plan.config.publish, project, events))
    if ledger is not None:
        # At the wall, as below. Nothing is trained, so importing torch does not need its own phase.
        from simpletuner.cli.execute import finish

        finish(plan, ledger, hub, events, world)
        return
    step = plan.resume.step if plan.resume else 0
    summary = "\n".join(start_lines(budget))
    events.publish(StateChanged("starting", step, plan.length.total_steps, summary))
    publish_warnings(events, [warning for warning in plan.warnings if warning not in urgent])
    for decision in budget.decisions:
        events.notify(f"offload auto: {decision}")
    keep_compiled(machine_folder(plan))
    with events.phase("Loading torch", stage="init_torch"), without_gc():
        # The wall: torch and the classes of the family take seconds to import, so they come after
        # all checks that do not need them.
        from simpletuner.cli.execute import execute
        from simpletuner.models.adapter import load_adapter

        load_adapter(plan.spec)
    execute(budget, hub, events, world, yes=yes)


def keep_compiled(folder: Path) -> None:
    """Let inductor and triton cache in subfolders of `folder`, unless the user has chosen others.

    By default inductor caches below /tmp, which rented machines lose; this default stays if
    `folder` is not writable. torch reads the variables when it compiles.
    """
    if why_not_writable(folder):
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((folder / "inductor").absolute()))
    os.environ.setdefault("TRITON_CACHE_DIR", str((folder / "triton").absolute()))
