"""`simpletuner train` from start to finish.

plan ─► fetch ─► caches ─► assemble ─► train ─► publish
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import torch

from simpletuner.atomic import sweep_files, sweep_folders, writing_to
from simpletuner.budget.budget import Budget
from simpletuner.config.precision import transformer_dtype, vae_dtype
from simpletuner.distributed.requests import (
    STOPPING,
    expect_requests,
    stop_on_interrupt,
    take_requests,
)
from simpletuner.distributed.world import World, compute_threads
from simpletuner.encoding.caches import prepare_caches
from simpletuner.encoding.encoders import Encoding, build_adapter
from simpletuner.errors import Interrupted, full_text
from simpletuner.memory.precision import DTYPES, check_device
from simpletuner.planning.checkpoint_folder import FOLDER_NAME, PIPELINE_FOLDER
from simpletuner.planning.entries import latent_storage, text_folder
from simpletuner.planning.length import length_key
from simpletuner.planning.lineage import branch_folder, start_line
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.reporting.events import EventStream, RunState, StateChanged
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, describe_damage
from simpletuner.reporting.record import Recorded, RunRecord
from simpletuner.run.companions import Companion, Ledger, mark_done
from simpletuner.run.rehearsal import rehearse
from simpletuner.run.session import Session, build_callbacks, build_validation, publish_result
from simpletuner.speed.attention import activate_attention
from simpletuner.speed.measure import device_rates
from simpletuner.training.assemble import make_accelerator
from simpletuner.training.loop import train
from simpletuner.validation.runner import PREVIEW_FOLDERS

# Workspace settings with which cuBLAS is deterministic, at a cost in memory or speed.
CUBLAS_KEY = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE_WORKSPACES = (":4096:8", ":16:8")
# Age in seconds from which a temporary file in a shared cache is stale.
ABANDONED = 3600.0


def run_plan(
    budget: Budget,
    events: EventStream,
    companions: Sequence[Companion] = (),
    world: World = World(),
    *,
    rehearsed: bool | None = None,
) -> None:
    """Run a plan, or resume it where an earlier session stopped, and publish the verified result.

    Args:
        budget: the plan, with the estimate of its memory and time.
        companions: the run's companions in this process.
        world: the processes that train together.
        rehearsed: whether to rehearse the memory peaks first; None rehearses on a GPU.

    Raises:
        UserError: an error that the user can fix; checkpoints are kept.
        Interrupted: Ctrl-C; a checkpoint of the last step is on disk.
    """
    plan = budget.plan
    with announced_end(plan, events, world), ExitStack() as held:
        prepare_machine(plan)
        accelerator = make_accelerator()
        device = accelerator.device
        check_device(plan.config.precision, device)
        activate_attention(plan.config.precision, device)
        adapter = build_adapter(plan)
        # All processes wait until leftovers of an earlier session are removed.
        world.on_main(lambda: prepare_folder(plan))
        epoch = plan.resume.manifest.epoch if plan.resume else 1
        caches = prepare_caches(
            Encoding(plan, adapter, device, events), epoch, budget.listing, world
        )
        # Measured before the transformer is loaded, since the measurement needs memory too.
        dtype = DTYPES[transformer_dtype(plan.config.precision)]
        rates = world.main_only(lambda: device_rates(plan.output_dir, device, dtype))

        # After the caches, so that encoders and transformer need not fit on the device together.
        # `caches.plan` lacks files that could not be decoded, so it replaces the plan from here on.
        session = Session.open(caches, accelerator, world)
        plan = session.plan
        state = session.state
        loader = session.loader
        budget = replace(budget, plan=plan)
        if plan.resume:
            events.say(f"Continuing from {plan.resume.path.name}")
        held.enter_context(closing(loader))
        world.barrier()  # all have read the checkpoint, which the start of a branch may move
        recorded = world.on_main(lambda: begin_records(plan, events, companions, state.global_step))
        # However the run ends, a checkpoint or preview in progress is completed first.
        writing, decoding = (held.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        validation = build_validation(session, recorded, decoding)
        callbacks = build_callbacks(
            session, validation, recorded, budget, rates, companions, writing
        )
        if rehearsed or (rehearsed is None and device.type == "cuda"):
            with events.phase("Rehearsing the memory peaks", stage="init_prepare_models"):
                for tried in rehearse(session, validation, budget):
                    events.say(tried)
        # Exited before the result is published, when no step is left to finish and Ctrl-C
        # interrupts immediately.
        with ExitStack() as around:
            for companion in companions:
                around.enter_context(companion.around(session, budget))
            around.enter_context(stop_on_interrupt(events.stop, lambda: announce_stop(session)))
            train(session.assembly, loader, state, callbacks, events.stop)

        # Written before the result, so that after a kill the next start finds the pending tasks.
        ledger = Ledger(
            state.global_step,
            state.epoch,
            (*(task for companion in companions for task in companion.tasks), "end"),
        )
        world.main_only(lambda: ledger.write(plan.output_dir))
        result = publish_result(session)
        world.main_only(lambda: end(plan, events, companions, ledger, result))


def finish_run(
    plan: Plan, ledger: Ledger, events: EventStream, companions: Sequence[Companion]
) -> None:
    """Complete the pending tasks of a session that was killed after the last step."""
    with announced_end(plan, events, World()):
        sweep_strays(plan)
        begin_records(plan, events, companions, ledger.step)
        end(plan, events, companions, ledger, f"Results: {plan.output_dir}")


def begin_records(
    plan: Plan, events: EventStream, companions: Sequence[Companion], step: int
) -> Recorded:
    """Start recording events after a step; the record comes first, since companions read it.

    The record, the checkpoints and the result of a line that the run leaves are set aside before.

    Raises:
        UserError: the record cannot be written.
    """
    with writing_to(plan.output_dir):
        branch = start_line(plan.output_dir, plan.resume)
    if branch is not None:
        events.say(f"Moved to {plan.output_dir / branch_folder(branch.line)}: {branch.rest}.")
    for file in (METRICS_FILE, MEDIA_FILE):
        if step and (damage := describe_damage(plan.output_dir / file)):
            events.say(damage, warning=True)
    record = RunRecord(plan.output_dir, step)
    events.subscribe("The record", record, ends_run=Exception)
    for companion in companions:
        companion.begin(plan, step)
    return record.recorded


def announce_stop(session: Session) -> None:
    """Publish that the run stops after the current step."""
    state = session.state
    total_steps = session.plan.length.total_steps
    session.events.publish(StateChanged("stopping", state.global_step, total_steps, STOPPING))


def end(
    plan: Plan, events: EventStream, companions: Sequence[Companion], ledger: Ledger, result: str
) -> None:
    """Finish a run whose result is on disk; the last lines name the result, the companions'
    outcomes and commands.
    """
    lines = [
        result,
        *(companion.finish(ledger) for companion in companions),
        f'Render with it: simpletuner sample {shlex.quote(str(plan.output_dir))} --prompt "..."',
        f"To train longer, start the same command with a larger {length_key(plan)}.",
        *(companion.unfinished for companion in companions),
    ]
    drop_late_requests(plan, events)
    events.publish(
        StateChanged(
            "finished", ledger.step, plan.length.total_steps, "\n".join(filter(None, lines))
        )
    )
    # Last, so that after an earlier kill the next start announces the end again.
    mark_done(plan.output_dir, "end")


def drop_late_requests(plan: Plan, events: EventStream) -> None:
    """Remove and name the requests that were made after the last step, which no step follows."""
    if late := take_requests(plan.output_dir):
        events.say(f"Requested after the last step, so not done: {', '.join(late)}.")


@contextmanager
def announced_end(plan: Plan, events: EventStream, world: World) -> Iterator[None]:
    """A context that publishes a failure or interruption, so that all records are closed with that
    state.
    """
    try:
        yield
    except BaseException as error:
        how: RunState = (
            "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        )
        message = world.first_failure(error) or full_text(error)
        if world.is_main:
            drop_late_requests(plan, events)
        events.publish(StateChanged(how, events.step, plan.length.total_steps, message))
        raise


def prepare_folder(plan: Plan) -> None:
    """Create the output folder, or clean up after an earlier session."""
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    sweep_strays(plan)
    expect_requests(plan.output_dir)  # requests count from now on


def sweep_strays(plan: Plan) -> None:
    """Remove temporary files of killed runs; in caches only old files, since other runs may use the
    same cache.
    """
    names = re.compile(rf"{FOLDER_NAME.pattern}|{PIPELINE_FOLDER}|unverified")
    for folder in (plan.output_dir, plan.output_dir / "ema"):
        sweep_files(folder)
        sweep_folders(folder, names)
    for below in PREVIEW_FOLDERS:
        sweep_files(plan.output_dir / below)
    caches = {text_folder(plan), *(text_folder(plan, data) for data in plan.datasets)}
    for folder in caches | {data.latent_dir for data in plan.datasets}:
        sweep_files(folder, deep=True, older_than=ABANDONED)


def prepare_machine(plan: SamplePlan) -> None:
    """Set process-wide options of torch."""
    torch.set_num_threads(compute_threads(plan.config.caching.torch_num_threads))
    config = plan.config
    ahead = [latent_storage(plan, dataset) == "ahead" for dataset in plan.datasets]
    # Sampling reads no datasets, but must use the settings with which the run rendered its
    # previews.
    ahead = ahead or [not (config.caching.vae_cache_ondemand or config.caching.vae_cache_disable)]
    # Otherwise, the VAE encodes in another thread, where it must not change process-wide settings.
    beside = vae_dtype(config.precision, config.caching) == "fp32" and not all(ahead)
    # The same applies to the VAE of previews, which computes in the dtype of the transformer.
    background = config.validation.validation_decode_in_background
    dtype = transformer_dtype(config.precision)
    beside |= bool(background) and dtype == "fp32"
    allowed = not config.precision.disable_tf32 and not beside
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    # On Hopper, torch prefers cuDNN, whose gradients of masked attention may be NaN (pytorch
    # #196678), and which has no backward pass for some shapes. Without it, torch's order is flash,
    # memory-efficient, plain on every GPU.
    torch.backends.cuda.enable_cudnn_sdp(False)
    fix_order(plan.config.speed.deterministic)


def fix_order(wanted: bool) -> None:
    """If wanted, restrict torch to deterministic operations; all other operations raise an error.

    Call it before the first matmul, when cuBLAS reads its setting.
    """
    if wanted and os.environ.get(CUBLAS_KEY) not in REPEATABLE_WORKSPACES:
        os.environ[CUBLAS_KEY] = REPEATABLE_WORKSPACES[0]
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False  # would choose convolutions by timing
    # A debugging aid that would write all memory once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
