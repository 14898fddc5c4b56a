"""Publish the result of a run, verified by loading it as users will, and name it in a program for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from torch import Tensor

from simpletuner.config.precision import transformer_dtype
from simpletuner.diffusion.batch import Batch
from simpletuner.headers import METADATA, read_header
from simpletuner.memory.precision import DTYPES
from simpletuner.models.registry import load_adapter
from simpletuner.models.usage import Usage
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact_texts
from simpletuner.reporting.report import Result
from simpletuner.training.ema import Ema
from simpletuner.training.guard import stop_if_result_not_finite
from simpletuner.training.manifest import LORA_FILE, PIPELINE_FOLDER, STEP_NOTE, describe_errors, result_step
from simpletuner.training.noise import add_noise
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import predict_now
from simpletuner.training.trained import Publication

DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "fp8": "bfloat16"}


def publish_result(
    plan: Plan, assembly: Assembly, ema: Ema | None, note: Mapping[str, str], read: Callable[[], Batch]
) -> str:
    """Write the result and check it; returns a message for the user.

    Args:
        read: loads a training batch, for results that are compared with what was trained on it.

    Raises:
        NonFiniteError: a weight is NaN or infinite; nothing is written.
        RuntimeError: the file does not load as it was saved.
    """
    if not assembly.world.is_main and assembly.trained.sharers.size == 1:
        return ""
    dtype = DTYPES[transformer_dtype(plan.config.precision)]
    shift, predict = plan.config.sampling_shift, partial(predict_once, assembly, read)
    publication = Publication(assembly.adapter, plan.source, dtype, shift, note, predict)
    with assembly.sampling_weights():
        stop_if_result_not_finite(assembly, ema)
        return assembly.trained.publish(plan.output_dir, publication, ema)


def predict_once(assembly: Assembly, read: Callable[[], Batch]) -> Tensor:
    """The prediction for a batch with the noise of step 0, as in previews."""
    assembly.transformer.eval()
    batch = read().to(assembly.accelerator.device)
    return predict_now(assembly, assembly.adapter.prepare(add_noise(assembly, batch, 0, 0)))


def weight_note(plan: Plan, state: TrainState) -> Mapping[str, str]:
    """Header entries of weight files: model, run, step and the user's comment."""
    note = {
        "modelspec.architecture": f"{plan.spec.name}/{plan.flavour.name}",
        "modelspec.title": plan.config.tracking.tracker_run_name,
        STEP_NOTE: str(state.global_step),
    }
    if plan.config.publish.trigger:  # Kandinsky's own program puts it before prompts
        note["trigger"] = plan.config.publish.trigger
    comment: Any = plan.config.publish.modelspec_comment
    if comment:
        text = comment if isinstance(comment, str) else "\n".join(map(str, comment))
        values = {
            "{current_step}": str(state.global_step),
            "{current_epoch}": str(state.epoch),
            "{timestamp}": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        note["modelspec.description"] = text
    return redact_texts(note)


def find_result(plan: Plan, step: int) -> Result | None:
    """The published file or folder with a program that uses it; None unless its own note says that it is of `step`."""
    model_type = plan.config.model.model_type
    if result_step(plan.output_dir, model_type) != step:
        return None
    path = plan.output_dir / (LORA_FILE if model_type == "lora" else PIPELINE_FOLDER)
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    notes = read_header(path).get(METADATA, {}) if path.is_file() else {}
    result = str(plan.output_dir if path.is_file() else path)
    snippet = snippet_for(plan, plan.source["transformer"].location, result)
    return Result(path.name, sum(each.stat().st_size for each in files), snippet, describe_errors(notes))


def snippet_for(plan: Plan, base: str, result: str) -> str:
    """A program that samples the newest preview of the main prompt; empty for LoRA files in ComfyUI's form.

    Args:
        base: hub id or folder of the base model, for a LoRA.
        result: hub id or folder of the LoRA, or of the fine-tuned pipeline.
    """
    config, is_lora = plan.config, plan.config.model.model_type == "lora"
    if is_lora and config.lora.lora_format == "comfyui":
        return ""
    validation = config.validation
    usage = Usage(
        model=base if is_lora else result,
        lora=result if is_lora else None,
        task=plan.flavour.task,
        dtype=DTYPE_NAMES[config.precision.mixed_precision],
        prompt=plan.prompts[-1].prompt if plan.prompts else "",
        negative_prompt=validation.validation_negative_prompt or "",
        size=plan.sizes[0],
        frames=validation.validation_num_video_frames or 1,
        frame_rate=validation.framerate or plan.spec.frame_rate or 1,
        steps=validation.validation_num_inference_steps or 30,
        guidance=validation.validation_guidance or 1.0,
        seed=plan.seed if validation.validation_seed is None else validation.validation_seed,
        options=config.family,
        shift=config.flow.flow_schedule_shift if config.is_explicit("flow_schedule_shift") else None,
        solver=validation.validation_noise_scheduler,
    )
    return load_adapter(plan.spec).usage_snippet(usage)
