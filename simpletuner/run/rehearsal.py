"""Rehearses the memory peaks of a run before step 1, to run out of memory at once or not at all.

The peaks are a micro-step of the largest bucket, forward and backward, and a preview with two
sampling steps. A preview that is decoded in the background may meet the peak of a step, in another
stream, whose memory the allocator keeps apart. Whether the two meet is chance, so the peak of the
step is held as one block while the preview is decoded.

Weights are not updated and random states are restored, so a run is bit-identical with or without a
rehearsal. The optimizer state allocated in step 1 is added to the measurement instead of rehearsed:
undoing an update would need a second copy of weights and state, and `optimizer_release_gradients`
updates during the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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

TRAINING = "training"  # phases of the plan, one for each bucket


def rehearse(session: Session, validation: ValidationRunner, budget: Budget) -> Iterator[str]:
    """Rehearse the largest micro-step, and the largest preview; yields a line about each peak.

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
    memory = DeviceMemory(assembly.accelerator.device)
    step = Peak(title, TRAINING, optimizer, budget, memory)

    with unchanged(optimizer, assembly.techniques):
        bytes_of_step = step.measure(lambda: rehearse_micro_step(assembly, session.reader(largest)))
        optimizer.zero_grad(set_to_none=True)  # as after a step
        if validation.decodes_in_background:
            both = Peak(f"{title} while a preview is decoded", TRAINING, optimizer, budget, memory)
            beside = partial(memory.held, bytes_of_step - memory.now)
            bytes_of_both = both.measure(lambda: validation.rehearse(assembly, beside))
            yield both.line(max(bytes_of_step, bytes_of_both))
            return
        yield step.line(bytes_of_step)
        if validation.prompts:
            preview = Peak("a preview", PREVIEWS, optimizer, budget, memory)
            yield preview.line(preview.measure(lambda: validation.rehearse(assembly)))


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


class DeviceMemory:
    """The memory of a GPU as torch's allocator counts it; other devices have no such counter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_counted = device.type == "cuda"

    def reset_peak(self) -> None:
        """Start to look for a peak."""
        if self.is_counted:
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> float:
        """The most bytes allocated at a time since `reset_peak`; 0 if not counted."""
        return float(torch.cuda.max_memory_allocated()) if self.is_counted else 0.0

    @property
    def now(self) -> float:
        """Bytes allocated now; 0 if not counted."""
        return float(torch.cuda.memory_allocated()) if self.is_counted else 0.0

    @contextmanager
    def held(self, size: float) -> Iterator[None]:
        """A context in which `size` bytes are allocated, on the compute stream.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        if not self.is_counted:
            yield
            return
        torch.cuda.empty_cache()  # blocks that are free would count twice
        block = torch.empty(max(int(size), 0), dtype=torch.uint8, device=self.device)
        yield
        del block


@dataclass(frozen=True)
class Peak:
    """A peak to rehearse.

    Attributes:
        title: what reaches it, for the user.
        phase: the beginning of the phase's name in the plan.
    """

    title: str
    phase: str
    optimizer: Optimizer
    budget: Budget
    memory: DeviceMemory

    def measure(self, rehearsal: Callable[[], object]) -> float:
        """Bytes at the peak, optimizer state not counted; 0 without a GPU.

        Raises:
            UserError: the device ran out of memory.
        """
        memory = self.memory
        memory.reset_peak()
        try:
            rehearsal()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):  # CUDA's libraries raise several types of errors
                raise
            raise UserError(self._shortage()) from None
        peak = memory.peak
        if self.phase == TRAINING:
            # After a micro-step, its gradients are still there, and the update of step 1 adds its
            # temporaries.
            updating = self.budget.model.update_tensors * _local_bytes(self.optimizer)
            peak = max(peak, memory.now + updating)
        memory.reset_peak()
        return peak

    def line(self, peak: float) -> str:
        """The expected and, on a GPU, the measured memory."""
        expected = gigabytes(self._expected)
        if not self.memory.is_counted:
            return f"Rehearsed {self.title}: not measured, planned {expected}"
        # Without the optimizer state, the rehearsal would promise memory that step 1 takes.
        peak += coming_state(self.optimizer, self.budget)
        return f"Rehearsed {self.title}: {gigabytes(peak)}, planned {expected}"

    @property
    def _expected(self) -> float:
        phases = self.budget.phases
        peaks = [planned.device for planned in phases if planned.name.startswith(self.phase)]
        return max(peaks, default=0.0)

    def _shortage(self) -> str:
        budget = self.budget
        room = "" if budget.device.memory is None else f" of {gigabytes(budget.device.memory)}"
        return (
            f"memory: {self.title} does not fit {budget.device.name}; the plan expected "
            f"{gigabytes(self._expected)}{room}. {less_for_steps(budget.config.offload)}"
        )


def coming_state(optimizer: Optimizer, budget: Budget) -> float:
    """Bytes that the optimizer will allocate on the device in its first step."""
    is_resumed = bool(optimizer.state)
    if is_resumed or budget.config.offload.offload_optimizer_state:
        return 0.0
    size = 0.0
    for weight in _weights(optimizer):
        dtype = "bf16" if weight.dtype == torch.bfloat16 else "fp32"
        size += budget.model.state_bytes(dtype) * local(weight).numel()
    return size


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _local_bytes(optimizer: Optimizer) -> int:
    """Bytes of the weights that the optimizer updates in this process."""
    return sum(local(weight).nbytes for weight in _weights(optimizer))


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
