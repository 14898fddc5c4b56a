"""The progress of a run, and the objects that take part in a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from simpletuner.distributed.world import World
from simpletuner.memory.offload.streamer import Streamer
from simpletuner.models.adapter import FamilyAdapter, TileCounts
from simpletuner.reporting.events import StepReport
from simpletuner.techniques.base import HiddenStates, Technique
from simpletuner.training.meter import SampleFlops
from simpletuner.training.noise import NoiseSource
from simpletuner.training.release import GradientRelease
from simpletuner.training.settings import StepSettings
from simpletuner.training.trained import Trained
from simpletuner.training.update import sampling_weights


@dataclass
class TrainState:
    """The progress of a run.

    Attributes:
        global_step: number of optimizer steps done.
        epoch: epoch of the last sample, counted from 1.
        epochs_done: number of completed epochs.
        data_before: position in the data before the current step; None between steps.
        techniques_before: shallow copies of the techniques, with their states before the current
            step.
        report: of the last step of this session.
    """

    global_step: int = 0
    epoch: int = 1
    epochs_done: int = 0
    data_before: dict[str, Any] | None = None
    techniques_before: list[Technique] = field(default_factory=list)
    report: StepReport | None = None


@dataclass
class Assembly:
    """All objects that take part in a step, built by `assemble`.

    Attributes:
        trained: a LoRA, or the whole transformer.
        parameters: trained weights by name, in the optimizer's order.
        hidden: hidden states for techniques.
        modules: modules of techniques by the technique's name.
        wrapped_modules: the same modules wrapped for gradient synchronisation, as they are called.
        scaler: loss scaler, which prevents underflow of float16 gradients; disabled in other
            precisions.
        streamer: copies weights to the device during a step; None without streaming.
        sample_flops: FLOPs of a sample; None if they are not counted.
        take_tiles: see `BlockLayout`.
        release: updates weights during the backward pass; None if they are updated after it.
        world: the processes that train together.
        processes_per_sample: number of processes that share the tokens of a sample.
        is_sharded: weights are sharded, so processes run every forward pass together.
        passes: number of forward passes in this session's steps.
        is_halfway: an update of the weights or their average has begun, and its step is not counted
            yet.
    """

    adapter: FamilyAdapter
    accelerator: Accelerator
    transformer: nn.Module
    trained: Trained
    parameters: dict[str, nn.Parameter]
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    settings: StepSettings
    hidden: HiddenStates
    techniques: list[Technique] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    wrapped_modules: list[nn.Module] = field(default_factory=list)
    streamer: Streamer | None = None
    sample_flops: SampleFlops | None = None
    take_tiles: Callable[[], TileCounts] = dict
    release: GradientRelease | None = None
    world: World = field(default_factory=World)
    processes_per_sample: int = 1
    is_sharded: bool = False
    passes: int = 0
    is_halfway: bool = False

    @property
    def data_parallel(self) -> World:
        """The world in which every member trains on other samples."""
        return self.world.data_parallel(self.processes_per_sample)

    @property
    def noise(self) -> NoiseSource:
        """Draws the noise of this process's micro-batches."""
        return NoiseSource(self.settings, self.adapter.spec, self.data_parallel, self.techniques)

    @property
    def module_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the techniques' modules, by `<technique>.<name>`."""
        parameters: dict[str, nn.Parameter] = {}
        for technique, module in self.modules.items():
            for name, parameter in module.named_parameters():
                parameters[f"{technique}.{name}"] = parameter
        return parameters

    @property
    def all_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the model and of the techniques' modules."""
        return self.parameters | self.module_parameters

    @property
    def writes(self) -> bool:
        """Whether this process takes part in writing the trained weights.

        With replicas, only one process writes. Shards must be gathered, in which every process
        takes part.
        """
        return self.world.is_main or self.trained.sharers.size > 1

    @property
    def is_mid_update(self) -> bool:
        """Whether weights may be partly updated, so that they belong to no step."""
        return self.is_halfway or (self.release is not None and self.release.is_halfway)

    def updating(self) -> AbstractContextManager[None]:
        """A context for the backward pass of a step."""
        if self.release is None:
            return nullcontext()
        return self.release.updating()

    @contextmanager
    def exchange_only(self, *, transformer: bool, modules: bool) -> Iterator[None]:
        """A context whose backward pass synchronises the gradients of the selected modules.

        Gradients of the other modules only accumulate in this process.
        """
        with ExitStack() as stack:
            if not transformer:
                stack.enter_context(self.accelerator.no_sync(self.transformer))
            if not modules:
                for module in self.wrapped_modules:
                    stack.enter_context(self.accelerator.no_sync(module))
            yield

    def averaged(self, wanted: bool) -> AbstractContextManager[None]:
        """A context with the moving average in place of the weights, if wanted."""
        ema = self.trained.ema
        if wanted and ema is not None:
            return ema.applied()
        return nullcontext()

    def sampling_weights(self) -> AbstractContextManager[None]:
        """A context with the weights for sampling; schedule-free optimizers train others."""
        return sampling_weights(self.optimizer)


def random_states() -> dict[str, Any]:
    """The states of all global random generators.

    Training does not depend on them, since each step is seeded. They are saved so that other code
    that draws from them is not affected by an interruption.
    """
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        # A tensor, since `torch.load` with `weights_only` rejects NumPy's arrays.
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),  # empty without a GPU
        "accelerator": accelerator_state(),
    }


def accelerator_state() -> torch.Tensor | None:
    """The state of the generator of an Apple or Intel GPU; None elsewhere."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cuda":
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    # The checkpoint may come from a machine with more devices.
    torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
    state = states.get("accelerator")  # absent in checkpoints of version 0.1
    if state is not None and accelerator_state() is not None:
        torch.get_device_module().set_rng_state(state)
