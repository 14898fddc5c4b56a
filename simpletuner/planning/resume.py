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
from simpletuner.planning.checkpoint_folder import Checkpoint, Identity, select_checkpoint
from simpletuner.planning.environment import allows_other_batch_size
from simpletuner.planning.lineage import find_branch
from simpletuner.planning.plans import Model, Plan
from simpletuner.weights.lora_names import LORA_FILE

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
# What is done with the colour profiles of pictures; earlier versions ignored them, and wrote
# nothing.
PROFILES = "converted to sRGB"
# Keys whose change does not fit the trained weights or optimizer state; other settings may be
# changed deliberately.
LORA = (
    "lora_rank",
    "lora_alpha",
    "lora_init_type",
    "use_dora",
    "lora_type",
    "lokr_factor",
    "lora_plus_ratio",
)
FIXED = frozenset({"optimizer", "mixed_precision", *LoraConfig.model_fields}) - {"lora_dropout"}
TIMED_KERNELS = "kernel_choices.json"  # in the output folder of a run on a GPU, by version 0.1.0
# Of the digests of files in a manifest: 10 digits of 10,000 files take 110 kB, and the chance that
# two lists of 10,000 different files have one in common is 1 in 10,000.
DIGITS = 10
FILES_RECORDED = 10_000
# after the id of a dataset
CAPTIONS = ".captions"
SIZES = ".resolution"
OPTIMIZER = "optimizer_config."  # before the name of an optimizer's setting, whichever key sets it


def decide_seed(configured: int | None, resume: Checkpoint | None) -> int:
    """The seed of a run: 0 takes it from the clock, -1 and None from the system's random source.

    A resumed run keeps the seed drawn at its start.
    """
    # An explicit seed is compared with the checkpoint's in `sample_order`.
    if resume is not None and configured in (None, -1, 0):
        return resume.manifest.identity.seed
    if configured is None or configured == -1:
        return secrets.randbelow(2**31)
    return int(time.time()) if configured == 0 else configured


def check_resume(model: Model, targets: Targets, report: Problems) -> Checkpoint | None:
    """The checkpoint to continue from; reports changed settings before weights are loaded."""
    checkpoint = select_checkpoint(
        model.config.run.resume_from_checkpoint, model.output_dir, report
    )
    if checkpoint is None:
        return None
    _check_model(model, checkpoint, report)
    # The batch, the base and its files; then the settings that the mathematics depends on.
    _check_batch(model.config, checkpoint, report)
    branch = find_branch(model.output_dir, checkpoint)
    if branch is not None:
        report.warn("resume_from_checkpoint", branch.announcement)
    recorded = read_json(checkpoint.path / "config.json", Problems(), dict) or {}
    _check_base(model.config, checkpoint, recorded, report)
    _check_start(model.config.lora, checkpoint, recorded, report)
    _check_weights(model.source, checkpoint, report)
    _check_kernels(model.output_dir, checkpoint, report)
    removed = trained_with_removed(recorded)
    if removed:
        report.error("resume_from_checkpoint", _cannot_continue(checkpoint, removed))
    # Either way the run needs another output_dir; its changed settings would only add lines.
    elif checkpoint.manifest.identity.model_type == model.config.model.model_type:
        _check_settings(mathematics(model, targets), checkpoint, report)
    return checkpoint


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
    """Warn of other rounding if version 0.1.0 chose attention kernels by timing, as it did on GPUs
    only.
    """
    if checkpoint.manifest.identity.versions.get("simpletuner") != LAST_WITH:
        return
    if any((folder / TIMED_KERNELS).exists() for folder in (output_dir, checkpoint.path.parent)):
        message = (
            f"{checkpoint.path.name} was written by version 0.1.0, which chose attention kernels "
            "by timing."
        )
        consequence = (
            f"{TIMED_KERNELS} is no longer read, so the kernels may differ, and with them the "
            "rounding."
        )
        report.warn("resume_from_checkpoint", f"{message} {consequence}")


def _cannot_continue(checkpoint: Checkpoint, removed: Sequence[str]) -> str:
    """The message about a run that was trained with what this version no longer has."""
    start = f"init_lora={checkpoint.path / LORA_FILE}"
    if checkpoint.manifest.identity.model_type == "full":
        start = f"pretrained_transformer_model_name_or_path={checkpoint.path}"
    message = f"{checkpoint.path} was trained with {', '.join(removed)}, removed in {REMOVED_IN}. "
    message += f"Finish that run with simpletuner {LAST_WITH}, "
    return message + f"or start a new one from its weights: another output_dir, and {start}."


def _check_batch(config: RunConfig, checkpoint: Checkpoint, report: Problems) -> None:
    """Report a changed global batch; a different number of processes with the same global batch
    continues exactly.
    """
    identity = checkpoint.manifest.identity
    before = identity.train_batch_size * identity.num_processes
    processes = config.launch.data_processes
    size = config.schedule.train_batch_size
    if before == size * processes:
        return
    allowed = config.run.i_know_what_i_am_doing or bool(allows_other_batch_size())
    trained = f"train_batch_size {identity.train_batch_size}"
    asked = str(size)
    if identity.num_processes != processes:
        trained += f" in {counted(identity.num_processes, 'process', 'processes')}"
        asked += f" in {counted(processes, 'process', 'processes')}"
    message = f"{checkpoint.path} was trained with {trained}, not {asked}."
    # The global batch is what counts, so there may be a size that keeps it.
    if before % processes == 0:
        message += f" train_batch_size {before // processes} continues it."
    hint = (
        ""
        if allowed
        else " i_know_what_i_am_doing allows the change; the data order then starts over."
    )
    report.append(Problem("resume_from_checkpoint", message + hint, fatal=not allowed))


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
    folders = {
        role: part.local_folder() for role, part in source.parts.items() if role != "scheduler"
    }
    return {
        role: checkpoint_identity(folder) for role, folder in folders.items() if folder is not None
    }


def mathematics(model: Model, targets: Targets) -> dict[str, Any]:
    """The settings that determine a step's result, except rates, steps and intervals, which may
    change.

    Derived defaults are recorded as effective values.
    """
    config = model.config
    spec = model.spec
    lora = config.lora
    precision = config.precision
    fixed: dict[str, Any] = {
        "optimizer": optimizer_name(config.optimizer, precision.mixed_precision),
        "mixed_precision": trained_precision(config.optimizer, precision),
    }
    if config.model.model_type == "lora":
        fixed |= {key: getattr(lora, key) for key in LORA}
        fixed |= {
            # Effective values: the rank for an unset alpha, a file's content, the layers of a name.
            "lora_alpha": lora.lora_alpha or lora.lora_rank,
            "peft_lora_target_modules": targets,
        }
        if (key := adapter_kind(lora).settings_file) and (path := getattr(lora, key)):
            fixed[key] = read_json(Path(path).expanduser(), Problems())
    optimizer = optimizer_settings(config.optimizer, precision.mixed_precision)
    family = config.family.of(spec.options)
    groups = (config.flow, config.loss, config.text, family, *config.technique_groups, config.ema)
    # Models are compared by content (`weight_identities`), not by location.
    values = {key: value for group in groups for key, value in group.model_dump().items()}
    changeable = {
        key: value for key, value in values.items() if not key.endswith(("_name_or_path", "_cache"))
    }
    changeable |= {
        "lora_dropout": lora.lora_dropout,
        "quantized_matmul": precision.quantized_matmul,
        **compute_dtypes(precision, config.caching, spec.text_encoders),
        "gradient_accumulation_steps": config.schedule.gradient_accumulation_steps,
        **{f"{OPTIMIZER}{name}": value for name, value in optimizer.items()},
    }
    changeable |= {
        key: config.flat[key] for technique in config.technique_groups for key in technique.related
    }
    # As read back from a manifest, for comparison: tuples become lists, other objects text.
    written: dict[str, Any] = json.loads(json.dumps(changeable | fixed, default=str))
    return written


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
            f"{dataset.id}.conditioning_data": dataset.masks
            and dataset.masks.config.conditioning_type,
        }
    return settings


def sample_order(config: RunConfig, trained: Sequence[Dataset], seed: int) -> dict[str, Any]:
    """Settings that determine, together with the samples, the composition of batches and the
    crops.
    """
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
        if has_step_window(dataset):  # whose steps are counted in micro-batches
            order["gradient_accumulation_steps"] = config.schedule.gradient_accumulation_steps
    return order


def _check_weights(source: ModelSource, checkpoint: Checkpoint, report: Problems) -> None:
    recorded = checkpoint.manifest.identity.weights
    for role, identity in weight_identities(source).items():
        was = recorded.get(role, identity)  # older checkpoints lack weight digests
        if was != identity:
            part = source[role]
            message = (
                f"{part.location!r} holds another {role} ({identity[:12]}) than "
                f"{checkpoint.path} used"
            )
            report.error(part.key, f"{message} ({was[:12]}); choose another output_dir.")


def _check_settings(new: Mapping[str, Any], checkpoint: Checkpoint, report: Problems) -> None:
    """Report changed settings: errors for settings that the checkpoint cannot continue with, else
    warnings.
    """
    fixed = FIXED
    optimizer = new.get("optimizer")
    if optimizer is not None:
        fixed |= {f"{OPTIMIZER}{name}" for name in OPTIMIZERS[optimizer].lasting}
    old = checkpoint.manifest.identity.settings
    for key, change in _changes(old, new):
        if key.startswith(OPTIMIZER) and old.get("optimizer") != optimizer:
            continue  # settings of another optimizer, which is an error anyway
        hint = "the new value applies from here on"
        if key in fixed:
            hint = "set it back, or choose another output_dir"
        report.append(Problem(key, f"{checkpoint.path} {change}; {hint}.", fatal=key in fixed))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in old:
        if key in new and new[key] != old[key]:  # older versions wrote fewer keys
            yield key, f"was trained with {_difference(key, old[key], new[key])}"


def _difference(key: str, old: Any, new: Any) -> str:
    """A changed setting in words: `CAPTIONS` are digests, `SIZES` are lists such as
    `21 of 768x512@61`.
    """
    if key.endswith(CAPTIONS):
        return "other captions, or with captions of other files"
    if key.endswith(SIZES):
        before, after = (
            ", ".join(size.removesuffix("@1") for size in sizes) for sizes in (old, new)
        )
        return f"{before}, and now there are {after}"
    return f"{as_user_text(old)}, not {as_user_text(new)}"


def _check_start(
    lora: LoraConfig, checkpoint: Checkpoint, recorded: Mapping[str, Any], report: Problems
) -> None:
    """Report a start that a run which has already begun would ignore."""
    if lora.init_lora is None:
        return
    advice = "only acts at the start of a run. Choose another output_dir to start anew"
    before = recorded.get("init_lora")
    if before is None or home_path(str(before)).resolve() != home_path(lora.init_lora).resolve():
        message = (
            f"{checkpoint.path} did not start from {lora.init_lora!r}, and init_lora {advice},"
        )
        report.error("init_lora", f"{message} or remove init_lora to continue.")
    elif recorded.get("init_lora_step", lora.init_lora_step) != lora.init_lora_step:
        message = (
            f"{checkpoint.path} started at step {recorded['init_lora_step']}, not "
            f"{lora.init_lora_step};"
        )
        report.error("init_lora_step", f"{message} it {advice}, or set it back to continue.")


def _check_base(
    config: RunConfig, checkpoint: Checkpoint, recorded: Mapping[str, Any], report: Problems
) -> None:
    """Warn about a changed base precision, since a LoRA learns to compensate the rounding of its
    base.
    """
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
    """Warn about files that are read otherwise than when the checkpoint was trained."""
    if "colour_profiles" in checkpoint.manifest.identity.settings:
        return
    for dataset in datasets:
        names = [sample.name for sample in dataset.samples if is_converted(sample)]
        if names:
            message = (
                f"{checkpoint.path} was trained without the colour profile or crop that is "
                "stored in"
            )
            pictures = f"{counted(len(names), 'picture')} ({shorten(names, 3)})"
            advice = (
                "They are applied now, so these look different from here on; another output_dir "
                "starts anew."
            )
            report.warn(dataset.id, f"{message} {pictures}. {advice}")
        clips = sum(sample.clip is not None for sample in dataset.samples)
        if clips:
            message = (
                f"{checkpoint.path} was trained on slightly darker colours of "
                f"{counted(clips, 'clip')}."
            )
            report.warn(
                dataset.id,
                f"{message} They are exact from here on; another output_dir starts anew.",
            )


def file_digests(datasets: Sequence[Dataset]) -> str:
    """The beginnings of the SHA-256 of the trained files, sorted.

    Of many files, the lowest ones. A hash is as good as random, so this is a sample that any list
    with the same files contains.
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
    """Refuse datasets that have no file of the checkpoint's: they are more likely meant for another
    run.
    """
    known = set(checkpoint.manifest.identity.files.split())  # older checkpoints lack it
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
    """A sentence with the number of files that are gone and that are new; empty if neither is
    known.
    """
    known = set(checkpoint.manifest.identity.files.split())
    today = set(file_digests(trained).split())
    if (
        not known or max(len(known), len(today)) >= FILES_RECORDED
    ):  # older checkpoints lack it; samples do not tell
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
    # First compare by key; the fingerprint shows only that the data differ.
    files = _changed_files(trained, checkpoint)
    if changes := list(_changes(identity.order, sample_order(config, trained, seed))):
        for key, change in changes:
            cause = files if key.endswith(SIZES) else ""
            report.warn(key, f"{name} {change}; {consequence}.{cause}")
        return False
    if fingerprint(trained) != identity.datasets:
        if not config.datasets.override_dataset_config:
            report.warn(
                "data_backend_config",
                f"the datasets are not those of {name}; {consequence}.{files}",
            )
        return False
    of_batch = Problems()
    _check_batch(config, checkpoint, of_batch)
    return not of_batch
