"""The settings of training, in groups: for a step, a transformer and an assembly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simpletuner.config.lora import LoraConfig
from simpletuner.config.loss import LossConfig
from simpletuner.config.schema import (
    FlowConfig,
    LaunchConfig,
    OffloadConfig,
    OptimizerConfig,
    OptimizerName,
    PrecisionConfig,
    SpeedConfig,
)
from simpletuner.models.lora_layers import Targets


@dataclass(frozen=True)
class TrainingSpec:
    """The plan's decisions that training depends on.

    Attributes:
        lora_targets: modules that get a LoRA.
        seed: seed of the run; drawn by the plan if the user set none.
        total_steps: optimizer steps of the whole run.
        learning_rate: peak rate, after `lr_scale` and `lr_scale_sqrt`.
        timestep_offsets: non-zero `timestep_sampling_offset` by dataset id.
    """

    lora_targets: Targets
    seed: int
    total_steps: int
    learning_rate: float
    timestep_offsets: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepSettings(TrainingSpec):
    """The settings of a step.

    Attributes:
        accumulation: micro-steps per optimizer step.
        shift_is_explicit: the user set `flow_schedule_shift`.
        shared_noise: all processes draw the same random numbers.
        optimizer_name: the chosen optimizer, or the default one.
    """

    accumulation: int
    shift_is_explicit: bool
    shared_noise: bool
    flow: FlowConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    optimizer_name: OptimizerName


@dataclass(frozen=True)
class TransformerSettings:
    """How a transformer is loaded, placed and computed.

    Attributes:
        compiles_previews: compiled blocks also compute previews.
    """

    precision: PrecisionConfig
    offload: OffloadConfig
    speed: SpeedConfig
    launch: LaunchConfig
    compiles_previews: bool


@dataclass(frozen=True)
class AssemblySettings:
    """What a run trains, and how.

    Attributes:
        lora: the adapter; None for a full fine-tune.
        vae_dtype: config name of the VAE's dtype.
    """

    step: StepSettings
    transformer: TransformerSettings
    lora: LoraConfig | None
    vae_dtype: str
