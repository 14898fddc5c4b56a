"""`simpletuner sample` and `simpletuner sweep`: render from a result, or compare checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner.annexes.fitting.ready import weigh
from simpletuner.annexes.fitting.show import fit_line
from simpletuner.annexes.report.contact_sheet import PAGE, PICTURE
from simpletuner.annexes.report.sheet import Sheet
from simpletuner.annexes.sampling import Sampled, SampleRequest, plan_samples
from simpletuner.cli.process import without_gc
from simpletuner.cli.settings import command_settings, logged_events, prepare_output
from simpletuner.cli.settings_command import PASS_THROUGH, SHORT, SettingsCommand
from simpletuner.config.load import unknown_key
from simpletuner.config.schema import option_names
from simpletuner.config.sources import Arguments
from simpletuner.config.types import parse_number, parse_path, plain_key
from simpletuner.errors import Problems, nearest
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER
from simpletuner.planning.lock import at_work
from simpletuner.planning.plans import SamplePlan
from simpletuner.reporting.events import EventStream

SETTING = re.compile("--|[^=]+=")  # how a setting begins
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="What to render; may be given several times.")
]
Images = Annotated[
    list[str] | None, typer.Option("--image", help="A picture to start from (i2i, i2v).")
]
UseEma = Annotated[
    bool, typer.Option("--ema", help="Render with the moving average of the weights.")
]
Output = Annotated[Path | None, typer.Option("--output", help="Folder for the renders.")]
app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def sample(
    context: typer.Context,
    prompt: Prompts = None,
    image: Images = None,
    strength: Annotated[
        str, typer.Option("--strength", help="LoRA strength; 0 renders the base model.")
    ] = "1.0",
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="A step, or latest.")
    ] = None,
    ema: UseEma = False,
    output: Output = None,
) -> None:
    """Render from a result: sample OUTPUT_DIR a prompt, or --prompt "...". Also takes a checkpoint
    or a LoRA file.

    Uses the settings of the run's previews. Settings override them: --resolution, --frames,
    --steps, --guidance, --seed, --negative-prompt, and those of train. Without a source, renders
    the base model of model_family=NAME or example=NAME.
    """
    request = read_request(
        context.args,
        output=output or Path("samples"),
        key="--strength",
        strengths=strength.split(","),
        prompts=prompt or (),
        images=image or (),
        checkpoints=None if checkpoint is None else [checkpoint],
        ema=ema,
    )
    with checked_samples(request, logged_events()) as samples:
        for path in samples.render():
            samples.events.notify(f"Saved {path}")


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def sweep(
    context: typer.Context,
    prompt: Prompts = None,
    image: Images = None,
    strengths: Annotated[
        str, typer.Option("--strengths", help="Strengths of the LoRA: 0.5,0.75,1.0")
    ] = "1.0",
    checkpoints: Annotated[
        str | None, typer.Option("--checkpoints", help="Steps: 100,200. All by default.")
    ] = None,
    ema: UseEma = False,
    output: Output = None,
) -> None:
    """Compare a run's checkpoints: sweep OUTPUT_DIR writes one contact sheet, as a page and as a
    picture.

    By default it renders the run's prompts from the same seeds, into the folder sweep of the run.
    An interrupted sweep resumes where it stopped. Settings override those of the run, as in sample.
    """
    chosen = None
    if checkpoints is not None:
        chosen = [name.strip() for name in checkpoints.split(",")]
    request = read_request(
        context.args,
        output=output,
        key="--strengths",
        strengths=strengths.split(","),
        prompts=prompt or (),
        images=image or (),
        checkpoints=chosen,
        ema=ema,
        sweeps=True,
    )
    with checked_samples(request, logged_events()) as samples:
        sheet = samples.compare()
        key = "" if sheet.is_evaluated else " The key for that is hold_out, in the dataset file."
        samples.events.notify(sheet.verdict + key)
        samples.events.notify(f"Saved {sheet.folder / PAGE} and {PICTURE}")


def read_request(
    tokens: list[str], output: Path | None, key: str, strengths: list[str], **asked: Any
) -> SampleRequest:
    """The request of a command line; its arguments hold the problems.

    Args:
        output: the folder for the renders; that of the run's sweep by default.
        key: the option of the strengths, for messages.
        asked: further attributes of the request.
    """
    source = leading_source(tokens)
    rest = tokens if source is None else tokens[1:]
    if source is not None and not asked["prompts"]:
        words = leading_words(rest)
        if words:
            asked["prompts"] = [" ".join(words)]
            rest = rest[len(words) :]
    arguments = command_settings(rest)
    expand_short_names(arguments)
    asked["strengths"] = parse_strengths(key, strengths, arguments.problems)
    folder = str(output or Path(source or "") / SWEEP_FOLDER)
    try:
        parse_path(folder)
    except ValueError as error:
        arguments.problems.error("--output", f"{folder!r} {error}.")
        folder = ""  # the working folder, so that the remaining settings are checked too
    return SampleRequest(source, folder, arguments, **asked)


def leading_source(tokens: list[str]) -> str | None:
    """The first word unless it is a setting; an existing file may be called `a=b`."""
    if not tokens:
        return None
    is_setting = re.match(SETTING, tokens[0]) is not None
    if is_setting and not Path(tokens[0]).exists():
        return None
    return tokens[0]


def leading_words(tokens: list[str]) -> list[str]:
    """The words of a prompt that was typed without --prompt, up to the first setting."""
    return list(takewhile(lambda token: not re.match(SETTING, token), tokens))


def expand_short_names(arguments: Arguments) -> None:
    """Replace the short names of settings; those of misspelt ones become problems."""
    names = {*option_names(), *SHORT}
    expanded = []
    for key, value in arguments.settings:
        plain = plain_key(key)
        if plain not in names and nearest(plain, names) in SHORT:
            arguments.problems.error(key, f"{unknown_key(plain, names)} ({arguments.label})")
        else:
            expanded.append((SHORT.get(plain, key), value))
    arguments.settings = expanded


def parse_strengths(key: str, strengths: Iterable[object], problems: Problems) -> list[float]:
    """The strengths as numbers; others become problems of `key`."""
    numbers = []
    for strength in strengths:
        try:
            numbers.append(parse_number(strength))
        except ValueError as error:
            shown = strength.strip() if isinstance(strength, str) else strength
            problems.error(key, f"{shown!r} {error} such as 0.5 or 1.0.")
    return numbers


@dataclass(frozen=True)
class CheckedSamples:
    """A request that was checked and fits into memory, its plan and weights; torch is loaded."""

    request: SampleRequest
    plan: SamplePlan
    weights: Sequence[Sampled]
    events: EventStream

    def render(self) -> list[Path]:
        """Render with the first weights; returns the new files."""
        # At the wall, which `checked_samples` has crossed.
        from simpletuner.annexes.sweep import render_samples

        return render_samples(self.plan, self.weights[0], self.request.strengths, self.events)

    def compare(self) -> Sheet:
        """Render with all weights into a contact sheet."""
        # At the wall, as above.
        from simpletuner.annexes.sweep import render_sweep

        run = Path(self.request.source or "")
        strengths = self.request.strengths
        with at_work(self.plan.output_dir):
            return render_sweep(
                self.plan, self.weights, strengths, run, self.request.arguments, self.events
            )


@contextmanager
def checked_samples(
    request: SampleRequest, shown: AbstractContextManager[EventStream]
) -> Iterator[CheckedSamples]:
    """Check a request, create its output folder, and load torch.

    Raises:
        ConfigError: lists all problems.
    """
    arguments = request.arguments
    plan, weights = plan_samples(request)
    budget = weigh(plan, arguments.problems)
    plan = budget.plan
    arguments.problems.raise_if_fatal()
    prepare_output(plan.output_dir)
    with shown as events:
        for warning in plan.warnings:
            events.notify(str(warning), warning=True)
        names = ", ".join(sampled.name for sampled in weights)
        events.notify(f"{plan.spec.title} {plan.flavour.name}, {names}")
        events.notify(fit_line(budget))
        for decision in budget.decisions:
            events.notify(f"  offload auto: {decision}")
        with events.phase("Loading torch"), without_gc():
            # The wall: torch and the classes of the family take seconds to import.
            from simpletuner.models.adapter import load_adapter

            load_adapter(plan.spec)
        yield CheckedSamples(request, plan, weights, events)
