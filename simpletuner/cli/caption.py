"""`simpletuner caption`: writes captions for files that have none."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from simpletuner.annexes.captions.wording import Wording, check_captions, uncaptioned, unread
from simpletuner.annexes.report.html import thin
from simpletuner.cli.process import without_gc
from simpletuner.cli.settings import logged_events, plan_survey
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand

PREVIEWED = 3
app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def caption(
    context: typer.Context,
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="ID", help="Only this dataset.")
    ] = None,
    style: Annotated[
        Literal["short", "long", "tags"], typer.Option("--style", help="How to describe.")
    ] = "long",
    trigger: Annotated[
        str, typer.Option("--trigger", metavar="WORD", help="First words of every caption.")
    ] = "",
    preview: Annotated[
        bool, typer.Option("--preview", help="Show three captions, write nothing.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="At most this many files.")
    ] = None,
) -> None:
    """Write a .txt caption for each picture or clip that has none, with the checkpoint's
    Qwen2.5-VL.

    Existing captions are kept, so a repeated call continues an interrupted one. Takes the settings
    of train.
    """
    # A survey accepts files without captions; a plan for training does not.
    survey = plan_survey(context.args)
    wording = Wording(style, trigger)
    check_captions(survey, wording, dataset)
    files = list(uncaptioned(survey.datasets, dataset))[:limit]
    with logged_events() as events:
        for note in unread(files):
            events.notify(note, warning=True)
        # A second call on a captioned folder ends at once.
        if not files:
            events.notify("Every picture and clip has a caption.")
            return
        with events.phase("Loading torch"), without_gc():
            # At the wall: torch comes with the model, so only once there is something to write.
            from simpletuner.annexes.captions.captioner import described, write_captions
        if preview:
            for file, text in described(survey, thin(files, PREVIEWED), wording, events):
                events.notify(f"{file.path}\n  {text}")
        else:
            written = write_captions(survey, files, wording, events)
            events.notify(f"Captions written: {written}; files left out: {len(files) - written}.")
