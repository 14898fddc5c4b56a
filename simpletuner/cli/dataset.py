"""`simpletuner dataset`: a page that shows how a dataset will be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.annexes.captions.dataset_page import write_page
from simpletuner.annexes.display.progress import shown_events
from simpletuner.cli.settings import Cached, plan_survey
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")]
app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def dataset(
    context: typer.Context, out: Out = Path("dataset.html"), cached: Cached = False
) -> None:
    """Write a page that shows how every file will be trained: crop, caption, near-duplicates, and
    skipped files.

    Dataset files are not modified. Takes the settings of train.
    """
    survey = plan_survey(context.args, cached=cached)
    with shown_events() as events:
        write_page(survey, out, events)
        events.notify(f"Saved {out}")
