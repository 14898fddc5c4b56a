"""Pictures and clips of a run as HTML: before and after, all previews, and training samples."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.reporting.html import Html, element, join
from simpletuner.reporting.pieces import section
from simpletuner.reporting.previews import Cell, PreviewGrid, Row, TrainingSample

NO_PROMPT = "(empty prompt)"


def comparison_section(grid: PreviewGrid) -> Html | None:
    """An empty section that `page.js` fills with previews from the grid, so that no picture is embedded twice."""
    shown = [row for row in grid.rows if _has_two(row.plain) or _has_two(row.averaged)]
    if not shown:
        return None
    is_video = any(cell.record.is_video for row in shown for cell in row.plain if cell)
    hint = "Untrained model on the left, newest step on the right." if is_video else "Drag across a picture."
    return section("Before and after", element("div.comparisons"), hint=hint, id="comparison", hidden=True)


def _has_two(cells: Sequence[Cell | None]) -> bool:
    return sum(cell is not None and bool(cell.source) for cell in cells) > 1


def previews_section(grid: PreviewGrid) -> Html | None:
    """A row per prompt and a column per step; EMA previews stand below those of the trained weights."""
    if not grid.rows:
        return None
    left_out = [
        f"{count:,} more {what}"
        for count, what in ((grid.hidden_steps, "steps"), (grid.hidden_rows, "prompts"))
        if count
    ]
    note = f" Not shown here: {' and '.join(left_out)}; all files are in the output folder." if left_out else ""
    averaged = " EMA previews stand below those of the weights." if any(row.averaged for row in grid.rows) else ""
    hint = f"Each prompt has the same noise at every step. Click to enlarge.{averaged}{note}"
    return section("Previews", [_prompt(row, grid.steps) for row in grid.rows], hint=hint, class_="gallery")


def _prompt(row: Row, steps: Sequence[int]) -> Html:
    heading = element("header", element("h3", row.name), element("p.prompt", row.prompt or NO_PROMPT))
    cells = []
    for index, step in enumerate(steps):
        averaged = row.averaged[index] if row.averaged else None
        beside = _preview(averaged) if averaged else None
        cells.append(element("figure", _preview(row.plain[index]), beside, element("figcaption", f"step {step:,}")))
    return element("article.prompt-row", heading, element("div.cells", cells), data_name=row.name)


def _preview(cell: Cell | None) -> Html:
    if cell is None:
        return element("span.absent", "–")
    if not cell.source:
        return element("span.absent", "file gone")
    record = cell.record
    weights = "EMA, " if record.ema else ""
    name = f"{record.short_name}, {weights}step {record.step}"
    size = {"width": record.width, "height": record.height}
    if record.is_video:
        media = element("video", src=cell.source, muted=True, loop=True, playsinline=True, preload="metadata", **size)
    else:
        media = element("img", src=cell.source, alt=name, loading="lazy", **size)
    seed = "" if record.seed is None else f", seed {record.seed}"
    return element(
        "button.preview",
        media,
        element("span.tag", "EMA") if record.ema else None,
        type="button",
        aria_label=f"Enlarge {name}",
        data_step=record.step,
        data_ema=record.ema,
        data_label=f"{weights}step {record.step:,}, {record.width}×{record.height}{seed}",
        data_file=record.path,
    )


def samples_section(samples: Sequence[TrainingSample], total: int) -> Html | None:
    """Some of the training pictures or clips, cropped as they are trained."""
    if not samples:
        return None
    some = f"{len(samples)} of {total:,} files. " if len(samples) < total else ""
    clips = " First frames of clips." if any(sample.is_clip for sample in samples) else ""
    shown = [_sample(sample) for sample in samples]
    hint = f"{some}Cropped as they are trained.{clips}"
    return section("Trained on", element("div.samples", shown), hint=hint, class_="gallery")


def _sample(sample: TrainingSample) -> Html:
    pictures = [source for source in (sample.edited_from, sample.source) if source]
    images = [element("img", src=source, alt=sample.name, loading="lazy") for source in pictures]
    label = sample.name if not sample.edited_from else f"{sample.name}: source and target"
    buttons = [
        element("button.preview", image, type="button", aria_label=f"Enlarge {sample.name}", data_label=label)
        for image in images
    ]
    more = len(sample.captions) - 1
    caption = sample.captions[0] if sample.captions else ""
    others = f" (and {more} more)" if more > 0 else ""
    text = element("figcaption.prompt", join(caption or "(no caption)", others), title="\n".join(sample.captions))
    return element("figure.sample", element("div.pair" if len(images) > 1 else "div", buttons), text)
