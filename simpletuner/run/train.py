"""`simpletuner train` from top to bottom.

plan ─► fetch ─► caches ─► assemble ─► train ─► publish
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import torch
from accelerate import Accelerator

from simpletuner.annexes.publishing.card import CARD_FOLDER
from simpletuner.annexes.publishing.upload import Destination
from simpletuner.annexes.publishing.uploads import Uploads, repeat_command
from simpletuner.annexes.replay.autopsy import Doing, autopsied
from simpletuner.atomic import sweep_files, sweep_folders
from simpletuner.budget.budget import Budget
from simpletuner.budget.measure import device_rates
from simpletuner.caching.read import BatchReader
from simpletuner.config.optimizers import peak_learning_rate
from simpletuner.config.precision import transformer_dtype, vae_dtype
from simpletuner.data.loader import BatchLoader
from simpletuner.distributed.requests import STOPPING, expect_requests, stop_on_interrupt
from simpletuner.distributed.world import World, usable_cores
from simpletuner.errors import Interrupted, full_text
from simpletuner.memory.precision import DTYPES
from simpletuner.memory.products import check_device
from simpletuner.models.kernels import KERNELS
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import feature_kinds, latent_storage, text_folder
from simpletuner.reporting.events import EventStream, RunState, StateChanged
from simpletuner.reporting.report import REPORT_FILE
from simpletuner.run.caches import CacheFiller, Encoding, build_adapter, prepare_caches
from simpletuner.run.ledger import FULL, WITHOUT_UPLOADS, Ledger, strike
from simpletuner.run.publish import publish_result, weight_note
from simpletuner.run.records import keep_records
from simpletuner.run.rehearsal import rehearse
from simpletuner.run.watchers import Session, build_callbacks, build_uploads, build_validation
from simpletuner.training.assemble import TrainingSpec, assemble, make_accelerator
from simpletuner.training.checkpoints import load_checkpoint
from simpletuner.training.ema import Ema
from simpletuner.training.loop import train
from simpletuner.training.manifest import FOLDER_NAME, PIPELINE_FOLDER
from simpletuner.training.noise import with_noise
from simpletuner.training.state import Assembly, TrainState
from simpletuner.validation.runner import PREVIEW_FOLDERS

# With one of these, cuBLAS gives the same bits each time, at a cost of memory or speed.
CUBLAS_KEY, REPEATABLE_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# Seconds after which no live process is still writing a temporary file in a shared cache.
ABANDONED = 3600.0


def run_plan(
    plan: Plan,
    budget: Budget,
    events: EventStream,
    *,
    rehearsed: bool | None = None,
    destinations: Sequence[Destination] = (),
    world: World = World(),
) -> None:
    """Run a plan, or resume it where an earlier session stopped, and publish the verified result.

    Args:
        budget: the plan's estimate of memory and time.
        rehearsed: whether to try the most memory-hungry moments first; None does so on a GPU.
        destinations: where the result is uploaded to; they are prepared.
        world: the processes that train together.

    Raises:
        UserError: something the user can fix; checkpoints are kept.
        Interrupted: Ctrl-C; a checkpoint of the last step is on disk.
    """
    with announced_end(events, plan.length.total_steps, world):
        _run(plan, budget, events, rehearsed, destinations, world)


def _run(
    plan: Plan, budget: Budget, events: EventStream, rehearsed: bool | None, destinations: Sequence[Destination],
    world: World,
) -> None:  # fmt: skip
    prepare_machine(plan)
    accelerator = make_accelerator()
    device, config, doing = accelerator.device, plan.config, Doing()
    check_device(config.precision, device)
    events.subscribe(doing)
    adapter = build_adapter(plan)
    world.on_main(lambda: prepare_folder(plan))
    KERNELS.open(plan.output_dir, *([plan.resume.path.parent] if plan.resume else []), world=world)
    epoch = plan.resume.manifest.epoch if plan.resume else 1
    caches = prepare_caches(Encoding(plan, adapter, device, events), epoch, budget.listing, world)
    plan = caches.plan

    # Measured before the transformer is loaded: it needs memory, too.
    dtype = DTYPES[transformer_dtype(config.precision)]
    rates = world.main_only(lambda: device_rates(plan.output_dir, device, dtype))
    assembly, ema, reader, loader, state = load(plan, caches, accelerator, events, world)
    if plan.resume:
        events.say(f"Continuing from {plan.resume.path.name}")

    with closing(loader):
        record = keep_records(plan, events, state.global_step, world)
        uploads = build_uploads(plan, destinations, events)
        session = Session(plan, caches.catalogue, reader, loader, ema, record, events, rates, budget, uploads, world)
        validation = build_validation(session, state)
        callbacks = build_callbacks(session, validation)
        if rehearsed or (rehearsed is None and device.type == "cuda"):
            with events.phase("Rehearsing the largest moments", stage="init_prepare_models"):
                for tried in rehearse(assembly, loader.sampler.batches(loader.epoch), reader, validation, budget):
                    events.say(str(tried))
        total_steps = plan.length.total_steps
        with (
            autopsied(session, assembly, state, doing),
            stop_on_interrupt(
                events.stop, lambda: events.publish(StateChanged("stopping", state.global_step, total_steps, STOPPING))
            ),
        ):
            train(assembly, loader, state, callbacks, events.stop)
        ledger = Ledger(state.global_step, state.epoch, FULL if destinations else WITHOUT_UPLOADS)
        world.main_only(lambda: ledger.write(plan.output_dir))
        note = weight_note(plan, state)
        result = publish_result(plan, assembly, ema, note, lambda: reader(loader.sampler.batches(loader.epoch)[0]))
        world.main_only(lambda: _end(plan, events, uploads, ledger, result))


def finish_run(plan: Plan, ledger: Ledger, destinations: Sequence[Destination], events: EventStream) -> None:
    """Do what a session that was killed after the last step has left to do.

    Args:
        destinations: where the result is uploaded to; they are prepared.
    """
    with announced_end(events, plan.length.total_steps, World()):
        sweep_strays(plan)
        keep_records(plan, events, ledger.step, World())
        _end(plan, events, build_uploads(plan, destinations, events), ledger, f"Results: {plan.output_dir}")


def _end(plan: Plan, events: EventStream, uploads: Uploads, ledger: Ledger, result: str) -> None:
    """Everything after the result is on disk."""
    if "card" in ledger.tasks:
        uploads.finish(ledger)
    lines = "\n".join(end_lines(plan, result, uploads))
    events.publish(StateChanged("finished", ledger.step, plan.length.total_steps, lines))
    strike(plan.output_dir, "end")


def load(
    plan: Plan, caches: CacheFiller, accelerator: Accelerator, events: EventStream, world: World
) -> tuple[Assembly, Ema | None, BatchReader, BatchLoader, TrainState]:
    """Everything that takes part in training, in the state in which this session starts."""
    config = plan.config
    with events.phase("Loading the transformer", stage="init_load_base_model"):
        techniques = [technique.build() for technique in plan.techniques]
        assembly = assemble(config, training_spec(plan), caches.encoding.adapter, techniques, accelerator, world)
    ema = Ema(assembly.parameters, config.ema, accelerator.device) if config.ema.use_ema else None
    dropout, features = config.text.caption_dropout_probability, feature_kinds(plan)
    encoding = caches.encoding
    reader = BatchReader(caches.catalogue, dropout, plan.seed, encoding.restore, encoding.encode, features)
    loader = BatchLoader(plan.sampler(assembly.world), reader, config.caching, caches.follow, pin=True)
    state = begin(plan, assembly, loader, ema)
    loader.complete, loader.count = partial(with_noise, assembly), state.global_step * assembly.settings.accumulation
    return assembly, ema, reader, loader, state


@contextmanager
def announced_end(events: EventStream, total_steps: int, world: World) -> Iterator[None]:
    """Publish if the run fails or is interrupted, so that all records are closed and say so."""
    try:
        yield
    except BaseException as error:
        how: RunState = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        message = world.first_failure(error) or full_text(error)
        events.publish(StateChanged(how, events.step, total_steps, message))
        raise


def end_lines(plan: Plan, result: str, uploads: Uploads) -> Iterator[str]:
    """The last lines of a finished run: the result, the report, the next commands."""
    yield result
    yield f"Report: {plan.output_dir / REPORT_FILE}"
    yield f'Look at it: simpletuner sample {shlex.quote(str(plan.output_dir))} --prompt "..."'
    yield "To train longer, start the same command with a larger max_train_steps."
    if uploads.failed and uploads.destinations:
        yield f"Not everything was uploaded; the next command tries again: {repeat_command(plan.output_dir)}"


def prepare_folder(plan: Plan) -> None:
    """Make the output folder, or tidy that of an earlier session."""
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    sweep_strays(plan)
    expect_requests(plan.output_dir)  # those of this session count from now on


def sweep_strays(plan: Plan) -> None:
    """Remove temporary files of killed runs; in caches only old ones, since other runs may use the same cache."""
    names = re.compile(rf"{FOLDER_NAME.pattern}|{PIPELINE_FOLDER}|{CARD_FOLDER}|unverified")
    for folder in (plan.output_dir, plan.output_dir / "ema"):
        sweep_files(folder)
        sweep_folders(folder, names)
    for below in PREVIEW_FOLDERS:
        sweep_files(plan.output_dir / below)
    caches = {text_folder(plan), *(text_folder(plan, each) for each in plan.datasets)}
    for folder in caches | {each.latent_dir for each in plan.datasets}:
        sweep_files(folder, deep=True, older_than=ABANDONED)


def begin(plan: Plan, assembly: Assembly, loader: BatchLoader, ema: Ema | None) -> TrainState:
    """The state in which this session starts: a checkpoint, step 0, or `init_lora_step` of the LoRA it starts from."""
    if plan.resume is not None:
        return load_checkpoint(plan.resume, assembly, loader, ema, same_data=plan.same_data)
    lora = plan.config.lora
    return TrainState(global_step=lora.init_lora_step if lora.init_lora else 0)


def training_spec(plan: Plan) -> TrainingSpec:
    """The plan's decisions that training depends on."""
    offsets = {each.id: offset for each in plan.trained if (offset := each.config.timestep_sampling_offset)}
    rate = peak_learning_rate(plan.config)
    return TrainingSpec(plan.lora_targets, plan.seed, plan.length.total_steps, rate, offsets)


def prepare_machine(plan: Plan) -> None:
    """Set process-wide options of torch."""
    torch.set_num_threads(compute_threads(plan.config.caching.torch_num_threads))
    config = plan.config
    # The VAE encodes in another thread then, where it must not change the settings of the process.
    beside = vae_dtype(config.precision, config.caching) == "fp32" and any(
        latent_storage(plan, each) != "ahead" for each in plan.datasets
    )
    allowed = not config.precision.disable_tf32 and not beside
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    # torch prefers cuDNN on Hopper, where its gradients of masked attention may be NaN (pytorch #196678). Attention
    # without a mask still uses it where it is measured to be faster.
    torch.backends.cuda.enable_cudnn_sdp(False)
    fix_order(plan.config.speed.deterministic)


def fix_order(wanted: bool) -> None:
    """Let torch use only operations whose results do not depend on an order of execution, and refuse others.

    Before the first matrix product, for which cuBLAS reads its setting.
    """
    if wanted and os.environ.get(CUBLAS_KEY) not in REPEATABLE_WORKSPACES:
        os.environ[CUBLAS_KEY] = REPEATABLE_WORKSPACES[0]
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False  # which chooses convolutions by timing
    # A debugging aid, which would write all memory once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compute_threads(wanted: int) -> int:
    """Threads for computation on a CPU, limited by the cores this process may use and by OMP_NUM_THREADS.

    More threads than cores would wait for each other in every operation.
    """
    usable = usable_cores()
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(wanted, usable, int(given) if given.isdecimal() else usable))
