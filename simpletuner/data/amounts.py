"""Whether a dataset is large enough, and what of it is left out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from simpletuner.errors import Problem

from .context import DataContext
from .dataset import Dataset
from .sample import NOTEWORTHY, shorten


def summarise_rejected(dataset: Dataset, problems: list[Problem]) -> None:
    """One warning with every picture that is left out, by reason; the ledger has the details."""
    names = defaultdict(list)
    for file in dataset.rejected:
        if file.reason in NOTEWORTHY:
            names[file.reason].append(file.name)
    if names and dataset.samples:
        left_out = "; ".join(f"{len(files)} {reason} ({shorten(files)})" for reason, files in names.items())
        total = sum(map(len, names.values()))
        message = f"{total} files are left out: {left_out}. The plan lists each with its reason."
        problems.append(Problem(dataset.id, message, fatal=False))


def check_amount(dataset: Dataset, context: DataContext, problems: list[Problem]) -> Dataset:
    """Report a dataset that cannot fill one optimizer step, or raise its repeats where that is allowed."""
    count = len(dataset.samples)
    if not count:
        # What is wrong with the entry itself explains it already.
        own = (problem for problem in problems if problem.fatal)
        if not any(problem.where == dataset.id or problem.where.startswith(f"{dataset.id}.") for problem in own):
            problems.append(Problem(dataset.id, _nothing_usable(dataset)))
        return dataset
    if not dataset.config.is_trained:
        return dataset
    needed = dataset.batch_size * context.num_processes * context.gradient_accumulation_steps
    enough = -(-needed // count) - 1  # repeats with which there are
    if dataset.repeats < enough:
        if context.defaults.allow_dataset_oversubscription and dataset.config.repeats is None:
            message = f"repeats is raised to {enough}: {count} samples have to fill a step of {needed}."
            problems.append(Problem(dataset.id, message, fatal=False))
            dataset = replace(dataset, repeats=enough)
        elif not context.defaults.disable_bucket_pruning:
            problems.append(Problem(dataset.id, _too_few(dataset, context, needed, enough)))
            return dataset
    _warn_of_small_buckets(dataset, context, problems)
    return dataset


def _nothing_usable(dataset: Dataset) -> str:
    counts = ", ".join(f"{number} {reason}" for reason, number in dataset.counts().most_common())
    message = f"no samples detected in dataset {dataset.id} ({dataset.config.instance_data_dir!r}): "
    message += f"none of its files can be used ({counts})." if counts else "the folder is empty."
    details = [file for file in dataset.rejected if file.reason in NOTEWORTHY]
    return f"{message} For instance {details[0].name} {details[0].detail}." if details else message


def _too_few(dataset: Dataset, context: DataContext, needed: int, enough: int) -> str:
    count, repeats = len(dataset.samples), dataset.repeats
    return (
        f"no samples detected in dataset {dataset.id} for a whole step: {count} samples x (repeats {repeats} + 1) "
        f"= {count * (repeats + 1)}, and one step takes {needed} (train_batch_size {dataset.batch_size} x "
        f"{context.num_processes} processes x gradient_accumulation_steps {context.gradient_accumulation_steps}). "
        f"repeats {enough} would do."
    )


def _warn_of_small_buckets(dataset: Dataset, context: DataContext, problems: list[Problem]) -> None:
    batch = dataset.batch_size * context.num_processes
    small = [
        f"{label} ({len(samples)})"
        for label, samples in dataset.buckets().items()
        if len(samples) * (dataset.repeats + 1) < batch
    ]
    if small:
        message = f"buckets with fewer samples than a batch of {batch} are filled by repeating: {shorten(small)}."
        problems.append(Problem(dataset.id, message, fatal=False))
