"""Whether and where a run continues, and what must be as it was."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletuner.caching.keys import digest
from simpletuner.config.json_files import read_json
from simpletuner.config.load import RunConfig
from simpletuner.config.precision import quantisation
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problem
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.plan.environment import allows_other_batch_size
from simpletuner.training.manifest import Checkpoint, select_checkpoint


def decide_seed(configured: int | None, resume: Checkpoint | None) -> int:
    """The seed of a run: 0 comes from the clock, -1 and None from the system's random source.

    A run that continues keeps a seed that was drawn when it began.
    """
    if resume is not None and configured in (None, -1, 0):
        return resume.manifest.identity.seed
    if configured is None or configured == -1:
        return secrets.randbelow(2**31)
    return int(time.time()) if configured == 0 else configured


def check_resume(config: RunConfig, spec: FamilySpec, flavour: Flavour, problems: list[Problem]) -> Checkpoint | None:
    """The checkpoint to resume from, unless it belongs to another model."""
    output_dir = Path(config.run.output_dir).expanduser()
    checkpoint = select_checkpoint(config.run.resume_from_checkpoint, output_dir, problems)
    if checkpoint is None:
        return None
    identity, key = checkpoint.manifest.identity, "resume_from_checkpoint"
    for what, old, new in (
        ("model_family", identity.model_family, spec.name),
        ("model_flavour", identity.model_flavour, flavour.name),
        ("model_type", identity.model_type, config.model.model_type),
    ):
        if old != new:
            message = f"{checkpoint.path} was trained with {what} {old}, not {new}; choose another output_dir."
            problems.append(Problem(key, message))
    size = config.schedule.train_batch_size
    if identity.train_batch_size != size:
        allowed = config.run.i_know_what_i_am_doing or allows_other_batch_size()
        message = f"{checkpoint.path} was trained with train_batch_size {identity.train_batch_size}, not {size}."
        hint = "" if allowed else " i_know_what_i_am_doing allows it; data order then starts anew."
        problems.append(Problem(key, message + hint, fatal=not allowed))
    problems.extend(_check_base(config, checkpoint))
    return checkpoint


def _check_base(config: RunConfig, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A LoRA makes up for the errors of the base it was trained on, so another precision of it is worth a word."""
    settings = read_json(checkpoint.path / "config.json", [])
    old = settings.get("base_model_precision", "no_change") if isinstance(settings, dict) else "no_change"
    new = config.precision.base_model_precision
    if quantisation(old) != quantisation(new):
        message = f"{new!r}: {checkpoint.path.name} was trained with {old!r}, so the base is no longer quite the same."
        yield Problem("base_model_precision", message, fatal=False)


def fingerprint(datasets: Sequence[Dataset]) -> str:
    """Stands for the samples of datasets: their names, contents and repeats."""
    samples = [[each.id, each.repeats, [[one.name, one.content] for one in each.samples]] for each in datasets]
    return digest({"datasets": samples})


def has_same_data(
    config: RunConfig, resume: Checkpoint | None, trained: Sequence[Dataset], problems: list[Problem]
) -> bool:
    """Whether the order of samples can continue where the checkpoint left it."""
    if resume is None:
        return True
    if fingerprint(trained) != resume.manifest.identity.datasets:
        if not config.datasets.override_dataset_config:
            message = f"the datasets are not those that {resume.path.name} was trained on; its epoch begins anew."
            problems.append(Problem("data_backend_config", message, fatal=False))
        return False
    return resume.manifest.identity.train_batch_size == config.schedule.train_batch_size
