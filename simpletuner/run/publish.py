"""The end of a run: the result where users look for it, loaded once the way they will load it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from torch import Tensor

from simpletuner.atomic import UNFINISHED_FOLDER_SUFFIX, build_folder
from simpletuner.models.source import Part
from simpletuner.plan.build import Plan
from simpletuner.training.checkpoints import lora_names
from simpletuner.training.ema import Ema
from simpletuner.training.lora import verify_file
from simpletuner.training.manifest import LORA_FILE, PIPELINE_FOLDER
from simpletuner.training.state import Assembly, TrainState

INDEX_FILE = "model_index.json"


def publish(plan: Plan, assembly: Assembly, ema: Ema | None, note: Mapping[str, str]) -> str:
    """Write the result and check it; returns what to tell the user.

    Raises:
        RuntimeError: the file does not load as it was saved.
    """
    if not assembly.world.is_main:
        return ""
    with assembly.sampling_weights():
        if assembly.lora is None:
            return _publish_pipeline(plan, assembly, ema)
        if ema is not None:
            _publish_lora(plan.output_dir / "ema", assembly, note, lora_names(ema.average))
        path, checked = _publish_lora(plan.output_dir, assembly, note)
    size = path.stat().st_size / 1e6
    loads = "load through the stock pipeline as they were trained"
    if assembly.lora.form == "comfyui":
        loads = "are what was trained, under the names that ComfyUI looks for"
    return f"Saved {path} ({size:.1f} MB); all {checked} tensors {loads}."


def weight_note(plan: Plan, state: TrainState) -> Mapping[str, str]:
    """Entries for the header of weight files: what they belong to, and the user's comment."""
    note = {
        "modelspec.architecture": f"{plan.spec.name}/{plan.flavour.name}",
        "modelspec.title": plan.config.tracking.tracker_run_name,
        "simpletuner.step": str(state.global_step),
    }
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
    return note


def _publish_lora(
    folder: Path, assembly: Assembly, note: Mapping[str, str], weights: Mapping[str, Tensor] | None = None
) -> tuple[Path, int]:
    """A LoRA file that takes its place only after it was loaded and compared; and how many tensors it has."""
    if assembly.lora is None:
        raise RuntimeError("there is no LoRA to publish")
    trial = folder / f"unverified{UNFINISHED_FOLDER_SUFFIX}"
    candidate = assembly.lora.save(trial, weights=weights, note=note)
    checked = verify_file(candidate, assembly.lora, assembly.adapter.load_bare_pipeline(), weights)
    final = candidate.replace(folder / LORA_FILE)
    trial.rmdir()
    return final, checked


def _publish_pipeline(plan: Plan, assembly: Assembly, ema: Ema | None) -> str:
    """A complete folder for `from_pretrained`: the trained transformer beside copies of the other parts."""
    transformer: Any = assembly.accelerator.unwrap_model(assembly.transformer)
    with build_folder(plan.output_dir / PIPELINE_FOLDER) as folder:
        for role, part in plan.source.parts.items():
            if role != "transformer":
                shutil.copytree(part.fetch(), folder / part.folder, symlinks=False)
        shutil.copyfile(_index_file(plan.source["scheduler"]), folder / INDEX_FILE)
        if ema is None:
            transformer.save_pretrained(folder / "transformer")
        else:
            with ema.applied():
                transformer.save_pretrained(folder / "transformer")
    return f"Saved {plan.output_dir / PIPELINE_FOLDER}; it loads with from_pretrained."


def _index_file(part: Part) -> Path:
    if part.is_local:
        return Path(part.location).expanduser() / INDEX_FILE
    return Path(hf_hub_download(part.location, INDEX_FILE, revision=part.revision))
