"""The model card of a run: `model_card/` in its output folder, with all that stands beside weights in a repository.

README.md                what the run was; its front matter is what the hub reads
simpletuner_config.json  the settings, without secrets and without what is known on this machine only
assets/                  previews of the step, and the evaluation loss as a picture

Free of torch.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from simpletuner.atomic import build_folder, write_json
from simpletuner.config.json_files import read_json
from simpletuner.redaction import HIDDEN, redact_settings
from simpletuner.reporting.metrics import MediaRecord

CARD_FOLDER, README, SETTINGS_FILE, ASSETS = "model_card", "README.md", "simpletuner_config.json", "assets"
CURVE = "evaluation_loss.png"
MOST_MEDIA = 32  # previews in a gallery
UNPROMPTED = "unconditional (blank prompt)"  # the hub shows no gallery entry without a text
# Whoever has not named a repository is known by this.
NOBODY = "your-name"
PATH = re.compile(r"""(?:^|[\s"'=(\[,])(?:~|[A-Za-z]:|\\)?[/\\][^\s/\\]+[/\\]""")
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")
Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Card:
    """Everything a card shows.

    Attributes:
        title: name of the run.
        front: the front matter, except for the gallery.
        repository: `owner/name` on the hub.
        settings: public ones, see `public_settings`.
        summary: the message of its commit.
        subtitle: what was trained, in a few words.
        local_base: the base model was read from a folder, so that `base_model` is a guess.
        prompt: of the last preview.
        validation, training, adapter: rows of the tables.
        datasets: rows of the table of datasets, by heading.
        evaluation: (step, loss) on held-out data.
        checked: what loading the file again has shown; empty for a checkpoint.
        snippet: a program that uses the weights; empty for files in ComfyUI's form.
        quantise: lines that quantise its base as in training; empty if that was not quantised.
        ema: what became of the moving average, or nothing.
    """

    title: str
    front: Mapping[str, Any]
    repository: str
    settings: Mapping[str, Any]
    summary: str
    subtitle: str
    step: int
    local_base: bool
    prompt: str
    negative_prompt: str
    validation: Rows
    training: Rows
    adapter: Rows
    datasets: Sequence[Mapping[str, str]]
    evaluation: Sequence[tuple[int, float]]
    checked: str
    snippet: str
    quantise: str
    ema: str
    note: str = ""
    media: Sequence[MediaRecord] = field(default=())


def write_card(output_dir: Path, card: Card) -> None:
    """Replace the card of a run.

    Raises:
        DiskFullError: there was no space; the old card is kept.
    """
    with build_folder(output_dir / CARD_FOLDER) as folder:
        (folder / ASSETS).mkdir()
        widget = [_shown(output_dir, folder, each, name, card) for each, name in _named(card.media)]
        if len(card.evaluation) > 1:
            (folder / ASSETS / CURVE).write_bytes(draw_curve(card.evaluation))
        (folder / README).write_text(render_card(card, widget), encoding="utf-8")
        notes = {"repository": card.repository, "step": card.step, "summary": card.summary}
        write_json(folder / SETTINGS_FILE, {"_metadata": notes, "config": dict(card.settings)})


def read_notes(folder: Path) -> dict[str, Any]:
    """What a card notes about itself: repository, step and summary; empty if there is no card."""
    content = read_json(folder / SETTINGS_FILE, []) if (folder / SETTINGS_FILE).is_file() else None
    return dict(content["_metadata"]) if isinstance(content, dict) else {}


def move_card(output_dir: Path, repository: str) -> None:
    """Let the card in an output folder, if there is one, name another repository."""
    folder = output_dir / CARD_FOLDER
    old = read_notes(folder).get("repository", repository)
    if old != repository:
        for name in (README, SETTINGS_FILE):
            text = (folder / name).read_text(encoding="utf-8")
            (folder / name).write_text(text.replace(f'"{old}"', f'"{repository}"'), encoding="utf-8")


def render_card(card: Card, widget: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text of README.md: front matter by a YAML writer, then Markdown."""
    # Imported late: it takes as long as the whole command line.
    from huggingface_hub.repocard_data import ModelCardData

    data = ModelCardData(**{**card.front, **({"widget": list(widget)} if widget else {})})
    body = _environment().get_template("card.md.jinja").render(card=card, gallery=bool(widget), curve=CURVE)
    return f"---\n{data.to_yaml()}\n---\n\n{body}"


def _named(media: Sequence[MediaRecord]) -> list[tuple[MediaRecord, str]]:
    """Previews with their names in `assets/`: image_<prompt>_<number>."""
    prompts = list(dict.fromkeys(each.short_name for each in media))
    counts = dict.fromkeys(prompts, -1)
    named = []
    for each in media[:MOST_MEDIA]:
        counts[each.short_name] += 1
        number = f"{prompts.index(each.short_name)}_{counts[each.short_name]}"
        named.append((each, f"image_{number}{Path(each.path).suffix}"))
    return named


def _shown(output_dir: Path, folder: Path, media: MediaRecord, name: str, card: Card) -> dict[str, Any]:
    """Copy a preview; returns its entry in the gallery."""
    shutil.copyfile(output_dir / media.path, folder / ASSETS / name)
    return {
        "text": media.prompt.strip() or UNPROMPTED,
        "parameters": {"negative_prompt": card.negative_prompt},
        "output": {"url": f"./{ASSETS}/{name}"},
    }


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as others may see them: without secrets, and without files and folders of this machine."""
    return {key: value for key, value in redact_settings(settings).items() if not _is_private(value)}


def _is_private(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_private, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_private, value))
    if not isinstance(value, str):
        return False
    with suppress(OSError, ValueError):  # too long for a path
        if Path(value).expanduser().exists():
            return True
    return HIDDEN in value or PATH.search(value) is not None


def draw_curve(points: Sequence[tuple[int, float]]) -> bytes:
    """A PNG of losses by step, with the lowest one marked."""
    from PIL import Image, ImageDraw, ImageFont

    width, height, edge = 960, 420, 48
    steps, losses = zip(*points, strict=True)
    low, high = min(losses), max(losses)
    first, last = steps[0], steps[-1]

    def at(step: int, loss: float) -> tuple[float, float]:
        across = (step - first) / max(last - first, 1)
        up = (loss - low) / ((high - low) or 1.0)
        return edge + across * (width - 2 * edge), height - edge - up * (height - 2 * edge)

    picture = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(16)
    for one, other in pairwise(at(*point) for point in points):
        draw.line([one, other], "#2563eb", 3)
    best = min(points, key=lambda point: point[1])
    draw.circle(at(*best), 6, "#2563eb")
    draw.text((edge, 12), f"Evaluation loss, lowest {best[1]:.4g} at step {best[0]:,}", "#111111", font)
    draw.text((edge, height - 32), f"step {first:,}", "#555555", font)
    draw.text((width - edge, height - 32), f"step {last:,}", "#555555", font, anchor="ra")
    draw.line([(edge, height - edge), (width - edge, height - edge)], "#bbbbbb")
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def plain(text: object) -> str:
    """Text as one line of Markdown that looks as it is written, also in a table."""
    return SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def fenced(text: str, language: str = "") -> str:
    """Text as a block of code, in a fence that it cannot close."""
    longest = max((len(each) for each in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(  # of Markdown: texts pass through `plain` or `fenced`
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(plain=plain, fenced=fenced)
    return environment
