"""Rules between the datasets and the settings of a run. Each function yields the problems it finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import FlowConfig, RunConfig
from simpletuner.data.buckets import Geometry
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problem, did_you_mean, warning, within
from simpletuner.models.adapter_kinds import adapter_kind
from simpletuner.models.registry import FAMILY_DATASET_KEYS
from simpletuner.plan.environment import check_folders

if TYPE_CHECKING:  # it checks by this module
    from simpletuner.plan.build import Plan

SMALLEST_RESOLUTION = 64  # pixels; a smaller number was probably meant as megapixels
MOST_CROPPED = 0.2  # share of a side that goes without a warning if nobody asked for a crop
OTHER_LAWS = ("flow_use_uniform_schedule", "flow_use_beta_schedule", "mixflow_enabled")


def check_datasets(plan: Plan) -> Iterator[Problem]:
    """Entries that nothing uses, keys without effect, and what evaluation lacks."""
    config, datasets = plan.config, plan.datasets
    yield from _check_kinds(config, plan.trained)
    yield from _check_previewed(config.validation.eval_dataset_id or [], datasets)
    for technique in config.techniques_in_use:
        yield from technique.check_datasets(config, datasets)
    evaluation = config.evaluation
    if evaluation.measures_loss and not any(each.config.dataset_type == "eval" for each in datasets):
        key = "eval_steps_interval" if evaluation.eval_steps_interval else "eval_epoch_interval"
        yield warning(key, "has no effect: no dataset has dataset_type eval, on which to measure the loss.")
    for dataset in datasets:
        yield from _check_resolution(config, dataset)
        yield from _check_cropping(dataset)
        yield from _check_noise_levels(config.flow, dataset)
        if dataset.config.slider_strength:
            yield from _check_slider(config, dataset)
        for key in sorted((FAMILY_DATASET_KEYS - plan.spec.words.dataset_keys) & dataset.config.model_fields_set):
            yield warning(f"{dataset.id}.{key}", f"has no effect: {plan.spec.title} does not use it.")
        if dataset.config.dataset_type == "eval":
            yield from _check_evaluated(plan, dataset)


def _check_evaluated(plan: Plan, dataset: Dataset) -> Iterator[Problem]:
    """What is made of an eval dataset: its loss, or previews that start from it."""
    measures_loss = plan.config.evaluation.measures_loss
    if measures_loss and plan.flavour.task == "i2i" and not dataset.references:
        message = "is required: without source pictures this flavour has no loss on the dataset."
        yield Problem(f"{dataset.id}.conditioning_data", message)
    elif not measures_loss and dataset.id not in (plan.config.validation.eval_dataset_id or []):
        yield warning(dataset.id, "is not used: set eval_steps_interval (loss) or eval_dataset_id (previews).")


def _check_noise_levels(flow: FlowConfig, dataset: Dataset) -> Iterator[Problem]:
    """A dataset's own noise levels need a law that they shift."""
    # Logit-normal has no key: it is what the others replace.
    law = next((key for key in OTHER_LAWS if getattr(flow, key)), None)
    if dataset.config.timestep_sampling_offset and law:
        message = f"is added before the sigmoid of logit-normal sigmas, and {law} has none; remove one of them."
        yield Problem(f"{dataset.id}.timestep_sampling_offset", message)


def _check_kinds(config: RunConfig, trained: Sequence[Dataset]) -> Iterator[Problem]:
    """Regularisation data needs a LoRA, and a LoRA for sliders data with a strength."""
    regularised = [each.id for each in trained if each.config.is_regularisation_data]
    if regularised and config.model.model_type == "full":
        message = "needs model_type lora: the base model is the one with the LoRA off."
        yield Problem(f"{regularised[0]}.is_regularisation_data", message)
    if config.lora.slider_lora_target and not any(each.config.slider_strength for each in trained):
        yield warning("slider_lora_target", "is on, but no trained dataset has a slider_strength: this is no slider.")


def _check_previewed(chosen: Sequence[str], datasets: Sequence[Dataset]) -> Iterator[Problem]:
    """Datasets chosen for previews must exist and should not be trained."""
    ids = [each.id for each in datasets]
    for name in chosen:
        if name not in ids:
            yield Problem("eval_dataset_id", f"{name!r} is no dataset ({', '.join(ids)}).{did_you_mean(name, ids)}")
    for each in datasets:
        if each.config.is_trained and each.id in chosen:
            message = f"{each.id} is also trained; give it dataset_type eval if it is for evaluation and previews only."
            yield warning("eval_dataset_id", message)


def _check_slider(config: RunConfig, dataset: Dataset) -> Iterator[Problem]:
    """What a strength can be multiplied with."""
    lora, key = config.lora, f"{dataset.id}.slider_strength"
    if not dataset.config.is_trained:
        yield warning(key, "has no effect: the dataset is not trained.")
    elif config.model.model_type == "full":
        yield Problem(key, "needs model_type lora: it is the strength of the LoRA.")
    elif reason := adapter_kind(lora).no_slider:
        yield Problem(key, f"{reason}.")
    elif dataset.config.is_regularisation_data:
        yield Problem(key, "cannot be combined with is_regularisation_data: that target is the model at strength 0.")
    elif lora.use_dora or lora.lora_init_type in ("olora", "pissa"):
        with_it = "use_dora" if lora.use_dora else f"lora_init_type {lora.lora_init_type}"
        yield Problem(key, f"cannot be combined with {with_it}: not all that it changes scales with the strength.")


def _check_resolution(config: RunConfig, dataset: Dataset) -> Iterator[Problem]:
    """A resolution in pixels that looks like megapixels."""
    resolution, kind = dataset.config.resolution, dataset.config.resolution_type
    if resolution is not None and resolution < SMALLEST_RESOLUTION and kind != "area":
        message = (
            f"{resolution:g} is in pixels, since resolution_type is {kind}; for megapixels set resolution_type area. "
            "(i_know_what_i_am_doing allows it.)"
        )
        yield Problem(f"{dataset.id}.resolution", message, fatal=not config.run.i_know_what_i_am_doing)


def _check_cropping(dataset: Dataset) -> Iterator[Problem]:
    """What is cropped only because of the multiple that sides are rounded to."""
    if dataset.config.crop or not dataset.config.is_trained or not dataset.samples:  # others follow a trained one
        return
    share, sample = max(((_cropped(each.geometry), each) for each in dataset.samples), key=itemgetter(0))
    if share > MOST_CROPPED:
        (width, height), resized = sample.geometry.size, sample.geometry.resized
        # The picture is wider than its bucket, by cross-multiplied ratios.
        side = "width" if resized[0] * height > resized[1] * width else "height"
        message = f"{share:.0%} of the {side} of {sample.name} is cropped: {width}x{height} is the nearest size"
        yield warning(f"{dataset.id}.resolution", f"{message} on the model's grid; a larger resolution crops less.")


def _cropped(geometry: Geometry) -> float:
    """The share of a side."""
    return 1 - min(kept / whole for kept, whole in zip(geometry.size, geometry.resized, strict=True))


def check_cache_folders(entries: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Cache paths that datasets name must not be files."""
    for entry in entries:
        yield from within(entry.id, check_folders({"cache_dir": entry.cache_dir, "cache_dir_vae": entry.cache_dir_vae}))
