"""The plan as a person reads it: what will run, on what, and what decided it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from simpletuner.config.schema import all_options
from simpletuner.data.sample import LedgerEntry
from simpletuner.plan.budget import Budget
from simpletuner.plan.build import Plan
from simpletuner.plan.disk import find_writings
from simpletuner.plan.entries import evaluated
from simpletuner.plan.show_budget import budget_lines
from simpletuner.reporting.redaction import redact_settings

# A ledger longer than this is shown by its counts and its rejected files alone.
LONGEST_LEDGER = 60


def show_plan(plan: Plan, budget: Budget, stream: TextIO) -> None:
    """Write the whole plan as text."""
    for line in plan_lines(plan, budget):
        print(line, file=stream)


def plan_lines(plan: Plan, budget: Budget) -> Iterator[str]:
    """The plan, line by line."""
    yield f"{plan.spec.title} {plan.flavour.name}, {plan.config.model.model_type}"
    yield f"  model    {plan.source['transformer'].location}"
    yield f"  output   {plan.output_dir}"
    yield f"  datasets {plan.dataset_file}"
    drawn = "" if plan.config.run.seed or plan.resume else " (drawn for this run; set seed to repeat it)"
    yield f"  seed     {plan.seed}{drawn}"
    yield ""
    yield from _length_lines(plan)
    yield ""
    yield "Settings and who set them (what is left at its default is not shown):"
    yield from _setting_lines(plan)
    for dataset in plan.datasets:
        yield ""
        yield from _ledger_lines(dataset.id, dataset.ledger(), dataset.changes_each_epoch)
    yield ""
    yield from _cache_lines(plan, budget)
    yield from _preview_lines(plan)
    yield ""
    yield from budget_lines(plan, budget, find_writings(plan, budget))
    if plan.warnings:
        yield ""
        yield "Warnings:"
        yield from (f"  {warning}" for warning in plan.warnings)


def _length_lines(plan: Plan) -> Iterator[str]:
    length, schedule = plan.length, plan.config.schedule
    per_step = schedule.train_batch_size * schedule.gradient_accumulation_steps
    yield f"{_count(length.total_steps, 'step')} of {_count(per_step, 'sample')}"
    yield f"{_count(length.batches_per_epoch, 'batch', 'batches')} an epoch, {_count(length.epochs, 'epoch')}"
    if plan.resume is not None:
        yield f"continues from {plan.resume.path.name} (step {plan.resume.step})"


def _setting_lines(plan: Plan) -> Iterator[str]:
    values = redact_settings(plan.config.flat())
    changed = [name for name in all_options() if plan.config.origins[name] != "default"]
    width = max((len(name) for name in changed), default=0)
    for name in changed:
        yield f"  {name:<{width}}  {_written(values[name])}  ({plan.config.origins[name]})"


def _written(value: Any) -> str:
    """A value as it would stand in config.json; text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number} {word if number == 1 else words or word + 's'}"


def _ledger_lines(dataset_id: str, ledger: Sequence[LedgerEntry], changes_each_epoch: bool) -> Iterator[str]:
    used = [entry for entry in ledger if not entry.use]
    yield f"Dataset {dataset_id}: {len(used)} of {len(ledger)} files are used"
    if changes_each_epoch:
        yield "  crops are drawn and encoded anew each epoch (vae_cache_clear_each_epoch false keeps the first)"
    buckets: dict[str, int] = {}
    for entry in used:
        if entry.geometry is not None:
            buckets[entry.trained_size] = buckets.get(entry.trained_size, 0) + 1
    for label, count in sorted(buckets.items()):
        yield f"  bucket {label}: {count}"
    shown = ledger if len(ledger) <= LONGEST_LEDGER else [entry for entry in ledger if entry.use]
    for entry in shown[:LONGEST_LEDGER]:
        yield f"  {entry.name}: {_fate(entry)}"
    if len(shown) > LONGEST_LEDGER:
        yield f"  and {len(shown) - LONGEST_LEDGER} more"


def _fate(entry: LedgerEntry) -> str:
    if entry.use or entry.geometry is None or entry.original_size is None:
        return f"not used, {entry.use}"
    geometry = entry.geometry
    width, height = geometry.size
    left, top = geometry.crop
    size = f"{entry.original_size[0]}x{entry.original_size[1]}"
    resized = f"{geometry.resized[0]}x{geometry.resized[1]}"
    frames = f"{entry.frames} frames, " if entry.frames > 1 else ""
    fitted = f"resized to {resized}, cropped to {width}x{height} at {left},{top}"
    return f"{size}, {frames}{fitted}, {_count(entry.captions, 'caption')}"


def _cache_lines(plan: Plan, budget: Budget) -> Iterator[str]:
    lacking = budget.missing
    if lacking is None:
        yield "Caches: the checkpoint is not on this machine yet; it will be downloaded, then everything encoded once."
        return
    for what, absent, total in (
        ("captions and prompts", lacking.texts, lacking.all_texts),
        (plan.spec.samples, len(lacking.latents), lacking.all_latents),
    ):
        yield f"Cache of {what}: {total - absent} of {total} are there, {absent} to encode"


def _preview_lines(plan: Plan) -> Iterator[str]:
    watched = evaluated(plan)
    if watched:
        names = ", ".join(f"{each.id} ({_count(len(each.samples), 'sample')})" for each in watched)
        yield f"Evaluation loss at {plan.config.evaluation.eval_timesteps} timesteps: {names}"
    if plan.prompts:
        sizes = ", ".join(f"{width}x{height}" for width, height in plan.sizes)
        names = ", ".join(prompt.short_name for prompt in plan.prompts)
        yield f"Previews every {plan.config.validation.validation_step_interval} steps at {sizes}: {names}"
