"""The facts of a run that its model card shows; `reporting/card.md.jinja` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from simpletuner.annexes.publishing.card import NOBODY, public_settings, write_card
from simpletuner.annexes.publishing.report import example_program, published_result
from simpletuner.annexes.publishing.upload import Destination, Hub
from simpletuner.annexes.publishing.uploads import Uploads
from simpletuner.config.optimizers import learning_rate, optimizer_name
from simpletuner.config.precision import transformer_dtype
from simpletuner.config.publishing import repository_name
from simpletuner.plan.build import Plan
from simpletuner.reporting.curves import evaluation_points
from simpletuner.reporting.events import EventStream
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, Columns, read_media, read_rows

PIPELINE_TAGS = {"t2i": "text-to-image", "i2i": "image-to-image", "t2v": "text-to-video", "i2v": "image-to-video"}
# Settings for one machine.
PRIVATE = ("webhook_config", "publishing_config", "post_checkpoint_script", "post_upload_script")
# Names that optimum-quanto has for the precisions of a base model.
QUANTO_TYPES = {"int8": "qint8", "int4": "qint4", "int2": "qint2", "fp8": "qfloat8", "fp8uz": "qfloat8_e4m3fnuz"}


def open_uploads(plan: Plan, destinations: Sequence[Destination], events: EventStream) -> Uploads:
    """What uploads checkpoints and the result of a run with its model card, and runs the user's scripts.

    Args:
        destinations: they are prepared.
    """
    publish, tracking = plan.config.publish, plan.config.tracking
    name = repository_name(publish.hub_model_id or tracking.tracker_project_name)
    hubs = [place.repository for place in destinations if isinstance(place, Hub)]
    repository = hubs[0] if hubs else name if "/" in name else f"{NOBODY}/{name}"
    describe = partial(describe_run, repository)
    return Uploads(publish, plan.output_dir, tracking.tracker_run_name, destinations, events, describe)


def describe_run(repository: str, plan: Plan, step: int, epoch: int) -> None:
    """Write the model card of a run as of a step: of its result if that is of this step, else of a checkpoint.

    Args:
        repository: `owner/name` on the hub.
    """
    config, folder, base = plan.config, plan.output_dir, plan.source["transformer"]
    base_name = plan.flavour.repository if base.is_local else base.location
    chosen = {key: value for key, value in config.flat().items() if config.is_explicit(key) and key not in PRIVATE}
    facts: dict[str, Any] = {
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
        "snippet": example_program(plan, base_name, repository),
        "quanto": QUANTO_TYPES.get(config.precision.base_model_precision.removesuffix("-quanto")),
        "evaluation": evaluation_points(
            Columns.of(row for row in read_rows(folder / METRICS_FILE) if row["step"] <= step)
        ),
    }
    media = [each for each in read_media(folder / MEDIA_FILE) if each.step == step]
    write_card(folder, _front(plan, base_name), facts, public_settings(chosen), media)


def _front(plan: Plan, base: str) -> dict[str, Any]:
    """The front matter, except for the gallery."""
    publish, kind, family = plan.config.publish, plan.config.model.model_type, plan.spec.name
    pipeline = PIPELINE_TAGS[plan.flavour.task]
    safety = "safe-for-work" if publish.model_card_safe_for_work else "not-for-all-audiences"
    # The template tag makes the hub show the gallery of a LoRA.
    adapter = ["template:sd-lora", plan.config.lora.kind.lower()] if kind == "lora" else []
    tags = [family, f"{family}-diffusers", pipeline, "diffusers", "simpletuner", safety, kind, *adapter]
    return {
        "license": plan.spec.license,
        "base_model": base,
        "base_model_relation": "adapter" if kind == "lora" else "finetune",
        "library_name": "diffusers",
        "pipeline_tag": pipeline,
        "tags": list(dict.fromkeys(tags)),
        "instance_prompt": publish.trigger or None,
    }
