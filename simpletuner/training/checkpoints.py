"""Saves a run and resumes it bit for bit.

checkpoint-<step>/
  pytorch_lora_weights.safetensors   what users load (LoRA), or transformer/ (full)
  ema/, transformer_ema/             the moving average in the same form
  training_state/trainable.safetensors   the LoRA exactly as trained
  training_state/<technique>.module.safetensors   the weights of a technique
  training_state/state.pt            optimizer, EMA, data position, random states, techniques
  training_state/shards/             the large tensors of that state, if sharded (FSDP2)
  config.json                        settings without secrets
  manifest.json                      written last
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from simpletuner.atomic import build_folder, open_atomically, write_json
from simpletuner.config.optimizers import OPTIMIZERS
from simpletuner.config.schema import CheckpointConfig
from simpletuner.errors import UserError, is_out_of_memory
from simpletuner.models.blocks import DEVICE_FAILURES
from simpletuner.planning import checkpoint_folder
from simpletuner.planning.checkpoint_folder import (
    ROLLING,
    STATE_FOLDER,
    Checkpoint,
    Identity,
    Line,
    Manifest,
    Progress,
)
from simpletuner.reporting.events import CheckpointSaved, EventStream, StepReport
from simpletuner.reporting.intervals import Interval
from simpletuner.training.drafts import CopiedDrafts, Draft
from simpletuner.training.guard import refuse_not_finite, stop_if_result_not_finite
from simpletuner.training.loader import BatchLoader
from simpletuner.training.loop import Callback
from simpletuner.training.optimizer_state import load_state
from simpletuner.training.sharding import is_shard, load_shards, shard_moments, without_shards
from simpletuner.training.state import Assembly, TrainState, random_states, restore_random_states
from simpletuner.training.weight_note import WeightNote

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
MODULE_SUFFIX = ".module.safetensors"
# Errors raised on reading a file that is not a saved state.
FOREIGN_FILE_ERRORS = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    FileNotFoundError,
    EOFError,
    UnpicklingError,
    struct.error,
    SafetensorError,
)


def load_checkpoint(
    checkpoint: Checkpoint, assembly: Assembly, loader: BatchLoader, *, same_data: bool
) -> TrainState:
    """Restore a run from a checkpoint.

    Args:
        same_data: datasets and batch size are unchanged; otherwise the epoch starts over.

    Raises:
        UserError: the checkpoint is damaged or edited, holds NaN or infinity, or has other trained
            layers or another optimizer.
    """
    damaged = checkpoint_folder.damaged_files(checkpoint)
    if damaged:
        raise UserError(
            f"{checkpoint.path} is damaged: {', '.join(damaged)}. Choose an earlier checkpoint."
        )
    try:
        return _restore(checkpoint, assembly, loader, same_data=same_data)
    except FOREIGN_FILE_ERRORS as error:  # a file was changed together with its recorded hash
        is_of_device = is_out_of_memory(error) or isinstance(error, DEVICE_FAILURES)
        if is_of_device or assembly.world.size > 1:  # a failed collective raises the same types
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = (
            f"{checkpoint.path} is not a valid checkpoint ({reason}). Choose an earlier checkpoint."
        )
        raise UserError(message) from error


def _restore(
    checkpoint: Checkpoint, assembly: Assembly, loader: BatchLoader, *, same_data: bool
) -> TrainState:
    folder = checkpoint.path / STATE_FOLDER
    assembly.trained.load(checkpoint.path)
    _load_modules(assembly.modules, folder)
    content = _read_state(checkpoint, assembly)
    try:
        _load_optimizer(assembly, content["optimizer"])
    except ValueError as error:
        raise UserError(f"{checkpoint.path} was made with another optimizer: {error}") from error
    if content["scaler"]:  # empty unless mixed_precision was fp16
        assembly.scaler.load_state_dict(content["scaler"])
    for technique in assembly.techniques:
        # A technique without a state has been enabled since, and starts now.
        if technique.name in content["techniques"]:
            technique.load_state_dict(content["techniques"][technique.name])
    ema = assembly.trained.ema
    if ema is not None and content["ema"] is None:
        # It has been enabled since; without this, it would average the weights of step 0 until its
        # first update.
        ema.restart()
    elif ema is not None:
        refuse_not_finite(content["ema"]["average"], f"The moving average in {checkpoint.path}")
        ema.load_state_dict(content["ema"])
    loader.load_state_dict(content["loader"] if same_data else loader.beginning())
    restore_random_states(content["random"])
    return TrainState(content["global_step"], content["epoch"], loader.epochs_done)


def _read_state(checkpoint: Checkpoint, assembly: Assembly) -> dict[str, Any]:
    """The content of `state.pt`, with sharded tensors distributed like the parameters.

    Raises:
        ValueError: it belongs to another step than the manifest.
    """
    folder = checkpoint.path / STATE_FOLDER
    saved = checkpoint.manifest
    parameters = [
        parameter for group in assembly.optimizer.param_groups for parameter in group["params"]
    ]
    # To the CPU first, since the optimizer moves its state to the device of its parameters.
    # Memory-mapped if tensors are then copied elsewhere, one at a time.
    mapped = any(map(is_shard, parameters)) or assembly.accelerator.device.type != "cpu"
    content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True, mmap=mapped)
    step = content["global_step"]
    epoch = content["epoch"]
    if (step, epoch) != (saved.step, saved.epoch):
        expected = f"step {saved.step} of epoch {saved.epoch}"
        raise ValueError(f"step {step} of epoch {epoch}, but its manifest has {expected}")
    state: dict[str, Any] = load_shards(content, folder, parameters)
    return state


def _load_optimizer(assembly: Assembly, saved: dict[str, Any]) -> None:
    """Restore the optimizer.

    Raises:
        ValueError: it belongs to another optimizer.
    """
    optimizer = assembly.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    host = None if assembly.release is None else assembly.release.host
    spec = OPTIMIZERS[assembly.settings.optimizer_name]
    load_state(optimizer, shard_moments(saved, parameters), spec, host)


def _load_modules(modules: Mapping[str, nn.Module], folder: Path) -> None:
    """Restore the weights of techniques: new techniques start now, disabled ones are ignored."""
    saved = {
        path.name.removesuffix(MODULE_SUFFIX): path
        for path in sorted(folder.glob(f"*{MODULE_SUFFIX}"))
    }
    for name, module in modules.items():
        if name not in saved:
            logger.warning("%s was off in %s and starts now.", name, folder.parent)
            continue
        try:
            weights = load_file(saved[name])
            refuse_not_finite(weights, saved[name])
            module.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"{saved[name]} does not fit: {error}") from None
    for name in saved.keys() - modules.keys():
        logger.warning(
            "%s was on in %s and is off now; its weights are not used.", name, folder.parent
        )


def _save_state(path: Path, content: Any) -> None:
    with open_atomically(path) as file:
        # Written directly to the file: the state of a full fine-tune may not fit into memory twice.
        torch.save(content, file)


class Previews(Protocol):
    """Previews that may still be decoded in the background."""

    def publish_finished(self) -> None:
        """Wait until all of them are on disk."""


class CheckpointUser(Protocol):
    """May use the folders of checkpoints while the run goes on, such as an upload."""

    @property
    def in_use(self) -> Collection[Path]:
        """Checkpoints that must not be removed now."""


@dataclass
class UnfinishedCheckpoint:
    """A checkpoint whose folder has a temporary name.

    Attributes:
        manifest: describes the checkpoint, but for its files.
        copies: the files that are still to be written; None if all are.
        building: renames the folder on exit, or removes it after an error.
    """

    folder: Path
    manifest: Manifest
    copies: CopiedDrafts | None
    building: ExitStack

    def complete(self) -> None:
        """Write the copies, hash and flush all files, and rename the folder.

        Removes the folder if that fails. Needs neither the weights nor other processes.
        """
        with self.building:
            if self.copies is not None:
                for draft in self.copies.wait():
                    draft.write_into(self.folder)
            files = checkpoint_folder.describe_files(self.folder)
            checkpoint_folder.write_manifest(self.folder, replace(self.manifest, files=files))


@dataclass
class CheckpointWriter(Callback):
    """Callback that saves checkpoints at the configured intervals and prunes old ones.

    Training continues while a thread hashes and flushes the files of a checkpoint, and writes them
    if host memory has room for a copy. The next checkpoint and the end of the run wait for the
    thread.

    Attributes:
        thread: a pool of one worker.
        note: header entries of weight files.
        previews: must be on disk before the checkpoint, since a resumed run does not render them
            again.
        users: may use checkpoints, which then must not be removed.
        in_background: host memory has room for a copy of the checkpoint, and weights are not
            sharded.
        in_shards: every process writes its shards of the state; otherwise the main process gathers
            them.
        saved_step: step of the newest checkpoint.
    """

    output_dir: Path
    config: CheckpointConfig
    loader: BatchLoader
    identity: Identity
    settings: Mapping[str, Any]
    events: EventStream
    note: WeightNote
    previews: Previews | None = None
    users: Sequence[CheckpointUser] = ()
    in_shards: bool = True
    in_background: bool = False
    thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    saved_step: int | None = field(default=None, init=False)
    _completing: Future[CheckpointSaved] | None = field(default=None, init=False)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        # A resumed run need not save the checkpoint it has just loaded.
        self.saved_step = state.global_step

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        # Raises background errors, such as a full disk, before the next checkpoint.
        if self._completing is not None and self._completing.done():
            self._finish_completing()
        regular = Interval(
            self.config.checkpoint_step_interval, self.config.checkpoint_epoch_interval
        )
        rolling = Interval(self.config.checkpointing_rolling_steps)
        if regular.is_due(state.global_step, state.epochs_done, report.epochs_done):
            self.save(assembly, state)
        elif rolling.is_due(state.global_step):
            self.save(assembly, state, rolling=True)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """Save the last step.

        An interrupted run saves a rolling checkpoint, which never displaces a regular one.
        """
        self.save(assembly, state, rolling=state.global_step < assembly.settings.total_steps)
        self._finish_completing()

    def on_failure(self, assembly: Assembly, state: TrainState) -> None:
        """Save the last complete step; unfinished previews are rendered when the run continues."""
        if self.saved_step is None:  # before the first step
            return
        previews = self.previews
        self.previews = None
        if previews is not None:
            # A failure of previews must not keep the weights from being saved.
            with suppress(Exception):
                previews.publish_finished()
        self.on_train_end(assembly, state)

    def save(self, assembly: Assembly, state: TrainState, *, rolling: bool = False) -> None:
        """Save now, unless this step is already saved, then remove checkpoints beyond the limit.

        Raises:
            DiskFullError: for this checkpoint or the previous one.
        """
        if self.saved_step == state.global_step or not assembly.writes:
            return
        self._finish_completing()
        if self.previews is not None:
            self.previews.publish_finished()
        step = state.global_step
        suffix = ROLLING if rolling else ""
        path = self.output_dir / f"checkpoint-{step}{suffix}"
        started = time.monotonic()
        # Uninterrupted, unless processes write together: if one fails, all others would wait for it
        # forever.
        writes_together = assembly.trained.sharers.size > 1
        with nullcontext() if writes_together else assembly.world.uninterrupted():
            unfinished = self.write(path, assembly, state)
        self.saved_step = step
        if unfinished is None:
            return

        def finish() -> CheckpointSaved:
            with assembly.world.uninterrupted():
                unfinished.complete()
            return CheckpointSaved(path, step, time.monotonic() - started)

        self._completing = self.thread.submit(finish)

    def write(
        self, final: Path, assembly: Assembly, state: TrainState
    ) -> UnfinishedCheckpoint | None:
        """Write or copy the files of a checkpoint. Collective if the trained weights are sharded.

        Returns:
            the checkpoint, to be completed, in the main process; None in all others.

        Raises:
            NonFiniteError: a weight is NaN or infinite; nothing is written.
            DiskFullError: no space left; earlier checkpoints are kept.
        """
        stop_if_result_not_finite(assembly.all_parameters, assembly.trained.ema)
        copies: CopiedDrafts | None = None
        sharers = assembly.trained.sharers
        with ExitStack() as building:
            folder = sharers.on_main(lambda: building.enter_context(build_folder(final)))
            sharers.on_main((folder / STATE_FOLDER).mkdir)
            # Closed promptly, since the moving average may replace the weights until then.
            with closing(self._drafts(assembly, state, folder)) as drafts:
                if self.in_background:
                    copies = CopiedDrafts(drafts, assembly.accelerator.device)
                else:
                    for draft in drafts:
                        sharers.on_main(partial(draft.write_into, folder))
            # From here on, `UnfinishedCheckpoint` renames or removes the folder.
            folder_building = building.pop_all()
        manifest = self._manifest(assembly, state)
        unfinished = UnfinishedCheckpoint(folder, manifest, copies, folder_building)
        return sharers.main_only(lambda: unfinished)

    def _manifest(self, assembly: Assembly, state: TrainState) -> Manifest:
        """The manifest, still without the files."""
        line = checkpoint_folder.read_line(self.output_dir) or Line()
        progress = Progress(
            self.loader.index, self.loader.epochs_done, assembly.settings.total_steps
        )
        return Manifest(
            step=state.global_step,
            epoch=state.epoch,
            identity=self.identity,
            files={},
            progress=progress,
            forks=line.forks,
        )

    def _drafts(self, assembly: Assembly, state: TrainState, folder: Path) -> Generator[Draft]:
        """The files except the manifest. Collective if the trained weights are sharded.

        Args:
            folder: folder for shards, which are written immediately.
        """
        ema = assembly.trained.ema
        yield from assembly.trained.drafts(self.note.at(state.global_step, state.epoch))
        content = {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "optimizer": assembly.optimizer.state_dict(),
            "scaler": assembly.scaler.state_dict(),
            "ema": None if ema is None else ema.state_dict(),
            "loader": self.loader.state_dict(),
            "random": random_states(),
            "techniques": {
                technique.name: technique.state_dict() for technique in assembly.techniques
            },
        }
        shards = folder / STATE_FOLDER if self.in_shards else None
        yield Draft(
            f"{STATE_FOLDER}/{STATE_FILE}",
            _save_state,
            without_shards(content, shards, assembly.trained.sharers),
        )
        for name, module in assembly.modules.items():
            weights = {
                key: tensor.detach().contiguous() for key, tensor in module.state_dict().items()
            }
            yield Draft.of_tensors(f"{STATE_FOLDER}/{name}{MODULE_SUFFIX}", weights)
        yield Draft("config.json", write_json, dict(self.settings))

    def _finish_completing(self) -> None:
        """Wait for the checkpoint that is being completed, publish it, and remove old ones."""
        completing = self._completing
        self._completing = None
        if completing is None:
            return
        saved = completing.result()
        rolling = saved.path.name.endswith(ROLLING)
        limit = self.config.checkpoints_total_limit
        if rolling:
            limit = self.config.checkpoints_rolling_total_limit
        # Old ones only now, since the new checkpoint could have failed, and in this thread, where
        # uploads choose the checkpoint to send.
        in_use = [path for user in self.users for path in user.in_use]
        removed = checkpoint_folder.prune(self.output_dir, limit, rolling=rolling, in_use=in_use)
        self.events.publish(replace(saved, removed=removed))
