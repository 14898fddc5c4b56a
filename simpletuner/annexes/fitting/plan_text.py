"""The details of a plan as text: its run, settings and datasets, and what it costs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from simpletuner.annexes.fitting.show import start_lines
from simpletuner.budget.budget import (
    Budget,
    free_batch,
    preview_rounds,
    remaining_seconds,
    remaining_steps,
    steps_per_epoch,
)
from simpletuner.budget.device import Device, gigabytes
from simpletuner.budget.disk import feature_costs, find_writings
from simpletuner.caching.catalogue import Entries
from simpletuner.config.optimizers import learning_rate, peak_learning_rate
from simpletuner.config.schema import DEFAULTS, LaunchConfig, OffloadConfig
from simpletuner.config.types import as_user_text
from simpletuner.data.dataset import Dataset
from simpletuner.data.file_names import is_junk
from simpletuner.data.sample import EXPECTED, LedgerEntry, Rejected
from simpletuner.errors import counted, escape_controls
from simpletuner.planning.entries import evaluated, previews_of_a_round
from simpletuner.planning.lineage import continuation
from simpletuner.planning.plans import Plan
from simpletuner.planning.prompts import rendered_sizes
from simpletuner.redaction import redact_settings
from simpletuner.reporting.layout import Layout
from simpletuner.reporting.wording import duration_text

logger = logging.getLogger(__name__)
# Longer lists of files are reduced to those that are left out.
LONGEST_LEDGER = 60
# Files that a short plan lists with the reason why they are left out.
SHOWN_LEFT_OUT = 8
PREVIEW_INTERVALS = {"step": "validation_step_interval", "epoch": "validation_epoch_interval"}
NEARLY_HALF = 0.6  # of the rounds of previews
SHOWN_BUCKETS = 4
# What pictures and clips that are left out count as, by the reason of their `Rejected`.
REASONS = {"held out": "held out", "not chosen": "not chosen", "no caption": "without a caption"}
NOT_USABLE = "not usable"
KINDS = (*REASONS.values(), NOT_USABLE)
# Keys that a dataset may have, too; if all of them do, the run's value says nothing.
OF_DATASETS = ("resolution", "aspect_bucket_alignment")


def log_plan(budget: Budget) -> None:
    """Write all settings, without secrets, and the plan to the debug log, for bug reports."""
    logger.debug("settings %s", json.dumps(redact_settings(budget.config.flat), ensure_ascii=False))
    for line in (*start_lines(budget), *detail_lines(budget, Layout(), verbose=True)):
        logger.debug("plan %s", line)


def detail_lines(
    budget: Budget, layout: Layout, *, verbose: bool = False, hidden: Set[str] = frozenset()
) -> Iterator[str]:
    """What follows the summary: run, settings, datasets and estimate.

    Args:
        budget: the plan with its estimate.
        layout: the width of the terminal.
        verbose: also every file, the settings that the family brings, and the cost of each bucket.
        hidden: keys of temporary files, which are not shown.
    """
    plan = budget.plan
    yield "Run"
    yield from layout.pairs(_run_rows(plan, hidden))
    yield ""
    yield from _settings_lines(plan, layout, hidden, verbose=verbose)
    yield "Datasets"
    for dataset in plan.datasets:
        yield from _dataset_lines(dataset, layout, verbose=verbose)
    yield ""
    yield "Before and during training"
    for line in (*_cache_lines(budget), *_preview_lines(plan)):
        yield from layout.wrap(line, indent=2)
    yield ""
    yield from budget_lines(budget, layout, verbose=verbose)
    if not verbose:
        yield ""
        yield "--verbose adds all files, the family's settings and the cost of each size."


def _run_rows(plan: Plan, hidden: Set[str]) -> Iterator[tuple[str, str]]:
    """The facts of a run, by name."""
    yield "model", plan.source["transformer"].location
    if plan.spec.attention is not None:
        attention = plan.spec.attention(plan.flavour, plan.source, plan.sizes)
        if attention is not None:
            yield "attention", attention
    if "data_backend_config" not in hidden:
        yield "datasets", str(plan.dataset_file)
    yield "output", str(plan.output_dir)
    is_drawn = plan.seed != plan.config.run.seed and not plan.resume
    note = " (drawn for this run; set seed to repeat it)" if is_drawn else ""
    yield "seed", f"{plan.seed}{note}"
    length = plan.length
    schedule = plan.config.schedule
    per_step = (
        plan.config.launch.data_processes
        * schedule.train_batch_size
        * schedule.gradient_accumulation_steps
    )
    yield "length", f"{counted(length.total_steps, 'step')} of {counted(per_step, 'sample')}"
    batches = counted(length.batches_per_epoch, "batch", "batches")
    yield "epochs", f"{batches} an epoch, {counted(length.epochs, 'epoch')}"
    peak = peak_learning_rate(plan.config)
    rate = learning_rate(plan.config.optimizer, plan.config.model.model_type)
    if peak != rate:
        yield "rate", f"{peak:.3g}, which is {rate:.3g} scaled to the samples of a step"
    if plan.resume is not None:
        origin = f"{continuation(plan.output_dir, plan.resume)} ({plan.resume.path.name})"
        yield "begin", f"{origin}{_remainder(plan)}"


def _remainder(plan: Plan) -> str:
    """The steps and epochs that remain of a continued run whose data have changed."""
    steps = remaining_steps(plan)
    if plan.same_data or not steps:
        return ""
    first = plan.origin.epoch
    last = plan.length.epochs
    epochs = f"epochs {first} to {last}"
    if first == last:
        epochs = f"epoch {first}"
    return f"; {counted(steps, 'step is', 'steps are')} left: {epochs} of today's data"


def changed_settings(plan: Plan) -> list[tuple[str, Any, str]]:
    """Settings other than defaults, with value and origin; secrets are redacted."""
    values = redact_settings(plan.config.flat)
    origins = plan.config.origins
    return [(name, values[name], origins[name]) for name in plan.config.keys_set()]


def _settings_lines(
    plan: Plan, layout: Layout, hidden: Set[str], *, verbose: bool
) -> Iterator[str]:
    """The settings other than defaults, grouped by origin, with an empty line after each group.

    Args:
        hidden: keys to leave out.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value, origin in changed_settings(plan):
        if name in hidden:
            continue
        if name in OF_DATASETS and not _is_trained_with(plan, name, value):
            continue
        groups.setdefault(origin, []).append((name, as_user_text(value)))
    if not verbose:
        for origin in DEFAULTS:
            groups.pop(origin, None)
    for origin, rows in groups.items():
        yield layout.shorten(f"Settings ({origin})", used=0)
        yield from layout.pairs(rows)
        yield ""


def _is_trained_with(plan: Plan, name: str, value: Any) -> bool:
    """Whether any dataset has the run's value of a key that every dataset may have."""
    return any(getattr(dataset.config, name) == value for dataset in plan.datasets)


def _dataset_lines(dataset: Dataset, layout: Layout, *, verbose: bool) -> Iterator[str]:
    """How many files of a dataset are trained in which sizes, and which are not."""
    yield from layout.wrap(f"{dataset.id}: {_use_of_files(dataset)}", indent=2)
    sizes: Counter[str] = Counter()
    for sample in dataset.samples:
        sizes[sample.geometry.size.of_frames(sample.frames)] += 1
    if sizes:
        texts = [f"{count} of {size}" for size, count in sorted(sizes.items())]
        yield from layout.wrap(f"trained sizes: {', '.join(texts)}", indent=4)
    if dataset.changes_each_epoch:
        yield from layout.wrap(
            "crops are redrawn and re-encoded each epoch (vae_cache_clear_each_epoch false "
            "keeps the first)",
            indent=4,
        )
    share = learned_share(dataset)
    if share is not None:
        yield f"    masks: {share:.1%} is learned on average"
    if verbose:
        yield from _ledger_lines(dataset, layout)
    else:
        yield from _left_out_lines(dataset, layout)


def _use_of_files(dataset: Dataset) -> str:
    """`23 of 30 pictures used, 3 held out, 4 not usable; 2 other files are not read`"""
    noun = "clips" if dataset.clips else "pictures"
    left_out = Counter(_kind_of(file) for file in dataset.rejected if not is_junk(file.name))
    others = left_out.pop("other", 0)
    total = len(dataset.samples) + left_out.total()
    parts = [f"{len(dataset.samples)} of {counted(total, noun.removesuffix('s'))} used"]
    parts += [f"{left_out[kind]} {kind}" for kind in KINDS if left_out[kind]]
    text = ", ".join(parts)
    if others:
        text += f"; {counted(others, 'other file is', 'other files are')} not read"
    return text


def _kind_of(file: Rejected) -> str:
    """What a file that is left out counts as."""
    if file.reason in REASONS:
        return REASONS[file.reason]
    if file.reason in EXPECTED:
        return "other"  # neither a picture nor a clip of this dataset
    return NOT_USABLE


def _left_out_lines(dataset: Dataset, layout: Layout) -> Iterator[str]:
    """The first files that are left out against the user's expectation, with their reasons."""
    expected = {*EXPECTED, "held out"}
    names = {file.name for file in dataset.rejected if file.reason not in expected}
    entries = [entry for entry in dataset.unused_lines() if entry.name in names]
    for entry in entries[:SHOWN_LEFT_OUT]:
        yield from _file_lines(entry, layout)
    if len(entries) > SHOWN_LEFT_OUT:
        yield f"    and {len(entries) - SHOWN_LEFT_OUT} more (--verbose)"


def _ledger_lines(dataset: Dataset, layout: Layout) -> Iterator[str]:
    """Every file with its use; of a long list, only the files that are not used."""
    is_long = len(dataset.samples) + len(dataset.rejected) > LONGEST_LEDGER
    ledger = dataset.unused_lines() if is_long else dataset.ledger()
    shown = [entry for entry in ledger if not is_junk(entry.name)]
    for entry in shown[:LONGEST_LEDGER]:
        yield from _file_lines(entry, layout)
    if len(shown) > LONGEST_LEDGER:
        yield f"    and {len(shown) - LONGEST_LEDGER} more"


def _file_lines(entry: LedgerEntry, layout: Layout) -> Iterator[str]:
    """A file and its use; a name that is wider than the terminal loses its middle."""
    name = layout.shorten(escape_controls(entry.name), used=len("    : "))
    yield from layout.wrap(f"{name}: {escape_controls(_use_of(entry))}", indent=4)


def _use_of(entry: LedgerEntry) -> str:
    """How a file is used, or why it is not."""
    geometry = entry.geometry
    if entry.use or geometry is None or entry.original_size is None:
        return f"not used, {entry.use}"
    left, top = geometry.crop
    parts = [f"{entry.original_size}"]
    if entry.frames > 1:
        parts.append(f"{entry.frames} frames")
    parts += [
        f"resized to {geometry.resized}",
        f"cropped to {geometry.size} at {left},{top}",
        counted(entry.captions, "caption"),
    ]
    if entry.note:
        parts.append(entry.note)
    return ", ".join(parts)


def _cache_lines(budget: Budget) -> Iterator[str]:
    plan = budget.plan
    listing = budget.listing
    if listing is None:
        transformer = plan.source["transformer"]
        absence = transformer.absence()
        if absence:
            yield f"Model: {transformer.location!r} {absence}"
            return
        size = gigabytes(budget.parts.download_bytes(plan.source))
        yield f"Download of the model: about {size}"
        yield "Caches: captions and files are encoded once, after the download."
        return
    noun = plan.spec.media_noun
    yield _cache_line("captions and prompts", listing.texts)
    yield _cache_line(noun, listing.ahead)
    later = len(listing.encoded_in_training)
    if later:
        yield (
            f"Encoded in training: {later} {noun}; the VAE stays on the device, and its time is "
            "not counted below"
        )
    if listing.features:
        time = ""
        if listing.features.missing:
            flops = feature_costs(plan.spec, listing).flops
            seconds = duration_text(flops / budget.device.rates.matmul)
            time = f" (about {seconds}, and the time to decode them)"
        yield f"{_cache_line('features', listing.features)}{time}"


def _cache_line(title: str, entries: Entries[Any]) -> str:
    absent = len(entries.missing)
    total = len(entries)
    return f"Cache of {title}: {total - absent} of {total} exist, {absent} to encode"


def _preview_lines(plan: Plan) -> Iterator[str]:
    """The evaluation loss, previews, and where events are sent."""
    datasets = [
        f"{dataset.id} ({counted(len(dataset.samples), 'sample')})" for dataset in evaluated(plan)
    ]
    if datasets:
        timesteps = plan.config.evaluation.eval_timesteps
        yield f"Evaluation loss at {timesteps} timesteps: {', '.join(datasets)}"
    if plan.prompts:
        sizes = ", ".join(map(str, rendered_sizes(plan.prompts, plan.sizes)))
        names = ", ".join(prompt.short_name for prompt in plan.prompts)
        count, subjects = previews_of_a_round(plan)
        per_round = ""
        if subjects > len(plan.prompts):
            per_round = f", {count} {plan.spec.media_noun} a round"
        yield f"Previews {_preview_intervals(plan)} at {sizes}: {names}{per_round}"
    for hook in plan.config.webhooks.hooks:
        yield f"Events are sent to a {hook}"


def _preview_intervals(plan: Plan) -> str:
    """When previews are rendered, such as "every 100 steps and every epoch"."""
    intervals = []
    for unit, key in PREVIEW_INTERVALS.items():
        interval = plan.config.flat[key]
        if interval == 1:
            intervals.append(f"every {unit}")
        elif interval:
            intervals.append(f"every {counted(interval, unit)}")
    return " and ".join(intervals)


def budget_lines(budget: Budget, layout: Layout, *, verbose: bool) -> Iterator[str]:
    """The estimates of memory, time and disk.

    Args:
        budget: the plan with its estimate.
        layout: the width of the terminal.
        verbose: also the cost of a micro-step of each bucket.
    """
    yield from layout.wrap(_device_line(budget.device))
    if budget.config.launch.num_processes > 1:
        for line in _process_lines(budget):
            yield from layout.wrap(line, indent=2)
    yield from _phase_lines(budget, layout)
    if verbose:
        yield from _bucket_lines(budget, layout)
    for line in _cost_lines(budget, verbose=verbose):
        yield from layout.wrap(line, indent=2)


def _cost_lines(budget: Budget, *, verbose: bool) -> Iterator[str]:
    """Time and disk, what the estimate assumes, and what `offload: auto` has chosen."""
    if verbose:
        yield from _density_lines(budget)
    yield from _time_lines(budget)
    if verbose:
        yield from _extra_pass_lines(budget)
    writings = [
        f"{writing.what} up to {gigabytes(writing.total)}" for writing in find_writings(budget)
    ]
    yield f"disk: {', '.join(writings)}"
    if budget.parts.assumed:
        yield (
            f"{', '.join(budget.parts.assumed)}: not on this machine, sizes assumed from "
            f"{budget.plan.flavour.name}"
        )
    if budget.guess:
        yield f"{budget.guess}"
    for decision in budget.decisions:
        yield f"offload auto: {decision}"


def _device_line(device: Device) -> str:
    memory = "unknown memory" if device.memory is None else gigabytes(device.memory)
    parts = [device.name, memory]
    if device.taken_by_others:
        parts.append(device.taken_by_others)
    if device.has_own_memory and device.host_memory:
        parts.append(f"host memory {gigabytes(device.host_memory)}")
    notes = [note for note in (device.note, device.hint) if note]
    return f"Estimate for {', '.join(parts)} ({'; '.join(notes)})"


def _process_lines(budget: Budget) -> Iterator[str]:
    launch = budget.config.launch
    machines = counted(launch.num_machines, "machine")
    method = parallelism(launch, budget.config.offload)
    yield f"{launch.num_processes} processes on {machines}, one per device, {method}"
    if launch.sequence_parallel_size > 1:
        yield (
            f"the tokens of a sample are shared by {launch.sequence_parallel_size} processes, "
            f"each of which exchanges {gigabytes(budget.sent.exchanged)} a step"
        )
    yield "device memory is of one process, host memory of all processes of a machine"


def _extra_pass_lines(budget: Budget) -> Iterator[str]:
    """The passes that techniques add, which the estimates include."""
    added = budget.model.added(budget.steps[0].load)
    passes = []
    if added.forwards:
        passes.append(f"{added.forwards:.2g} forward passes")
    if added.passes:
        passes.append(f"{added.passes:.2g} forward and backward passes")
    if passes:
        yield f"techniques add {' and '.join(passes)} per micro-step on average"


def _phase_lines(budget: Budget, layout: Layout) -> Iterator[str]:
    """Peak memory of the phases; for training, of the largest bucket."""
    training = [phase for phase in budget.phases if phase.trains]
    largest = max(training, key=lambda phase: phase.device, default=None)
    rows = [("peak memory", "device", "host")]
    for phase in budget.phases:
        if phase.trains and phase is not largest:
            continue
        on_device = gigabytes(phase.device) if phase.device else "-"
        rows.append((phase.name, on_device, gigabytes(phase.on_host(budget.device))))
    yield from layout.table(rows)


def _bucket_lines(budget: Budget, layout: Layout) -> Iterator[str]:
    """The largest buckets: tokens, FLOPs, memory by kind, and time."""
    buckets = list(zip(budget.workload.buckets, budget.steps, strict=True))
    rows = [("micro-step", "tokens", "TFLOP", "weights", "trained", "inputs", "block", "time")]
    for bucket, step in buckets[:SHOWN_BUCKETS]:
        memory = step.memory
        row = (
            bucket.label,
            str(step.load.samples * step.load.tokens),
            f"{step.cost.executed.total / 1e12:.3g}",
            # The columns of memory add up to the peak of the step.
            gigabytes(memory.weights),
            gigabytes(memory.trained + memory.gradients + memory.update),
            gigabytes(memory.inputs),
            gigabytes(memory.block + memory.outside),
            duration_text(step.cost.seconds),
        )
        rows.append(row)
    yield from layout.table(rows)
    if len(buckets) > SHOWN_BUCKETS:
        yield f"  and {len(buckets) - SHOWN_BUCKETS} smaller buckets"


def _density_lines(budget: Budget) -> Iterator[str]:
    """The density of block-sparse attention in the largest buckets; TFLOP and time include it."""
    density = budget.parts.transformer.density
    if density is None:
        return
    buckets = list(zip(budget.workload.buckets, budget.steps, strict=True))
    shares = []
    for bucket, step in buckets[:SHOWN_BUCKETS]:
        tokens = step.load.tokens
        origin = "measured" if tokens in budget.densities else "assumed"
        shares.append(f"{density(tokens) * 100:.0f} % at {bucket.label} ({origin})")
    yield f"attention density (share of the tiles visited): {', '.join(shares)}"


def _time_lines(budget: Budget) -> Iterator[str]:
    plan = budget.plan
    if plan.is_finished:
        yield "no steps remain: this run is finished"
        return
    training, previews = remaining_seconds(budget)
    step = duration_text(budget.step_seconds)
    steps = f"{duration_text(training)} for {counted(remaining_steps(plan), 'step')}"
    preview_time = ""
    if previews:
        preview_time = f", and {duration_text(previews)} for previews"
    yield f"about {step} a step, {steps}{preview_time}; without filling the caches"
    if previews:
        count = preview_rounds(plan)
        share = previews / (training + previews)
        yield (
            f"{counted(count, 'round')} of previews, {share:.0%} of that time; "
            f"{halved_previews(plan)} halves it"
        )
    batch = free_batch(budget, steps_per_epoch(plan))
    if batch:
        yield (
            f"the GPU waits for the host to launch kernels: with train_batch_size {batch} a "
            "step takes as long"
        )


def parallelism(launch: LaunchConfig, offload: OffloadConfig) -> str:
    """How several processes train together: `DDP`, `DDP, streamed` or `FSDP2`."""
    if launch.is_sharded:
        return "FSDP2"
    return "DDP, streamed" if offload.enable_group_offload else "DDP"


def halved_previews(plan: Plan) -> str:
    """The setting that halves the time of previews."""
    flat = plan.config.flat
    intervals = {key: 2 * flat[key] for key in PREVIEW_INTERVALS.values() if flat[key] is not None}
    # With few rounds, doubling the interval does not halve them: the first and last always take
    # place.
    fewer = preview_rounds(replace(plan, config=plan.config.with_values(intervals, "")))
    if fewer <= NEARLY_HALF * preview_rounds(plan):
        return " and ".join(f"{key} {value}" for key, value in intervals.items())
    steps = flat["validation_num_inference_steps"] or 1
    return f"validation_num_inference_steps {max(1, steps // 2)}"


def learned_share(dataset: Dataset) -> float | None:
    """The mean share of a file that its mask leaves to learn; None without masks."""
    shares = dataset.white_shares.values()
    return sum(shares) / len(shares) if shares else None
