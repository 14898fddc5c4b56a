"""Rules between settings and datasets."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import RunConfig
from simpletuner.data.buckets import Geometry
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problem, Problems, did_you_mean
from simpletuner.models.adapter_kinds import adapter_kind
from simpletuner.models.registry import FAMILY_DATASET_KEYS
from simpletuner.planning.environment import check_folders
from simpletuner.planning.plans import Model
from simpletuner.planning.techniques.table import ruling_techniques

SMALLEST_RESOLUTION = 64  # pixels; a smaller number was probably meant as megapixels
MOST_CROPPED = 0.2  # share of a side that may be cropped without a warning if `crop` is off
# Keys that replace the logit-normal distribution of sigmas.
OTHER_DISTRIBUTIONS = ("flow_use_uniform_schedule", "flow_use_beta_schedule")


def check_datasets(model: Model, datasets: Sequence[Dataset], report: Problems) -> None:
    """Entries that nothing uses, keys without effect, and what evaluation lacks."""
    config = model.config
    trained = [dataset for dataset in datasets if dataset.config.is_trained]
    _check_kinds(config, trained, report)
    _check_previewed(config.validation.eval_dataset_id or [], datasets, report)
    for technique in ruling_techniques(config):
        technique.check_datasets(config, datasets, report)
    for dataset in datasets:
        _check_resolution(model, dataset, report)
        _check_cropping(dataset, report)
        _check_noise_levels(config, dataset, report)
        if dataset.config.slider_strength:
            _check_slider(config, dataset, report)
        unused = FAMILY_DATASET_KEYS - model.spec.captions.dataset_keys
        for key in sorted(unused & dataset.config.model_fields_set):
            message = f"has no effect: {model.spec.title} does not use it."
            report.warn(f"{dataset.id}.{key}", message)
        if dataset.config.dataset_type == "eval":
            _check_evaluated(model, dataset, report)


def _check_evaluated(model: Model, dataset: Dataset, report: Problems) -> None:
    """An eval dataset needs a use: its loss, or previews that start from it."""
    measures_loss = model.config.evaluation.measures_loss
    if measures_loss and model.flavour.task == "i2i" and not dataset.references:
        message = "is required: without source pictures this flavour has no loss on the dataset."
        report.error(f"{dataset.id}.conditioning_data", message)
    elif not measures_loss and dataset.id not in (model.config.validation.eval_dataset_id or []):
        report.warn(
            dataset.id, "is not used: set eval_steps_interval (loss) or eval_dataset_id (previews)."
        )


def _check_noise_levels(config: RunConfig, dataset: Dataset, report: Problems) -> None:
    """An offset of a dataset's noise levels needs a distribution that it shifts."""
    if not dataset.config.timestep_sampling_offset:
        return
    # Logit-normal has no key of its own: it applies unless one of these is set.
    distributions = [key for key in OTHER_DISTRIBUTIONS if config.flat[key]]
    if distributions:
        message = (
            f"is added before the sigmoid of logit-normal sigmas, and {distributions[0]} has none; "
            "remove one of them."
        )
        report.error(f"{dataset.id}.timestep_sampling_offset", message)


def _check_kinds(config: RunConfig, trained: Sequence[Dataset], report: Problems) -> None:
    """Check regularisation data, and that a LoRA for sliders has data with a strength.

    Regularisation data needs a LoRA, whose base model is the target, and another dataset.
    """
    regularised = [dataset.id for dataset in trained if dataset.config.is_regularisation_data]
    drawn = [dataset for dataset in trained if dataset.config.probability > 0]
    if drawn and all(dataset.config.is_regularisation_data for dataset in drawn):
        report.error(
            f"{drawn[0].id}.is_regularisation_data",
            "is set on every dataset that is trained, so the only target would be the base model "
            "itself. Remove it, or add a dataset without it.",
        )
    if regularised and config.model.model_type == "full":
        message = "needs model_type lora: the base model is the one with the LoRA off."
        report.error(f"{regularised[0]}.is_regularisation_data", message)
    has_strength = any(dataset.config.slider_strength for dataset in trained)
    if config.lora.slider_lora_target and not has_strength:
        message = (
            "no dataset sets slider_strength: "
            "the run trains an ordinary LoRA, on a slider's layers."
        )
        report.warn("slider_lora_target", message)


def _check_previewed(chosen: Sequence[str], datasets: Sequence[Dataset], report: Problems) -> None:
    """Datasets chosen for previews must exist and should not be trained."""
    ids = [dataset.id for dataset in datasets]
    for name in chosen:
        if name not in ids:
            message = f"{name!r} is not a dataset id; choose from {', '.join(ids)}."
            report.error("eval_dataset_id", message + did_you_mean(name, ids))
    for dataset in datasets:
        if dataset.config.is_trained and dataset.id in chosen:
            advice = "give it dataset_type eval if it is for evaluation and previews only."
            report.warn("eval_dataset_id", f"{dataset.id} is also trained; {advice}")


def _check_slider(config: RunConfig, dataset: Dataset, report: Problems) -> None:
    """A strength multiplies a LoRA that scales with it."""
    if not dataset.config.is_trained:
        return
    lora = config.lora
    key = f"{dataset.id}.slider_strength"
    if config.model.model_type == "full":
        report.error(key, "needs model_type lora: it is the strength of the LoRA.")
    elif adapter_kind(lora).no_slider:
        report.error(key, f"{adapter_kind(lora).no_slider}.")
    elif dataset.config.is_regularisation_data:
        report.error(
            key,
            "cannot be combined with is_regularisation_data: that target is the model at "
            "strength 0.",
        )
    elif lora.use_dora or lora.lora_init_type in ("olora", "pissa"):
        setting = "use_dora" if lora.use_dora else f"lora_init_type {lora.lora_init_type}"
        report.error(
            key,
            f"cannot be combined with {setting}: not all that it changes scales with the strength.",
        )


def _check_resolution(model: Model, dataset: Dataset, report: Problems) -> None:
    """A resolution in pixels that looks like megapixels."""
    resolution = dataset.config.resolution
    kind = dataset.config.resolution_type
    if resolution is None or resolution >= SMALLEST_RESOLUTION or kind == "area":
        return
    advice = f"use {SMALLEST_RESOLUTION}"
    most_megapixels = (model.spec.largest_side / 1000) ** 2
    if resolution <= most_megapixels:
        advice = "for megapixels set resolution_type area"
    message = (
        f"{resolution:g} is in pixels, since resolution_type is {kind}; {advice}. "
        "(i_know_what_i_am_doing allows it.)"
    )
    is_fatal = not model.config.run.i_know_what_i_am_doing
    report.append(Problem(f"{dataset.id}.resolution", message, fatal=is_fatal))


def _check_cropping(dataset: Dataset, report: Problems) -> None:
    """Samples that lose much of a side only because sides are rounded to the model's grid."""
    if dataset.config.crop or not dataset.samples:
        return
    if not dataset.config.is_trained:  # its sizes follow those of a trained dataset
        return
    sample = max(dataset.samples, key=lambda sample: max(_cropped_shares(sample.geometry)))
    of_width, of_height = _cropped_shares(sample.geometry)
    share = max(of_width, of_height)
    if share > MOST_CROPPED:
        side = "width" if of_width > of_height else "height"
        report.warn(
            f"{dataset.id}.resolution",
            f"{share:.0%} of the {side} of {sample.name} is cropped: {sample.geometry.size} is the "
            "nearest size on the model's grid; a larger resolution crops less.",
        )


def _cropped_shares(geometry: Geometry) -> tuple[float, float]:
    """The shares of width and height that a crop takes off."""
    width, height = geometry.size
    resized_width, resized_height = geometry.resized
    return 1 - width / resized_width, 1 - height / resized_height


def check_cache_folders(entries: Sequence[DatasetConfig], report: Problems) -> None:
    """Cache paths that datasets name must not be files."""
    for entry in entries:
        folders = {"cache_dir": entry.cache_dir, "cache_dir_vae": entry.cache_dir_vae}
        with report.within(entry.id) as of_entry:
            check_folders(folders, of_entry)
