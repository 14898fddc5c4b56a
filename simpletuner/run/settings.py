"""The settings of every component of a run, selected from its config."""

from __future__ import annotations

from simpletuner.config.optimizers import optimizer_name, peak_learning_rate
from simpletuner.config.precision import vae_dtype
from simpletuner.config.schema import RunConfig
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.training.settings import (
    AssemblySettings,
    StepSettings,
    TrainingSpec,
    TransformerSettings,
)
from simpletuner.validation.renderer import RenderSettings


def training_spec(plan: Plan) -> TrainingSpec:
    """The plan's decisions that training depends on."""
    offsets = {}
    for dataset in plan.trained:
        if dataset.config.timestep_sampling_offset:
            offsets[dataset.id] = dataset.config.timestep_sampling_offset
    rate = peak_learning_rate(plan.config)
    return TrainingSpec(plan.lora_targets, plan.seed, plan.length.total_steps, rate, offsets)


def assembly_settings(config: RunConfig, spec: TrainingSpec) -> AssemblySettings:
    """What a run trains, and how."""
    return AssemblySettings(
        step=step_settings(config, spec),
        transformer=transformer_settings(config),
        lora=config.lora if config.model.model_type == "lora" else None,
        vae_dtype=vae_dtype(config.precision, config.caching),
    )


def step_settings(config: RunConfig, spec: TrainingSpec) -> StepSettings:
    """The settings of a run's steps."""
    return StepSettings(
        **vars(spec),
        accumulation=config.schedule.gradient_accumulation_steps,
        shift_is_explicit=config.is_explicit("flow_schedule_shift"),
        shared_noise=not config.run.seed_for_each_device,
        flow=config.flow,
        loss=config.loss,
        optimizer=config.optimizer,
        optimizer_name=optimizer_name(config.optimizer, config.precision.mixed_precision),
    )


def transformer_settings(config: RunConfig) -> TransformerSettings:
    """How the transformer of a run is loaded, placed and computed."""
    return TransformerSettings(
        precision=config.precision,
        offload=config.offload,
        speed=config.speed,
        launch=config.launch,
        compiles_previews=config.validation.validation_torch_compile,
    )


def render_settings(plan: SamplePlan) -> RenderSettings:
    """How the previews and samples of a plan are rendered."""
    return RenderSettings(
        validation=plan.config.validation,
        offload=plan.config.offload,
        shift=plan.config.sampling_shift,
        keep_vae_loaded=plan.config.caching.keep_vae_loaded,
        frame_rate=plan.frame_rate,
    )
