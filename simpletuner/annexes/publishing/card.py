"""The model card of a run: `model_card/` in its output folder, uploaded with the weights.

README.md                describes the run; the hub reads its front matter
simpletuner_config.json  the settings, without secrets and paths of this machine
assets/                  previews of the step, and a curve of the evaluation loss
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image, ImageDraw, ImageFont

from simpletuner.annexes.figures import Columns, evaluation_points
from simpletuner.atomic import build_folder, write_json
from simpletuner.config.json_reader import read_json
from simpletuner.config.optimizers import learning_rate, optimizer_name
from simpletuner.config.paths import home_path
from simpletuner.config.precision import transformer_dtype
from simpletuner.errors import Problems
from simpletuner.hashing import hash_text
from simpletuner.headers import METADATA, read_header
from simpletuner.models.usage import Usage
from simpletuner.planning.checkpoint_folder import PIPELINE_FOLDER, describe_errors, result_step
from simpletuner.planning.plans import Plan
from simpletuner.planning.prompts import ValidationPrompt
from simpletuner.redaction import HIDDEN, redact, redact_settings
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    MediaRecord,
    read_media,
    read_rows,
)
from simpletuner.reporting.wording import size_text
from simpletuner.weights.lora_names import LORA_FILE
from simpletuner.weights.original import OriginalTransformer

CARD_FOLDER = "model_card"
README = "README.md"
SETTINGS_FILE = "simpletuner_config.json"
ASSETS = "assets"
MOST_MEDIA = 32  # previews in a gallery
UNPROMPTED = "unconditional (blank prompt)"  # the hub hides gallery entries without a text
# The owner in cards of runs that are not uploaded.
NOBODY = "your-name"
# An absolute path with a folder: `/data/`, `~/data/`, `C:\data\`, `\\server\data\`.
PATH = re.compile(r"""(?:^|[\s"'=(\[,])(?:~|[A-Za-z]:|\\)?[/\\][^\s/\\]+[/\\]""")
# Characters that Markdown interprets.
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")
PIPELINE_TAGS = {
    "t2i": "text-to-image",
    "i2i": "image-to-image",
    "t2v": "text-to-video",
    "i2v": "image-to-video",
}
# Settings of this machine.
PRIVATE = ("webhook_config", "post_checkpoint_script", "post_upload_script")
# optimum-quanto's names for base model precisions.
QUANTO_TYPES = {
    "int8": "qint8",
    "int4": "qint4",
    "int2": "qint2",
    "fp8": "qfloat8",
    "fp8uz": "qfloat8_e4m3fnuz",
}
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "fp8": "bfloat16"}


def describe_run(repository: str, plan: Plan, step: int, epoch: int) -> None:
    """Replace the model card of a run.

    The card describes the result if it was published at this step, else the checkpoint.

    Args:
        repository: `owner/name` on the hub.

    Raises:
        DiskFullError: no space; the old card is kept.
    """
    # Imported here: the import takes as long as starting the command line.
    from huggingface_hub.repocard_data import ModelCardData

    config = plan.config
    facts = card_facts(plan, repository, step, epoch)
    media = _named(read_media(plan.output_dir / MEDIA_FILE), step)
    explicit = {
        key: value
        for key, value in config.flat.items()
        if config.is_explicit(key) and key not in PRIVATE
    }
    settings = public_settings(explicit)
    # Equal for runs with equal settings, regardless of their names.
    recipe = hash_text(json.dumps(settings, sort_keys=True, default=str))[:16]
    values = {**facts, "gallery": bool(media), "recipe": recipe}
    negative_prompt = config.validation.validation_negative_prompt or ""
    with build_folder(plan.output_dir / CARD_FOLDER) as folder:
        (folder / ASSETS).mkdir()
        gallery = []
        for name, preview in media.items():
            shutil.copyfile(plan.output_dir / preview.path, folder / ASSETS / name)
            gallery.append(
                {
                    "text": preview.prompt.strip() or UNPROMPTED,
                    "parameters": {"negative_prompt": negative_prompt},
                    "output": {"url": f"./{ASSETS}/{name}"},
                }
            )
        if len(facts["evaluation"]) > 1:
            draw_curve(facts["evaluation"]).save(folder / ASSETS / "evaluation_loss.png")
        # Written by a YAML library, which quotes prompts safely.
        entries = {**front_matter(plan, facts["base"]), "widget": gallery or None}
        front = ModelCardData(**redact_settings(entries))
        text = f"---\n{front.to_yaml()}\n---\n\n{redact(_render('card.md.jinja', values))}"
        (folder / README).write_text(text, encoding="utf-8")
        notes = {
            "repository": repository,
            "step": step,
            "summary": redact(_render("commit.txt.jinja", values)),
        }
        write_json(folder / SETTINGS_FILE, {"_metadata": notes, "config": settings})


def read_notes(folder: Path) -> dict[str, Any]:
    """The metadata of a card: repository, step and summary; empty without a card."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return {}
    content = read_json(path, Problems())
    return dict(content["_metadata"]) if isinstance(content, dict) else {}


def move_card(output_dir: Path, repository: str) -> None:
    """Change the repository in the card of an output folder, if there is a card."""
    folder = output_dir / CARD_FOLDER
    old = read_notes(folder).get("repository", repository)
    if old == repository:
        return
    for path in (folder / README, folder / SETTINGS_FILE):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f'"{old}"', f'"{repository}"'), encoding="utf-8")


def _named(media: Sequence[MediaRecord], step: int) -> dict[str, MediaRecord]:
    """The previews of a step by their names in `assets/`: image_<prompt>_<number>."""
    previews = [record for record in media if record.step == step]
    prompts = list(dict.fromkeys(record.short_name for record in previews))
    counts: Counter[str] = Counter()
    named = {}
    for record in previews[:MOST_MEDIA]:
        number = counts[record.short_name]
        suffix = Path(record.path).suffix
        named[f"image_{prompts.index(record.short_name)}_{number}{suffix}"] = record
        counts[record.short_name] += 1
    return named


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without secrets, and without files and folders of this machine."""
    redacted = redact_settings(settings)
    return {key: value for key, value in redacted.items() if not _is_private(value)}


def _is_private(value: Any) -> bool:
    """Whether a value contains a secret, or a file or folder of this machine."""
    if isinstance(value, Mapping):
        return any(map(_is_private, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_private, value))
    if not isinstance(value, str):
        return False
    with suppress(OSError, ValueError):  # too long for a path
        # A bare name is private if such a file exists; PATH matches other paths.
        if home_path(value).exists():
            return True
    return HIDDEN in value or PATH.search(value) is not None


def draw_curve(points: Sequence[tuple[int, float]]) -> Image.Image:
    """Draw losses by step, with the lowest marked."""
    first_step, _ = points[0]
    last_step, _ = points[-1]
    best_step, lowest = min(points, key=itemgetter(1))
    steps = max(last_step - first_step, 1)
    rise = max(loss for _, loss in points) - lowest
    if rise == 0:
        rise = 1.0

    def position(step: int, loss: float) -> tuple[float, float]:
        # Margins of 48 in 960 x 420; y grows downwards.
        return 48 + 864 * (step - first_step) / steps, 372 - 324 * (loss - lowest) / rise

    picture = Image.new("RGB", (960, 420), "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(16)
    draw.line([position(step, loss) for step, loss in points], "#2563eb", 3)
    draw.circle(position(best_step, lowest), 6, "#2563eb")
    title = f"Evaluation loss, lowest {lowest:.4g} at step {best_step:,}"
    draw.text((48, 12), title, "#111111", font)
    draw.text((48, 388), f"step {first_step:,}", "#555555", font)
    draw.text((912, 388), f"step {last_step:,}", "#555555", font, anchor="ra")
    return picture


def plain(text: object) -> str:
    """Escape text as one line of Markdown, also for tables."""
    return SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def fenced(text: str, language: str = "") -> str:
    """Text as a code block, in a fence longer than any run of backticks in the text."""
    runs = re.findall("`+", text)
    longest = max(map(len, runs), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Render a Markdown template; user texts pass through `plain` or `fenced`."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(plain=plain, fenced=fenced)
    return environment.get_template(template).render(values)


def card_facts(plan: Plan, repository: str, step: int, epoch: int) -> dict[str, Any]:
    """The values for the templates."""
    config = plan.config
    base = plan.source["transformer"]
    # A local path is meaningless to other users.
    base_name = plan.flavour.base_model if base.is_local else base.location
    rows = (row for row in read_rows(plan.output_dir / METRICS_FILE) if row["step"] <= step)
    pipeline = pipeline_location(plan, base_name)
    return {
        "plan": plan,
        "config": config,
        "repository": repository,
        "step": step,
        "epoch": epoch,
        "base": base_name,
        "is_lora": config.model.model_type == "lora",
        "learning_rate": learning_rate(config.optimizer, config.model.model_type),
        "optimizer": optimizer_name(config.optimizer, config.precision.mixed_precision),
        "precision": transformer_dtype(config.precision),
        "options": public_settings(config.family.of(plan.spec.options).model_dump()),
        "result": published_result(plan, step),
        "snippet": example_program(plan, pipeline, repository, alone=True),
        "quanto": QUANTO_TYPES.get(config.precision.base_model_precision.removesuffix("-quanto")),
        "evaluation": evaluation_points(Columns.of(rows)),
    }


def front_matter(plan: Plan, base: str) -> dict[str, Any]:
    """The front matter, without the gallery."""
    publish = plan.config.publish
    model_type = plan.config.model.model_type
    family = plan.spec.name
    pipeline = PIPELINE_TAGS[plan.flavour.task]
    safety = "safe-for-work" if publish.model_card_safe_for_work else "not-for-all-audiences"
    tags = [
        family,
        f"{family}-diffusers",
        pipeline,
        "diffusers",
        "simpletuner",
        safety,
        model_type,
    ]
    relation = "finetune"
    if model_type == "lora":
        relation = "adapter"
        # The template tag makes the hub show the gallery of a LoRA.
        tags += ["template:sd-lora", plan.config.lora.kind.lower()]
    return {
        "license": plan.spec.license,
        "base_model": base,
        "base_model_relation": relation,
        "library_name": "diffusers",
        "pipeline_tag": pipeline,
        "tags": list(dict.fromkeys(tags)),
        "instance_prompt": publish.trigger or None,
    }


def published_result(plan: Plan, step: int) -> dict[str, str] | None:
    """The published result of a finished run; None unless it was published at `step`.

    Returns:
        path: file or folder, relative to the output folder.
        size: size as text.
        snippet: a Python program that loads the result and samples.
        errors: conversion errors as text, for a LoRA converted from another adapter.
    """
    model_type = plan.config.model.model_type
    if result_step(plan.output_dir, model_type) != step:
        return None
    path = plan.output_dir / (LORA_FILE if model_type == "lora" else PIPELINE_FOLDER)
    if path.is_file():
        result = plan.output_dir
        files = [path]
        notes = read_header(path)[METADATA]
    else:
        result = path
        files = [file for file in path.rglob("*") if file.is_file()]
        notes = {}
    pipeline = pipeline_location(plan, plan.source["transformer"].location)
    return {
        "path": path.name,
        "size": size_text(sum(file.stat().st_size for file in files)),
        "snippet": example_program(plan, pipeline, str(result)),
        "errors": describe_errors(notes),
    }


def takes_original(plan: Plan) -> bool:
    """Whether the transformer is in a repository of its own, in the original form."""
    return isinstance(plan.source["transformer"], OriginalTransformer)


def pipeline_location(plan: Plan, base: str) -> str:
    """Where the pipeline of the base model is loaded from."""
    return plan.flavour.repository if takes_original(plan) else base


def example_program(plan: Plan, base: str, result: str, *, alone: bool = False) -> str:
    """A program that samples the newest preview of the main prompt.

    Empty for a LoRA in ComfyUI's form, which diffusers cannot load.

    Args:
        base: hub id or folder of the base model, for a LoRA.
        result: hub id or folder of the LoRA, or of the fine-tuned pipeline.
        alone: for readers who do not have this program.
    """
    config = plan.config
    is_lora = config.model.model_type == "lora"
    if is_lora and config.lora.lora_format == "comfyui":
        return ""
    validation = config.validation
    shown = plan.prompts[-1] if plan.prompts else ValidationPrompt("", "", "")
    seed = plan.seed if validation.validation_seed is None else validation.validation_seed
    usage = Usage(
        model=base if is_lora else result,
        lora=result if is_lora else None,
        task=plan.flavour.task,
        dtype=DTYPE_NAMES[config.precision.mixed_precision],
        prompt=shown.prompt,
        negative_prompt=validation.validation_negative_prompt or "",
        size=shown.sizes_among(plan.sizes)[0],
        frames=validation.validation_num_video_frames or 1,
        frame_rate=validation.framerate or plan.spec.frame_rate or 1,
        steps=validation.validation_num_inference_steps or 30,
        guidance=shown.guidance or validation.validation_guidance or 1.0,
        seed=seed if shown.seed is None else shown.seed,
        options=config.family,
        shift=config.sampling_shift,
        solver=validation.validation_noise_scheduler,
        alone=alone,
        original=plan.flavour.original if takes_original(plan) else None,
    )
    # Imported here: it imports torch, which the checks of uploads do without.
    from simpletuner.models.adapter import load_adapter

    return load_adapter(plan.spec).usage_snippet(usage)
