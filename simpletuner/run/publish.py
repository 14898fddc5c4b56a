"""Publish the result of a run, verified by loading it as users will."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from torch import Tensor

from simpletuner.config.precision import transformer_dtype
from simpletuner.diffusion.batch import Batch
from simpletuner.memory.precision import DTYPES
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact_texts
from simpletuner.training.ema import Ema
from simpletuner.training.guard import stop_if_result_not_finite
from simpletuner.training.manifest import STEP_NOTE
from simpletuner.training.noise import add_noise
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import predict_now
from simpletuner.training.trained import Publication


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
