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
from simpletuner.run.companions import Companion, Ledger, Task, mark_done
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
CHECKING = "Saving and checking the result"
# Age from which a temporary file in a shared cache is stale.
ABANDONED_SECONDS = 3600.0


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
    # Entered contexts are left in reverse order, however the run ends.
    with announced_end(plan, events, world), ExitStack() as contexts:
        prepare_machine(plan)
        accelerator = make_accelerator()
        device = accelerator.device
        check_device(plan.config.precision, device)
        activate_attention(plan.config.precision, device)
        adapter = build_adapter(plan)
        # All processes wait until leftovers of an earlier session are removed.
        world.on_main(lambda: prepare_folder(plan))
        epoch = plan.resume.manifest.epoch if plan.resume else 1
        encoding = Encoding(plan, adapter, device, events)
        caches = prepare_caches(encoding, epoch, budget.listing, world)
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
            events.notify(f"Continuing from {plan.resume.path.name}")
        contexts.enter_context(closing(loader))
        # Until all have read the checkpoint, which the start of a branch may move.
        world.barrier()
        recorded = world.on_main(lambda: begin_records(plan, events, companions, state.global_step))
        # Leaving a pool completes the checkpoint or preview in progress.
        writing = contexts.enter_context(ThreadPoolExecutor(1))
        decoding = contexts.enter_context(ThreadPoolExecutor(1))
        validation = build_validation(session, recorded, decoding)
        callbacks = build_callbacks(
            session, validation, recorded, budget, rates, companions, writing
        )
        if rehearsed is None:
            rehearsed = device.type == "cuda"
        if rehearsed:
            with events.phase("Rehearsing the memory peaks", stage="init_prepare_models"):
                for line in rehearse(session, validation, budget):
                    events.notify(line)
        # Left before the result is published, when no step is left to finish and Ctrl-C interrupts
        # immediately.
        with ExitStack() as around_training:
            for companion in companions:
                around_training.enter_context(companion.around(session, budget))
            around_training.enter_context(
                stop_on_interrupt(events.stop, lambda: announce_stop(session))
            )
            train(session.assembly, loader, state, callbacks, events.stop)

        # Written before the result, so that after a kill the next start finds the pending tasks.
        ledger = Ledger(state.global_step, state.epoch, tasks_after(companions))
        world.main_only(lambda: ledger.write(plan.output_dir))
        # A stream of its own: a stop that is requested now comes too late to end the run.
        with EventStream(events.publish).phase(CHECKING, stage="save_result"):
            result = publish_result(session)
        world.main_only(lambda: end(plan, events, companions, ledger, result))


def tasks_after(companions: Sequence[Companion]) -> tuple[Task, ...]:
    """The tasks that are left once the result is on disk, in order."""
    tasks: list[Task] = []
    for companion in companions:
        tasks += companion.tasks
    return (*tasks, "end")


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
    """Start recording events after a step.

    If the run leaves the line of its folder, what that line has beyond the step is set aside first.

    Raises:
        UserError: the record cannot be written.
    """
    with writing_to(plan.output_dir):
        branch = start_line(plan.output_dir, plan.resume)
    if branch is not None:
        events.notify(f"Moved to {plan.output_dir / branch_folder(branch.line)}: {branch.rest}.")
    if step:
        for file in (METRICS_FILE, MEDIA_FILE):
            damage = describe_damage(plan.output_dir / file)
            if damage:
                events.notify(damage, warning=True)
    # Before the companions, which read the record.
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
    """Finish a run whose result is on disk.

    The last lines name the result, the outcomes of the companions, and the next commands.
    """
    lines = [result]
    lines += [companion.finish(ledger) for companion in companions]
    folder = shlex.quote(str(plan.output_dir))
    lines += [
        f'Render with it: simpletuner sample {folder} --prompt "..."',
        f"To train longer, start the same command with a larger {length_key(plan)}.",
    ]
    lines += [companion.unfinished for companion in companions]
    drop_late_requests(plan, events)
    message = "\n".join(line for line in lines if line)
    events.publish(StateChanged("finished", ledger.step, plan.length.total_steps, message))
    # Last, so that after an earlier kill the next start announces the end again.
    mark_done(plan.output_dir, "end")


def drop_late_requests(plan: Plan, events: EventStream) -> None:
    """Remove the requests that were made after the last step, and log them."""
    requests = take_requests(plan.output_dir)
    if requests:
        events.notify(f"Requested after the last step, so not done: {', '.join(requests)}.")


@contextmanager
def announced_end(plan: Plan, events: EventStream, world: World) -> Iterator[None]:
    """A context that publishes a failure or interruption, with which all records are closed."""
    try:
        yield
    except BaseException as error:
        state: RunState = "failed"
        if isinstance(error, Interrupted | KeyboardInterrupt):
            state = "interrupted"
        message = world.first_failure(error) or full_text(error)
        if isinstance(error, KeyboardInterrupt):
            message = "Cancelled."
        if world.is_main:
            drop_late_requests(plan, events)
        events.publish(StateChanged(state, events.step, plan.length.total_steps, message))
        raise


def prepare_folder(plan: Plan) -> None:
    """Create the output folder, or clean up after an earlier session."""
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    sweep_strays(plan)
    expect_requests(plan.output_dir)  # requests count from now on


def sweep_strays(plan: Plan) -> None:
    """Remove temporary files of killed runs."""
    names = re.compile(rf"{FOLDER_NAME.pattern}|{PIPELINE_FOLDER}|unverified")
    for folder in (plan.output_dir, plan.output_dir / "ema"):
        sweep_files(folder)
        sweep_folders(folder, names)
    for subfolder in PREVIEW_FOLDERS:
        sweep_files(plan.output_dir / subfolder)
    caches = {text_folder(plan)}
    for dataset in plan.datasets:
        caches |= {text_folder(plan, dataset), dataset.latent_dir}
    for folder in caches:
        # Only old ones, since another run may be writing to the same cache.
        sweep_files(folder, deep=True, older_than=ABANDONED_SECONDS)


def prepare_machine(plan: SamplePlan) -> None:
    """Set process-wide options of torch."""
    config = plan.config
    torch.set_num_threads(compute_threads(config.caching.torch_num_threads))
    # A float32 VAE needs exact products. Where it runs in another thread, beside training, it
    # cannot switch this process-wide setting for itself.
    allows_tf32 = not config.precision.disable_tf32 and not has_float32_vae_beside(plan)
    torch.backends.cuda.matmul.allow_tf32 = allows_tf32
    torch.backends.cudnn.allow_tf32 = allows_tf32
    # On Hopper, torch prefers cuDNN, whose gradients of masked attention may be NaN (pytorch
    # #196678), and which has no backward pass for some shapes. Without it, torch's order is flash,
    # memory-efficient, plain on every GPU.
    torch.backends.cuda.enable_cudnn_sdp(False)
    set_determinism(config.speed.deterministic)


def has_float32_vae_beside(plan: SamplePlan) -> bool:
    """Whether a VAE computes in float32 in another thread during training."""
    config = plan.config
    # The VAE of previews computes in the dtype of the transformer.
    preview_dtype = transformer_dtype(config.precision)
    if config.validation.validation_decode_in_background and preview_dtype == "fp32":
        return True
    if vae_dtype(config.precision, config.caching) != "fp32":
        return False
    if plan.datasets:
        return any(latent_storage(plan, dataset) != "ahead" for dataset in plan.datasets)
    # Sampling reads no datasets, but must use the setting with which the run rendered its previews.
    return bool(config.caching.vae_cache_ondemand or config.caching.vae_cache_disable)


def set_determinism(is_deterministic: bool) -> None:
    """Allow all operations of torch, or only deterministic ones; others raise an error.

    Call it before the first matmul, when cuBLAS reads its setting.
    """
    if is_deterministic and os.environ.get(CUBLAS_KEY) not in REPEATABLE_WORKSPACES:
        os.environ[CUBLAS_KEY] = REPEATABLE_WORKSPACES[0]
    if is_deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(is_deterministic)
    torch.backends.cudnn.benchmark = False  # would choose convolutions by timing
    # A debugging aid that would write all memory once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
