"""`simpletuner caption` and `simpletuner dataset`: caption and inspect a dataset before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from simpletuner.cli.settings import Cached, logged_events, surveyed, uncollected

PREVIEWED = 3
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")]


def caption(
    context: typer.Context,
    dataset: Annotated[str | None, typer.Option("--dataset", metavar="ID", help="Only this dataset.")] = None,
    style: Annotated[Literal["short", "long", "tags"], typer.Option("--style", help="How to describe.")] = "long",
    trigger: Annotated[str, typer.Option("--trigger", metavar="WORD", help="First words of every caption.")] = "",
    preview: Annotated[bool, typer.Option("--preview", help="Show three captions, write nothing.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many files.")] = None,
) -> None:
    """Write a .txt caption for each picture or clip that has none, with the checkpoint's Qwen2.5-VL.

    Existing captions are kept, so a repeated call continues an interrupted one. Takes the settings of train.
    """
    from simpletuner.annexes.captions.wording import Wording, check_captions, uncaptioned, unread

    # A survey accepts files without captions; a plan for training does not.
    survey = surveyed(context.args)
    wording = Wording(style, trigger)
    check_captions(survey, wording, dataset)
    files = list(uncaptioned(survey.datasets, dataset))[:limit]
    with logged_events() as events:
        for note in unread(files):
            events.say(note, warning=True)
        # Before torch is imported: a second call on a captioned folder ends at once.
        if not files:
            events.say("Every picture and clip has a caption.")
            return
        with events.phase("Loading torch"), uncollected():
            from simpletuner.annexes.captions.captioner import described, write_captions
            from simpletuner.annexes.report.html import thin
        if preview:
            for file, text in described(survey, thin(files, PREVIEWED), wording, events):
                events.say(f"{file.path}\n  {text}")
        else:
            written = write_captions(survey, files, wording, events)
            events.say(f"Captions written: {written}; files left out: {len(files) - written}.")


def dataset(context: typer.Context, out: Out = Path("dataset.html"), cached: Cached = False) -> None:
    """Write a page that shows how every file will be trained: crop, caption, near-duplicates, and skipped files.

    Dataset files are not modified. Takes the settings of train.
    """
    from simpletuner.annexes.display.progress import shown_events

    survey = surveyed(context.args, cached=cached)
    with shown_events() as events:
        from simpletuner.annexes.captions.dataset_page import write_page

        write_page(survey, out, events)
        events.say(f"Saved {out}")
