"""Rules between keys: contradictions, and keys without effect.

Simple rules are declared by options (`requires`, `excludes`); the others are functions here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from simpletuner.atomic import why_not_writable
from simpletuner.config.json_reader import check_unset
from simpletuner.config.optimizers import check_optimizer, learning_rate
from simpletuner.config.paths import home_path
from simpletuner.config.precision import (
    check_packages,
    check_quantized_matmul,
    text_encoder_dtype,
    transformer_dtype,
)
from simpletuner.config.publishing import check_publishing
from simpletuner.config.schema import (
    DECAYING_SCHEDULERS,
    PLAIN_PRECISIONS,
    RunConfig,
    all_options,
    family_groups,
)
from simpletuner.config.speed import BLOCK_KEYS, check_speed
from simpletuner.config.techniques.preservation import PreservationConfig
from simpletuner.config.techniques.tread import TreadConfig
from simpletuner.config.trackers import check_trackers
from simpletuner.config.webhooks import check_webhooks
from simpletuner.data.captions import control_token
from simpletuner.errors import NoEffect, Problem, Problems, counted, shorten
from simpletuner.models.other_models import why_not_trained_from
from simpletuner.models.source import (
    MODEL_KEY,
    ModelSource,
    blocks_of,
    differing_weights,
    encoder_fault,
    encoder_weights,
    vae_fault,
)
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.planning import effects
from simpletuner.planning.environment import check_folders, check_launch, check_offload
from simpletuner.planning.plans import Model
from simpletuner.planning.prompts import ValidationPrompt
from simpletuner.planning.techniques.table import check_encoders, ruling_techniques

# What settings are judged for: a run, its caches, pictures from its result, a look at the datasets,
# or a form that is being filled in.
Purpose = Literal["train", "caches", "sample", "survey", "draft"]

HIGHEST_USUAL_RATE = 0.1
# Optimizers for which a rate of 1 is reasonable.
RATE_IS_A_FACTOR = ("prodigy", "muon", "torch-sgd", "optimi-sgd", "bnb-sgd8bit")
# Keys without effect on families of pictures.
FRAME_KEYS = ("vae_enable_temporal_roll", "validation_num_video_frames", "framerate")


def check_config(config: RunConfig, purpose: Purpose = "train") -> list[Problem]:
    """All problems visible in the settings alone, for every family."""
    report = Problems()
    check_settings(config, purpose, report)
    return worth_reporting(report, config)


def check_settings(config: RunConfig, purpose: Purpose, report: Problems) -> None:
    """Report what the settings alone show, for every family, and keys without effect, set or not.

    `worth_reporting` leaves out keys without effect that nobody set.
    """
    rules = SAMPLE_RULES if purpose == "sample" else RULES
    for rule in rules:
        rule(config, report)


def check_requirements(config: RunConfig, report: Problems) -> None:
    """Keys, set or not, whose requirements do not hold."""
    for key, option in all_options().items():
        lacking = [condition for condition in option.requires if not condition.holds(config.flat)]
        if not lacking:
            continue
        # The switch of a group precedes the conditions of its keys; one reason is enough.
        if not lacking[0].fatal:
            report.no_effect(key, lacking[0].lacking)
            continue
        # All errors at once, so that whoever meets one condition is not refused for the next.
        fatal = [condition for condition in lacking if condition.fatal]
        reasons = [condition.reason for condition in fatal if condition.reason]
        reason = reasons[0] if reasons else ""
        report.no_effect(key, f"needs {' and '.join(map(str, fatal))}{reason}.", fatal=True)


def check_conflicts(config: RunConfig, report: Problems) -> None:
    """Conflicts, refusals and remarks that options declare; see `Option.conflicts`."""
    for option in all_options().values():
        if option.excludes or option.refused or option.remarks:
            option.conflicts(config.flat, report)


def find_problems(model: Model, purpose: Purpose) -> Problems:
    """All problems of the settings and their checkpoint, with keys without effect, set or not.

    A survey looks at datasets alone. Samples are made with the settings of a run that gave its
    warnings, so they need only what makes rendering fail. A draft is judged after each answer, so
    no file of the checkpoint is looked for.
    """
    config = model.config
    spec = model.spec
    flavour = model.flavour
    source = model.source
    report = Problems()
    check_settings(config, purpose, report)
    if purpose == "survey":
        return report
    check_family(config, spec, report)
    spec.checks.settings(config, flavour, report)
    check_block_numbers(config, spec, source, report)
    if config.launch.sequence_parallel_size > 1:
        check_sequence(model, report)
    is_refused = refuse_others(config, spec, source, report)
    if purpose == "draft":
        # The steps of an epoch are unknown without datasets.
        check_total(config, config.schedule.max_train_steps or 0, report)
    else:
        check_flavour(config, flavour, report)
        effects.by_source(source, report)
        source.check_names(report)
        if not is_refused and source.check(report):
            check_parts(spec, flavour, source, report)
    check_packages(config.precision, report)
    return report


def refuse_others(
    config: RunConfig, spec: FamilySpec, source: ModelSource, report: Problems
) -> bool:
    """Refuse published models that are not trained here by name, before they are downloaded.

    A folder may have any name if its transformer is one of the family.

    Returns:
        whether the model was refused.
    """
    location = config.model.pretrained_model_name_or_path
    why = why_not_trained_from(location) if location else ""
    if not why:
        return False
    transformer = source["transformer"]
    if transformer.is_local:
        kind = (transformer.read_config() or {}).get("_class_name")
        if kind in spec.components["transformer"].kinds:
            return False
    report.error(MODEL_KEY, f"{location!r} {why}")
    return True


def without_effect(problems: Iterable[Problem]) -> dict[str, str]:
    """The keys that have no effect, and why: the first of several reasons."""
    reasons: dict[str, str] = {}
    for problem in problems:
        if isinstance(problem, NoEffect):
            reasons.setdefault(problem.where, problem.message)
    return reasons


def worth_reporting(problems: Iterable[Problem], config: RunConfig) -> list[Problem]:
    """The problems without repetitions, and without most keys that have no effect.

    A key without effect is left out if it is unset, has its default, or is reported as an error.
    The first of several reasons why a key has no effect is enough.
    """
    problems = list(problems)
    options = all_options()
    settings = config.flat
    errors = set()
    for problem in problems:
        if problem.fatal and not isinstance(problem, NoEffect):
            errors.add(problem.where)
    # Keys without effect by their name alone, so that the first reason stays; others by message.
    kept: dict[tuple[str, ...], Problem] = {}
    for problem in problems:
        key = problem.where
        if not isinstance(problem, NoEffect):
            kept.setdefault((key, problem.message), problem)
            continue
        if not config.is_explicit(key) or settings[key] == options[key].default:
            continue
        if problem.fatal:
            message = problem.message + " Otherwise leave it out."
            kept.setdefault((key,), replace(problem, message=message))
        elif key not in errors:
            kept.setdefault((key,), problem)
    return list(kept.values())


def check_output(config: RunConfig, report: Problems) -> None:
    """Report an output folder that is not writable, and cache paths that are files."""
    shared_folders = {
        home_path("~").resolve(): "the home folder",
        Path("/"): "the root of the file system",
    }
    shared = shared_folders.get(home_path(config.run.output_dir).resolve())
    if shared is not None:
        message = (
            f"{config.run.output_dir!r} is {shared}; a run needs a folder of its own, such as "
            "output/my-lora."
        )
        report.error("output_dir", message)
        return
    reason = why_not_writable(Path(config.run.output_dir).expanduser())
    if reason:
        report.error("output_dir", reason)
        return  # caches are often inside it and would repeat the problem
    folders = config.run.model_dump(
        include={"cache_dir", "cache_dir_text", "cache_dir_vae"}, exclude_none=True
    )
    check_folders(folders, report)


def check_length(config: RunConfig, report: Problems) -> None:
    """Exactly one of steps and epochs must be set."""
    steps = config.schedule.max_train_steps or 0
    epochs = config.schedule.num_train_epochs
    if steps > 0 and epochs is not None and epochs > 0:
        report.error(
            "num_train_epochs",
            f"is {epochs} and max_train_steps is {steps}; set one to 0 or leave it out.",
        )
    if steps == 0 and epochs == 0:
        report.error("num_train_epochs", "is 0, as max_train_steps is; there is nothing to train.")


def check_rates(config: RunConfig, report: Problems) -> None:
    """A decaying rate must end below its start; a rate must be plausible."""
    optimizer = config.optimizer
    rate = learning_rate(optimizer, config.model.model_type)
    # A sine may also rise, so it is not checked.
    if optimizer.lr_scheduler in DECAYING_SCHEDULERS and optimizer.lr_end >= rate:
        message = (
            f"{optimizer.lr_end:g} is not below learning_rate {rate:g}; {optimizer.lr_scheduler} "
            "could not decay."
        )
        report.error("lr_end", message)
    # Such as 1e4 for 1e-4.
    if rate > HIGHEST_USUAL_RATE and optimizer.optimizer not in RATE_IS_A_FACTOR:
        report.warn("learning_rate", f"{rate:g} is far above the usual 1e-4; weights will diverge.")


def check_lora(config: RunConfig, report: Problems) -> None:
    """Report inits that change the base if its precision cannot hold the remainder."""
    init = config.lora.lora_init_type
    if init not in ("olora", "pissa"):
        return
    base = config.precision.base_model_precision
    dtype = transformer_dtype(config.precision)
    if base not in PLAIN_PRECISIONS:
        message = f"{init!r} changes the base, which base_model_precision {base!r} does not allow."
        report.error("lora_init_type", f"{message} Use default or gaussian.")
    elif dtype != "fp32":
        report.error(
            "lora_init_type",
            f"{init!r} moves part of the base into the LoRA and rounds the rest to {dtype}, which "
            "changes more than the LoRA does. Use default or gaussian, or base_model_precision "
            "fp32.",
        )


def check_rest(config: RunConfig, report: Problems) -> None:
    """Short rules, and the rules declared beside their settings."""
    if config.is_explicit("flow_schedule_shift"):
        report.no_effect(
            "flow_schedule_auto_shift", "has no effect: flow_schedule_shift is set and wins."
        )
    evaluation = config.evaluation
    if evaluation.eval_steps_interval is not None and evaluation.eval_epoch_interval is not None:
        report.warn("eval_epoch_interval", "is given beside eval_steps_interval; both are used.")
    check_optimizer(config.optimizer, config.precision.mixed_precision, report)
    if config.model.model_type == "lora":  # a full fine-tune has no frozen weight to quantise
        check_quantized_matmul(config.precision, report)
    check_speed(config.speed, config.precision, config.launch, report)
    check_trackers(config.tracking, report)
    check_publishing(config.publish, config.tracking.tracker_project_name, report)
    if config.webhooks.hooks:
        check_webhooks(config.webhooks, report)
    check_unset([*config.publish, *config.webhooks], report, fatal=False)
    for technique in ruling_techniques(config):
        technique.check(config, report)
    check_encoders(config, report)


def check_family(config: RunConfig, spec: FamilySpec, report: Problems) -> None:
    """Report violated limits of the family, and every key without effect on it, set or not."""
    length = config.text.tokenizer_max_length
    if length is not None and length > spec.captions.longest:
        report.warn(
            "tokenizer_max_length",
            f"{length} is too long for {spec.title}; {spec.captions.longest} is used.",
        )
    _check_vae(config, spec, report)
    if config.lora.lora_format == "comfyui" and not spec.in_comfyui:
        model = " ".join(filter(None, [spec.title, config.model.model_flavour]))
        report.error("lora_format", f"'comfyui': ComfyUI cannot run {model}; use diffusers.")
    _check_unused_keys(spec, report)
    second = config.precision.text_encoder_2_precision
    sets_dtype = spec.text_encoders > 1 and second in ("bf16", "fp32")
    if sets_dtype and second != text_encoder_dtype(config.precision):
        message = (
            f"{second!r}: the text encoders compute in one dtype; set text_encoder_1_precision to "
            "the same."
        )
        report.error("text_encoder_2_precision", message)
    vae = config.model.pretrained_vae_model_name_or_path
    base = config.model.pretrained_model_name_or_path
    if vae is not None and base is not None and vae != base:
        report.warn(
            "pretrained_vae_model_name_or_path",
            f"{vae!r} is not pretrained_model_name_or_path {base!r}.",
        )


def _check_vae(config: RunConfig, spec: FamilySpec, report: Problems) -> None:
    """Report what the family's VAE cannot do: ways to decode and encode, lengths of clips."""
    if config.validation.validation_decoding == "strips" and not spec.decodes_in_strips:
        message = (
            f"'strips' has no effect: the VAE of {spec.title} takes few frames at a time; tiles "
            "take less memory."
        )
        report.warn("validation_decoding", message)
    if config.caching.vae_enable_temporal_roll and spec.slices_convolutions:
        report.error(
            "vae_enable_temporal_roll",
            f"diffusers encodes a clip of {spec.title} as a whole and cannot carry convolutions "
            "between frames; vae_enable_patch_conv lowers the VAE's memory.",
        )
    frames = config.validation.validation_num_video_frames
    stride = spec.frame_stride
    if spec.media != "video" or frames is None:
        return
    if (frames - 1) % stride != 0:  # clips fill whole latent frames
        below = (frames - 1) // stride * stride + 1
        above = below + stride
        report.error(
            "validation_num_video_frames",
            f"{frames} is not {stride}k+1; the nearest are {below} and {above}.",
            remedy={"validation_num_video_frames": above},
        )


def _check_unused_keys(spec: FamilySpec, report: Problems) -> None:
    """Report keys for features that the family lacks."""
    if not spec.slices_convolutions:
        message = f"has no effect: the VAE of {spec.title} is not the one it applies to."
        report.no_effect("vae_enable_patch_conv", message)
    if not spec.frame_rate:
        for key in FRAME_KEYS:
            report.no_effect(key, f"has no effect: {spec.title} has no frames.")
    if not spec.fast_blocks:
        for key in BLOCK_KEYS:
            report.no_effect(key, f"has no effect: {spec.title} has no such blocks to choose.")
    if spec.cost.guided_together:
        message = f"has no effect: {spec.title}'s pipeline always does so."
        report.no_effect("validation_batched_guidance", message)
    if spec.defaults.get("vae_dtype") == "fp32":
        message = f"has no effect: the VAE of {spec.title} decodes in float32."
        report.no_effect("validation_decode_in_background", message)
    if spec.text_encoders == 1:
        message = f"has no effect: {spec.title} has one text encoder."
        report.no_effect("text_encoder_2_precision", message)
    for group in family_groups():
        if group is not spec.options:
            for key in group.model_fields:
                report.no_effect(key, f"has no effect: {spec.title} is not {group.__doc__}.")


def check_flavour(config: RunConfig, flavour: Flavour, report: Problems) -> None:
    """Report keys that the flavour does not use, and the effects of training it."""
    if flavour.distilled:
        report.warn(
            "model_flavour",
            f"{flavour.name} is distilled; trained, it may need guidance or more steps.",
        )
    effects.by_flavour(config, flavour, report)


def check_block_numbers(
    config: RunConfig, spec: FamilySpec, source: ModelSource, report: Problems
) -> None:
    """Report block numbers that the checkpoint does not have, if it is on this machine."""
    blocks = None
    if spec.block_counts:
        # The last group holds the visual blocks, after the text blocks.
        key = list(spec.block_counts.values())[-1]
        number = (source["transformer"].read_config() or {}).get(key)
        if isinstance(number, int):  # a file of the user may hold anything
            blocks = number
    # A family that cannot skip tokens reports so in its own checks.
    routes = config.techniques.of(TreadConfig).routes if spec.token_blocks else ()
    for technique in ruling_techniques(config):
        technique.check_model(config, spec, routes, blocks, report)


def check_sequence(model: Model, report: Problems) -> None:
    """Check that a sequence-parallel group divides the heads, and is within one machine."""
    key = "sequence_parallel_size"
    spec = model.spec
    launch = model.config.launch
    size = launch.sequence_parallel_size
    if spec.heads is None:
        report.error(
            key, f"{size}: a block of {spec.title} needs all tokens of a sample together; use 1."
        )
        return
    dimensions = model.source["transformer"].read_config()
    heads = spec.heads(dimensions or spec.cost.published(model.flavour.name))
    largest = math.gcd(heads, launch.local_processes)
    if largest % size != 0:
        divisors = [str(number) for number in range(1, largest + 1) if largest % number == 0]
        processes = counted(launch.local_processes, "process", "processes")
        report.error(
            key,
            f"{size} must divide the {heads} heads of the model and the {processes} of each "
            f"machine: use {', '.join(divisors)}.",
        )


def check_parts(spec: FamilySpec, flavour: Flavour, source: ModelSource, report: Problems) -> None:
    """Whether the parts on this machine can be used, belong to the family and hold every weight."""
    vae = source["vae"]
    fault = vae_fault(vae.read_config() or {})
    if fault is not None:
        report.error(vae.key, f"the vae in {vae.location!r} {fault}.")
        return
    spec.checks.checkpoint(flavour, source, report)
    check_weights(spec, flavour, source, report)


def check_weights(
    spec: FamilySpec, flavour: Flavour, source: ModelSource, report: Problems
) -> None:
    """Whether the parts on this machine are of the family and hold every weight.

    The libraries initialise a missing weight at random with no more than a warning.
    """
    # From config.json and headers alone, before gigabytes are read.
    for role, component in spec.components.items():
        part = source[role]
        config = part.read_config() if component.kinds else None
        if config is None:
            continue
        kind = config.get("_class_name", config.get("model_type"))
        where = f"the {role} in {part.location!r}"
        if kind not in component.kinds:
            allowed = " or ".join(map(repr, component.kinds))
            report.error(part.key, f"{where} is a {kind!r}; {spec.title} has a {allowed}.")
        elif role.startswith("text_encoder"):
            tokens = source[role.replace("text_encoder", "tokenizer")].tokens()
            fault = encoder_fault(config, encoder_weights(part), tokens)
            if fault is not None:
                report.error(part.key, f"{where} {fault}.")
    _check_transformer(spec, flavour, source, report)


def _check_transformer(
    spec: FamilySpec, flavour: Flavour, source: ModelSource, report: Problems
) -> None:
    """Report missing weights: of blocks that config.json counts, and outside the blocks.

    Shapes are compared with the class when the run starts (`models.loading.check_shapes`).
    """
    part = source["transformer"]
    config = part.read_config()
    shapes = part.weight_shapes()
    if config is None or not shapes:
        return
    where = f"the transformer in {part.location!r}"
    published = spec.cost.published_shapes(flavour.name)
    # Weights outside the blocks, as the published checkpoint has them.
    prefixes = tuple(f"{group}." for group in spec.block_counts)
    outside = {name for name in published if not name.startswith(prefixes)}
    absent = sorted(outside - shapes.keys())
    for group, key in spec.block_counts.items():
        expected = config.get(key)
        blocks = blocks_of(group, shapes)
        if isinstance(expected, int):  # a file of the user may hold anything
            if any(number >= expected for number in blocks):
                report.error(
                    part.key,
                    f"{where} has {len(blocks)} {group}, its config.json has {key} {expected}.",
                )
            absent += [f"{group}.{number}" for number in range(expected) if number not in blocks]
        # All blocks of a group have the same weights.
        absent += differing_weights(group, blocks)
    if absent:
        report.error(part.key, f"{where} is incomplete: its files lack {shorten(absent)}.")


def check_prompts(config: RunConfig, prompts: Sequence[ValidationPrompt], report: Problems) -> None:
    """Report control tokens in prompts, which would end the prompt or stand for a picture."""
    texts: list[tuple[str, str | None]] = [(prompt.nickname, prompt.prompt) for prompt in prompts]
    texts.append(("validation_negative_prompt", config.validation.validation_negative_prompt))
    # It becomes a caption, see `PreservationConfig.other_caption`.
    preservation = config.techniques.of(PreservationConfig).preservation_prompt
    texts.append(("preservation_prompt", preservation))
    for name, text in texts:
        token = control_token(text or "")
        if token is not None:
            report.error(
                f"prompt {name!r}", f"holds {token}, a control token of the tokenizer; remove it."
            )


def check_total(config: RunConfig, total_steps: int, report: Problems) -> None:
    """Warm-up must end, and what starts at a step must start, before the run ends."""
    if total_steps == 0:  # a draft whose epochs decide
        return
    consequences = {"lr_warmup_steps": "the learning rate never reaches its value and never decays"}
    if config.ema.use_ema:
        consequences["ema_warmup_steps"] = "the average stays a copy of the weights"
    for technique in config.techniques_in_use:
        consequences |= technique.late
    if not config.validation.validation_disable:
        consequences["validate_after_step"] = "no previews before the last step"
    for key, consequence in consequences.items():
        step = config.flat[key]
        if step >= total_steps:
            length = counted(total_steps, "step")
            report.warn(
                key, f"{step} is not below the length of the run ({length}): {consequence}."
            )


RULES = (
    # First, since `worth_reporting` keeps the first of several reasons why a key has no effect.
    check_requirements,
    effects.by_settings,
    check_conflicts,
    check_output,
    check_launch,
    check_length,
    check_rates,
    check_offload,
    check_lora,
    check_rest,
)
# What only training needs, such as packages of an optimizer, may be missing for samples.
SAMPLE_RULES = (check_conflicts, check_output, check_offload)
