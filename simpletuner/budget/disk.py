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
from simpletuner.budget.estimate import StepModel
from simpletuner.caching.catalogue import FeatureCost, LatentEntry
from simpletuner.config.precision import text_encoder_dtype
from simpletuner.errors import Problem, Problems
from simpletuner.models.cost import BYTES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.entries import Listing, text_folder
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.rounding import ceil_div

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
    if folder is not None and model.streamed_bytes:  # every run writes these again
        yield Writing(
            "offloaded weights",
            Path(folder).expanduser(),
            model.streamed_bytes,
            model.streamed_bytes,
        )


def _checkpoint_writing(plan: Plan, model: StepModel) -> Writing:
    """The checkpoints that are kept, and the one that is written."""
    limits = plan.config.checkpoints
    # A LoRA is saved twice: exactly, to resume from, and as the file for pipelines.
    copies = 1 if model.is_full else 2
    one = model.trained_numbers * (
        copies * model.number_bytes + model.state_bytes + model.average_bytes
    )
    saves = ceil_div(plan.length.total_steps, limits.checkpoint_step_interval)
    kept = (
        min(saves, limits.checkpoints_total_limit or saves) + 1
    )  # a new one is written before the oldest is removed
    if limits.checkpointing_rolling_steps:
        kept += limits.checkpoints_rolling_total_limit
    return Writing("checkpoints", plan.output_dir, (kept + 1) * one, 2 * one)


def _cache_writings(budget: Budget[SamplePlan], listing: Listing) -> Iterator[Writing]:
    plan = budget.plan
    written = [
        *listing.ahead.missing,
        *(each for each in listing.encoded_in_training if each.storage == "ondemand"),
    ]
    latents = _latent_bytes(plan, written)
    redrawn = _redrawn(plan, listing)
    # Every later epoch adds the latents of its random crops.
    last = plan.length.epochs if isinstance(plan, Plan) else listing.epoch
    later = max(0, last - listing.epoch) * _latent_bytes(plan, redrawn)
    if latents or later:
        yield Writing("latents", [*written, *redrawn][0].folder, latents + later, latents)
    features = feature_costs(plan.spec, listing)
    if features.stored:
        yield Writing(
            "features", listing.features.missing[0].folder, features.stored, features.stored
        )
    # Upper bound for `total`: every caption as long as the longest prompt.
    longest = max((bucket.text for bucket in budget.workload.buckets), default=0)
    width = budget.parts.transformer.shapes[f"{plan.spec.cost.prompt_layer}.weight"][1]
    texts = float(
        len(listing.texts.missing)
        * longest
        * width
        * BYTES[text_encoder_dtype(plan.config.precision)]
    )
    if texts:
        yield Writing("text embeddings", text_folder(plan), texts, texts * USUAL_CAPTION)


def _latent_bytes(plan: SamplePlan, entries: Sequence[LatentEntry]) -> float:
    """The size of cached latents: 16 channels in float32."""
    total = 0.0
    for entry in entries:
        size = plan.spec.latent_size(*entry.sample.geometry.size, entry.sample.frames)
        total += 4.0 * 16 * math.prod(size) * (COMPRESSED if entry.compress else 1.0)
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
        total = sum(each.total for each in group)
        at_once = sum(each.at_once for each in group)
        what = ", ".join(f"{each.what} {gigabytes(each.total)}" for each in group)
        message = (
            f"{str(place)!r} has {gigabytes(free)} free; the run writes up to {gigabytes(total)} "
            f"({what})."
        )
        if at_once > free:
            report.append(
                Problem("disk", message, fatal=not plan.config.run.i_know_what_i_am_doing)
            )
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
