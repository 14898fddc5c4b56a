"""The tensorboard mirror. Importing this module imports torch and tensorboard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from simpletuner.reporting.metrics import MediaRecord


class TensorboardTracker:
    """One folder of event files.

    Args:
        folder: event files go here; each session adds one.
        output_dir: paths of previews are relative to it.
        start_step: hides what an earlier session wrote after this step.
    """

    def __init__(self, folder: Path, output_dir: Path, start_step: int) -> None:
        self._folder, self._output_dir, self._start_step = folder, output_dir, start_step
        self._writer: Any = None

    def start(self, run_config: Mapping[str, Any]) -> None:
        self._writer = SummaryWriter(str(self._folder), purge_step=self._start_step + 1)
        text = json.dumps(run_config, indent=2, ensure_ascii=False, default=str)
        self._writer.add_text("config", "    " + text.replace("\n", "\n    "), self._start_step)

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
