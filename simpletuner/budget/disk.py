"""Estimates the bytes that a run writes to disk, and checks free space."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletuner.atomic import nearest_existing
from simpletuner.budget.budget import Budget
from simpletuner.budget.device import gigabytes
from simpletuner.budget.step_memory import StepModel
from simpletuner.caching.catalogue import FeatureCost, LatentEntry
from simpletuner.config.precision import text_encoder_dtype
from simpletuner.errors import Problem, Problems
from simpletuner.models.cost import BYTES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.entries import Listing, text_folder
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.rounding import ceil_div

LATENT_BYTES = 4.0 * 16  # per position: 16 channels in float32
COMPRESSED = 0.8  # size of a latent compressed with zstd, relative to uncompressed
USUAL_CAPTION = 0.25  # tokens of a typical caption, relative to the maximum


@dataclass(frozen=True)
class Writing:
    """At most `total` bytes written to a folder, at least `at_once` of them."""

    what: str
    folder: Path
    total: float
    at_once: float


def find_writings(budget: Budget[SamplePlan]) -> Iterator[Writing]:
    """Checkpoints, cache entries and weights offloaded to disk."""
    plan = budget.plan
    model = budget.model
    if isinstance(plan, Plan):
        yield _checkpoint_writing(plan, model)
    if budget.listing is not None:
        yield from _cache_writings(budget, budget.listing)
    folder = plan.config.offload.group_offload_to_disk_path
    if folder is not None and model.streamed_bytes:
        yield Writing(
            "offloaded weights",  # every run writes them again
            Path(folder).expanduser(),
            total=model.streamed_bytes,
            at_once=model.streamed_bytes,
        )


def _checkpoint_writing(plan: Plan, model: StepModel) -> Writing:
    """The checkpoints that are kept, and the one that is written."""
    limits = plan.config.checkpoints
    # A LoRA is saved twice: exactly, to resume from, and as the file for pipelines.
    copies = 1 if model.is_full else 2
    checkpoint = model.checkpoint_bytes(copies)
    saves = ceil_div(plan.length.total_steps, limits.checkpoint_step_interval)
    kept = min(saves, limits.checkpoints_total_limit or saves)
    kept += 1  # a new one is written before the oldest is removed
    if limits.checkpointing_rolling_steps:
        kept += limits.checkpoints_rolling_total_limit
    return Writing(
        "checkpoints",
        plan.output_dir,
        # The published result is as large as a checkpoint.
        total=(kept + 1) * checkpoint,
        at_once=2 * checkpoint,
    )


def _cache_writings(budget: Budget[SamplePlan], listing: Listing) -> Iterator[Writing]:
    plan = budget.plan
    yield from _latent_writings(plan, listing)
    features = feature_costs(plan.spec, listing)
    if features.stored:
        folder = listing.features.missing[0].folder
        yield Writing("features", folder, total=features.stored, at_once=features.stored)
    # At most, every caption is as long as the longest prompt.
    longest = max((bucket.text for bucket in budget.workload.buckets), default=0)
    width = budget.parts.transformer.shapes[f"{plan.spec.cost.prompt_layer}.weight"][1]
    token_bytes = width * BYTES[text_encoder_dtype(plan.config.precision)]
    texts = float(len(listing.texts.missing) * longest * token_bytes)
    if texts:
        yield Writing(
            "text embeddings", text_folder(plan), total=texts, at_once=texts * USUAL_CAPTION
        )


def _latent_writings(plan: SamplePlan, listing: Listing) -> Iterator[Writing]:
    written = [*listing.ahead.missing]
    written += [entry for entry in listing.encoded_in_training if entry.storage == "ondemand"]
    now = _latent_bytes(plan, written)
    # Every later epoch adds the latents of its random crops.
    redrawn = _redrawn(plan, listing)
    later = 0.0
    if isinstance(plan, Plan):
        later_epochs = max(0, plan.length.epochs - listing.epoch)
        later = later_epochs * _latent_bytes(plan, redrawn)
    if now or later:
        folder = [*written, *redrawn][0].folder
        yield Writing("latents", folder, total=now + later, at_once=now)


def _latent_bytes(plan: SamplePlan, entries: Sequence[LatentEntry]) -> float:
    """The size of cached latents."""
    total = 0.0
    for entry in entries:
        positions = plan.spec.latent_size(*entry.sample.geometry.size, entry.sample.frames)
        ratio = COMPRESSED if entry.compress else 1.0
        total += LATENT_BYTES * math.prod(positions) * ratio
    return total


def _redrawn(plan: SamplePlan, listing: Listing) -> list[LatentEntry]:
    """The cached latents of an epoch whose random crops every epoch draws anew."""
    datasets = {dataset.id for dataset in plan.trained if dataset.changes_each_epoch}
    if not datasets:
        return []
    cached = [entry for entry in listing.latents if entry.storage != "never"]
    return [entry for entry in cached if entry.sample.dataset_id in datasets]


def feature_costs(spec: FamilySpec, listing: Listing | None) -> FeatureCost:
    """Total cost of the features to compute."""
    costs = []
    for entry in listing.features.missing if listing else ():
        sample = entry.latents.sample
        frames, height, width = spec.latent_size(*sample.geometry.size, sample.frames)
        costs.append(entry.kind.cost(frames, height // spec.patch_size, width // spec.patch_size))
    return FeatureCost(sum(cost.stored for cost in costs), sum(cost.flops for cost in costs))


def check_disk(plan: SamplePlan, writings: Iterable[Writing], report: Problems) -> None:
    """Report lack of disk space: fatal if `at_once` does not fit, a warning if `total` may not."""
    by_disk: dict[int, list[Writing]] = {}
    for writing in writings:
        # Folders on one disk compete for its space.
        by_disk.setdefault(nearest_existing(writing.folder).stat().st_dev, []).append(writing)
    for group in by_disk.values():
        place = nearest_existing(group[0].folder)
        free = shutil.disk_usage(place).free
        total = sum(writing.total for writing in group)
        at_once = sum(writing.at_once for writing in group)
        parts = [f"{writing.what} {gigabytes(writing.total)}" for writing in group]
        message = (
            f"{str(place)!r} has {gigabytes(free)} free; the run writes up to {gigabytes(total)} "
            f"({', '.join(parts)})."
        )
        if at_once > free:
            is_fatal = not plan.config.run.i_know_what_i_am_doing
            report.append(Problem("disk", message, fatal=is_fatal))
        elif total > free:
            report.warn("disk", f"{message} {_advice(plan, group)}")


def _advice(plan: SamplePlan, group: Sequence[Writing]) -> str:
    """The setting that lowers the largest part of what is written to a disk."""
    largest = max(group, key=lambda writing: writing.total)
    if largest.what == "latents" and any(dataset.changes_each_epoch for dataset in plan.trained):
        return (
            "Random crops are encoded anew in every epoch; vae_cache_clear_each_epoch false keeps "
            "the first."
        )
    return "A lower checkpoints_total_limit needs less."
