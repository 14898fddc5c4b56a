"""The keys of config.json, grouped by component, and all groups together: `RunConfig`.

A class is the config group of one component and a section of the reference page. Options of a model
family live in `models/*/options.py` and those of a technique in `config/techniques/`;
`family_groups` and `technique_groups` add them to this schema. A family's defaults, which override
these, live in `models/*/spec.py`.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

from pydantic import BeforeValidator

from simpletuner.config.launch import LaunchConfig
from simpletuner.config.lora import LoraConfig
from simpletuner.config.loss import LossConfig
from simpletuner.config.option import (
    Group,
    Option,
    TechniqueGroup,
    accepted,
    common,
    option,
    options_of,
    unless,
    when,
)
from simpletuner.config.precision import PLAIN_PRECISIONS as PLAIN_PRECISIONS
from simpletuner.config.precision import PrecisionConfig as PrecisionConfig
from simpletuner.config.precision import recomputed
from simpletuner.config.publishing import PublishConfig
from simpletuner.config.remote import SourceName
from simpletuner.config.trackers import TrackingConfig
from simpletuner.config.types import (
    Flag,
    Gigabytes,
    Integer,
    Number,
    PathText,
    Sizes,
    Text,
    TextList,
    Texts,
    parse_text,
    plain_key,
)
from simpletuner.config.webhooks import WebhookConfig

CaptionStrategy = Literal[
    "textfile", "filename", "metadata", "instanceprompt", "instance_prompt", "parquet", SourceName
]
# Choices that look like numbers may be written as numbers.
Alignment = Annotated[Literal["8", "16", "24", "32", "64", "128"], BeforeValidator(parse_text)]

MODELS = Path(__file__).parents[1] / "models"
LEARNING_RATES = {"lora": 1e-4, "full": 5e-5}
# Pixels per edge; a larger number is a typo.
LARGEST_SIZE = 100_000
MOST_SHOTS = 1000  # previews per prompt in one validation
SHORTEST_CAPTION = 16  # tokens; a shorter limit would cut nearly every caption
NOISE_LEVELS = 1000  # timesteps of the models; the highest is pure noise
# Not sine, which returns to learning_rate.
DECAYING_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_warmup",
    "cosine_with_restarts",
    "polynomial",
)

Scheduler = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "sine",
]
OptimizerName = Literal[
    "adamw_bf16",
    "adamw",
    "torch-adamw",
    "torch-adam",
    "torch-nadam",
    "torch-radam",
    "torch-adagrad",
    "torch-rmsprop",
    "torch-sgd",
    "optimi-adamw",
    "optimi-stableadamw",
    "optimi-lion",
    "optimi-radam",
    "optimi-ranger",
    "optimi-adan",
    "optimi-adam",
    "optimi-sgd",
    "ao-adamw8bit",
    "ao-adamw4bit",
    "adamw_schedulefree",
    "adamw_schedulefree+aggressive",
    "adamw_schedulefree+no_kahan",
    "muon",
    "prodigy",
    "bnb-adamw8bit",
    "bnb-adamw",
    "bnb-lion8bit",
    "bnb-lion",
    "bnb-adagrad8bit",
    "bnb-sgd8bit",
]

# Keys whose default each family sets in its `spec.py`.
of_family = partial(common, None, default_note="of the family")
# Keys that act only while previews are rendered.
previewed = partial(option, requires=unless("validation_disable"))


class ModelConfig(Group):
    """Model"""

    model_type: Literal["lora", "full"] = common(
        ...,
        refused=dict.fromkeys(
            ("lokr", "lycoris"), "is a kind of LoRA: set model_type lora, and the kind as lora_type"
        ),
    )
    """A LoRA is a small file on top of the frozen model; full trains every weight, which needs far
    more memory and disk.
    """
    model_family: Text = common(...)
    """kandinsky5-image makes pictures and edits, kandinsky5-video clips, sanavideo clips of 480p.
    `_` for `-` and any letter case are accepted.
    """
    model_flavour: Text | None = common(
        None, aliases=("model_flavor",), default_note="the family's first"
    )
    """The published checkpoint to train on: what it makes, how large it is, and what it is tuned
    for.
    """
    pretrained_model_name_or_path: PathText | None = common(None, default_note="of the flavour")
    """Hub id or folder of a diffusers checkpoint; overrides the flavour."""
    pretrained_vae_model_name_or_path: PathText | None = option(None, default_note="the model path")
    """Hub id or folder of the VAE."""
    pretrained_transformer_model_name_or_path: PathText | None = option(
        None, default_note="the model path"
    )
    """Hub id or folder of the transformer."""
    pretrained_transformer_subfolder: PathText = option("transformer")
    """Folder of the transformer within that path."""
    revision: Text | None = option(None)
    """Branch, tag or commit of the hub repository."""
    variant: Text | None = option(None)
    """Weight file variant, such as fp16."""


class RunOptions(Group):
    """Run and paths"""

    output_dir: PathText = common("simpletuner-results")
    """Folder for all output of the run; created if missing."""
    logging_dir: PathText = common("logs", requires=unless(report_to=("none", "simpletuner")))
    """Where trackers such as TensorBoard keep their files."""
    cache_dir: PathText | None = common(None, default_note="`<output_dir>/cache`")
    """Where encoded captions, pictures and clips are kept, to be encoded once only."""
    cache_dir_text: PathText | None = option(None, default_note="`<cache_dir>/text`")
    """Folder for encoded captions."""
    cache_dir_vae: PathText | None = option(None, default_note="`<cache_dir>/vae`")
    """Folder for encoded pictures and clips."""
    data_backend_config: PathText | None = common(
        None, default_note="multidatabackend.json beside the config", label="Dataset File"
    )
    """JSON file that lists the datasets: their folders, captions and sizes."""
    # A seed is not a quantity, so LARGEST_NUMBER does not apply.
    seed: Integer | None = common(None, ge=-1, le=math.inf)
    """The same seed gives the same data order, noise and initial weights. 0 takes it from the
    clock, -1 or unset draws one; both are logged."""
    seed_for_each_device: Flag = option(True, requires=unless(num_processes=1))
    """true: every sample of a step draws different noise, as in one process with a larger batch.
    false: every process draws the same noise as the first."""
    resume_from_checkpoint: PathText = common("latest")
    """`latest` continues what was last trained, or starts a new run. The step, name or path of a
    checkpoint continues from there, in a branch if it is not the last one (docs/TUTORIAL.md).
    `none` starts at step 0 and overwrites no checkpoint."""
    i_know_what_i_am_doing: Flag = option(False)
    """Downgrade safety errors that mention this key to warnings."""


class ScheduleConfig(Group):
    """Schedule"""

    train_batch_size: Integer = common(1, ge=1, label="Batch Size")
    """Samples trained at once on each device: more give steadier steps and need more memory. A
    dataset may override it.
    """
    gradient_accumulation_steps: Integer = common(1, ge=1)
    """Batches whose gradients make one step: the effect of a larger batch in the memory of one."""
    max_train_steps: Integer | None = common(None, ge=0, label="Steps")
    """How long to train. More steps learn more, until the model repeats its data. 0 or unset: set
    by the number of epochs.
    """
    num_train_epochs: Integer | None = common(
        None, ge=0, default_note="1 without max_train_steps", label="Epochs"
    )
    """Passes over all data, if max_train_steps is unset or 0."""


class CheckpointConfig(Group):
    """Checkpoints"""

    checkpoint_step_interval: Integer = common(500, aliases=("checkpointing_steps",), ge=1)
    """Steps between checkpoints, from which one continues, samples or compares."""
    checkpoint_epoch_interval: Integer | None = option(None, ge=1)
    """Also save after every n-th epoch."""
    checkpoints_total_limit: Integer = common(5, aliases=("save_total_limit",), ge=0)
    """Maximum number of checkpoints; a save removes the oldest ones beyond it. 0 keeps all."""
    checkpointing_rolling_steps: Integer = common(0, ge=0)
    """Steps between additional rolling checkpoints, pruned separately; 0 disables them."""
    checkpoints_rolling_total_limit: Integer = option(
        1, ge=1, requires=when("checkpointing_rolling_steps")
    )
    """Number of rolling checkpoints to keep."""
    disk_low_threshold: Gigabytes | None = option(None, gt=0, le=1e6)
    """Save a checkpoint and stop if output_dir has less free space: 10G, 500M or a number of GB."""


class OptimizerConfig(Group):
    """Optimizer"""

    optimizer: OptimizerName | None = common(
        None, default_note="adamw_bf16 with mixed_precision bf16, else adamw"
    )
    """adamw_bf16 and the optimi optimizers train bf16 weights with Kahan summation. muon needs
    about three times the rate of AdamW. Some optimizers need a package, which the error names."""
    optimizer_config: Text | None = option(None)
    """Optimizer settings as "key=value,key=value"."""
    optimizer_beta1: Number | None = option(None, ge=0, lt=1)
    """Decay of the average gradient; set it only together with optimizer_beta2."""
    optimizer_beta2: Number | None = option(None, ge=0, lt=1)
    """Decay of the average squared gradient; set it only together with optimizer_beta1."""
    adam_beta1: Number | None = option(None, ge=0, lt=1, default_note="0.9")
    """Decay of the average gradient in optimizers of the Adam kind."""
    adam_beta2: Number | None = option(None, ge=0, lt=1, default_note="0.999 for plain adamw")
    """Decay of the average squared gradient in optimizers of the Adam kind."""
    adam_weight_decay: Number | None = option(
        None, ge=0, le=100, default_note="0.01 for plain adamw"
    )
    """How strongly optimizers of the Adam kind pull weights towards 0."""
    adam_epsilon: Number | None = option(None, gt=0, le=1, default_note="1e-8, with optimi 1e-6")
    """Added to the denominator in optimizers of the Adam kind, against division by 0. Where
    gradients are as small as this number, it halves the updates."""
    optimizer_release_gradients: Flag = option(
        False,
        requires=when(model_type="full", because="the gradients of a LoRA are small", fatal=True),
        excludes=(
            unless(
                gradient_accumulation_steps=1,
                because="freed gradients cannot be accumulated. Use train_batch_size",
            ),
            when(
                grad_clip_method="norm",
                because="the norm needs all gradients at once. Use value, or max_grad_norm 0",
            )
            & when("max_grad_norm"),
            when(
                mixed_precision="fp16",
                because="a step that overflows could not be skipped as a whole. Use bf16",
            ),
            unless(
                num_processes=1,
                because="processes average gradients before they update. Leave it out",
            ),
        ),
    )
    """Update each weight as soon as its gradient is ready, then free the gradient: less memory for
    full fine-tunes, same results."""
    learning_rate: Number | None = common(
        None, gt=0, le=1000, default_note="1e-4 for lora, 5e-5 for full"
    )
    """How far each step moves the weights, after the warm-up. Too high diverges or burns in, too
    low learns nothing.
    """
    lr_scale: Flag = option(False)
    """Multiply the learning rate by processes x accumulation x batch."""
    lr_scale_sqrt: Flag = option(False, excludes=when("lr_scale"))
    """Multiply the learning rate by the square root of that product instead."""
    lr_scheduler: Scheduler = common("constant_with_warmup")
    """After the warm-up: constant; linear, cosine, restarted cosine or polynomial decay to lr_end;
    or a sine between learning_rate and lr_end."""
    lr_warmup_steps: Integer = common(0, ge=0)
    """Steps of a linear ramp from 0, with every scheduler."""
    lr_end: Number = option(
        4e-7, ge=0, le=1000, requires=when(lr_scheduler=(*DECAYING_SCHEDULERS, "sine"))
    )
    """Final learning rate of decaying schedulers."""
    lr_power: Number = option(0.8, gt=0, le=100, requires=when(lr_scheduler="polynomial"))
    """Power of the polynomial scheduler."""
    lr_num_cycles: Integer = option(
        1, ge=1, requires=when(lr_scheduler=("cosine_with_restarts", "sine"))
    )
    """Cycles of cosine_with_restarts and sine."""
    max_grad_norm: Number = common(2.0, ge=0, le=1e6)
    """Gradient clipping threshold; 0 disables clipping."""
    grad_clip_method: Literal["value", "norm"] = option("value", requires=when("max_grad_norm"))
    """value: clip every gradient element to ±max_grad_norm; norm: clip the global gradient norm."""


class SpeedConfig(Group):
    """Speed"""

    speed: Literal["auto", "reference"] = option("auto")
    """auto: all optimizations that keep the results (docs/SPEED.md). reference: diffusers' code."""
    speed_keep_attention: Flag | None = option(
        None, default_note="as `speed` says", requires=when("gradient_checkpointing")
    )
    """With gradient_checkpointing: keep the output of self-attention, tokens x width x 2 bytes per
    block, instead of recomputing it."""
    deterministic: Flag = option(False)
    """The same bits in every run on a GPU, by kernels with a fixed order of summation. Slower; on a
    CPU, runs are always identical."""


class EmaConfig(Group):
    """EMA"""

    requires = when("use_ema")

    use_ema: Flag = common(False, label="EMA")
    """Keep an exponential moving average of the trained weights."""
    ema_validation: Literal["none", "ema_only", "comparison"] = common(
        "comparison", label="Previews"
    )
    """Render previews with the trained weights (none), their average (ema_only), or both."""
    ema_update_interval: Integer = option(1, ge=1)
    """Steps between updates of the average."""
    # The schedule of TensorFlow's ExponentialMovingAverage with num_updates.
    ema_decay: Number = common(0.995, ge=0, le=0.9999)
    """Upper limit of the decay min((1+n)/(10+n), ema_decay) with n = step - 1."""
    ema_warmup_steps: Integer = option(0, ge=0)
    """Before this step, the average is a copy of the weights."""
    ema_device: Literal["cpu", "accelerator"] = option("cpu", requires=unless("ema_cpu_only"))
    """Device of the average. With cpu, every update copies the weights to the host."""
    ema_cpu_only: Flag = option(False, label="EMA CPU Only")
    """Keep and update the average on the CPU only."""
    ema_foreach_disable: Flag = option(False)
    """Use plain loops instead of foreach updates; same results."""

    @property
    def is_on_host(self) -> bool:
        """Whether the average is kept in host memory."""
        return self.ema_cpu_only or self.ema_device == "cpu"


SLOTS = 2  # ring buffer of streamed blocks, in groups: one computes while the next is copied
streamed = partial(
    option, requires=when("enable_group_offload", "group_offload_text_encoder", "group_offload_vae")
)


class OffloadConfig(Group):
    """Offload"""

    offload: Literal["manual", "auto"] = common("manual")
    """auto sets unset keys of offloading, checkpointing and speed_keep_attention to the fastest
    combination that fits."""
    enable_group_offload: Flag = common(
        False,
        excludes=(
            when(
                "enable_model_cpu_offload",
                because="one streams the blocks, the other moves them all",
            ),
            when("fsdp_enable", because="FSDP shards the weights that group offload would stream"),
            when(
                model_type="full",
                because=(
                    "only frozen weights stream, and it has none; leave it out and set offload auto"
                ),
            ),
        ),
    )
    """Stream the transformer's frozen weights from host memory, block by block; same results."""
    group_offload_type: Literal["block_level", "leaf_level"] = streamed(
        "block_level",
        remarks={
            "leaf_level": (
                "is treated as block_level: a whole block copies faster than its single layers"
            )
        },
    )
    """Unit of streaming; leaf_level also streams blocks."""
    group_offload_blocks_per_group: Integer = streamed(1, ge=1, common=True)
    """Number of blocks streamed together; two groups are on the device at a time."""
    group_offload_resident_blocks: Integer = option(0, ge=0, requires=when("enable_group_offload"))
    """Evenly spaced blocks that stay on the device; helps if copies are slower than compute."""
    group_offload_use_stream: Flag = streamed(False, common=True)
    """Overlap copies with compute (CUDA)."""
    group_offload_to_disk_path: PathText | None = streamed(None)
    """Keep offloaded weights in this folder, not in host memory; every step reads them twice."""
    group_offload_text_encoder: Flag = option(False)
    """Stream the layers of text encoders while caching."""
    group_offload_vae: Flag = option(
        False,
        excludes=when(
            "enable_model_cpu_offload", because="one moves parts of the VAE, the other all of it"
        ),
    )
    """Stream the VAE's blocks while caching and in previews; saves little: VAEs are small."""
    offload_block_inputs: Flag = recomputed(False, label="Offload Block Inputs")
    """Keep the block inputs saved by gradient checkpointing in host memory (CUDA)."""
    offload_optimizer_state: Flag = option(
        False,
        requires=(
            when(model_type="full", fatal=True),
            when(
                "optimizer_release_gradients",
                because="it updates one weight of a full fine-tune at a time",
                fatal=True,
            ),
        ),
    )
    """Keep optimizer state in host memory; updates copy it to the device (CUDA); same results."""
    enable_model_cpu_offload: Flag = previewed(False, common=True)
    """In previews, move the transformer off the device while the VAE decodes."""


class CachingConfig(Group):
    """Caching"""

    vae_dtype: Literal["bf16", "fp16", "fp32"] | None = option(
        None, default_note="fp32 with mixed_precision no, else bf16"
    )
    """Dtype of the VAE; part of the cache identity."""
    vae_batch_size: Integer = common(1, ge=1)
    """Samples per VAE batch, reduced if memory runs out; a batch changes only the rounding."""
    vae_enable_slicing: Flag = option(False)
    """Encode and decode the samples of a batch one by one."""
    vae_enable_tiling: Flag = common(False)
    """Encode and decode in tiles; their seams differ slightly, so caches depend on this key."""
    vae_enable_patch_conv: Flag = option(False)
    """Run 3D convolutions in temporal slices (Kandinsky 5 Video's VAE)."""
    vae_enable_temporal_roll: Flag = option(False)
    """Carry convolution state from frame to frame: always on in Sana Video's VAE, unavailable in
    the others."""
    keep_vae_loaded: Flag | None = previewed(None, default_note="true where memory allows")
    """Keep the VAE on the device between validations."""
    vae_cache_ondemand: Flag = common(False)
    """Encode and cache latents at their first use; the VAE stays loaded."""
    vae_cache_disable: Flag = option(False)
    """Encode latents at every use instead of caching them; a dataset may override this."""
    compress_disk_cache: Flag = option(True)
    """Compress cache entries; existing entries are readable with either setting."""
    text_encoder_batch_size: Integer | None = option(
        None, ge=1, default_note="8; 32 with group_offload_text_encoder; 1 on a CPU"
    )
    """Captions per text encoder batch, reduced if memory runs out; changes only the rounding."""
    image_processing_batch_size: Integer = option(32, ge=1)
    """Number of pictures decoded ahead."""
    max_workers: Integer = option(32, ge=1)
    """Decode threads, at most the machine's cores."""
    torch_num_threads: Integer = option(8, ge=1)
    """Compute threads on a CPU, at most the machine's cores."""
    dataloader_prefetch: Flag = option(False)
    """Prefetch several batches instead of one."""
    dataloader_prefetch_qlen: Integer = option(10, ge=1, requires=when("dataloader_prefetch"))
    """Batches to prefetch."""
    delete_problematic_images: Flag = option(False)
    """Move damaged files to `<output_dir>/quarantine`; nothing is deleted."""
    delete_unwanted_images: Flag = option(False)
    """Also move files outside the size or aspect limits to quarantine."""

    def captions_at_once(self, device: str, *, streamed: bool) -> int:
        """Batch size for captions; larger if every batch copies the weights to the device.

        A CPU is compute-bound: batches save nothing, and padding costs time.
        """
        if self.text_encoder_batch_size is not None:
            return self.text_encoder_batch_size
        if device == "cpu":
            return 1
        return 32 if streamed else 8


beta = partial(option, requires=when("flow_use_beta_schedule"))


class FlowConfig(Group):
    """Flow matching"""

    flow_schedule_shift: Number | None = of_family(gt=0, le=100)
    """Shift k of training sigmas, s·k / (1 + (k-1)·s): above 1 favours composition, below 1 detail.
    If set, previews use it too."""
    # The two points are from FLUX.1: `calculate_shift` in diffusers.
    flow_schedule_auto_shift: Flag = common(False)
    """Shift e^mu, mu linear in the token count from 0.5 at 256 to 1.15 at 4096 tokens."""
    flow_sigmoid_scale: Number = option(
        1.0, gt=0, le=100, requires=unless("flow_use_uniform_schedule", "flow_use_beta_schedule")
    )
    """Standard deviation of the logit-normal's underlying normal distribution."""
    flow_use_uniform_schedule: Flag = option(False)
    """Uniform sigmas instead of logit-normal."""
    flow_use_beta_schedule: Flag = option(False, excludes=when("flow_use_uniform_schedule"))
    """Beta-distributed sigmas instead of logit-normal."""
    flow_beta_schedule_alpha: Number = beta(2.0, gt=0, le=1000)
    """First parameter of the beta distribution."""
    flow_beta_schedule_beta: Number = beta(2.0, gt=0, le=1000)
    """Second parameter of the beta distribution."""
    disable_segmented_timestep_sampling: Flag = option(False)
    """Draw sigmas independently, not stratified over equal slices of the schedule."""


class TextConfig(Group):
    """Text"""

    caption_dropout_probability: Number = common(
        0.1,
        ge=0,
        le=1,
        remarks={
            0: (
                "means that the model never sees the empty caption, which weakens guidance; 0.1 "
                "is usual"
            )
        },
    )
    """Probability of training a sample with the empty caption."""
    tokenizer_max_length: Integer | None = of_family(ge=SHORTEST_CAPTION)
    """Longer captions are truncated, with a warning."""


Decoding = Literal["whole", "strips", "tiles"]
guided = unless(validation_guidance=1, because="guidance of 1 needs no negative prompt")


class ValidationConfig(Group):
    """Validation"""

    # Intervals stay in a file whose previews are switched off for a time, so they need no
    # validation.
    validation_step_interval: Integer | None = common(
        None,
        aliases=("validation_steps",),
        ge=1,
        label="Preview Interval",
        default_note=(
            "up to eight times between start and end, so that previews take a tenth of the run; "
            "not with validation_epoch_interval"
        ),
    )
    """Steps from one round of previews to the next."""
    validation_epoch_interval: Integer | None = option(None, ge=1)
    """Epochs from one round of previews to the next."""
    validation_prompt: Text | None = common(None, label="Preview Prompt")
    """What previews show, in words; their files are named `validation`."""
    user_prompt_library: PathText | None = common(None)
    """JSON file of more prompts, which may have their own seed, size, guidance and picture."""
    validation_prompt_library: Flag = option(False)
    """Also render a built-in list of prompts."""
    validation_negative_prompt: Text | None = of_family(requires=guided)
    """What previews should not show: guidance steers away from it."""
    validation_seed: Integer | None = common(
        None, default_note="`seed`", requires=unless("validation_randomize")
    )
    """The same seed makes previews of different steps comparable."""
    validation_randomize: Flag = previewed(False)
    """Use a new seed for every round of previews."""
    validation_seed_source: Literal["cpu", "gpu"] = option("cpu")
    """Where the noise of previews is drawn: cpu and gpu make other pictures of the same seed."""
    validation_guidance: Number | None = of_family(ge=1, le=100)
    """How closely previews follow their prompt; too high makes them harsh."""
    validation_num_inference_steps: Integer | None = of_family(ge=1, le=NOISE_LEVELS)
    """Steps in which the sampler draws a preview: more take longer and show finer detail."""
    validation_resolution: Sizes | None = of_family(form="text")
    """N, WxH or a comma-separated list; previews have exactly this size."""
    validation_num_video_frames: Integer | None = of_family(ge=1, le=10_000)
    """Frames of a preview clip, 4k+1; 8k+1 for 2b-720p."""
    framerate: Integer | None = of_family(aliases=("frame_rate",), ge=1, le=1000)
    """Frames per second at which clips are read and previews play."""
    validation_using_datasets: Flag = option(False)
    """Use pictures of a dataset as conditions for previews."""
    eval_dataset_id: TextList | None = option(None)
    """Datasets of these pictures, one id or a list."""
    validation_preview: Flag = previewed(False)
    """Write thumbnails of unfinished previews to the output folder and to raw webhooks."""
    validation_preview_steps: Integer = option(1, ge=1, requires=when("validation_preview"))
    """Sampling steps between thumbnails."""
    disable_benchmark: Flag = previewed(False)
    """Do not render previews of the untrained model at step 0."""
    validation_disable: Flag = common(False, label="No Previews")
    """Train without previews, also at the end."""
    validation_disable_unconditional: Flag | None = previewed(
        None, default_note="true, unless there is no other prompt"
    )
    """Do not render the empty prompt."""
    validation_on_startup: Flag = previewed(False)
    """Render when a run starts or resumes."""
    validate_after_step: Integer = previewed(0, ge=0, label="First Step")
    """The first step at which previews may be rendered."""
    num_validation_images: Integer = option(1, ge=1, le=MOST_SHOTS, label="Number per Prompt")
    """Pictures or clips rendered for each prompt."""
    num_eval_images: Integer = option(4, ge=1, le=100_000)
    """Pictures taken from a dataset for each round of previews or evaluation."""
    validation_image_format: Literal["png", "webp", "jpeg"] = option("png")
    """png keeps every detail; webp and jpeg files are smaller."""
    validation_noise_scheduler: Literal["euler", "unipc", "dpm++"] | None = option(
        None, default_note="the pipeline's"
    )
    """Sampler of previews; keeps the shift of the pipeline's sampler."""
    validation_decoding: Decoding = option(
        "whole", default_note="`whole`; `strips` for clips that are too large for torch or the GPU"
    )
    """How previews are decoded: `strips` take less memory and change only the rounding; `tiles`
    take the least, but slightly change pixels at the seams."""
    validation_batched_guidance: Flag | None = option(
        None,
        default_note="true where memory allows and `speed` is auto",
        requires=(
            unless("validation_disable"),
            unless(validation_guidance=1, because="guidance of 1 is one pass"),
        ),
    )
    """Run both passes of guidance in previews as one batch, which changes only the rounding."""
    validation_decode_in_background: Flag | None = option(
        None,
        default_note="true on a GPU whose memory allows it",
        requires=unless("validation_disable") & when(num_processes=1),
        excludes=when(
            "enable_model_cpu_offload",
            "group_offload_vae",
            because="they would move the VAE meanwhile",
        ),
    )
    """Decode sampled previews in a thread while training continues."""
    validation_torch_compile: Flag = option(True)
    """Use compiled blocks in previews too, if training compiles them."""


measured = partial(option, requires=when("eval_steps_interval", "eval_epoch_interval"))


class EvaluationConfig(Group):
    """Evaluation"""

    eval_steps_interval: Integer | None = common(None, ge=1, requires=unless("eval_loss_disable"))
    """Steps between measurements of the loss on `num_eval_images` samples of each eval dataset;
    also after the last step.
    """
    eval_epoch_interval: Number | None = option(
        None, gt=0, le=1e6, requires=unless("eval_loss_disable")
    )
    """Interval in epochs; 0.5 is twice per epoch."""
    eval_timesteps: Integer = measured(28, ge=1, le=NOISE_LEVELS)
    """Number of evenly spaced timesteps in the evaluation."""
    eval_dataset_pooling: Flag = measured(False)
    """Also report the mean over datasets."""
    eval_loss_disable: Flag = option(False)
    """Do not measure the loss on held-out files."""

    @property
    def measures_loss(self) -> bool:
        """Whether an interval is set and evaluation is not disabled."""
        if self.eval_loss_disable:
            return False
        return self.eval_steps_interval is not None or self.eval_epoch_interval is not None


class SharedKeys(Group):
    """Keys of a dataset whose run-wide defaults may be set in config.json."""

    minimum_image_size: Number | None = option(None, ge=0, le=LARGEST_SIZE)
    """Smaller pictures are left out; 0 disables the limit."""
    maximum_image_size: Number | None = option(None, ge=0, le=LARGEST_SIZE)
    """Larger pictures are resized to target_downsample_size before cropping."""
    target_downsample_size: Number | None = option(None, ge=0, le=LARGEST_SIZE)
    """Size to which pictures above maximum_image_size are reduced."""
    instance_prompt: Texts | None = option(None)
    """Trigger words: put before every caption, or used instead of captions."""
    skip_file_discovery: TextList | None = option(None)
    """Scans to skip: vae, aspect, metadata, text."""


class DatasetDefaults(SharedKeys):
    """Dataset defaults"""

    resolution: Number | None = of_family(gt=0, le=LARGEST_SIZE)
    """Size at which files are trained. Larger learns finer detail, and needs memory and time."""
    resolution_type: Literal["pixel", "area", "pixel_area"] = common("pixel_area")
    """What the size means: short edge, megapixels, or edge of a square of equal area."""
    aspect_bucket_rounding: Integer = option(2, ge=1, le=9)
    """Pictures are grouped by width / height, rounded to this many decimals."""
    aspect_bucket_alignment: Alignment | None = of_family(common=False)
    """Widths and heights of buckets are multiples of this many pixels."""
    caption_strategy: CaptionStrategy = common("filename")
    """textfile: a text beside each file. filename: the file's name. instanceprompt: the same words
    for all. The others read a table.
    """
    prepend_instance_prompt: Flag = option(False)
    """Prepend instance_prompt to all captions."""
    only_instance_prompt: Flag = option(False)
    """Use instance_prompt instead of captions."""
    preserve_data_backend_cache: Flag = option(False)
    """Do not look for added files."""
    ignore_missing_files: Flag = option(False)
    """Use cached entries of missing files."""
    retry_failed: Flag = option(False)
    """Retry failed downloads of remote datasets."""
    disable_bucket_pruning: Flag = option(False)
    """Keep buckets smaller than a batch, padded with repeated samples."""
    allow_dataset_oversubscription: Flag = option(False)
    """If repeats is unset, raise it until a batch is full."""
    override_dataset_config: Flag = option(False)
    """Continue a run with a changed dataset, even with one that has none of its files."""
    data_backend_sampling: Literal["auto-weighting", "uniform"] = option("auto-weighting")
    """Choose datasets by size x probability, or by probability alone."""
    conditioning_multidataset_sampling: Literal["random", "combined"] = option("random")
    """Use one conditioning dataset per sample, or all of them."""


class AcceptedConfig(Group):
    """Accepted without effect"""

    trust_remote_code: Flag = accepted(
        False, "every part of a model is a class of the installed libraries"
    )
    checkpointing_use_tempdir: Flag = accepted(False, "writes are always atomic")
    offload_during_startup: Flag = accepted(
        False, "text encoders and VAE are never on the device together anyway"
    )
    read_batch_size: Integer = accepted(25, "reading needs no batches", ge=1)
    write_batch_size: Integer = accepted(128, "writing needs no batches", ge=1)
    metadata_update_interval: Integer = accepted(
        3600, "the index is saved once, before training", ge=60
    )
    vae_cache_scan_behaviour: Literal["recreate", "sync"] = accepted(
        "recreate", "a latent that does not match is re-encoded, under its own key"
    )
    dynamo_use_regional_compilation: Flag = accepted(
        True, "the blocks are compiled, never the whole transformer"
    )
    fsdp_transformer_layer_cls_to_wrap: TextList | None = accepted(
        None, "the family's blocks are known and are gathered one at a time"
    )
    fsdp_cpu_ram_efficient_loading: Flag = accepted(
        True, "processes of a machine always share the weights they read"
    )
    snr_gamma: Number | None = accepted(None, "it does not apply to flow models", ge=0, le=1000)
    ignore_final_epochs: Flag = accepted(
        True, "a run ends at max_train_steps, or else after num_train_epochs"
    )
    strict_epoch_limit: Flag = accepted(
        False, "a run ends at max_train_steps, or else after num_train_epochs"
    )


GroupType = TypeVar("GroupType", bound=Group)
FAMILY_DEFAULT = "family default"
FAMILY_FIXED = "fixed by the family"
CHOSEN = "chosen by offload auto"
BY_SIZE = "chosen by the size of previews"
BY_COST = "chosen by the cost of previews"
KEPT = "default when the run began"
# Checkpoints record these origins, so their texts must not change.
NOT_SET_BY_USER = ("default", FAMILY_DEFAULT, FAMILY_FIXED, CHOSEN, BY_SIZE, BY_COST, KEPT)
DEFAULTS = ("default", FAMILY_DEFAULT, KEPT)  # of them, those that no rule has chosen


@dataclass(frozen=True)
class OptionsByGroup:
    """Groups that are declared outside this module, by their class."""

    groups: Mapping[type[Group], Group]

    def of(self, group: type[GroupType]) -> GroupType:
        return cast(GroupType, self.groups[group])


class FamilyOptions(OptionsByGroup):
    """The option groups of all model families; only those of the run's family have an effect."""


class TechniqueOptions(OptionsByGroup):
    """The option groups of all techniques, on or off."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, one immutable group per component, with the origin of every key."""

    model: ModelConfig
    run: RunOptions
    tracking: TrackingConfig
    publish: PublishConfig
    webhooks: WebhookConfig
    schedule: ScheduleConfig
    checkpoints: CheckpointConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    speed: SpeedConfig
    launch: LaunchConfig
    ema: EmaConfig
    lora: LoraConfig
    offload: OffloadConfig
    caching: CachingConfig
    flow: FlowConfig
    text: TextConfig
    loss: LossConfig
    techniques: TechniqueOptions
    validation: ValidationConfig
    evaluation: EvaluationConfig
    datasets: DatasetDefaults
    accepted: AcceptedConfig
    family: FamilyOptions
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def technique_groups(self) -> list[TechniqueGroup]:
        """The groups of all techniques, on or off."""
        return [self.techniques.of(group) for group in technique_groups()]

    @property
    def techniques_in_use(self) -> list[TechniqueGroup]:
        """The techniques that are on or have no switch; only their rules apply."""
        return [
            group
            for group in self.technique_groups
            if group.requires is None or group.requires.holds(self.flat)
        ]

    @property
    def sampling_shift(self) -> float | None:
        """The user's explicit training shift, which replaces the checkpoint's shift in sampling."""
        return self.flow.flow_schedule_shift if self.is_explicit("flow_schedule_shift") else None

    def is_explicit(self, key: str) -> bool:
        """Whether the user set the key, in a file or on the command line."""
        return self.origins.get(key, "default") not in NOT_SET_BY_USER

    def keys_set(self) -> list[str]:
        """The keys that are set, in the order of this module.

        The family's choice counts only where it has an effect: not its block for a technique that
        is off.
        """
        chosen = []
        for key, declared in all_options().items():
            is_set = self.origins.get(key, "default") != "default"
            if self.is_explicit(key) or (is_set and declared.has_effect(self.flat)):
                chosen.append(key)
        return chosen

    def with_values(self, values: Mapping[str, Any], origin: str) -> RunConfig:
        """The config with some keys replaced, and `origin` recorded as their source."""
        updates: dict[str, Any] = {}
        for attribute in GROUPS:
            updates[attribute] = _with_values(getattr(self, attribute), values)
        updates["techniques"] = TechniqueOptions(_all_with_values(self.techniques, values))
        updates["family"] = FamilyOptions(_all_with_values(self.family, values))
        return replace(self, **updates, origins={**self.origins, **dict.fromkeys(values, origin)})

    @property
    def groups(self) -> Mapping[type[Group], Group]:
        """Every group, by its class."""
        values: dict[type[Group], Group] = {
            group: getattr(self, attribute) for attribute, group in GROUPS.items()
        }
        return values | {**self.techniques.groups, **self.family.groups}

    @functools.cached_property  # half of a plan's rules read it
    def flat(self) -> Mapping[str, Any]:
        """Every key and its value, for snapshots and the plan."""
        values = self.groups
        flat: dict[str, Any] = {}
        for group in all_groups():
            flat |= values[group].model_dump(by_alias=True)
        return flat


def _with_values(group: GroupType, values: Mapping[str, Any]) -> GroupType:
    """A group with some values replaced, not validated: they come from this program."""
    changes = {name: value for name, value in values.items() if name in type(group).model_fields}
    return group.model_copy(update=changes) if changes else group


def _all_with_values(
    options: OptionsByGroup, values: Mapping[str, Any]
) -> dict[type[Group], Group]:
    return {kind: _with_values(group, values) for kind, group in options.groups.items()}


_HINTS = get_type_hints(RunConfig)
# The groups of this package that are attributes of RunConfig.
GROUPS: dict[str, type[Group]] = {
    name: hint
    for name, hint in _HINTS.items()
    if isinstance(hint, type) and issubclass(hint, Group)
}


@functools.cache
def all_groups() -> list[type[Group]]:
    """All groups, in the order of RunConfig, which is that of the reference page."""
    groups: list[type[Group]] = []
    for name in _HINTS:
        if name in GROUPS:
            groups.append(GROUPS[name])
        elif name == "techniques":
            groups += technique_groups()
        elif name == "family":
            groups += family_groups()
    return groups


@functools.cache
def technique_groups() -> list[type[TechniqueGroup]]:
    """The groups of the techniques, each declared in a file below `config/techniques/`."""
    files = sorted((Path(__file__).parent / "techniques").glob("[!_]*.py"))
    return _declared(
        [f"simpletuner.config.techniques.{path.stem}" for path in files], TechniqueGroup
    )


@functools.cache
def family_groups() -> list[type[Group]]:
    """The groups that the model families declare in `models/*/options.py`."""
    folders = sorted(path.parent.name for path in MODELS.glob("*/options.py"))
    return _declared([f"simpletuner.models.{folder}.options" for folder in folders], Group)


def _declared(modules: Sequence[str], kind: type[GroupType]) -> list[type[GroupType]]:
    """The groups of a kind that modules declare."""
    groups = []
    for name in modules:
        # Imported here by name, since some of these modules import this one.
        for value in vars(importlib.import_module(name)).values():
            is_imported = getattr(value, "__module__", "") != name  # such as Group itself
            if isinstance(value, type) and issubclass(value, kind) and not is_imported:
                groups.append(value)
    return groups


def option_names() -> dict[str, Option]:
    """Every key of config.json, by name and alias."""
    return options_of(*all_groups())


@functools.cache
def all_options() -> dict[str, Option]:
    """Every key of config.json by name, in the order of this module; keys of families come last."""
    return {option.name: option for option in option_names().values()}


def sections() -> dict[str, list[Option]]:
    """The options by the section of the reference page."""
    by_section: dict[str, list[Option]] = {}
    for declared in all_options().values():
        by_section.setdefault(declared.section, []).append(declared)
    return by_section


def main_name(written: str) -> str:
    """The canonical name of a key in any spelling; unknown keys are returned unchanged."""
    known = option_names().get(plain_key(written))
    return known.name if known else written


def render_config(values: Mapping[str, Any]) -> str:
    """Render a config.json in the order of the schema, an empty line between groups.

    Unknown keys come last.
    """
    keys_by_group = [
        [name for name in group.model_fields if name in values] for group in all_groups()
    ]
    keys_by_group.append([name for name in values if name not in all_options()])
    blocks = []
    for names in keys_by_group:
        if names:
            blocks.append(",\n".join(_json_entry(name, values[name]) for name in names))
    return "{\n" + ",\n\n".join(blocks) + "\n}\n"


def _json_entry(name: str, value: Any) -> str:
    # Newlines in texts are escaped, so only lines of JSON are indented.
    text = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    return f"  {json.dumps(name)}: {text}"
