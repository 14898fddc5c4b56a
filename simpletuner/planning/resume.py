"""Resuming: which checkpoint a run continues from, and which settings must be unchanged."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simpletuner.caching.keys import checkpoint_identity
from simpletuner.config.absent import REMOVED_IN
from simpletuner.config.json_reader import read_json
from simpletuner.config.lora import LoraConfig
from simpletuner.config.optimizers import (
    OPTIMIZERS,
    optimizer_name,
    optimizer_settings,
    trained_precision,
)
from simpletuner.config.paths import home_path
from simpletuner.config.precision import compute_dtypes, quantisation
from simpletuner.config.records import LAST_WITH, trained_with_removed
from simpletuner.config.schema import RunConfig
from simpletuner.config.types import as_user_text
from simpletuner.data.dataset import Dataset
from simpletuner.data.media_checks import is_converted
from simpletuner.data.schedule import has_step_window
from simpletuner.errors import Problem, Problems, counted, shorten
from simpletuner.hashing import hash_json
from simpletuner.models.adapter_kinds import adapter_kind
from simpletuner.models.lora_layers import Targets
from simpletuner.models.source import ModelSource
from simpletuner.planning.checkpoint_folder import Checkpoint, Identity
from simpletuner.planning.environment import allows_other_batch_size
from simpletuner.planning.kept_defaults import OPTIMIZER
from simpletuner.planning.lineage import find_branch, why_not_now
from simpletuner.planning.plans import Model, Plan
from simpletuner.weights.lora_names import LORA_FILE

# Packages whose versions a checkpoint records, since they affect the result.
PACKAGES = (
    "simpletuner",
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "pillow",
    "torch-optimi",
)
# What is done with the colour profiles of pictures. Earlier versions ignored them, and recorded
# nothing.
PROFILES = "converted to sRGB"
# The settings of a LoRA that the mathematics of a step depends on.
LORA = (
    "lora_rank",
    "lora_alpha",
    "lora_init_type",
    "use_dora",
    "lora_type",
    "lokr_factor",
    "lora_plus_ratio",
)
# Keys whose change does not fit the trained weights or the optimizer state. Other settings may be
# changed deliberately.
FIXED = frozenset({"optimizer", "mixed_precision", *LoraConfig.model_fields}) - {"lora_dropout"}
TIMED_KERNELS = "kernel_choices.json"  # in the output folder of a run on a GPU, by version 0.1.0
# A manifest records this many digits of this many files: 110 kB. The chance that two lists of
# 10,000 different files have an entry in common is 1 in 10,000: 10,000² pairs, 16**10 values.
DIGITS = 10
FILES_RECORDED = 10_000
# Endings of recorded keys, after the id of a dataset.
CAPTIONS = ".captions"
SIZES = ".resolution"


def decide_seed(configured: int | None, resume: Checkpoint | None) -> int:
    """The seed of a run: 0 takes it from the clock, -1 and None from the system's random source.

    A resumed run keeps the seed drawn at its start.
    """
    # An explicit seed is compared with the checkpoint's in `sample_order`.
    if resume is not None and configured in (None, -1, 0):
        return resume.manifest.identity.seed
    if configured is None or configured == -1:
        return secrets.randbelow(2**31)
    if configured == 0:
        return int(time.time())
    return configured


def check_resume(model: Model, checkpoint: Checkpoint, targets: Targets, report: Problems) -> None:
    """Report what has changed since a checkpoint, before weights are loaded."""
    _check_model(model, checkpoint, report)
    _check_batch(model.config, checkpoint, report)
    branch = find_branch(model.output_dir, checkpoint)
    if branch is not None:
        report.warn("resume_from_checkpoint", branch.announcement)
        reason = why_not_now(model.output_dir)
        if reason:
            report.error("resume_from_checkpoint", reason)
    recorded = read_json(checkpoint.path / "config.json", Problems(), dict) or {}
    _check_base(model.config, checkpoint, recorded, report)
    _check_start(model.config.lora, checkpoint, recorded, report)
    _check_weights(model.source, checkpoint, report)
    _check_kernels(model.output_dir, checkpoint, report)
    removed = trained_with_removed(recorded)
    if removed:
        report.error("resume_from_checkpoint", _cannot_continue(checkpoint, removed))
    elif checkpoint.manifest.identity.model_type == model.config.model.model_type:
        # Otherwise the run needs another output_dir anyway, and its changed settings would only
        # add lines. A key of the family that an older version did not have counts as its default.
        implied = model.spec.options().model_dump()
        _check_settings(mathematics(model, targets), checkpoint, report, implied)


def _check_model(model: Model, checkpoint: Checkpoint, report: Problems) -> None:
    """Report another model than that of the checkpoint."""
    identity = checkpoint.manifest.identity
    recorded = {
        "model_family": identity.model_family,
        "model_flavour": identity.model_flavour,
        "model_type": identity.model_type,
    }
    chosen = {
        "model_family": model.spec.name,
        "model_flavour": model.flavour.name,
        "model_type": model.config.model.model_type,
    }
    for key, old in recorded.items():
        if old != chosen[key]:
            message = (
                f"{checkpoint.path} was trained with {key} {old}, not {chosen[key]}; choose "
                "another output_dir."
            )
            report.error("resume_from_checkpoint", message)


def _check_kernels(output_dir: Path, checkpoint: Checkpoint, report: Problems) -> None:
    """Warn of other rounding if version 0.1.0 chose attention kernels by timing, as on GPUs."""
    if checkpoint.manifest.identity.versions.get("simpletuner") != LAST_WITH:
        return
    if any((folder / TIMED_KERNELS).exists() for folder in (output_dir, checkpoint.path.parent)):
        report.warn(
            "resume_from_checkpoint",
            f"{checkpoint.path.name} was written by version 0.1.0, which chose attention kernels "
            f"by timing. {TIMED_KERNELS} is no longer read, so the kernels may differ, and with "
            "them the rounding.",
        )


def _cannot_continue(checkpoint: Checkpoint, removed: Sequence[str]) -> str:
    """The message about a run that was trained with what this version no longer has."""
    start = f"init_lora={checkpoint.path / LORA_FILE}"
    if checkpoint.manifest.identity.model_type == "full":
        start = f"pretrained_transformer_model_name_or_path={checkpoint.path}"
    return (
        f"{checkpoint.path} was trained with {', '.join(removed)}, removed in {REMOVED_IN}. Finish "
        f"that run with simpletuner {LAST_WITH}, or start a new one from its weights: another "
        f"output_dir, and {start}."
    )


def _check_batch(config: RunConfig, checkpoint: Checkpoint, report: Problems) -> None:
    """Report a changed global batch.

    Another number of processes with the same global batch continues exactly.
    """
    identity = checkpoint.manifest.identity
    global_batch = identity.train_batch_size * identity.num_processes
    processes = config.launch.data_processes
    size = config.schedule.train_batch_size
    if global_batch == size * processes:
        return
    before = f"train_batch_size {identity.train_batch_size}"
    now = str(size)
    if identity.num_processes != processes:
        before += f" in {counted(identity.num_processes, 'process', 'processes')}"
        now += f" in {counted(processes, 'process', 'processes')}"
    message = f"{checkpoint.path} was trained with {before}, not {now}."
    if global_batch % processes == 0:
        message += f" train_batch_size {global_batch // processes} continues it."
    is_allowed = config.run.i_know_what_i_am_doing or bool(allows_other_batch_size())
    if not is_allowed:
        message += " i_know_what_i_am_doing allows the change; the data order then starts over."
    report.append(Problem("resume_from_checkpoint", message, fatal=not is_allowed))


@cache
def package_versions() -> dict[str, str]:
    """Version of each installed package that affects the result."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            # From package metadata, since importing the packages would take seconds.
            versions[name] = version(name)
    return versions


def identify(plan: Plan) -> Identity:
    """The identity that a run records in its checkpoints."""
    config = plan.config
    return Identity(
        model_family=plan.spec.name,
        model_flavour=plan.flavour.name,
        model_type=config.model.model_type,
        train_batch_size=config.schedule.train_batch_size,
        num_processes=config.launch.data_processes,
        seed=plan.seed,
        datasets=fingerprint(plan.trained),
        files=file_digests(plan.trained),
        versions=package_versions(),
        weights=weight_identities(plan.source),
        settings=mathematics(plan, plan.lora_targets) | dataset_mathematics(plan.trained),
        order=sample_order(config, plan.trained, plan.seed),
        origins={key: origin for key, origin in config.origins.items() if origin != "default"},
    )


def weight_identities(source: ModelSource) -> dict[str, str]:
    """Content digests of the models on this machine, by role."""
    identities = {}
    for role, part in source.parts.items():
        folder = part.local_folder() if role != "scheduler" else None
        if folder is not None:
            identities[role] = checkpoint_identity(folder)
    return identities


def mathematics(model: Model, targets: Targets) -> dict[str, Any]:
    """The settings that determine a step's result, as they are recorded in a manifest.

    Rates, steps and intervals may change. Derived defaults are recorded as effective values.
    """
    config = model.config
    precision = config.precision
    settings = _settings_of_groups(model)
    settings["lora_dropout"] = config.lora.lora_dropout
    settings["quantized_matmul"] = precision.quantized_matmul
    settings |= compute_dtypes(precision, config.caching, model.spec.text_encoders)
    settings["gradient_accumulation_steps"] = config.schedule.gradient_accumulation_steps
    optimizer = optimizer_settings(config.optimizer, precision.mixed_precision)
    settings |= {f"{OPTIMIZER}{name}": value for name, value in optimizer.items()}
    for technique in config.technique_groups:
        settings |= {key: config.flat[key] for key in technique.related}
    settings["optimizer"] = optimizer_name(config.optimizer, precision.mixed_precision)
    settings["mixed_precision"] = trained_precision(config.optimizer, precision)
    if config.model.model_type == "lora":
        settings |= _settings_of_lora(config.lora, targets)
    # As read back from a manifest, for comparison: tuples become lists, other objects text.
    written: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return written


def _settings_of_groups(model: Model) -> dict[str, Any]:
    """The groups of settings that count as a whole."""
    config = model.config
    family = config.family.of(model.spec.options)
    groups = (config.flow, config.loss, config.text, family, *config.technique_groups, config.ema)
    settings = {}
    for group in groups:
        for key, value in group.model_dump().items():
            # Models are compared by content (`weight_identities`), not by location.
            if not key.endswith(("_name_or_path", "_cache")):
                settings[key] = value
    return settings


def _settings_of_lora(lora: LoraConfig, targets: Targets) -> dict[str, Any]:
    """Effective values: the rank for an unset alpha, the layers of a name, a file's content."""
    settings = {key: getattr(lora, key) for key in LORA}
    settings["lora_alpha"] = lora.lora_alpha or lora.lora_rank
    settings["peft_lora_target_modules"] = targets
    key = adapter_kind(lora).settings_file
    if key and getattr(lora, key):
        settings[key] = read_json(Path(getattr(lora, key)).expanduser(), Problems())
    return settings


def dataset_mathematics(trained: Sequence[Dataset]) -> dict[str, Any]:
    """The settings of datasets that determine a step's result, except those in `sample_order`."""
    settings: dict[str, Any] = {"colour_profiles": PROFILES}
    for dataset in trained:
        # A digest, since texts of 100,000 samples would bloat every manifest.
        captions = hash_json({"captions": [sample.captions for sample in dataset.samples]})
        settings |= {
            f"{dataset.id}.is_regularisation_data": dataset.config.is_regularisation_data,
            f"{dataset.id}.timestep_sampling_offset": dataset.config.timestep_sampling_offset,
            f"{dataset.id}{CAPTIONS}": f"texts with the digest {captions[:12]}",
            f"{dataset.id}.conditioning_data": (
                dataset.masks and dataset.masks.config.conditioning_type
            ),
        }
    return settings


def sample_order(config: RunConfig, trained: Sequence[Dataset], seed: int) -> dict[str, Any]:
    """Settings that decide, with the samples, which samples share a batch, and the crops."""
    order: dict[str, Any] = {"seed": seed}
    for dataset in trained:
        samples = dataset.batch_size * config.launch.data_processes
        entry = dataset.config
        counts = Counter((sample.geometry.size, sample.frames) for sample in dataset.samples)
        # "768x512@61": width, height, frames.
        sizes = sorted((f"{size}@{frames}", count) for (size, frames), count in counts.items())
        order |= {
            f"{dataset.id}{SIZES}": [f"{count} of {size}" for size, count in sizes],
            f"{dataset.id}.train_batch_size": f"{samples} over all processes",
            f"{dataset.id}.slider_strength": entry.slider_strength or 0,
            f"{dataset.id}.crop": entry.crop and [entry.crop, entry.crop_aspect, entry.crop_style],
            f"{dataset.id}.probability": entry.probability,
            f"{dataset.id}.window": [
                entry.start_epoch,
                entry.end_epoch,
                entry.start_step,
                entry.end_step,
            ],
        }
        if has_step_window(dataset):
            # Such a window begins at a micro-batch that depends on the accumulation.
            order["gradient_accumulation_steps"] = config.schedule.gradient_accumulation_steps
    return order


def _check_weights(source: ModelSource, checkpoint: Checkpoint, report: Problems) -> None:
    """Report a model whose files are not those that the checkpoint was trained with."""
    recorded = checkpoint.manifest.identity.weights
    for role, identity in weight_identities(source).items():
        trained_with = recorded.get(role, identity)  # older checkpoints lack weight digests
        if trained_with != identity:
            part = source[role]
            report.error(
                part.key,
                f"{part.location!r} holds another {role} ({identity[:12]}) than {checkpoint.path} "
                f"used ({trained_with[:12]}); choose another output_dir.",
            )


def _check_settings(
    new: Mapping[str, Any],
    checkpoint: Checkpoint,
    report: Problems,
    implied: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Report changed settings: an error if the checkpoint cannot continue with them.

    Args:
        implied: values of keys that the checkpoint does not record.
    """
    fixed = FIXED
    optimizer = new.get("optimizer")
    if optimizer is not None:
        fixed |= {f"{OPTIMIZER}{name}" for name in OPTIMIZERS[optimizer].lasting}
    old = {**implied, **checkpoint.manifest.identity.settings}
    for key, change in _changes(old, new):
        if key.startswith(OPTIMIZER) and old.get("optimizer") != optimizer:
            continue  # settings of another optimizer, which is an error anyway
        hint = "the new value applies from here on"
        if key in fixed:
            hint = "set it back, or choose another output_dir"
        report.append(Problem(key, f"{checkpoint.path} {change}; {hint}.", fatal=key in fixed))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what has changed in words) of the keys that both have with different values."""
    for key in old:
        if key in new and new[key] != old[key]:  # older versions wrote fewer keys
            yield key, f"was trained with {_difference(key, old[key], new[key])}"


def _difference(key: str, old: Any, new: Any) -> str:
    """A changed setting in words."""
    if key.endswith(CAPTIONS):  # only digests are recorded
        return "other captions, or with captions of other files"
    if key.endswith(SIZES):  # lists such as `21 of 768x512@61`
        before = ", ".join(size.removesuffix("@1") for size in old)
        after = ", ".join(size.removesuffix("@1") for size in new)
        return f"{before}, and now there are {after}"
    return f"{as_user_text(old)}, not {as_user_text(new)}"


def _check_start(
    lora: LoraConfig, checkpoint: Checkpoint, recorded: Mapping[str, Any], report: Problems
) -> None:
    """Report a changed `init_lora`, which a run that has already begun would ignore."""
    if lora.init_lora is None:
        return
    advice = "only acts at the start of a run. Choose another output_dir to start anew"
    before = recorded.get("init_lora")
    if before is None or home_path(str(before)).resolve() != home_path(lora.init_lora).resolve():
        report.error(
            "init_lora",
            f"{checkpoint.path} did not start from {lora.init_lora!r}, and init_lora {advice}, or "
            "remove init_lora to continue.",
        )
    elif recorded.get("init_lora_step", lora.init_lora_step) != lora.init_lora_step:
        report.error(
            "init_lora_step",
            f"{checkpoint.path} started at step {recorded['init_lora_step']}, not "
            f"{lora.init_lora_step}; it {advice}, or set it back to continue.",
        )


def _check_base(
    config: RunConfig, checkpoint: Checkpoint, recorded: Mapping[str, Any], report: Problems
) -> None:
    """Warn about another base precision: a LoRA learns to compensate the rounding of its base."""
    old = recorded.get("base_model_precision", "no_change")
    new = config.precision.base_model_precision
    if quantisation(old) != quantisation(new):
        message = (
            f"{new!r}: {checkpoint.path.name} was trained with {old!r}, so the base weights "
            "differ slightly."
        )
        report.warn("base_model_precision", message)


def fingerprint(datasets: Sequence[Dataset]) -> str:
    """A digest of the samples of datasets: their names, contents and repeats."""
    # By content, not by path, so that a moved folder is the same data.
    described: list[list[Any]] = []
    for dataset in datasets:
        samples = [[sample.name, sample.content] for sample in dataset.samples]
        described.append([dataset.id, dataset.repeats, samples])
    return hash_json({"datasets": described})


def _check_conversions(
    datasets: Sequence[Dataset], checkpoint: Checkpoint, report: Problems
) -> None:
    """Warn about files that are read differently from when the checkpoint was trained."""
    if "colour_profiles" in checkpoint.manifest.identity.settings:
        return
    for dataset in datasets:
        names = [sample.name for sample in dataset.samples if is_converted(sample)]
        if names:
            pictures = f"{counted(len(names), 'picture')} ({shorten(names, 3)})"
            report.warn(
                dataset.id,
                f"{checkpoint.path} was trained without the colour profile or crop that is stored "
                f"in {pictures}. They are applied now, so these look different from here on; "
                "another output_dir starts anew.",
            )
        clips = [sample for sample in dataset.samples if sample.clip is not None]
        if clips:
            report.warn(
                dataset.id,
                f"{checkpoint.path} was trained on slightly darker colours of "
                f"{counted(len(clips), 'clip')}. They are exact from here on; another output_dir "
                "starts anew.",
            )


def file_digests(datasets: Sequence[Dataset]) -> str:
    """The beginnings of the SHA-256 of the trained files, sorted; at most `FILES_RECORDED`.

    Of many files, these are the lowest digests. A hash is as good as random, so they are a sample
    that does not depend on the order or the names of the files.
    """
    return " ".join(sorted(_digests(datasets))[:FILES_RECORDED])


def _digests(datasets: Sequence[Dataset]) -> set[str]:
    digests: set[str] = set()
    for dataset in datasets:
        digests |= {sample.content[:DIGITS] for sample in dataset.samples}
    return digests


def _check_files(
    config: RunConfig, trained: Sequence[Dataset], checkpoint: Checkpoint, report: Problems
) -> None:
    """Refuse datasets without any file of the checkpoint: they are probably for another run."""
    known = set(checkpoint.manifest.identity.files.split())  # empty in older checkpoints
    today = _digests(trained)
    if not known or known & today or config.datasets.override_dataset_config:
        return
    message = (
        f"has none of the files that {checkpoint.path} was trained on. For other data, choose "
        "another output_dir"
    )
    if config.model.model_type == "lora" and config.lora.lora_type == "standard":
        message += f" (init_lora={checkpoint.path} starts from this LoRA there)"
    report.error(
        "data_backend_config", f"{message}; override_dataset_config continues this run with them."
    )


def _changed_files(trained: Sequence[Dataset], checkpoint: Checkpoint) -> str:
    """A sentence with the numbers of files that are gone and that are new; empty if unknown."""
    known = set(checkpoint.manifest.identity.files.split())  # empty in older checkpoints
    today = set(file_digests(trained).split())
    is_sample = max(len(known), len(today)) >= FILES_RECORDED
    if not known or is_sample:
        return ""
    gone = len(known - today)
    new = len(today - known)
    changes = []
    if gone > 0:
        changes.append(f"{counted(gone, 'file is', 'files are')} gone or changed")
    if new > 0:
        changes.append(f"{counted(new, 'file is', 'files are')} new or changed")
    return f" {', '.join(changes)}." if changes else ""


def has_same_data(
    config: RunConfig,
    trained: Sequence[Dataset],
    checkpoint: Checkpoint,
    seed: int,
    report: Problems,
) -> bool:
    """Whether the sample order can continue where the checkpoint stopped."""
    identity = checkpoint.manifest.identity
    name = checkpoint.path.name
    _check_files(config, trained, checkpoint, report)
    _check_settings(dataset_mathematics(trained), checkpoint, report)
    _check_conversions(trained, checkpoint, report)
    epoch = checkpoint.manifest.epoch
    progress = checkpoint.manifest.progress
    is_complete = progress is not None and progress.epochs_done == epoch
    consequence = f"epoch {epoch} is complete" if is_complete else f"epoch {epoch} starts over"
    changed_files = _changed_files(trained, checkpoint)
    # First by key: the fingerprint shows only that the data differ.
    changes = list(_changes(identity.order, sample_order(config, trained, seed)))
    for key, change in changes:
        cause = changed_files if key.endswith(SIZES) else ""
        report.warn(key, f"{name} {change}; {consequence}.{cause}")
    if changes:
        return False
    if fingerprint(trained) != identity.datasets:
        if not config.datasets.override_dataset_config:
            report.warn(
                "data_backend_config",
                f"the datasets are not those of {name}; {consequence}.{changed_files}",
            )
        return False
    # `check_resume` has reported another batch.
    of_batch = Problems()
    _check_batch(config, checkpoint, of_batch)
    return not of_batch
