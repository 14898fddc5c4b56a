"""Rehearses the memory peaks of a run before step 1, to run out of memory at once or not at all.

The peaks are a micro-step of the largest bucket, forward and backward, and a preview with two
sampling steps. Weights are not updated and random states are restored, so a run is bit-identical
with or without a rehearsal. The optimizer state allocated in step 1 is added to the measurement
instead of rehearsed: undoing an update would need a second copy of weights and state, and
`optimizer_release_gradients` updates during the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from simpletuner.budget.advice import less_for_steps
from simpletuner.budget.budget import Budget
from simpletuner.budget.device import gigabytes
from simpletuner.budget.phases import PREVIEWS
from simpletuner.data.sampler import PlannedBatch
from simpletuner.diffusion.batch import Batch
from simpletuner.errors import UserError, is_out_of_memory
from simpletuner.run.session import Session
from simpletuner.techniques.base import Technique
from simpletuner.training.losses import Losses, StepNumbers
from simpletuner.training.sharding import local
from simpletuner.training.state import Assembly, random_states, restore_random_states
from simpletuner.training.step import run_micro_step
from simpletuner.validation.runner import ValidationRunner


def rehearse(session: Session, validation: ValidationRunner, budget: Budget) -> Iterator[str]:
    """Rehearse the largest micro-step, then the largest preview; yields one line about each.

    Raises:
        UserError: the device ran out of memory.
    """
    assembly = session.assembly
    optimizer = assembly.optimizer
    loader = session.loader
    largest = max(loader.sampler.batches(loader.epoch), key=pixels_of)
    samples = largest.samples
    frames = f", {samples[0].frames} frames" if samples[0].frames > 1 else ""
    title = f"the largest micro-step ({len(samples)} x {largest.size}{frames})"

    def micro_step() -> None:
        rehearse_micro_step(assembly, session.reader(largest))

    def preview() -> None:
        validation.rehearse(assembly)

    with unchanged(optimizer, assembly.techniques):
        yield _measure(optimizer, budget, title, "training", micro_step)
    if validation.prompts:
        yield _measure(optimizer, budget, "a preview", PREVIEWS, preview)


def pixels_of(batch: PlannedBatch) -> int:
    """Pixels of all frames of a micro-batch, with which its activations grow."""
    width, height = batch.size
    return len(batch.samples) * batch.samples[0].frames * width * height


def rehearse_micro_step(
    assembly: Assembly, batch: Batch, global_step: int = 0, micro_step: int = 0
) -> Losses:
    """Forward and backward pass of one micro-batch at a position in the run.

    The gradients are left to the caller to clear.
    """
    losses = Losses()
    assembly.transformer.train()
    run_micro_step(assembly, batch.to(assembly.accelerator.device), global_step, micro_step, losses)
    return StepNumbers(losses).to_host().losses


def _measure(
    optimizer: Optimizer, budget: Budget, title: str, phase: str, rehearsal: Callable[[], None]
) -> str:
    """Rehearse one peak; returns a line with the expected and, on a GPU, the measured memory.

    Args:
        phase: the beginning of the phase's name in the plan.
    """
    peaks = [planned.device for planned in budget.phases if planned.name.startswith(phase)]
    expected = max(peaks, default=0.0)
    on_gpu = any(weight.is_cuda for weight in _weights(optimizer))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        rehearsal()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):  # CUDA's libraries raise several types of errors
            raise
        room = "" if budget.device.memory is None else f" of {gigabytes(budget.device.memory)}"
        raise UserError(
            f"memory: {title} does not fit {budget.device.name}; the plan expected "
            f"{gigabytes(expected)}{room}. {less_for_steps(budget.config.offload)}"
        ) from None
    if not on_gpu:
        return f"Rehearsed {title}: not measured, planned {gigabytes(expected)}"
    peak = float(torch.cuda.max_memory_allocated())
    if phase == "training":
        # The gradients are still there, and step 1 adds the temporaries of an update.
        updating = budget.model.update_bytes * _numbers(optimizer)
        peak = max(peak, torch.cuda.memory_allocated() + updating)
    # Without the optimizer state, the rehearsal would promise memory that step 1 takes.
    peak += coming_state(optimizer, budget)
    torch.cuda.reset_peak_memory_stats()
    return f"Rehearsed {title}: {gigabytes(peak)}, planned {gigabytes(expected)}"


def coming_state(optimizer: Optimizer, budget: Budget) -> float:
    """Bytes that the optimizer will allocate on the device in its first step."""
    is_resumed = bool(optimizer.state)
    if is_resumed or budget.config.offload.offload_optimizer_state:
        return 0.0
    return budget.model.state_bytes * _numbers(optimizer)


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _numbers(optimizer: Optimizer) -> int:
    """Number of elements that the optimizer updates in this process."""
    return sum(local(weight).numel() for weight in _weights(optimizer))


@contextmanager
def unchanged(optimizer: Optimizer, techniques: Sequence[Technique]) -> Iterator[None]:
    """A context after which random states and techniques are as before, without gradients."""
    states = random_states()
    # Some techniques change state in the forward pass, such as CREPA's moving average.
    kept = [copy.deepcopy(technique.state_dict()) for technique in techniques]
    try:
        yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        for technique, state in zip(techniques, kept, strict=True):
            technique.load_state_dict(state)
        restore_random_states(states)
