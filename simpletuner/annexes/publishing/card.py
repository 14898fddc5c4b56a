"""The model card of a run: `model_card/` in its output folder, with all that stands beside weights in a repository.

README.md                what the run was; its front matter is what the hub reads
simpletuner_config.json  the settings, without secrets and without what is known on this machine only
assets/                  previews of the step, and the evaluation loss as a picture

Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image, ImageDraw, ImageFont

from simpletuner.atomic import build_folder, write_json
from simpletuner.config.json_files import read_json
from simpletuner.redaction import HIDDEN, redact, redact_settings
from simpletuner.reporting.metrics import MediaRecord

CARD_FOLDER, README, SETTINGS_FILE, ASSETS = "model_card", "README.md", "simpletuner_config.json", "assets"
CURVE = "evaluation_loss.png"
MOST_MEDIA = 32  # previews in a gallery
UNPROMPTED = "unconditional (blank prompt)"  # the hub shows no gallery entry without a text
# Whoever has not named a repository is known by this.
NOBODY = "your-name"
PATH = re.compile(r"""(?:^|[\s"'=(\[,])(?:~|[A-Za-z]:|\\)?[/\\][^\s/\\]+[/\\]""")
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")


def write_card(
    output_dir: Path,
    front: Mapping[str, Any],
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    media: Sequence[MediaRecord],
) -> None:
    """Replace the card of a run.

    Args:
        front: the front matter, except for the gallery.
        facts: what the templates show, `repository` and `step` among it.
        settings: public ones, see `public_settings`.

    Raises:
        DiskFullError: there was no space; the old card is kept.
    """
    recipe = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
    values = {"front": front, "curve": CURVE, "gallery": bool(media), "recipe": recipe, **facts}
    negative = facts["config"].validation.validation_negative_prompt or ""
    with build_folder(output_dir / CARD_FOLDER) as folder:
        (folder / ASSETS).mkdir()
        widget = []
        for media_file, name in _named(media):
            shutil.copyfile(output_dir / media_file.path, folder / ASSETS / name)
            text = media_file.prompt.strip() or UNPROMPTED
            shown = {"parameters": {"negative_prompt": negative}, "output": {"url": f"./{ASSETS}/{name}"}}
            widget.append({"text": text, **shown})
        if len(facts["evaluation"]) > 1:
            draw_curve(facts["evaluation"]).save(folder / ASSETS / CURVE)
        text = front_matter({**front, "widget": widget or None}) + redact(_render("card.md.jinja", values))
        (folder / README).write_text(text, encoding="utf-8")
        notes = {key: facts[key] for key in ("repository", "step")}
        notes["summary"] = redact(_render("commit.txt.jinja", values))
        write_json(folder / SETTINGS_FILE, {"_metadata": notes, "config": dict(settings)})


def front_matter(data: Mapping[str, Any]) -> str:
    """Front matter by a YAML writer, whatever texts there are in it; secrets are hidden."""
    # Imported late: it takes as long as the whole command line.
    from huggingface_hub.repocard_data import ModelCardData

    return f"---\n{ModelCardData(**redact_settings(data)).to_yaml()}\n---\n\n"


def read_notes(folder: Path) -> dict[str, Any]:
    """What a card notes about itself: repository, step and summary; empty if there is no card."""
    content = read_json(folder / SETTINGS_FILE, []) if (folder / SETTINGS_FILE).is_file() else None
    return dict(content["_metadata"]) if isinstance(content, dict) else {}


def move_card(output_dir: Path, repository: str) -> None:
    """Let the card in an output folder, if there is one, name another repository."""
    folder = output_dir / CARD_FOLDER
    old = read_notes(folder).get("repository", repository)
    for path in (folder / README, folder / SETTINGS_FILE) if old != repository else ():
        path.write_text(path.read_text(encoding="utf-8").replace(f'"{old}"', f'"{repository}"'), encoding="utf-8")


def _named(media: Sequence[MediaRecord]) -> Iterator[tuple[MediaRecord, str]]:
    """Previews with their names in `assets/`: image_<prompt>_<number>."""
    prompts = list(dict.fromkeys(each.short_name for each in media))
    counts = Counter[str]()
    for each in media[:MOST_MEDIA]:
        yield each, f"image_{prompts.index(each.short_name)}_{counts[each.short_name]}{Path(each.path).suffix}"
        counts[each.short_name] += 1


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


def draw_curve(points: Sequence[tuple[int, float]]) -> Image.Image:
    """Losses by step, with the lowest one marked."""
    (first, _), (last, _), best = points[0], points[-1], min(points, key=lambda point: point[1])
    span, rise = max(last - first, 1), (max(loss for _, loss in points) - best[1]) or 1.0

    def at(point: tuple[int, float]) -> tuple[float, float]:
        return 48 + 864 * (point[0] - first) / span, 372 - 324 * (point[1] - best[1]) / rise

    picture = Image.new("RGB", (960, 420), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(16)
    draw.line([at(point) for point in points], "#2563eb", 3)
    draw.circle(at(best), 6, "#2563eb")
    draw.text((48, 12), f"Evaluation loss, lowest {best[1]:.4g} at step {best[0]:,}", "#111111", font)
    draw.text((48, 388), f"step {first:,}", "#555555", font)
    draw.text((912, 388), f"step {last:,}", "#555555", font, anchor="ra")
    return picture


def plain(text: object) -> str:
    """Text as one line of Markdown that looks as it is written, also in a table."""
    return SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def fenced(text: str, language: str = "") -> str:
    """Text as a block of code, in a fence that it cannot close."""
    longest = max((len(each) for each in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _render(template: str, values: Mapping[str, Any]) -> str:
    """A text from a template: unlike pages it is no HTML; texts of users pass through `plain` or `fenced`."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(plain=plain, fenced=fenced)
    return environment.get_template(template).render(values)
