"""Keys that cannot act in this run: because of other settings, the checkpoint, or the data.

What one key needs of another is declared beside it (`requires`, in `config/`); here is what takes
more than that. Every rule reports `NoEffect`, which becomes a warning only for a key that the user
set.
"""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.paths import home_path
from simpletuner.config.precision import PLAIN_PRECISIONS, PRECISION_KEYS
from simpletuner.config.schema import DatasetDefaults, RunConfig
from simpletuner.config.trackers import tracker_names
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import holds_files
from simpletuner.errors import Problems
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import PICTURE_TASKS, Flavour

LOCAL_TRACKERS = {"none", "simpletuner"}  # they have neither projects nor files of their own
# Keys of previews that start from a picture.
PICTURE_KEYS = ("validation_using_datasets", "eval_dataset_id")


def by_settings(config: RunConfig, report: Problems) -> None:
    """Keys that cannot act because of several other settings together."""
    if all(config.flat[key] in PLAIN_PRECISIONS for key in PRECISION_KEYS):
        report.no_effect("quantize_via", "has no effect: no model is quantised.")
    schedule = config.schedule
    samples = (
        schedule.train_batch_size
        * schedule.gradient_accumulation_steps
        * config.launch.data_processes
    )
    if samples == 1:
        for key in ("lr_scale", "lr_scale_sqrt"):
            report.no_effect(key, "has no effect: a step has one sample, so the factor is 1.")
    if config.caching.vae_batch_size == 1 and config.validation.num_validation_images == 1:
        report.no_effect(
            "vae_enable_slicing",
            "has no effect: vae_batch_size is 1, so no batch has several samples.",
        )
    _by_receivers(config, report)


def _by_receivers(config: RunConfig, report: Problems) -> None:
    """Names and formats for trackers, the hub and webhooks, if nothing is sent there."""
    hooks = config.webhooks.hooks
    is_local = LOCAL_TRACKERS.issuperset(tracker_names(config.tracking.report_to))
    if is_local and not config.publish.push_to_hub and not hooks:
        message = "has no effect without a tracker (report_to), push_to_hub or webhook_config."
        report.no_effect("tracker_project_name", message)
    if hooks and all(hook.webhook_type != "raw" for hook in hooks):
        report.no_effect("webhook_images", "has no effect: no webhook has webhook_type raw.")


def by_flavour(config: RunConfig, flavour: Flavour, report: Problems) -> None:
    """Keys of previews that start from pictures, for a flavour that starts from noise."""
    if flavour.task in PICTURE_TASKS:
        return
    for key in PICTURE_KEYS:
        report.no_effect(key, f"has no effect: {flavour.name} starts from noise, not a picture.")
    if not config.evaluation.measures_loss:
        message = (
            "has no effect: neither the evaluation loss nor previews take samples of a dataset."
        )
        report.no_effect("num_eval_images", message)


def by_source(source: ModelSource, report: Problems) -> None:
    """The revision of a repository, if every part is a folder on this machine."""
    if all(home_path(part.location).is_dir() for part in source.parts.values()):
        report.no_effect(
            "revision", "has no effect: the model is in a folder, not in a repository on the hub."
        )


def by_data(
    config: RunConfig,
    datasets: Sequence[Dataset],
    entries: Sequence[DatasetConfig],
    report: Problems,
) -> None:
    """Keys that cannot act on the datasets of a run.

    Args:
        entries: the entries of the dataset file as they are written.
    """
    _by_evaluation(config, datasets, report)
    _by_entries([entry for entry in entries if holds_files(entry)], report)
    _by_trained(config, [dataset for dataset in datasets if dataset.config.is_trained], report)
    if all(len(dataset.references) < 2 for dataset in datasets):
        message = "has no effect: no dataset has several conditioning datasets to choose from."
        report.no_effect("conditioning_multidataset_sampling", message)
    if all(dataset.config.type == "local" for dataset in datasets):
        report.no_effect("retry_failed", "has no effect: no dataset is remote.")


def _by_trained(config: RunConfig, trained: Sequence[Dataset], report: Problems) -> None:
    """Keys of the order of samples and of their batches."""
    processes = config.launch.data_processes
    if len(trained) == 1:
        message = f"has no effect: {trained[0].id} is the only dataset that is trained."
        report.no_effect("data_backend_sampling", message)
    if all(dataset.batch_size * processes == 1 for dataset in trained):
        message = "has no effect: batches of one sample have no slices to draw from."
        report.no_effect("disable_segmented_timestep_sampling", message)
    if all(dataset.config.repeats is not None for dataset in trained):
        message = "has no effect: every dataset that is trained sets repeats."
        report.no_effect("allow_dataset_oversubscription", message)


def _by_evaluation(config: RunConfig, datasets: Sequence[Dataset], report: Problems) -> None:
    """Keys of the evaluation loss, which needs data, and several datasets for their mean."""
    if not config.evaluation.measures_loss:
        return
    if not any(_is_evaluated(dataset) for dataset in datasets):
        message = (
            "has no effect: no dataset has dataset_type eval or hold_out, on which to measure "
            "the loss."
        )
        for key in ("eval_steps_interval", "eval_epoch_interval", "eval_timesteps"):
            report.no_effect(key, message)
    if sum(dataset.config.dataset_type == "eval" for dataset in datasets) < 2:
        report.no_effect(
            "eval_dataset_pooling",
            "has no effect: a mean needs several datasets with an evaluation loss.",
        )


def _by_entries(entries: Sequence[DatasetConfig], report: Problems) -> None:
    """Run-wide defaults that every dataset replaces."""
    for key in DatasetDefaults.model_fields:
        if entries and all(getattr(entry, key, None) is not None for entry in entries):
            report.no_effect(key, f"has no effect: every dataset sets its own {key}.")


def _is_evaluated(dataset: Dataset) -> bool:
    """Whether a dataset has an evaluation loss."""
    # If no file could be held out, an error reports it.
    return dataset.config.dataset_type == "eval" or bool(dataset.config.hold_out)
