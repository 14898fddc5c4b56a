"""Where a run is, and what its parts are while it trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from simpletuner.config.schema import FlowConfig, LossConfig, OptimizerConfig
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.techniques.base import Technique
from simpletuner.techniques.hidden_states import HiddenStates
from simpletuner.training.optimizers import sampling_weights
from simpletuner.training.trained import Trained
from simpletuner.world import World

# FLOPs that training on one sample takes, what checkpointing recomputes not counted, given its tokens and text tokens.
SampleFlops = Callable[[int, int], float]


class WeightStreamer(Protocol):
    """Brings the weights of blocks to the device while other blocks compute."""

    def waited(self) -> float:
        """Seconds for which computing waited for weights since this was last asked; never waits for the device."""
        ...


@dataclass
class TrainState:
    """How far the run is.

    Attributes:
        global_step: optimizer steps done.
        epoch: where the last sample came from, counted from 1.
        epochs_done: epochs that are complete.
    """

    global_step: int = 0
    epoch: int = 1
    epochs_done: int = 0

    def passed(self, interval: int | None, report_epochs_done: int) -> bool:
        """Whether a step completed an epoch that is a multiple of `interval`."""
        return interval is not None and self.epochs_done // interval < report_epochs_done // interval


@dataclass(frozen=True)
class StepSettings:
    """The numbers a step needs.

    Attributes:
        accumulation: micro-steps per optimizer step.
        total_steps: optimizer steps of the whole run.
        base_learning_rate: peak rate, scaling rules applied.
        shift_is_explicit: the user set `flow_schedule_shift`.
        shared_noise: the samples of every process draw what those of the first one draw.
    """

    seed: int
    accumulation: int
    total_steps: int
    base_learning_rate: float
    shift_is_explicit: bool
    shared_noise: bool
    mixed_precision: str
    flow: FlowConfig
    loss: LossConfig
    optimizer: OptimizerConfig


@dataclass
class Assembly:
    """Everything that takes part in a step, put together by `assemble`.

    Attributes:
        trained: what is trained of the transformer.
        parameters: its weights, by name, in the order the optimizer knows them.
        hidden: what techniques see of the forward pass.
        modules: what techniques train beside it, by their names.
        scaler: keeps small float16 gradients from vanishing; inert in other precisions.
        streamer: brings weights to the device while it computes; None when all of them stay there.
        sample_flops: what a sample costs; None in an assembly that is not metered.
        world: the processes that train together.
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
    streamer: WeightStreamer | None = None
    sample_flops: SampleFlops | None = None
    world: World = field(default_factory=World)

    @property
    def module_parameters(self) -> dict[str, nn.Parameter]:
        """What techniques train, by `<technique>.<name>`."""
        modules = self.modules.items()
        return {f"{owner}.{name}": each for owner, module in modules for name, each in module.named_parameters()}

    def sampling_weights(self) -> AbstractContextManager[None]:
        """The weights to sample with and to publish, where the optimizer trains at others (schedule-free)."""
        return sampling_weights(self.optimizer, self.settings.optimizer, self.settings.mixed_precision)


def random_states() -> dict[str, Any]:
    """States of every global generator. Training does not depend on them, since each step seeds its own; they are
    kept so that nothing else in the process notices an interruption either."""
    numpy_state: Any = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo the drawing of random numbers since `random_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        # A checkpoint may come from a machine with more devices.
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
