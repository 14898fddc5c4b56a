"""Made records of runs: what a training would have left in its output folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from simpletuner.annexes.payloads import EventLog, Payloads
from simpletuner.planning.checkpoint_folder import Identity, Manifest, write_manifest
from simpletuner.reporting.events import (
    EVALUATION,
    EventStream,
    Notice,
    PhaseStarted,
    RunState,
    StateChanged,
)
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    MediaFile,
    MediaRecord,
    MetricsFile,
)

IDENTITY = Identity("kandinsky5-image", "t2i-lite-sft", "lora", 1, 0, "", {})
SIDE = 16  # pixels of previews


@dataclass(frozen=True)
class MadeRecord:
    """A run as its output folder shows it.

    Attributes:
        steps: how many are recorded.
        total: how many were planned.
        loss: the training loss at a step.
        held_out: the loss on held-out files by step.
        held_out_files: number of them, each measured at eight noise levels.
        checkpoints: steps whose checkpoints still exist.
        changes: differences of the last previews from the untrained model's, in levels of 255.
        pictures: number of trained pictures.
        warnings: warnings of the plan.
        end: how the session ended; None for one that was killed.
        message: the message of its end.
    """

    steps: int = 400
    total: int = 400
    loss: Callable[[int], float] = lambda step: 0.5
    rate: float = 1e-4
    held_out: Mapping[int, float] = field(default_factory=dict)
    held_out_files: int = 3
    checkpoints: Sequence[int] = (100, 200, 300, 400)
    changes: Sequence[int] = (9, 12)
    pictures: int = 20
    warnings: Sequence[str] = ()
    end: RunState | None = "finished"
    message: str = ""

    def write(self, folder: Path) -> Path:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._write_events(folder)
        self._write_metrics(folder)
        self._write_previews(folder)
        for step in self.checkpoints:
            checkpoint = folder / f"checkpoint-{step}"
            checkpoint.mkdir()
            write_manifest(checkpoint, Manifest(step, 1, IDENTITY, {}))
        return folder

    def _write_events(self, folder: Path) -> None:
        stream = EventStream(EventLog(folder, Payloads(every=0)))
        summary = f"LoRA on Kandinsky 5 Image\n  on {self.pictures} pictures (dataset cats)"
        stream.publish(StateChanged("starting", 0, self.total, summary))
        for warning in self.warnings:
            stream.publish(Notice(warning, warning=True))
        stream.publish(StateChanged("running", 0, self.total))
        if self.held_out:
            measured = self.held_out_files * 8
            stream.publish(PhaseStarted("Evaluating", measured, "timesteps", EVALUATION))
        if self.end is not None:
            stream.publish(StateChanged(self.end, self.steps, self.total, self.message))

    def _write_metrics(self, folder: Path) -> None:
        metrics = MetricsFile(folder / METRICS_FILE)
        for step in range(1, self.steps + 1):
            row = {"train_loss": self.loss(step), "learning_rate": self.rate}
            if step in self.held_out:
                row["loss/val/cats-held-out"] = self.held_out[step]
            metrics.append(step, row)
        metrics.close()

    def _write_previews(self, folder: Path) -> None:
        media = MediaFile(folder / MEDIA_FILE)
        for number, change in enumerate(self.changes):
            for step, level in ((0, 100), (self.steps, 100 + change)):
                path = f"validation_images/step_{step}_{number}.png"
                write_grey(folder / path, level)
                name = f"prompt-{number}"
                media.append(MediaRecord(step, name, "a cat", path, SIDE, SIDE, seed=42))
        media.close()


def write_grey(path: Path, level: int) -> None:
    """Write a picture of one grey level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((SIDE, SIDE, 3), level, np.uint8)).save(path)
