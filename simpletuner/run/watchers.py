"""Build the callbacks of a run, and the subjects that previews show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from PIL.Image import Image

from simpletuner.annexes.publishing.card import NOBODY
from simpletuner.annexes.publishing.model_card import describe_run
from simpletuner.annexes.publishing.upload import Destination, Hub
from simpletuner.annexes.publishing.uploads import Uploads
from simpletuner.budget.budget import Budget
from simpletuner.budget.device import DeviceRates
from simpletuner.budget.rounds import find_rounds, steps_per_epoch
from simpletuner.caching.catalogue import Catalogue
from simpletuner.caching.fill import prepared_picture
from simpletuner.caching.read import BatchReader
from simpletuner.config.publishing import repository_name
from simpletuner.config.schema import ScheduleConfig
from simpletuner.config.values import Size
from simpletuner.data.loader import BatchLoader
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.distributed.world import World
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import evaluated, preview_sources
from simpletuner.redaction import redact_settings
from simpletuner.reporting.environment import package_versions
from simpletuner.reporting.events import EventStream
from simpletuner.run.publish import weight_note
from simpletuner.run.records import Recorded
from simpletuner.training.checkpoints import CheckpointWriter
from simpletuner.training.ema import Ema
from simpletuner.training.loop import Callback
from simpletuner.training.recorder import EmaUpdater, Recorder, RequestHandler
from simpletuner.training.state import TrainState
from simpletuner.validation.adapters import fetched_runs
from simpletuner.validation.eval_loss import EvaluationLoss
from simpletuner.validation.runner import Subject, ValidationRunner


def build_subjects(plan: Plan, catalogue: Catalogue, reader: BatchReader) -> list[Subject]:
    """One subject per prompt and source picture; pictures are fitted to the size of a preview."""
    negative_text = plan.config.validation.validation_negative_prompt or ""
    subjects = []

    def embeds(text: str, picture: Sample | None, negative: bool, size: Size) -> TextEmbeds:
        fitted = None if picture is None else picture.fitted(size)
        return reader.read_text(catalogue.text(None, text, fitted, negative=negative))

    pictures = preview_sources(plan)
    for prompt in plan.prompts:
        for index, picture in enumerate(pictures):
            name = prompt.short_name if len(pictures) == 1 else f"{prompt.short_name}-{index}"
            subjects.append(
                Subject(
                    prompt=replace(prompt, short_name=name),
                    embeds=partial(embeds, prompt.prompt, picture, False),
                    negative=partial(embeds, negative_text, picture, True),
                    source=None if picture is None else partial(_fitted_picture, picture),
                    picture="" if picture is None else picture.content,
                )
            )
    return subjects


def _fitted_picture(sample: Sample, size: Size) -> Image:
    return prepared_picture(sample.fitted(size))


@dataclass(frozen=True)
class Session:
    """The parts of a run besides the model it trains.

    Attributes:
        plan: without files that turned out to be damaged.
        catalogue: locations of cache entries.
        reader: loads batches from cached entries.
        loader: supplies batches in the order of the run.
        ema: the moving average, if `use_ema` is set.
        rates: measured speed of the device, if it was measured.
        budget: the estimate of memory and time from before the run.
        uploads: what uploads checkpoints.
        world: the processes that train together.
    """

    plan: Plan
    catalogue: Catalogue
    reader: BatchReader
    loader: BatchLoader
    ema: Ema | None
    record: Recorded
    events: EventStream
    rates: DeviceRates | None
    budget: Budget
    uploads: Uploads
    world: World


def build_callbacks(session: Session, validation: ValidationRunner) -> list[Callback]:
    """The callbacks of a run in the order in which they are called; see `Callback` for the reason."""
    averaging: list[Callback] = [EmaUpdater(session.ema)] if session.ema else []
    evaluation, recorder, checkpoints = build_evaluation(session), build_recorder(session), build_checkpoints(session)
    requests = RequestHandler(
        session.plan.output_dir,
        session.events,
        {"save": checkpoints.save, "preview": validation.render},
        session.plan.config.checkpoints.disk_low_threshold or 0.0,
    )
    uploads: list[Callback] = [session.uploads] if session.world.is_main else []
    return [*averaging, evaluation, recorder, requests, checkpoints, validation, *uploads]


def build_validation(session: Session, state: TrainState) -> ValidationRunner:
    """The callback that renders previews.

    Args:
        state: with which the session starts.
    """
    plan = session.plan
    fetch = partial(fetched_runs, plan.config, plan.spec.name, plan.source)
    validation = ValidationRunner(
        config=plan.config,
        subjects=build_subjects(plan, session.catalogue, session.reader),
        sizes=plan.sizes,
        output_dir=plan.output_dir,
        seed=plan.seed,
        ema=session.ema,
        events=session.events,
        frame_rate=plan.frame_rate,
        adapters=session.world.leader_first(fetch) if plan.prompts else [],
        recorded=session.record.previews,
    )
    before = replace(state, epochs_done=epochs_before(session.loader, plan.config.schedule))
    validation.lacking = state.global_step > 0 and validation.is_due(before, state.epochs_done)
    return validation


def epochs_before(loader: BatchLoader, schedule: ScheduleConfig) -> int:
    """Epochs that were complete before the last step, which may have completed one itself."""
    batches = loader.index
    completed = batches >= loader.sampler.batches_per_epoch(loader.epoch)
    begun_earlier = batches < schedule.gradient_accumulation_steps
    return loader.epochs_done - (completed or begun_earlier)


def build_checkpoints(session: Session) -> CheckpointWriter:
    """The callback that saves checkpoints."""
    plan, config = session.plan, session.plan.config
    return CheckpointWriter(
        output_dir=plan.output_dir,
        in_shards=config.launch.fsdp_state_dict_type == "SHARDED_STATE_DICT",
        config=config.checkpoints,
        loader=session.loader,
        ema=session.ema,
        identity=plan.identity(package_versions()),
        settings=redact_settings(config.flat()),
        events=session.events,
        note=lambda state: weight_note(plan, state),
        in_use=session.uploads.in_use,
    )


def build_uploads(plan: Plan, destinations: Sequence[Destination], events: EventStream) -> Uploads:
    """What uploads checkpoints and the result, and runs the user's scripts."""
    tracking, publish = plan.config.tracking, plan.config.publish
    name = repository_name(publish.hub_model_id or tracking.tracker_project_name)
    hubs = [each.repository for each in destinations if isinstance(each, Hub)]
    repository = hubs[0] if hubs else name if "/" in name else f"{NOBODY}/{name}"
    write = partial(describe_run, plan, repository)
    uploads = Uploads(publish, plan.output_dir, tracking.tracker_run_name, destinations, events, write)
    events.subscribe(uploads)
    return uploads


def build_evaluation(session: Session) -> EvaluationLoss:
    """The callback that measures the loss on held-out data."""
    plan = session.plan
    return EvaluationLoss(
        config=plan.config.evaluation,
        datasets={each.id: each.samples for each in evaluated(plan)},
        read=session.reader.read_sample,
        seed=plan.seed,
        steps_per_epoch=steps_per_epoch(plan),
        ema=session.ema,
        ema_validation=plan.config.ema.ema_validation,
        events=session.events,
        lacking=not session.record.evaluated,
    )


def build_recorder(session: Session) -> Recorder:
    """The callback that publishes every step."""
    return Recorder(
        session.events,
        session.ema,
        session.plan.length.epochs,
        matmul_flops=session.rates.matmul_flops if session.rates else None,
        rounds=find_rounds(session.plan, session.budget),
    )
