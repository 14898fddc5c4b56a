"""The facts of a run that its model card shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simpletuner.config.load import RunConfig
from simpletuner.config.lora import LoraConfig
from simpletuner.config.optimizers import learning_rate, optimizer_name
from simpletuner.config.precision import transformer_dtype
from simpletuner.config.schema import PLAIN_PRECISIONS
from simpletuner.data.dataset import Dataset
from simpletuner.models.spec import Task
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact
from simpletuner.reporting.card import Card, public_settings, write_card
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, read_media, read_steps
from simpletuner.reporting.sheet import evaluation_points
from simpletuner.run.records import find_result, snippet_for

PIPELINE_TAGS: Mapping[Task, str] = {
    "t2i": "text-to-image", "i2i": "image-to-image", "t2v": "text-to-video", "i2v": "image-to-video",
}  # fmt: skip
# What the settings are told without: they are for one machine.
PRIVATE = ("webhook_config", "publishing_config", "post_checkpoint_script", "post_upload_script")
QUANTO_TYPES = {"int8": "qint8", "int4": "qint4", "int2": "qint2", "fp8": "qfloat8", "fp8uz": "qfloat8_e4m3fnuz"}


def describe(plan: Plan, repository: str, step: int, epoch: int) -> None:
    """Write the model card of a run as of a step: of its result if that is of this step, else of a checkpoint."""
    config, folder = plan.config, plan.output_dir
    settings = {key: value for key, value in config.flat().items() if config.is_explicit(key) and key not in PRIVATE}
    public, base = public_settings(settings), _base(plan)
    is_lora, average = config.model.model_type == "lora", config.ema.use_ema
    media = [each for each in read_media(folder / MEDIA_FILE) if each.step == step]
    rows = [row for row in read_steps(folder / METRICS_FILE) if row["step"] <= step]
    card = Card(
        title=redact(config.tracking.tracker_run_name),
        front=_front(plan, base),
        repository=repository,
        settings=public,
        summary="\n".join(_summary(plan, base, step, epoch)),
        subtitle=f"{config.lora.kind if is_lora else 'Full fine-tune'} on {plan.spec.title} ({plan.flavour.name})",
        step=step,
        local_base=plan.source["transformer"].is_local,
        prompt=redact(plan.prompts[-1].prompt) if plan.prompts else "",
        negative_prompt=redact(config.validation.validation_negative_prompt or ""),
        validation=[(name, str(value)) for name, value in _validation(plan)],
        training=[(name, str(value)) for name, value in _training(plan, step, epoch, public)],
        adapter=[(name, str(value)) for name, value in _adapter(config.lora, plan)] if is_lora else (),
        datasets=list(_datasets(plan.trained)),
        evaluation=evaluation_points(rows),
        checked=_checked(plan, step),
        snippet=snippet_for(plan, base, repository),
        quantise="\n".join(_quantise(config.precision.base_model_precision)),
        ema=_average(is_lora) if average else "",
        note=redact(config.publish.model_card_note or ""),
        media=media,
    )
    write_card(folder, card)


def _base(plan: Plan) -> str:
    """The base model on the hub; for one from a folder, that of the flavour."""
    part = plan.source["transformer"]
    return plan.flavour.repository if part.is_local else part.location


def _front(plan: Plan, base: str) -> dict[str, Any]:
    publish, kind = plan.config.publish, plan.config.model.model_type
    pipeline, is_lora = PIPELINE_TAGS[plan.flavour.task], kind == "lora"
    safety = "safe-for-work" if publish.model_card_safe_for_work else "not-for-all-audiences"
    # The template tag makes the hub show the gallery of a LoRA.
    adapter = ["template:sd-lora", plan.config.lora.kind.lower()] if is_lora else []
    tags = [plan.spec.name, f"{plan.spec.name}-diffusers", pipeline, "diffusers", "simpletuner", safety, kind, *adapter]
    trigger = {"instance_prompt": publish.trigger} if publish.trigger else {}
    return {
        "license": plan.spec.license,
        "base_model": base,
        "base_model_relation": "adapter" if is_lora else "finetune",
        "library_name": "diffusers",
        "pipeline_tag": pipeline,
        "tags": list(dict.fromkeys(tags)),
        **trigger,
    }


def _summary(plan: Plan, base: str, step: int, epoch: int) -> Iterator[str]:
    """The message of the commit."""
    yield f"Trained for {epoch} epoch{'s' if epoch > 1 else ''} and {step} steps."
    yield ""
    yield f"Datasets: {', '.join(each.id for each in plan.trained)}"
    yield f"Learning rate: {learning_rate(plan.config.optimizer, plan.config.model.model_type):g}"
    yield f"Batch size: {_effective_batch(plan.config)}"
    yield "Training objective: flow matching."
    yield f"Base model: {base}"


def _effective_batch(config: RunConfig) -> int:
    schedule = config.schedule
    return schedule.train_batch_size * schedule.gradient_accumulation_steps * config.launch.num_processes


def _validation(plan: Plan) -> Iterator[tuple[str, object]]:
    validation = plan.config.validation
    yield "Guidance", f"{validation.validation_guidance or 1.0:g}"
    yield "Steps", validation.validation_num_inference_steps
    yield "Sampler", validation.validation_noise_scheduler or "of the pipeline"
    yield "Seed", plan.seed if validation.validation_seed is None else validation.validation_seed
    yield "Size", ", ".join(f"{width}x{height}" for width, height in plan.sizes)
    if plan.frame_rate:
        yield "Frames", f"{validation.validation_num_video_frames} at {plan.frame_rate:g} per second"
    if validation.validation_negative_prompt:
        yield "Negative prompt", redact(validation.validation_negative_prompt)


def _training(plan: Plan, step: int, epoch: int, public: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    config = plan.config
    optimizer, schedule = config.optimizer, config.schedule
    rate, batch = learning_rate(optimizer, config.model.model_type), _effective_batch(config)
    yield "Steps, epochs", f"{step} of {plan.length.total_steps}, {epoch}"
    yield "Learning rate", f"{rate:g}, {optimizer.lr_scheduler}, {optimizer.lr_warmup_steps} steps of warm-up"
    clipped = f"{optimizer.grad_clip_method} {optimizer.max_grad_norm:g}" if optimizer.max_grad_norm else "none"
    yield "Gradient clipping", clipped
    parts = (schedule.train_batch_size, schedule.gradient_accumulation_steps, config.launch.num_processes)
    yield "Batch size", f"{batch} ({parts[0]} x {parts[1]} micro-steps x {parts[2]} processes)"
    yield "Optimizer", f"{optimizer_name(optimizer, config.precision.mixed_precision)} {_extra(optimizer)}".strip()
    yield "Objective", f"flow matching, shift {config.flow.flow_schedule_shift or 'of the model'}"
    yield "Precision", f"{transformer_dtype(config.precision)}, base {config.precision.base_model_precision}"
    yield "Activation checkpointing", "yes" if config.precision.gradient_checkpointing else "no"
    yield "Caption dropout", f"{config.text.caption_dropout_probability:g}"
    yield "Seed", plan.seed
    for name, value in config.family.of(plan.spec.options).model_dump().items():
        if name in public or not name.endswith("_path"):
            yield name, value
    recipe = json.dumps(public, sort_keys=True, default=str).encode()
    yield "Recipe", hashlib.sha256(recipe).hexdigest()[:16]


def _extra(optimizer: Any) -> str:
    return f"({optimizer.optimizer_config})" if optimizer.optimizer_config else ""


def _adapter(lora: LoraConfig, plan: Plan) -> Iterator[tuple[str, object]]:
    targets = plan.lora_targets
    yield "Kind", f"{lora.kind}{' (DoRA)' if lora.use_dora else ''}"
    yield "Rank, alpha, dropout", f"{lora.lora_rank}, {lora.alpha:g}, {lora.lora_dropout:g}"
    yield "Start", "init_lora" if lora.init_lora else lora.lora_init_type
    yield "Layers", targets if isinstance(targets, str) else ", ".join(sorted(targets))
    yield "Names in the file", lora.lora_format


def _datasets(datasets: Sequence[Dataset]) -> Iterator[dict[str, str]]:
    drawn = {each.id: len(each.samples) * (each.repeats + 1) for each in datasets}
    for each in datasets:
        config = each.config
        yield {
            "dataset": each.id,
            "files used": f"{len(each.samples)} of {len(each.samples) + len(each.rejected)}",
            "repeats": str(each.repeats),
            "share": f"{drawn[each.id] / sum(drawn.values()):.0%}",
            "resolution": f"{config.resolution:g} ({config.resolution_type})",
            "crop": f"{config.crop_style}, {config.crop_aspect}" if config.crop else "no",
            "batch": str(each.batch_size),
            "regularisation": "yes" if config.is_regularisation_data else "no",
        }


def _checked(plan: Plan, step: int) -> str:
    result = find_result(plan, step)
    if result is None:
        return ""
    if result.errors:
        update, prediction = (*result.errors, "unknown")[:2]
        return (
            "the LoRA is a conversion of the trained adapter, whose own file is beside it. It loads through the stock "
            f"pipeline; its relative error is {update} of the update, {prediction} of a prediction."
        )
    if not result.snippet:
        return "every tensor is what was trained, under the names that ComfyUI looks for."
    return "the weights load through the stock pipeline, and every tensor is what was trained."


def _quantise(precision: str) -> Iterator[str]:
    """Lines that quantise a base with quanto; the other libraries' have no such short form."""
    name, _, library = precision.partition("-")
    if precision not in PLAIN_PRECISIONS and library in ("", "quanto") and name in QUANTO_TYPES:
        yield f"from optimum.quanto import freeze, {QUANTO_TYPES[name]}, quantize"
        yield ""
        yield f"quantize(pipe.transformer, weights={QUANTO_TYPES[name]})"
        yield "freeze(pipe.transformer)"


def _average(is_lora: bool) -> str:
    if is_lora:
        return "`ema/` holds the moving average (EMA) of the weights in the same form."
    return "The weights are the moving average (EMA) of those that were trained."
