"""Saving a run and taking it up again, bit for bit.

checkpoint-<step>/
  pytorch_lora_weights.safetensors   what users load (LoRA), or transformer/ (full)
  ema/, transformer_ema/             the moving average in the same form
  training_state/trainable.safetensors   the LoRA exactly as it is trained
  training_state/<technique>.module.safetensors   what a technique trains beside the model
  training_state/state.pt            optimizer, EMA, data position, random states, techniques
  config.json                        settings without secrets
  manifest.json                      written last
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from simpletuner.atomic import build_folder, open_atomically, write_json
from simpletuner.config.schema import CheckpointConfig
from simpletuner.data.loader import BatchLoader
from simpletuner.errors import UserError
from simpletuner.reporting.events import CheckpointSaved, EventStream
from simpletuner.training.ema import Ema
from simpletuner.training.finite import refuse_not_finite, stop_if_result_not_finite
from simpletuner.training.manifest import (
    STATE_FOLDER,
    Checkpoint,
    Identity,
    Manifest,
    damaged_files,
    describe_files,
    prune,
    write_manifest,
)
from simpletuner.training.optimizers import load_state
from simpletuner.training.state import Assembly, TrainState, random_states, restore_random_states
from simpletuner.training.step import StepReport
from simpletuner.training.trained import EARLIER

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
MODULE_SUFFIX = ".module.safetensors"


def save_checkpoint(
    final: Path, assembly: Assembly, state: TrainState, loader: BatchLoader, ema: Ema | None, identity: Identity,
    settings: Mapping[str, Any], note: Mapping[str, str],
) -> None:  # fmt: skip
    """Write a whole checkpoint folder, or nothing.

    Raises:
        NonFiniteError: a weight is NaN or infinite; nothing is written.
        DiskFullError: no space left; earlier checkpoints are untouched.
    """
    stop_if_result_not_finite(assembly, ema)
    with build_folder(final) as folder:
        (folder / STATE_FOLDER).mkdir()
        assembly.trained.save(folder, ema=ema, note=note)
        assembly.trained.save_exact(folder)
        _save_modules(assembly, folder / STATE_FOLDER)
        with open_atomically(folder / STATE_FOLDER / STATE_FILE) as file:  # tensor by tensor
            torch.save(_state_of(assembly, state, loader, ema), file)
        write_json(folder / "config.json", dict(settings))
        manifest = Manifest(state.global_step, state.epoch, identity, describe_files(folder))
        write_manifest(folder, manifest)


def load_checkpoint(
    checkpoint: Checkpoint, assembly: Assembly, loader: BatchLoader, ema: Ema | None, *, same_data: bool
) -> TrainState:
    """Take up a run where a checkpoint left it.

    Args:
        same_data: datasets and batch size are what they were; otherwise the epoch is begun anew.

    Raises:
        UserError: the checkpoint is damaged, holds NaN or infinity, or was made with other trained layers or another
            optimizer.
    """
    damaged = damaged_files(checkpoint)
    if damaged:
        raise UserError(f"{checkpoint.path} is damaged: {', '.join(damaged)}. Choose an earlier checkpoint.")
    folder = checkpoint.path / STATE_FOLDER
    assembly.trained.load(checkpoint.path)
    _load_modules(assembly, folder)
    content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    try:
        load_state(assembly.optimizer, content["optimizer"])
    except ValueError as error:
        raise UserError(f"{checkpoint.path} was made with another optimizer: {error}") from error
    assembly.scaler.load_state_dict(content["scaler"])
    saved = dict(content["techniques"])
    for technique in assembly.techniques:
        if technique.name in saved:  # else it was switched on since, and begins now
            technique.load_state_dict(saved[technique.name])
    if ema is not None and content["ema"] is not None:
        refuse_not_finite(content["ema"]["average"], f"The moving average in {checkpoint.path}", EARLIER)
        ema.load_state_dict(content["ema"])
    position = content["loader"] if same_data else {**content["loader"], "position": 0}
    loader.load_state_dict(position)
    restore_random_states(content["random"])
    return TrainState(content["global_step"], content["epoch"], loader.epochs_done)


def _save_modules(assembly: Assembly, folder: Path) -> None:
    """What techniques train, each in a file of its own."""
    for name, module in assembly.modules.items():
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
        save_file(weights, folder / f"{name}{MODULE_SUFFIX}")


def _load_modules(assembly: Assembly, folder: Path) -> None:
    """Restore them; one that was switched on since begins now, what one left that is off now is not used."""
    saved = {path.name.removesuffix(MODULE_SUFFIX): path for path in sorted(folder.glob(f"*{MODULE_SUFFIX}"))}
    for name, module in assembly.modules.items():
        if name not in saved:
            logger.warning("%s was off in %s and begins now.", name, folder.parent)
            continue
        try:
            weights = load_file(saved[name])
            refuse_not_finite(weights, saved[name], EARLIER)
            module.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"{saved[name]} does not fit: {error}") from None
    for name in saved.keys() - assembly.modules.keys():
        logger.warning("%s was on in %s and is off now; what it had learned is not used.", name, folder.parent)


def _state_of(assembly: Assembly, state: TrainState, loader: BatchLoader, ema: Ema | None) -> dict[str, Any]:
    return {
        "global_step": state.global_step,
        "epoch": state.epoch,
        "optimizer": assembly.optimizer.state_dict(),
        "scaler": assembly.scaler.state_dict(),
        "ema": None if ema is None else ema.state_dict(),
        "loader": loader.state_dict(),
        "random": random_states(),
        "techniques": {technique.name: technique.state_dict() for technique in assembly.techniques},
    }


@dataclass
class CheckpointWriter:
    """Callback that saves at the configured intervals and keeps as many as configured.

    Attributes:
        note: entries for the header of weight files, by the state of the run.
    """

    output_dir: Path
    config: CheckpointConfig
    loader: BatchLoader
    ema: Ema | None
    identity: Identity
    settings: Mapping[str, Any]
    events: EventStream
    note: Callable[[TrainState], Mapping[str, str]]
    saved_step: int | None = field(default=None, init=False)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        # A run that is resumed need not save again what it has just loaded.
        self.saved_step = state.global_step

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        by_epoch = state.passed(self.config.checkpoint_epoch_interval, report.epochs_done)
        if state.global_step % self.config.checkpoint_step_interval == 0 or by_epoch:
            self.save(assembly, state)
        elif (
            self.config.checkpointing_rolling_steps and state.global_step % self.config.checkpointing_rolling_steps == 0
        ):
            self.save(assembly, state, rolling=True)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """An interruption must not displace a checkpoint of the configured intervals, so it saves a rolling one."""
        self.save(assembly, state, rolling=state.global_step < assembly.settings.total_steps)

    def save(self, assembly: Assembly, state: TrainState, *, rolling: bool = False) -> None:
        """Save now, unless this step is saved already; then remove what is beyond the limit."""
        if self.saved_step == state.global_step or not assembly.world.is_main:
            return
        name = f"checkpoint-{state.global_step}{'-rolling' if rolling else ''}"
        arguments = (assembly, state, self.loader, self.ema, self.identity, self.settings, self.note(state))
        started = time.monotonic()
        save_checkpoint(self.output_dir / name, *arguments)
        self.saved_step = state.global_step
        limit = self.config.checkpoints_rolling_total_limit if rolling else self.config.checkpoints_total_limit
        removed = prune(self.output_dir, limit, rolling=rolling)
        seconds = time.monotonic() - started
        self.events.publish(CheckpointSaved(self.output_dir / name, state.global_step, seconds, removed))
