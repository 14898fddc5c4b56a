"""`simpletuner start FOLDER`: from a folder of files to a LoRA, with a few questions."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from simpletuner.annexes.fitting.ready import CONSENT
from simpletuner.annexes.fitting.show import MISSING_GPU
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.annexes.start.ending import ending_of
from simpletuner.annexes.start.interview import ask_run
from simpletuner.annexes.start.new_run import FILES, NewRun
from simpletuner.annexes.start.recipe import find_demo
from simpletuner.annexes.start.verdict import plan_new_run, unwritten
from simpletuner.cli.consent import with_consent
from simpletuner.cli.next_step import print_next_step
from simpletuner.cli.plan import print_plan
from simpletuner.cli.settings import CardAsked, MemoryAsked, refuse_asked_device, set_asked_device
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand
from simpletuner.config.load import canonical
from simpletuner.config.schema import main_name
from simpletuner.config.sources import parse_arguments
from simpletuner.distributed.requests import signal_handlers
from simpletuner.errors import ConfigError, Interrupted, UserError, counted

STRENGTHS = "0.75,1.0"  # compared by the sweep; a LoRA trained on few files is often best below 1
app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def start(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="Pictures, clips, or two folders named before and after.")
    ],
    purpose: Annotated[str | None, typer.Option(help="subject, style, motion or edit.")] = None,
    trigger: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Trigger words: zkt, a grey cat.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to train, such as kandinsky5-image.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; by default the folder's.")
    ] = None,
    caption: Annotated[
        bool, typer.Option("--caption", help="Write captions for files without one.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take all defaults.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the config, show the plan, start nothing.")
    ] = False,
    device: CardAsked = None,
    device_memory: MemoryAsked = None,
) -> None:
    """Train on a folder: writes config/NAME, captions if asked, trains, and compares the
    checkpoints.

    Settings on the command line go into the config, as in start my_cat max_train_steps=500.
    """
    arguments = parse_arguments(context.args)
    if not dry_run:
        refuse_asked_device(device, device_memory)
    set_asked_device(arguments, device, device_memory)
    canonical(arguments.layer(), arguments.problems)
    # Unexpanded: references to environment variables are written to the config as they are.
    settings = {main_name(key): value for key, value in arguments.settings}
    for chosen in arguments.selectors:
        arguments.problems.error(chosen, "has no effect: start writes a config of its own.")
    arguments.problems.raise_if_fatal()
    run = ask_run(
        folder,
        Dialogue(asks=not yes, unasked="--yes"),
        {"purpose": purpose, "trigger": trigger, "model": model, "name": name},
        settings,
        captions=caption,
        device=arguments.device,
    )
    if not dry_run:
        _check_training(run)
    if (run.root / run.folder).exists():
        print(f"{run.folder} is as these answers would write it, so it is used.", flush=True)
    else:
        run.save()
        _report_written(run)
    if dry_run:
        _show_plan(run)
        return
    _run(_commands(run))
    output = Path(str(run.config()["output_dir"]))
    for line in ending_of(output, run.held_out):
        print(line)
    print_next_step(output)


def _report_written(run: NewRun) -> None:
    """Print which files were written, and how many are held out."""
    files = "config.json, multidatabackend.json and user_prompt_library.json"
    print(f"Written: {run.folder}/{files}", flush=True)
    if run.held_out:
        print(
            f"Held out: {run.held_out} of {run.usable} files, to compare checkpoints on them "
            "(hold_out in multidatabackend.json).",
            flush=True,
        )


def _show_plan(run: NewRun) -> None:
    """Show the plan of a run that is written and not started.

    Raises:
        ConfigError, typer.Exit: training would refuse it.
    """
    if not run.writes_captions or not run.media.uncaptioned:
        _run([["plan", f"env={run.name}", *run.device.flags]])
        return
    # `plan` would refuse the files for their lack of captions.
    command = shlex.join(["simpletuner", *_caption_command(run)])
    missing = counted(len(run.media.uncaptioned), "caption")
    print(f"Write {missing} before training: {command}")
    print(
        "Until then, the plan takes the trigger words as the caption of every file.\n", flush=True
    )
    with unwritten(run) as arguments:
        print_plan(arguments, hidden=FILES.keys())


def _commands(run: NewRun) -> list[list[str]]:
    """The commands that follow the config."""
    output = str(run.config()["output_dir"])
    commands = [["train", f"env={run.name}"], ["sweep", output, "--strengths", STRENGTHS]]
    return [_caption_command(run), *commands] if run.writes_captions else commands


def _caption_command(run: NewRun) -> list[str]:
    command = ["caption", f"env={run.name}"]
    # Without `captioned_as`, the dataset prepends the trigger words to captions, so written
    # captions must not begin with them.
    return [*command, "--trigger", run.phrase] if run.phrase and run.captioned_as else command


def _check_training(run: NewRun) -> None:
    """Plan the run before anything is written.

    Raises:
        ConfigError: training would refuse it.
    """
    demo = find_demo(run.media.kind)
    ways = (
        "--dry-run (only write the config, for another machine) or i_know_what_i_am_doing=true "
        "(train here anyway)"
    )
    if demo:
        ways = f"--model {demo} (a tiny model that draws simple shapes, in minutes), {ways}"
    try:
        with_consent(plan_new_run(run), yes=False)
    except ConfigError as error:
        for number, problem in enumerate(error.problems):
            if problem.where == MISSING_GPU or (demo and problem.where == "memory"):
                message = f"{problem.message.removesuffix(CONSENT).strip()} Add {ways}."
                error.problems[number] = replace(problem, message=message)
        raise


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run simpletuner commands in subprocesses, which free their memory on exit.

    Raises:
        typer.Exit: a command failed and printed its error; earlier results are kept.
    """
    shown = [f"simpletuner {shlex.join(command)}" for command in commands]
    # Ctrl-C also reaches the command, which saves a checkpoint before it exits: wait for it instead
    # of killing it. A function, since a child would inherit SIG_IGN.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        for number, command in enumerate(commands):
            print(f"$ {shown[number]}", flush=True)
            code = run_command([sys.executable, "-m", "simpletuner", *command])
            if code == 0:
                continue
            is_fixable = code == UserError.exit_code
            advice = "Once that is fixed, go on with" if is_fixable else "To go on"
            message = f"Stopped. {advice}: {' && '.join(shown[number:])}"
            if code == Interrupted.exit_code:
                raise Interrupted(message)  # in place of another "Interrupted."
            print(message, file=sys.stderr)
            # As in shells: a child that was killed by a signal has that signal's negative number.
            raise typer.Exit(code if code > 0 else 128 - code)
    finally:
        signal.signal(signal.SIGINT, before)


def run_command(command: Sequence[str]) -> int:
    """Run a command and return its exit code; SIGTERM is passed on to it, so that it can save."""
    child: subprocess.Popen[bytes] | None = None
    was_terminated = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal was_terminated
        was_terminated = True
        if child is not None:
            child.send_signal(number)

    with signal_handlers({signal.SIGTERM: pass_on}):
        child = subprocess.Popen(command)
        if was_terminated:  # possibly before there was a child to pass the signal on to
            child.send_signal(signal.SIGTERM)
        return child.wait()
