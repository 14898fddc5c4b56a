"""What `simpletuner train` does, from top to bottom.

plan ─► fetch ─► caches ─► assemble ─► train ─► publish
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from simpletuner.caching.read import BatchReader
from simpletuner.config.precision import transformer_dtype
from simpletuner.config.tread import read_routes
from simpletuner.data.loader import BatchLoader
from simpletuner.memory.device_rates import DeviceRates
from simpletuner.memory.measure import device_rates
from simpletuner.memory.precision import DTYPES
from simpletuner.plan.budget import Budget
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import evaluated
from simpletuner.plan.resume import fingerprint
from simpletuner.reporting.environment import package_versions
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, MediaFile, MediaRecord, MetricsFile
from simpletuner.reporting.progress import Progress
from simpletuner.reporting.redaction import redact_settings
from simpletuner.reporting.trackers import GuardedTracker, build_trackers
from simpletuner.run.caches import CacheWorkshop, build_adapter, fetch, quarantine_rejected
from simpletuner.run.previews import build_subjects
from simpletuner.run.publish import publish
from simpletuner.run.rehearsal import rehearse
from simpletuner.run.report import RunReport
from simpletuner.techniques.base import Technique
from simpletuner.techniques.regularisation import Regularisation
from simpletuner.techniques.tread import Tread
from simpletuner.training.assemble import Intent, assemble, make_accelerator, peak_learning_rate
from simpletuner.training.callbacks import Callback
from simpletuner.training.checkpoints import CheckpointWriter, load_checkpoint
from simpletuner.training.ema import Ema
from simpletuner.training.loop import stop_on_interrupt, train
from simpletuner.training.manifest import Identity
from simpletuner.training.recorder import EmaUpdater, Recorder, ReportWriter
from simpletuner.training.state import Assembly, TrainState
from simpletuner.validation.eval_loss import EvaluationLoss
from simpletuner.validation.runner import ValidationRunner

logger = logging.getLogger(__name__)


def run_plan(plan: Plan, budget: Budget, progress: Progress, *, rehearsed: bool | None = None) -> None:
    """Train what a plan says, from where an earlier session left it, to a verified file.

    Args:
        budget: what the plan expects of memory.
        rehearsed: whether the largest moments are tried first; None is on a GPU.

    Raises:
        UserError: something the user can mend; nothing that was complete is lost.
        Interrupted: Ctrl-C; a checkpoint of the last step is on disk.
    """
    prepare_machine(plan)
    accelerator = make_accelerator()
    adapter = build_adapter(plan)
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    quarantine_rejected(plan)
    workshop = CacheWorkshop(plan, adapter, accelerator.device, progress, fetch(plan, progress))
    plan = workshop.fill(plan.resume.manifest.epoch if plan.resume else 1)
    for dataset in plan.datasets:
        dataset.save_index()

    rates = device_rates(plan.output_dir, accelerator.device, DTYPES[transformer_dtype(plan.config.precision)])
    with progress.phase("Loading the transformer"):
        assembly = assemble(plan.config, intent_of(plan), adapter, choose_techniques(plan), accelerator)
    ema = Ema(assembly.parameters, plan.config.ema, accelerator.device) if plan.config.ema.use_ema else None
    reader = BatchReader(workshop.catalogue, plan.config.text.caption_dropout_probability, plan.seed, workshop.mend)
    loader = BatchLoader(
        plan.sampler(), reader, plan.config.caching, lambda epoch: _complete(workshop, epoch), pin=True
    )
    state = begin(plan, assembly, loader, ema)
    if plan.resume:
        progress.say(f"Continuing from {plan.resume.path.name}")

    report = RunReport(plan)
    trackers = build_trackers(
        plan.config.tracking, plan.output_dir, Path(plan.config.run.logging_dir).expanduser(), state.global_step
    )
    for tracker in trackers:
        tracker.start(plan.config.flat())
    metrics = MetricsFile(plan.output_dir / METRICS_FILE, state.global_step)
    media = MediaFile(plan.output_dir / MEDIA_FILE, state.global_step)
    try:
        callbacks = build_callbacks(
            plan, workshop, reader, loader, ema, trackers, report, progress, metrics, media, rates
        )
        if accelerator.device.type == "cuda" if rehearsed is None else rehearsed:
            validation = next(each for each in callbacks if isinstance(each, ValidationRunner))
            batches = plan.sampler().batches(loader.epoch)
            with progress.phase("Rehearsing the largest moments"):
                for tried in rehearse(assembly, batches, reader, validation, budget):
                    progress.say(str(tried))
        with stop_on_interrupt() as stop:
            train(assembly, loader, state, callbacks, stop)
        published = publish(plan, assembly, ema, weight_note(plan, state))
        report.write(state.global_step, "finished")
        progress.finish()
        progress.say(published)
    except BaseException as error:
        report.write(state.global_step, "stopped", message=str(error) or type(error).__name__)
        _finish(trackers, 1)
        raise
    finally:
        loader.close()
        metrics.close()
        media.close()
    _finish(trackers, 0)


def build_callbacks(
    plan: Plan,
    workshop: CacheWorkshop,
    reader: BatchReader,
    loader: BatchLoader,
    ema: Ema | None,
    trackers: list[GuardedTracker],
    report: RunReport,
    progress: Progress,
    metrics: MetricsFile,
    media: MediaFile,
    rates: DeviceRates | None,
) -> list[Callback]:
    """Who watches the run, in the order in which they are called."""
    config = plan.config

    def show(records: Sequence[MediaRecord]) -> None:
        for record in records:
            media.append(record)
        for tracker in trackers:
            if records:
                tracker.log_media(records, records[0].step)
        if records:
            report.write(records[0].step)

    checkpoints = CheckpointWriter(
        output_dir=plan.output_dir,
        config=config.checkpoints,
        loader=loader,
        ema=ema,
        identity=Identity(
            plan.spec.name, plan.flavour.name, config.model.model_type, config.schedule.train_batch_size,
            plan.seed, fingerprint(plan.trained), package_versions(),
        ),
        settings=redact_settings(config.flat()),
        say=progress.say,
        note=lambda current: weight_note(plan, current),
    )  # fmt: skip
    validation = ValidationRunner(
        config=config,
        subjects=build_subjects(plan, workshop.catalogue, reader),
        sizes=plan.sizes,
        output_dir=plan.output_dir,
        seed=plan.seed,
        ema=ema,
        phase=lambda title, total: progress.phase(title, total, plan.spec.samples),
        listener=show,
        frame_rate=preview_rate(plan),
    )
    evaluation = EvaluationLoss(
        config=config.evaluation,
        datasets={each.id: each.samples for each in evaluated(plan)},
        read=reader.read_sample,
        seed=plan.seed,
        steps_per_epoch=plan.length.batches_per_epoch / config.schedule.gradient_accumulation_steps,
        ema=ema,
        ema_validation=config.ema.ema_validation,
        phase=lambda title, total: progress.phase(title, total, "timesteps"),
        say=progress.say,
    )
    matmul_flops = rates.matmul_flops if rates else None
    recorder = Recorder(metrics, progress, trackers, ema, plan.length.epochs, matmul_flops)
    writer = ReportWriter(report.write, interval=max(50, plan.length.total_steps // 20))
    averaging: list[Callback] = [EmaUpdater(ema)] if ema else []
    # Evaluation adds to the metrics that the recorder then writes down.
    return [*averaging, checkpoints, evaluation, recorder, validation, writer]


def choose_techniques(plan: Plan) -> list[Technique]:
    """The techniques that the configuration switches on, in the order in which their doors are passed."""
    techniques: list[Technique] = []
    regularised = frozenset(each.id for each in plan.trained if each.config.is_regularisation_data)
    if regularised:
        techniques.append(Regularisation(regularised))
    if plan.config.tread.tread_config is not None:
        techniques.append(Tread(read_routes(plan.config.tread.tread_config, [])))  # the plan told its problems
    return techniques


def begin(plan: Plan, assembly: Assembly, loader: BatchLoader, ema: Ema | None) -> TrainState:
    """Where this session starts: at a checkpoint, at 0, or at the step that the LoRA it starts from counts as."""
    if plan.resume is not None:
        return load_checkpoint(plan.resume, assembly, loader, ema, same_data=plan.same_data)
    lora = plan.config.lora
    return TrainState(global_step=lora.init_lora_step if lora.init_lora else 0)


def preview_rate(plan: Plan) -> float | None:
    """Frames per second of preview clips; None for families of pictures."""
    return None if plan.spec.frame_rate is None else plan.config.validation.framerate or plan.spec.frame_rate


def intent_of(plan: Plan) -> Intent:
    """What training needs to know of the plan."""
    return Intent(plan.lora_targets, plan.seed, plan.length.total_steps, peak_learning_rate(plan.config))


def prepare_machine(plan: Plan) -> None:
    """Process-wide settings of torch."""
    torch.set_num_threads(compute_threads(plan.config.caching.torch_num_threads))
    allowed = not plan.config.precision.disable_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def compute_threads(wanted: int) -> int:
    """Threads for computing on a CPU: never more than this process may use, or than OMP_NUM_THREADS says.

    With more threads than cores they wait for each other at every operation, and tiny models crawl.
    """
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(wanted, usable, int(given) if given.isdecimal() else usable))


def weight_note(plan: Plan, state: TrainState) -> Mapping[str, str]:
    """Entries for the header of weight files: what they belong to, and the user's comment."""
    note = {
        "modelspec.architecture": f"{plan.spec.name}/{plan.flavour.name}",
        "modelspec.title": plan.config.tracking.tracker_run_name,
        "simpletuner.step": str(state.global_step),
    }
    comment: Any = plan.config.publish.modelspec_comment
    if comment:
        text = comment if isinstance(comment, str) else "\n".join(map(str, comment))
        values = {
            "{current_step}": str(state.global_step),
            "{current_epoch}": str(state.epoch),
            "{timestamp}": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        note["modelspec.description"] = text
    return note


def _complete(workshop: CacheWorkshop, epoch: int) -> None:
    """Encode what an epoch with new random crops lacks; other datasets lack nothing."""
    if any(dataset.changes_each_epoch for dataset in workshop.plan.datasets):
        workshop.fill(epoch)


def _finish(trackers: list[GuardedTracker], exit_code: int) -> None:
    for tracker in trackers:
        tracker.finish(exit_code)
