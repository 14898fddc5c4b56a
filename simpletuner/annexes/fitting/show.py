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
from simpletuner.budget.device import gigabytes
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
MOST_LEFT_OUT = (
    200  # files of a dataset that are listed with their reason; the plan in the terminal lists all
)
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
        print(in_red(line, stream) if line in urgent else line, file=stream)


def say_warnings(events: EventStream, warnings: Iterable[Problem]) -> None:
    """Publish warnings; that of a missing GPU is urgent."""
    for warning in warnings:
        events.say(str(warning), warning=True, urgent=warning.where == MISSING_GPU)


def plan_lines(budget: Budget) -> Iterator[str]:
    """The plan, line by line."""
    plan = budget.plan
    urgent = [warning for warning in plan.warnings if warning.where == MISSING_GPU]
    yield from map(str, urgent)
    yield f"{plan.spec.title} {plan.flavour.name}, {plan.config.model.model_type}"
    yield f"  model    {plan.source['transformer'].location}"
    yield f"  output   {plan.output_dir}"
    yield f"  datasets {plan.dataset_file}"
    drawn = (
        ""
        if plan.seed == plan.config.run.seed or plan.resume
        else " (drawn for this run; set seed to repeat it)"
    )
    yield f"  seed     {plan.seed}{drawn}"
    yield ""
    yield from _length_lines(plan)
    yield ""
    yield "Settings and their origins (without defaults):"
    changed = changed_settings(plan)
    width = max((len(name) for name, _, _ in changed), default=0)
    yield from (
        f"  {name:<{width}}  {as_user_text(value)}  ({origin})" for name, value, origin in changed
    )
    for dataset in plan.datasets:
        yield ""
        yield from _ledger_lines(dataset)
        if (learned := _learned(dataset)) is not None:
            yield f"  masks: {learned:.1%} is learned on average"
    yield ""
    yield from _cache_lines(budget)
    yield from _preview_lines(plan)
    yield ""
    yield from budget_lines(budget)
    if len(plan.warnings) > len(urgent):
        yield ""
        yield "Warnings:"
        yield from (f"  {warning}" for warning in plan.warnings if warning not in urgent)


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
        yield f"{continuation(plan.output_dir, plan.resume)} ({plan.resume.path.name}){_left(plan)}"


def _left(plan: Plan) -> str:
    """What is left of a continued run whose data have changed."""
    left = remaining_steps(plan)
    if plan.same_data or not left:
        return ""
    first = plan.origin.epoch
    last = plan.length.epochs
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    return f"; {counted(left, 'step is', 'steps are')} left: {epochs} of today's data"


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
        yield escape_controls(f"  {entry.name}: {_fate(entry)}")
    if len(shown) > LONGEST_LEDGER:
        yield f"  and {len(shown) - LONGEST_LEDGER} more"


def _fate(entry: LedgerEntry) -> str:
    if entry.use or entry.geometry is None or entry.original_size is None:
        return f"not used, {entry.use}"
    left, top = entry.geometry.crop
    frames = f"{entry.frames} frames, " if entry.frames > 1 else ""
    fitted = (
        f"resized to {entry.geometry.resized}, cropped to {entry.geometry.size} at {left},{top}"
    )
    note = f", {entry.note}" if entry.note else ""
    return f"{entry.original_size}, {frames}{fitted}, {counted(entry.captions, 'caption')}{note}"


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
    later = len(listing.encoded_in_training)
    for what, entries in (("captions and prompts", listing.texts), (noun, listing.ahead)):
        yield _cached(what, entries)
    if later:
        yield (
            f"Encoded in training: {later} {noun}; the VAE stays on the device, and its time is "
            "not counted below"
        )
    if listing.features:
        seconds = duration_text(
            feature_costs(plan.spec, listing).flops / budget.device.rates.matmul
        )
        time = (
            f" (about {seconds}, and the time to decode them)" if listing.features.missing else ""
        )
        yield f"{_cached('features', listing.features)}{time}"


def _cached(what: str, entries: Entries[Any]) -> str:
    absent = len(entries.missing)
    total = len(entries)
    return f"Cache of {what}: {total - absent} of {total} exist, {absent} to encode"


def _preview_lines(plan: Plan) -> Iterator[str]:
    watched = evaluated(plan)
    if watched:
        names = ", ".join(f"{each.id} ({counted(len(each.samples), 'sample')})" for each in watched)
        yield f"Evaluation loss at {plan.config.evaluation.eval_timesteps} timesteps: {names}"
    if plan.prompts:
        sizes = ", ".join(map(str, plan.sizes))
        names = ", ".join(prompt.short_name for prompt in plan.prompts)
        count, subjects = previews_of_a_round(plan)
        more = f", {count} {plan.spec.media_noun} a round" if subjects > len(plan.prompts) else ""
        flat = plan.config.flat
        intervals = [(flat[key], unit) for unit, key in PREVIEW_INTERVALS.items() if flat[key]]
        often = " and ".join(
            f"every {unit if many == 1 else counted(many, unit)}" for many, unit in intervals
        )
        yield f"Previews {often} at {sizes}: {names}{more}"
    for hook in plan.config.webhooks.hooks:
        yield f"Events are sent to a {hook}"


SHOWN_BUCKETS = 4


def budget_lines(budget: Budget) -> Iterator[str]:
    """The estimates of memory, time and disk, line by line."""
    device = budget.device
    launch = budget.config.launch
    room = "unknown memory" if device.memory is None else gigabytes(device.memory)
    room = ", ".join(filter(None, [room, device.taken_by_others]))
    host = (
        f", host memory {gigabytes(device.host_memory)}"
        if device.has_own_memory and device.host_memory
        else ""
    )
    yield (
        f"Estimate for {device.name}, {room}{host} "
        f"({'; '.join(filter(None, (device.note, device.hint)))})"
    )
    if launch.num_processes > 1:
        where = counted(launch.num_machines, "machine")
        way = parallelism(launch, budget.config.offload)
        yield f"  {launch.num_processes} processes on {where}, one per device, {way}"
        if launch.sequence_parallel_size > 1:
            shared = (
                f"the tokens of a sample are shared by {launch.sequence_parallel_size} processes"
            )
            yield f"  {shared}, each of which exchanges {gigabytes(budget.sent.exchanged)} a step"
        yield "  device memory is of one process, host memory of all processes of a machine"
    yield from _phase_lines(budget)
    yield from _bucket_lines(budget)
    yield from _density_lines(budget)
    yield from _time_lines(budget)
    added = budget.model.added(budget.steps[0].load)  # included in the estimates above
    kinds = ((added.forwards, "forward"), (added.passes, "forward and backward"))
    if extra := " and ".join(f"{count:.2g} extra {kind} passes" for count, kind in kinds if count):
        yield f"  with {extra} a micro-step on average"
    disk = ", ".join(
        f"{writing.what} up to {gigabytes(writing.total)}" for writing in find_writings(budget)
    )
    yield f"  disk: {disk}"
    if budget.parts.assumed:
        yield (
            f"  {', '.join(budget.parts.assumed)}: not on this machine, sizes assumed from "
            f"{budget.plan.flavour.name}"
        )
    if budget.guess:
        yield f"  {budget.guess}"
    for decision in budget.decisions:
        yield f"  offload auto: {decision}"


def _phase_lines(budget: Budget) -> Iterator[str]:
    """Peak memory of the phases; for training, of the largest bucket."""
    worst = max(
        (phase for phase in budget.phases if phase.trains),
        key=lambda phase: phase.device,
        default=None,
    )
    shown = [phase for phase in budget.phases if not phase.trains or phase is worst]
    width = max(len(name) for name in ("peak memory", *(phase.name for phase in shown))) + 2
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
    width = (
        max([len("micro-step"), *(len(bucket.label) for bucket, _ in buckets[:SHOWN_BUCKETS])]) + 2
    )
    yield _row(
        "micro-step", width, "tokens", "TFLOP", "weights", "trained", "inputs", "block", "time"
    )
    for bucket, step in buckets[:SHOWN_BUCKETS]:
        memory = step.memory
        cost = step.cost
        # These columns add up to the peak of the step.
        parts = (
            memory.weights,
            memory.trained + memory.update,
            memory.inputs,
            memory.block + memory.outside,
        )
        tokens = str(step.load.samples * step.load.tokens)
        flops = f"{cost.executed.total / 1e12:.3g}"
        yield _row(
            bucket.label, width, tokens, flops, *map(gigabytes, parts), duration_text(cost.seconds)
        )
    if len(buckets) > SHOWN_BUCKETS:
        yield f"  and {len(buckets) - SHOWN_BUCKETS} smaller buckets"


def _density_lines(budget: Budget) -> Iterator[str]:
    """The density of block-sparse attention in the largest buckets; TFLOP and time include it."""
    density = budget.parts.transformer.density
    if density is not None:
        shares = []
        for bucket, step in zip(
            budget.workload.buckets[:SHOWN_BUCKETS], budget.steps, strict=False
        ):
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
    beside = f", and {duration_text(previews)} for previews" if previews else ""
    step = duration_text(budget.step_seconds)
    whole = duration_text(training)
    steps = counted(remaining_steps(plan), "step")
    yield f"  about {step} a step, {whole} for {steps}{beside}; without filling the caches"
    if previews:
        count = preview_rounds(plan)
        share = previews / (training + previews)
        yield (
            f"  {counted(count, 'round')} of previews, {share:.0%} of that time; "
            f"{halved_previews(plan)} halves it"
        )
    if batch := free_batch(budget, steps_per_epoch(plan)):
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
    return (
        "validation_num_inference_steps "
        f"{max(1, (flat['validation_num_inference_steps'] or 1) // 2)}"
    )


def start_lines(budget: Budget) -> Iterator[str]:
    """A summary of the plan for the start of a run: model, data, duration, output folder, and
    whether it fits.
    """
    plan = budget.plan
    kind = plan.config.lora.kind if plan.config.model.model_type == "lora" else "full fine-tune"
    yield f"{kind} on {plan.spec.title} {plan.flavour.name}"
    names = [dataset.id for dataset in plan.trained]
    samples = sum(len(dataset.samples) for dataset in plan.trained)
    yield (
        f"  on {samples} {plan.spec.media_noun} (dataset{'s' if len(names) > 1 else ''} "
        f"{', '.join(names)})"
    )
    steps = remaining_steps(plan)
    rounds = preview_rounds(plan)
    seconds = sum(remaining_seconds(budget))
    after = f" after step {plan.resume.step}" if plan.resume else ""
    shown = f" and {counted(rounds, 'round')} of previews" if rounds else ""
    yield (
        f"  {counted(steps, 'step')}{after}{shown}, about {duration_text(seconds)}; saved to "
        f"{plan.output_dir}"
    )
    yield fit_line(budget)
    if budget.guess:
        yield f"  {budget.guess}"


def fit_line(budget: Budget[SamplePlan]) -> str:
    """`  fits: up to 16.4 GB of 25.8 GB on a GPU with 24 GiB, while training at 1024x1024`"""
    device = budget.device
    peak = max(budget.phases, key=lambda phase: phase.needed(device))
    room = "" if device.memory is None else f" of {gigabytes(device.memory)}"
    verdict = "fits" if budget.fits else "does not fit"
    return (
        f"  {verdict}: up to {gigabytes(peak.needed(device))}{room} on {device.name}, while "
        f"{peak.name}"
    )


def plan_json(budget: Budget | None, problems: Sequence[Problem]) -> str:
    """The document; if a fatal problem prevents a plan, it holds only the problems.

    Bytes and seconds are plain numbers; unknown values are `null`.
    """
    # Checks of the plan and of the budget may report the same problem.
    listed = [problem.to_json() for problem in dict.fromkeys(problems)]
    judged = {"problems": listed, "ok": not any(problem.fatal for problem in problems)}
    described = _described(budget) if budget else {}
    return json.dumps(judged | described, indent=2, ensure_ascii=False)


def _described(budget: Budget) -> dict[str, Any]:
    plan = budget.plan
    launch = budget.config.launch
    settings = {
        key: {"value": value, "origin": origin} for key, value, origin in changed_settings(plan)
    }
    return {
        "model": _described_model(budget),
        "output_dir": str(plan.output_dir),
        "seed": plan.seed,
        "settings": settings,
        "datasets": [_dataset(dataset) for dataset in plan.datasets],
        "length": _described_length(plan),
        "device": _described_device(budget),
        "assumed": [line.strip() for line in [*budget_lines(budget)][1:] if "assumed" in line],
        "memory": [
            {"phase": phase.name, "device": phase.device, "host": phase.host}
            for phase in budget.phases
        ],
        "buckets": _described_buckets(budget),
        "seconds": _described_time(budget),
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


def _described_model(budget: Budget) -> dict[str, Any]:
    plan = budget.plan
    return {
        "family": plan.spec.name,
        "flavour": plan.flavour.name,
        "type": plan.config.model.model_type,
        "location": plan.source["transformer"].location,
        "download": budget.parts.download_bytes(plan.source),
    }


def _described_length(plan: Plan) -> dict[str, Any]:
    length = plan.length
    return {
        "steps": length.total_steps,
        "steps_done": length.total_steps - remaining_steps(plan),
        "epochs": length.epochs,
        "batches_per_epoch": length.batches_per_epoch,
        "finished": plan.is_finished,
    }


def _described_device(budget: Budget) -> dict[str, Any]:
    device = budget.device
    return {
        "name": device.name,
        "memory": device.memory,
        "usable": device.usable,
        "note": device.note,
    }


def _described_buckets(budget: Budget) -> list[dict[str, Any]]:
    density = budget.parts.transformer.density
    described = []
    for bucket, step in zip(budget.workload.buckets, budget.steps, strict=True):
        tokens = step.load.tokens
        described.append(
            {
                "size": bucket.label,
                "share": bucket.share,
                "tokens": step.load.samples * tokens,
                "flops": step.cost.executed.total,
                "attention_density": density(tokens) if density else None,  # None: dense
                "memory": step.memory.total,
                "seconds": step.cost.seconds,
            }
        )
    return described


def _described_time(budget: Budget) -> dict[str, float]:
    """Seconds that remain, without filling the caches."""
    training, previews = remaining_seconds(budget)
    return {
        "step": budget.step_seconds,
        "training": training,
        "previews": previews,
        "total": training + previews,
    }


def _learned(dataset: Dataset) -> float | None:
    """The mean share of a file that its mask leaves to learn; None without masks."""
    white = dataset.white_shares.values()
    return sum(white) / len(white) if white else None


def _dataset(dataset: Dataset) -> dict[str, Any]:
    left_out = [{"file": entry.name, "reason": entry.use} for entry in dataset.unused_lines()]
    return {
        "id": dataset.id,
        "files": len(dataset.samples) + len(left_out),
        "used": len(dataset.samples),
        "left_out": left_out[:MOST_LEFT_OUT],
        "trained": dataset.config.is_trained,
        "repeats": dataset.repeats,
        "buckets": dataset.sizes(),
        "learned": _learned(dataset),  # null without masks
    }
