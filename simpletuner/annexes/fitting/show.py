"""The text and JSON of `simpletuner plan`: model, data, device, settings and cost."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, TextIO

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
from simpletuner.config.schema import LaunchConfig, OffloadConfig
from simpletuner.config.types import as_user_text
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import LedgerEntry
from simpletuner.errors import Problem, counted, escape_controls
from simpletuner.planning.entries import evaluated, previews_of_a_round
from simpletuner.planning.lineage import continuation
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.redaction import redact_settings
from simpletuner.reporting.events import EventStream
from simpletuner.reporting.screen import in_red
from simpletuner.reporting.wording import duration_text

logger = logging.getLogger(__name__)
# Longer ledgers are reduced to counts and rejected files.
LONGEST_LEDGER = 60
PREVIEW_INTERVALS = {"step": "validation_step_interval", "epoch": "validation_epoch_interval"}
NEARLY_HALF = 0.6  # of the rounds of previews
# Files of a dataset that the JSON lists with their reason; the plan in the terminal lists all.
MOST_LEFT_OUT = 200
SHOWN_BUCKETS = 4
MISSING_GPU = "device"  # `where` of the warning about a missing GPU, which is shown first


def log_plan(budget: Budget) -> None:
    """Write all settings, without secrets, and the plan to the debug log, for bug reports."""
    logger.debug("settings %s", json.dumps(redact_settings(budget.config.flat), ensure_ascii=False))
    for line in plan_lines(budget):
        logger.debug("plan %s", line)


def show_plan(budget: Budget, stream: TextIO) -> None:
    """Write the whole plan as text; a missing GPU is red on a terminal."""
    urgent = {str(warning) for warning in budget.plan.warnings if warning.where == MISSING_GPU}
    for line in plan_lines(budget):
        text = line
        if line in urgent:
            text = in_red(line, stream)
        print(text, file=stream)


def publish_warnings(events: EventStream, warnings: Iterable[Problem]) -> None:
    """Publish warnings; that of a missing GPU is urgent."""
    for warning in warnings:
        events.notify(str(warning), warning=True, urgent=warning.where == MISSING_GPU)


def plan_lines(budget: Budget) -> Iterator[str]:
    """The plan, line by line."""
    plan = budget.plan
    urgent = [warning for warning in plan.warnings if warning.where == MISSING_GPU]
    yield from map(str, urgent)
    yield f"{plan.spec.title} {plan.flavour.name}, {plan.config.model.model_type}"
    yield f"  model    {plan.source['transformer'].location}"
    yield f"  output   {plan.output_dir}"
    yield f"  datasets {plan.dataset_file}"
    is_drawn = plan.seed != plan.config.run.seed and not plan.resume
    note = " (drawn for this run; set seed to repeat it)" if is_drawn else ""
    yield f"  seed     {plan.seed}{note}"
    yield ""
    yield from _length_lines(plan)
    yield ""
    yield from _settings_lines(plan)
    for dataset in plan.datasets:
        yield ""
        yield from _ledger_lines(dataset)
        learned_share = _learned_share(dataset)
        if learned_share is not None:
            yield f"  masks: {learned_share:.1%} is learned on average"
    yield ""
    yield from _cache_lines(budget)
    yield from _preview_lines(plan)
    yield ""
    yield from budget_lines(budget)
    if len(plan.warnings) > len(urgent):
        yield ""
        yield "Warnings:"
        for warning in plan.warnings:
            if warning not in urgent:
                yield f"  {warning}"


def _settings_lines(plan: Plan) -> Iterator[str]:
    yield "Settings and their origins (without defaults):"
    settings = changed_settings(plan)
    width = max((len(name) for name, _, _ in settings), default=0)
    for name, value, origin in settings:
        yield f"  {name:<{width}}  {as_user_text(value)}  ({origin})"


def _length_lines(plan: Plan) -> Iterator[str]:
    length = plan.length
    schedule = plan.config.schedule
    per_step = (
        plan.config.launch.data_processes
        * schedule.train_batch_size
        * schedule.gradient_accumulation_steps
    )
    yield f"{counted(length.total_steps, 'step')} of {counted(per_step, 'sample')}"
    peak = peak_learning_rate(plan.config)
    rate = learning_rate(plan.config.optimizer, plan.config.model.model_type)
    if peak != rate:
        yield f"learning rate {peak:.3g}, which is {rate:.3g} scaled to the samples of a step"
    yield (
        f"{counted(length.batches_per_epoch, 'batch', 'batches')} an epoch, "
        f"{counted(length.epochs, 'epoch')}"
    )
    if plan.resume is not None:
        origin = f"{continuation(plan.output_dir, plan.resume)} ({plan.resume.path.name})"
        yield f"{origin}{_remainder(plan)}"


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


def _ledger_lines(dataset: Dataset) -> Iterator[str]:
    total = len(dataset.samples) + len(dataset.rejected)
    yield f"Dataset {dataset.id}: {len(dataset.samples)} of {counted(total, 'file')} used"
    if dataset.changes_each_epoch:
        yield (
            "  crops are redrawn and re-encoded each epoch (vae_cache_clear_each_epoch false "
            "keeps the first)"
        )
    for label, count in sorted(dataset.sizes().items()):
        yield f"  bucket {label}: {count}"
    # In a long ledger, only unused files are of interest.
    shown = dataset.ledger() if total <= LONGEST_LEDGER else dataset.unused_lines()
    for entry in shown[:LONGEST_LEDGER]:
        yield escape_controls(f"  {entry.name}: {_use_of(entry)}")
    if len(shown) > LONGEST_LEDGER:
        yield f"  and {len(shown) - LONGEST_LEDGER} more"


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
            yield f"Caches: {transformer.location!r} {absence}"
            return
        size = gigabytes(budget.parts.download_bytes(plan.source))
        yield f"Caches: about {size} will be downloaded first; then everything is encoded once."
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
        sizes = ", ".join(map(str, plan.sizes))
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


def budget_lines(budget: Budget) -> Iterator[str]:
    """The estimates of memory, time and disk, line by line."""
    yield _device_line(budget.device)
    if budget.config.launch.num_processes > 1:
        yield from _process_lines(budget)
    yield from _phase_lines(budget)
    yield from _bucket_lines(budget)
    yield from _density_lines(budget)
    yield from _time_lines(budget)
    yield from _extra_pass_lines(budget)
    writings = [
        f"{writing.what} up to {gigabytes(writing.total)}" for writing in find_writings(budget)
    ]
    yield f"  disk: {', '.join(writings)}"
    if budget.parts.assumed:
        yield (
            f"  {', '.join(budget.parts.assumed)}: not on this machine, sizes assumed from "
            f"{budget.plan.flavour.name}"
        )
    if budget.guess:
        yield f"  {budget.guess}"
    for decision in budget.decisions:
        yield f"  offload auto: {decision}"


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
    yield f"  {launch.num_processes} processes on {machines}, one per device, {method}"
    if launch.sequence_parallel_size > 1:
        yield (
            f"  the tokens of a sample are shared by {launch.sequence_parallel_size} processes, "
            f"each of which exchanges {gigabytes(budget.sent.exchanged)} a step"
        )
    yield "  device memory is of one process, host memory of all processes of a machine"


def _extra_pass_lines(budget: Budget) -> Iterator[str]:
    """The passes that techniques add, which the estimates include."""
    added = budget.model.added(budget.steps[0].load)
    passes = []
    if added.forwards:
        passes.append(f"{added.forwards:.2g} extra forward passes")
    if added.passes:
        passes.append(f"{added.passes:.2g} extra forward and backward passes")
    if passes:
        yield f"  with {' and '.join(passes)} a micro-step on average"


def _phase_lines(budget: Budget) -> Iterator[str]:
    """Peak memory of the phases; for training, of the largest bucket."""
    training = [phase for phase in budget.phases if phase.trains]
    largest = max(training, key=lambda phase: phase.device, default=None)
    shown = [phase for phase in budget.phases if not phase.trains or phase is largest]
    names = ["peak memory", *(phase.name for phase in shown)]
    width = max(len(name) for name in names) + 2
    yield _row("peak memory", width, "device", "host")
    for phase in shown:
        on_device = gigabytes(phase.device) if phase.device else "-"
        yield _row(phase.name, width, on_device, gigabytes(phase.on_host(budget.device)))


def _row(name: str, width: int, *cells: str) -> str:
    """A line of a table; its name takes `width` columns."""
    return f"  {name:<{width}}" + "".join(f"{cell:>10}" for cell in cells)


def _bucket_lines(budget: Budget) -> Iterator[str]:
    """The largest buckets: tokens, FLOPs, memory by kind, and time."""
    buckets = list(zip(budget.workload.buckets, budget.steps, strict=True))
    shown = buckets[:SHOWN_BUCKETS]
    labels = ["micro-step", *(bucket.label for bucket, _ in shown)]
    width = max(len(label) for label in labels) + 2
    yield _row(
        "micro-step", width, "tokens", "TFLOP", "weights", "trained", "inputs", "block", "time"
    )
    for bucket, step in shown:
        memory = step.memory
        yield _row(
            bucket.label,
            width,
            str(step.load.samples * step.load.tokens),
            f"{step.cost.executed.total / 1e12:.3g}",
            # The columns of memory add up to the peak of the step.
            gigabytes(memory.weights),
            gigabytes(memory.trained + memory.update),
            gigabytes(memory.inputs),
            gigabytes(memory.block + memory.outside),
            duration_text(step.cost.seconds),
        )
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
    yield f"  attention density (share of the tiles visited): {', '.join(shares)}"


def _time_lines(budget: Budget) -> Iterator[str]:
    plan = budget.plan
    if plan.is_finished:
        yield "  no steps remain: this run is finished"
        return
    training, previews = remaining_seconds(budget)
    step = duration_text(budget.step_seconds)
    steps = f"{duration_text(training)} for {counted(remaining_steps(plan), 'step')}"
    preview_time = ""
    if previews:
        preview_time = f", and {duration_text(previews)} for previews"
    yield f"  about {step} a step, {steps}{preview_time}; without filling the caches"
    if previews:
        count = preview_rounds(plan)
        share = previews / (training + previews)
        yield (
            f"  {counted(count, 'round')} of previews, {share:.0%} of that time; "
            f"{halved_previews(plan)} halves it"
        )
    batch = free_batch(budget, steps_per_epoch(plan))
    if batch:
        yield (
            f"  the GPU waits for the host to launch kernels: with train_batch_size {batch} a "
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


def start_lines(budget: Budget) -> Iterator[str]:
    """A summary of the plan for the start of a run."""
    plan = budget.plan
    kind = "full fine-tune"
    if plan.config.model.model_type == "lora":
        kind = plan.config.lora.kind
    yield f"{kind} on {plan.spec.title} {plan.flavour.name}"
    names = [dataset.id for dataset in plan.trained]
    noun = "datasets" if len(names) > 1 else "dataset"
    samples = sum(len(dataset.samples) for dataset in plan.trained)
    yield f"  on {samples} {plan.spec.media_noun} ({noun} {', '.join(names)})"
    work = counted(remaining_steps(plan), "step")
    if plan.resume:
        work += f" after step {plan.resume.step}"
    rounds = preview_rounds(plan)
    if rounds:
        work += f" and {counted(rounds, 'round')} of previews"
    seconds = sum(remaining_seconds(budget))
    yield f"  {work}, about {duration_text(seconds)}; saved to {plan.output_dir}"
    yield fit_line(budget)
    if budget.guess:
        yield f"  {budget.guess}"


def fit_line(budget: Budget[SamplePlan]) -> str:
    """`  fits: up to 16.4 GB of 25.8 GB on a GPU with 24 GiB, while training at 1024x1024`"""
    device = budget.device
    largest = max(budget.phases, key=lambda phase: phase.needed(device))
    verdict = "fits" if budget.fits else "does not fit"
    memory = gigabytes(largest.needed(device))
    if device.memory is not None:
        memory += f" of {gigabytes(device.memory)}"
    return f"  {verdict}: up to {memory} on {device.name}, while {largest.name}"


def plan_json(budget: Budget | None, problems: Sequence[Problem]) -> str:
    """The document; if a fatal problem prevents a plan, it holds only the problems.

    Bytes and seconds are plain numbers; unknown values are `null`.
    """
    document = {
        # Checks of the plan and of the budget may report the same problem.
        "problems": [problem.to_json() for problem in dict.fromkeys(problems)],
        "ok": not any(problem.fatal for problem in problems),
    }
    if budget is not None:
        document |= _document(budget)
    return json.dumps(document, indent=2, ensure_ascii=False)


def _document(budget: Budget) -> dict[str, Any]:
    plan = budget.plan
    launch = budget.config.launch
    settings = {
        key: {"value": value, "origin": origin} for key, value, origin in changed_settings(plan)
    }
    _, *lines = budget_lines(budget)  # without the line of the device
    return {
        "model": _model_in_json(budget),
        "output_dir": str(plan.output_dir),
        "seed": plan.seed,
        "settings": settings,
        "datasets": [_dataset_in_json(dataset) for dataset in plan.datasets],
        "length": _length_in_json(plan),
        "device": _device_in_json(budget.device),
        "assumed": [line.strip() for line in lines if "assumed" in line],
        "memory": [
            {
                "phase": phase.name,
                "device": phase.device,
                "host": phase.on_host(budget.device),
            }
            for phase in budget.phases
        ],
        "buckets": _buckets_in_json(budget),
        "seconds": _seconds_in_json(budget),
        "processes": {
            "count": launch.num_processes,
            "machines": launch.num_machines,
            "way": parallelism(launch, budget.config.offload),
            "sent": asdict(budget.sent),
        },
        "disk": [
            {"what": writing.what, "folder": str(writing.folder), "bytes": writing.total}
            for writing in find_writings(budget)
        ],
        "offload_auto": list(budget.decisions),
        "proposals": {decision: dict(settings) for decision, settings in budget.proposals.items()},
    }


def _model_in_json(budget: Budget) -> dict[str, Any]:
    plan = budget.plan
    return {
        "family": plan.spec.name,
        "flavour": plan.flavour.name,
        "type": plan.config.model.model_type,
        "location": plan.source["transformer"].location,
        "download": budget.parts.download_bytes(plan.source),
    }


def _length_in_json(plan: Plan) -> dict[str, Any]:
    length = plan.length
    return {
        "steps": length.total_steps,
        "steps_done": length.total_steps - remaining_steps(plan),
        "epochs": length.epochs,
        "batches_per_epoch": length.batches_per_epoch,
        "finished": plan.is_finished,
    }


def _device_in_json(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory": device.memory,
        "usable": device.usable,
        "note": device.note,
    }


def _buckets_in_json(budget: Budget) -> list[dict[str, Any]]:
    density = budget.parts.transformer.density
    buckets = []
    for bucket, step in zip(budget.workload.buckets, budget.steps, strict=True):
        tokens = step.load.tokens
        entry = {
            "size": bucket.label,
            "share": bucket.share,
            "tokens": step.load.samples * tokens,
            "flops": step.cost.executed.total,
            "attention_density": density(tokens) if density else None,  # None: dense
            "memory": step.memory.total,
            "seconds": step.cost.seconds,
        }
        buckets.append(entry)
    return buckets


def _seconds_in_json(budget: Budget) -> dict[str, float]:
    """Seconds that remain, without filling the caches."""
    training, previews = remaining_seconds(budget)
    return {
        "step": budget.step_seconds,
        "training": training,
        "previews": previews,
        "total": training + previews,
    }


def _learned_share(dataset: Dataset) -> float | None:
    """The mean share of a file that its mask leaves to learn; None without masks."""
    shares = dataset.white_shares.values()
    return sum(shares) / len(shares) if shares else None


def _dataset_in_json(dataset: Dataset) -> dict[str, Any]:
    left_out = [{"file": entry.name, "reason": entry.use} for entry in dataset.unused_lines()]
    return {
        "id": dataset.id,
        "files": len(dataset.samples) + len(left_out),
        "used": len(dataset.samples),
        "left_out": left_out[:MOST_LEFT_OUT],
        "trained": dataset.config.is_trained,
        "repeats": dataset.repeats,
        "buckets": dataset.sizes(),
        "learned": _learned_share(dataset),  # null without masks
    }
