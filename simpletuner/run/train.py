"""`simpletuner train` from top to bottom.

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

from simpletuner.atomic import sweep_files, sweep_folders
from simpletuner.budget.budget import Budget
from simpletuner.budget.measure import device_rates
from simpletuner.config.precision import transformer_dtype, vae_dtype
from simpletuner.distributed.requests import STOPPING, expect_requests, stop_on_interrupt
from simpletuner.distributed.world import World, compute_threads
from simpletuner.errors import Interrupted, full_text
from simpletuner.memory.precision import DTYPES, check_device
from simpletuner.models.blocks import KERNELS
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import latent_storage, machine_folder, text_folder
from simpletuner.reporting.events import EventStream, RunState, StateChanged
from simpletuner.reporting.record import Recorded, RunRecord
from simpletuner.run.caches import Encoding, build_adapter, prepare_caches
from simpletuner.run.companions import Companion, Ledger, strike
from simpletuner.run.rehearsal import rehearse
from simpletuner.run.session import Session, build_callbacks, build_validation, publish_result
from simpletuner.training.assemble import make_accelerator
from simpletuner.training.loop import train
from simpletuner.training.manifest import FOLDER_NAME, PIPELINE_FOLDER
from simpletuner.validation.runner import PREVIEW_FOLDERS

# With one of these, cuBLAS gives the same bits each time, at a cost of memory or speed.
CUBLAS_KEY, REPEATABLE_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# Seconds after which no live process is still writing a temporary file in a shared cache.
ABANDONED = 3600.0


def run_plan(
    budget: Budget, events: EventStream, companions: Sequence[Companion] = (), world: World = World(),
    *, rehearsed: bool | None = None,
) -> None:  # fmt: skip
    """Run a plan, or resume it where an earlier session stopped, and publish the verified result.

    Args:
        budget: the plan, with the estimate of its memory and time.
        companions: what accompanies the run in this process.
        world: the processes that train together.
        rehearsed: whether to try the most memory-hungry moments first; None does so on a GPU.

    Raises:
        UserError: something the user can fix; checkpoints are kept.
        Interrupted: Ctrl-C; a checkpoint of the last step is on disk.
    """
    plan = budget.plan
    with announced_end(plan, events, world), ExitStack() as held:
        prepare_machine(plan)
        accelerator = make_accelerator()
        device = accelerator.device
        check_device(plan.config.precision, device)
        adapter = build_adapter(plan)
        # The others wait until leftovers of an earlier session are gone.
        world.on_main(lambda: prepare_folder(plan))
        # A resumed run keeps the kernels that were measured before: others would round differently.
        earlier = [plan.resume.path.parent] if plan.resume else []
        KERNELS.open(plan.output_dir, *earlier, world=world, shared=machine_folder(plan))
        epoch = plan.resume.manifest.epoch if plan.resume else 1
        caches = prepare_caches(Encoding(plan, adapter, device, events), epoch, budget.listing, world)
        # Measured before the transformer is loaded: it needs memory, too.
        dtype = DTYPES[transformer_dtype(plan.config.precision)]
        rates = world.main_only(lambda: device_rates(plan.output_dir, device, dtype))

        # After the caches, since encoders and transformer need not fit on the device together.
        # `caches.plan` lacks files that could not be decoded, so it replaces the plan from here on.
        session = Session.open(caches, accelerator, world)
        plan, state, loader = session.plan, session.state, session.loader
        budget = replace(budget, plan=plan)
        if plan.resume:
            events.say(f"Continuing from {plan.resume.path.name}")
        held.enter_context(closing(loader))
        recorded = world.on_main(lambda: begin_records(plan, events, companions, state.global_step))
        # Whatever ends the run, a checkpoint or preview that is being written is completed first.
        writing, decoding = (held.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        validation = build_validation(session, recorded, decoding)
        callbacks = build_callbacks(session, validation, recorded, budget, rates, companions, writing)
        if rehearsed or (rehearsed is None and device.type == "cuda"):
            with events.phase("Rehearsing the largest moments", stage="init_prepare_models"):
                for tried in rehearse(session, validation, budget):
                    events.say(tried)
        # Left before the result is published: no step is left to finish then, and Ctrl-C interrupts at once.
        with ExitStack() as around:
            for companion in companions:
                around.enter_context(companion.around(session, budget))
            around.enter_context(stop_on_interrupt(events.stop, lambda: announce_stop(session)))
            train(session.assembly, loader, state, callbacks, events.stop)

        # Before the result: after a kill that leaves one, the next start knows what is still to do.
        ledger = Ledger(state.global_step, state.epoch, (*(task for one in companions for task in one.tasks), "end"))
        world.main_only(lambda: ledger.write(plan.output_dir))
        result = publish_result(session)
        world.main_only(lambda: end(plan, events, companions, ledger, result))


def finish_run(plan: Plan, ledger: Ledger, events: EventStream, companions: Sequence[Companion]) -> None:
    """Do what a session that was killed after the last step has left to do."""
    with announced_end(plan, events, World()):
        sweep_strays(plan)
        begin_records(plan, events, companions, ledger.step)
        end(plan, events, companions, ledger, f"Results: {plan.output_dir}")


def begin_records(plan: Plan, events: EventStream, companions: Sequence[Companion], step: int) -> Recorded:
    """Begin to record what follows a step, first in the record itself, which companions read.

    Raises:
        UserError: the record cannot be written.
    """
    record = RunRecord(plan.output_dir, step)
    events.subscribe(record)
    for companion in companions:
        companion.begin(plan, step)
    return record.recorded


def announce_stop(session: Session) -> None:
    """Publish that the run stops after the current step."""
    state, total_steps = session.state, session.plan.length.total_steps
    session.events.publish(StateChanged("stopping", state.global_step, total_steps, STOPPING))


def end(plan: Plan, events: EventStream, companions: Sequence[Companion], ledger: Ledger, result: str) -> None:
    """Everything after the result is on disk; the last lines name it, what companions made, and the next commands."""
    lines = [
        result,
        *(companion.finish(ledger) for companion in companions),
        f'Render with it: simpletuner sample {shlex.quote(str(plan.output_dir))} --prompt "..."',
        "To train longer, start the same command with a larger max_train_steps.",
        *(companion.unfinished for companion in companions),
    ]
    events.publish(StateChanged("finished", ledger.step, plan.length.total_steps, "\n".join(filter(None, lines))))
    # Last: after a kill before this line, the next start announces the end again.
    strike(plan.output_dir, "end")


@contextmanager
def announced_end(plan: Plan, events: EventStream, world: World) -> Iterator[None]:
    """Publish if the run fails or is interrupted, so that all records are closed and say so."""
    try:
        yield
    except BaseException as error:
        how: RunState = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        message = world.first_failure(error) or full_text(error)
        events.publish(StateChanged(how, events.step, plan.length.total_steps, message))
        raise


def prepare_folder(plan: Plan) -> None:
    """Make the output folder, or tidy that of an earlier session."""
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    sweep_strays(plan)
    expect_requests(plan.output_dir)  # those of this session count from now on


def sweep_strays(plan: Plan) -> None:
    """Remove temporary files of killed runs; in caches only old ones, since other runs may use the same cache."""
    names = re.compile(rf"{FOLDER_NAME.pattern}|{PIPELINE_FOLDER}|unverified")
    for folder in (plan.output_dir, plan.output_dir / "ema"):
        sweep_files(folder)
        sweep_folders(folder, names)
    for below in PREVIEW_FOLDERS:
        sweep_files(plan.output_dir / below)
    caches = {text_folder(plan), *(text_folder(plan, data) for data in plan.datasets)}
    for folder in caches | {data.latent_dir for data in plan.datasets}:
        sweep_files(folder, deep=True, older_than=ABANDONED)


def prepare_machine(plan: Plan) -> None:
    """Set process-wide options of torch."""
    torch.set_num_threads(compute_threads(plan.config.caching.torch_num_threads))
    config = plan.config
    ahead = [latent_storage(plan, each) == "ahead" for each in plan.datasets]
    # To sample from a run, its datasets are not read, and its previews were rendered with the settings of its training.
    ahead = ahead or [not (config.caching.vae_cache_ondemand or config.caching.vae_cache_disable)]
    # The VAE encodes in another thread otherwise, where it must not change the settings of the process.
    beside = vae_dtype(config.precision, config.caching) == "fp32" and not all(ahead)
    # So does the VAE of previews, which computes in the dtype of the transformer.
    background, dtype = config.validation.validation_decode_in_background, transformer_dtype(config.precision)
    beside |= bool(background) and dtype == "fp32"
    allowed = not config.precision.disable_tf32 and not beside
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    # torch prefers cuDNN on Hopper, where its gradients of masked attention may be NaN (pytorch #196678). Attention
    # without a mask still uses it where it is measured to be faster.
    torch.backends.cuda.enable_cudnn_sdp(False)
    fix_order(plan.config.speed.deterministic)


def fix_order(wanted: bool) -> None:
    """Let torch use deterministic operations only, and raise an error for others, if wanted.

    Before the first matrix product, for which cuBLAS reads its setting.
    """
    if wanted and os.environ.get(CUBLAS_KEY) not in REPEATABLE_WORKSPACES:
        os.environ[CUBLAS_KEY] = REPEATABLE_WORKSPACES[0]
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False  # which chooses convolutions by timing
    # A debugging aid, which would write all memory once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
