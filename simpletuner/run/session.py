"""A session of a run: its parts, and its callbacks in calling order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from accelerate import Accelerator
from torch import Tensor

from simpletuner.budget.budget import Budget, find_rounds, saves_in_background, steps_per_epoch
from simpletuner.budget.device import DeviceRates
from simpletuner.caching.catalogue import Catalogue
from simpletuner.config.precision import transformer_dtype
from simpletuner.distributed.world import World
from simpletuner.encoding.caches import CacheFiller
from simpletuner.encoding.read import BatchReader
from simpletuner.memory.precision import DTYPES
from simpletuner.planning.entries import evaluated, feature_kinds, prompts_with_sources
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.planning.resume import identify
from simpletuner.redaction import redact_settings
from simpletuner.reporting.events import EventStream
from simpletuner.reporting.record import Recorded
from simpletuner.run.companions import Companion
from simpletuner.run.settings import assembly_settings, render_settings, training_spec
from simpletuner.techniques.load import make_techniques
from simpletuner.training.assemble import assemble
from simpletuner.training.checkpoints import CheckpointWriter, load_checkpoint
from simpletuner.training.ema import Ema
from simpletuner.training.guard import stop_if_result_not_finite
from simpletuner.training.loader import BatchLoader
from simpletuner.training.loop import Callback
from simpletuner.training.recorder import EmaUpdater, Recorder, RequestHandler
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import predict_now
from simpletuner.training.trained import Publication
from simpletuner.training.weight_note import WeightNote
from simpletuner.validation.background import DecodingThread
from simpletuner.validation.encoded_prompt import EncodedPrompt
from simpletuner.validation.eval_loss import EvaluationLoss
from simpletuner.validation.runner import ValidationRunner, previews_are_due


@dataclass(frozen=True)
class Session:
    """All parts of training, in their state at the start of the session.

    Attributes:
        plan: the plan without files found to be damaged.
        catalogue: locations of cache entries.
        reader: loads batches from cached entries.
        loader: supplies batches in the order of the run.
    """

    plan: Plan
    events: EventStream
    catalogue: Catalogue
    assembly: Assembly
    reader: BatchReader
    loader: BatchLoader
    state: TrainState

    @classmethod
    def open(cls, caches: CacheFiller, accelerator: Accelerator, world: World) -> Session:
        """Load the model, and restore the checkpoint of a resumed run."""
        plan = caches.plan
        config = caches.plan.config
        encoding = caches.encoding
        events = encoding.events
        with events.phase("Loading the transformer", stage="init_load_base_model"):
            techniques = make_techniques(plan.techniques)
            settings = assembly_settings(config, training_spec(plan))
            assembly = assemble(settings, encoding.adapter, techniques, accelerator, world)
        # Starts from the initial weights; `load_checkpoint` replaces the average of a resumed run.
        if config.ema.use_ema:
            assembly.trained.ema = Ema(assembly.parameters, config.ema, accelerator.device)
        dropout = config.text.caption_dropout_probability
        features = feature_kinds(plan)
        reader = BatchReader(
            caches.catalogue, dropout, plan.seed, encoding.restore, encoding.encode, features
        )
        loader = BatchLoader(
            plan.sampler(assembly.world),
            reader,
            config.caching,
            caches.follow,
            pin=True,
            noise=assembly.noise,
            # Noise depends on the number of the micro-batch in the run, not in this session.
            count=plan.steps_done * assembly.settings.accumulation,
        )
        if plan.resume is not None:
            state = load_checkpoint(plan.resume, assembly, loader, same_data=plan.same_data)
        else:
            state = TrainState(plan.steps_done)
        return cls(plan, events, caches.catalogue, assembly, reader, loader, state)


def build_callbacks(
    session: Session,
    validation: ValidationRunner,
    recorded: Recorded,
    budget: Budget,
    rates: DeviceRates | None,
    companions: Sequence[Companion],
    thread: ThreadPoolExecutor,
) -> list[Callback]:
    """The callbacks of a run, in calling order; see `Callback` for the reasons.

    Args:
        rates: speed of the device, if measured.
        thread: a pool of one worker, which completes checkpoints.
    """
    plan = session.plan
    config = session.plan.config
    events = session.events
    first: list[Callback] = [EmaUpdater()]
    datasets = {dataset.id: dataset.samples for dataset in evaluated(plan)}
    if datasets:
        evaluation = EvaluationLoss(
            config=config.evaluation,
            datasets=datasets,
            read=session.reader.read_sample,
            steps_per_epoch=steps_per_epoch(plan),
            ema_validation=config.ema.ema_validation,
            events=events,
            is_missing=not recorded.evaluated,
        )
        first.append(evaluation)
    recorder = Recorder(
        events,
        plan.length.epochs,
        matmul_flops=rates.matmul_flops if rates else None,
        rounds=find_rounds(budget),
        step_seconds=budget.step_seconds,
    )
    checkpoints = CheckpointWriter(
        output_dir=plan.output_dir,
        in_shards=config.launch.fsdp_state_dict_type == "SHARDED_STATE_DICT",
        config=config.checkpoints,
        loader=session.loader,
        identity=identify(plan),
        settings=redact_settings(config.flat),
        events=events,
        note=weight_note(plan),
        previews=validation,
        users=companions,
        in_background=saves_in_background(budget) and session.assembly.trained.sharers.size == 1,
        thread=thread,
    )
    requests = RequestHandler(
        plan.output_dir,
        events,
        {"save": checkpoints.save, "preview": validation.render},
        config.checkpoints.disk_low_threshold or 0.0,
    )
    # The moving average first: later callbacks evaluate, save and render the average of this step.
    return [*first, recorder, requests, checkpoints, validation, *companions]


def build_validation(session: Session, recorded: Recorded, thread: Executor) -> ValidationRunner:
    """The callback that renders previews.

    Args:
        thread: a pool of one worker, which decodes previews in the background.
    """
    plan = session.plan
    state = session.state
    decoding = None
    if plan.config.validation.validation_decode_in_background:
        decoding = DecodingThread(thread, session.assembly.accelerator.device)
    # Previews follow the checkpoint of their step. After a kill in between, they were due and are
    # still to be rendered.
    step = state.global_step
    were_due = step > 0 and previews_are_due(
        plan.config.validation, step, epochs_before_step(session), state.epochs_done
    )
    return ValidationRunner(
        settings=render_settings(plan),
        ema_validation=plan.config.ema.ema_validation,
        prompts=encoded_prompts(plan, session.catalogue, session.reader),
        sizes=plan.sizes,
        output_dir=plan.output_dir,
        events=session.events,
        already_rendered=recorded.previews,
        were_due=were_due,
        decoding=decoding,
    )


def epochs_before_step(session: Session) -> int:
    """Epochs that were complete before the last step, which may have completed one."""
    loader = session.loader
    completed_an_epoch = loader.index >= loader.sampler.batches_per_epoch(loader.epoch)
    began_in_the_epoch_before = (
        loader.index < session.plan.config.schedule.gradient_accumulation_steps
    )
    if completed_an_epoch or began_in_the_epoch_before:
        return loader.epochs_done - 1
    return loader.epochs_done


def encoded_prompts(
    plan: SamplePlan, catalogue: Catalogue, reader: BatchReader
) -> list[EncodedPrompt]:
    """Every prompt with every source picture."""
    negative_text = plan.config.validation.validation_negative_prompt or ""
    prompts: list[EncodedPrompt] = []
    for prompt, pictures in prompts_with_sources(plan):
        for index, picture in enumerate(pictures):
            named = prompt
            if len(pictures) > 1:
                # The short name is part of file names, and pictures of one prompt must not
                # overwrite each other.
                named = replace(prompt, short_name=f"{prompt.short_name}-{index}")
            prompts.append(EncodedPrompt(named, negative_text, picture, catalogue, reader))
    return prompts


def publish_result(session: Session) -> str:
    """Write and verify the result; returns a message for the user.

    Raises:
        NonFiniteError: a weight is NaN or infinite; nothing is written.
        RuntimeError: the saved file does not reproduce the model.
    """
    plan = session.plan
    assembly = session.assembly
    if not assembly.writes:
        return ""
    publication = Publication(
        assembly.adapter,
        plan.source,
        DTYPES[transformer_dtype(plan.config.precision)],
        plan.config.sampling_shift,
        weight_note(plan).at(session.state.global_step, session.state.epoch),
        partial(predict_once, session),
    )
    with assembly.sampling_weights():
        stop_if_result_not_finite(assembly.all_parameters, assembly.trained.ema)
        return assembly.trained.publish(plan.output_dir, publication)


def predict_once(session: Session) -> Tensor:
    """The prediction for the first batch of the epoch, with the noise of step 0."""
    assembly = session.assembly
    loader = session.loader
    assembly.transformer.eval()  # as previews compute
    planned = loader.sampler.batches(loader.epoch)[0]
    batch = session.reader(planned).to(assembly.accelerator.device)
    noisy = assembly.noise.add(batch, 0, 0)
    return predict_now(assembly, assembly.adapter.prepare(noisy))


def weight_note(plan: Plan) -> WeightNote:
    """What the headers of a run's weight files record."""
    kind = "/lora" if plan.config.model.model_type == "lora" else ""
    return WeightNote(
        architecture=f"{plan.spec.name}/{plan.flavour.name}{kind}",
        title=plan.title,
        size=plan.sizes[0],
        trigger=plan.config.publish.trigger,
        comment=plan.config.publish.modelspec_comment,
    )
