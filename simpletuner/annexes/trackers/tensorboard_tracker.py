"""The tensorboard mirror. Importing this module imports torch and tensorboard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from simpletuner.annexes.trackers.trackers import TrackedRun
from simpletuner.reporting.metrics import MediaRecord


class TensorboardTracker:
    """One folder of event files, to which each session adds one. What an earlier session wrote after the first step of
    this one is hidden."""

    def __init__(self, run: TrackedRun) -> None:
        self._output_dir = run.output_dir
        folder = run.logging_dir / run.project / run.name
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.start_step + 1)
        text = json.dumps(run.settings, indent=2, ensure_ascii=False, default=str)
        self._writer.add_text("config", "    " + text.replace("\n", "\n    "), run.start_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        self._writer.add_histogram("timesteps", np.asarray(timesteps, dtype=np.float64), step)

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        for record in media:
            tag = f"validation/{record.short_name}/{record.index}{'/ema' if record.ema else ''}"
            path = self._output_dir / record.path
            self._writer.add_text(f"{tag}/prompt", record.prompt, step)
            if not record.is_video:  # tensorboard shows no mp4
                with Image.open(path) as picture:
                    self._writer.add_image(tag, np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        self._writer.flush()

    def finish(self, exit_code: int = 0) -> None:
        self._writer.close()
