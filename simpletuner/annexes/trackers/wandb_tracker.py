"""The wandb mirror. Importing this module imports wandb."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from simpletuner.annexes.trackers.trackers import TrackedRun
from simpletuner.config.trackers import wandb_mode
from simpletuner.reporting.metrics import MediaRecord

logger = logging.getLogger(__name__)

RUN_FILE = "wandb_run.json"
# Every update of the scatter plot sends all of its points again, so it is updated rarely and the points are limited.
TIMESTEPS_EVERY = 100
TIMESTEPS_KEPT = 5000
# Seconds that an unreachable server may delay the start.
INIT_TIMEOUT = 30.0


class WandbTracker:
    """One wandb run, continued under the same id when training resumes. Step 0 begins a new run."""

    def __init__(self, run: TrackedRun) -> None:
        self._output_dir = run.output_dir
        self._timesteps: list[tuple[int, float]] = []
        self._sent_timesteps_at = run.start_step
        run.logging_dir.mkdir(parents=True, exist_ok=True)
        run_id = previous_id(run.output_dir) if run.start_step else None
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            resume="allow" if run_id and wandb_mode() == "online" else None,
            dir=str(run.logging_dir),
            config=dict(run.settings),
            allow_val_change=True,
            # The console may show anything and the command line may contain a webhook's address: send neither.
            settings=wandb.Settings(
                console="off",
                quiet=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                init_timeout=INIT_TIMEOUT,
            ),
        )
        # Steps after the checkpoint were already sent before the interruption; the repeated steps have equal values.
        self._first_step = self._run.starting_step
        run.output_dir.mkdir(parents=True, exist_ok=True)
        (run.output_dir / RUN_FILE).write_text(json.dumps({"id": self._run.id}), encoding="utf-8")
        logger.info("wandb: %s", self._run.url if wandb_mode() == "online" else f"{wandb_mode()}, {self._run.dir}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step >= self._first_step:
            self._run.log(dict(metrics), step=step)

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        self._timesteps += [(step, float(timestep)) for timestep in timesteps]
        if step - self._sent_timesteps_at >= TIMESTEPS_EVERY:
            self._send_timesteps(step)

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        groups: dict[str, list[Any]] = {}
        for record in media:
            path = str(self._output_dir / record.path)
            kind = wandb.Video if record.is_video else wandb.Image
            item = kind(path, caption=record.prompt)
            groups.setdefault(f"validation/{record.short_name}{'/ema' if record.ema else ''}", []).append(item)
        if groups and step >= self._first_step:
            self._run.log(groups, step=step)

    def finish(self, exit_code: int = 0) -> None:
        if self._timesteps:
            self._send_timesteps(max(self._timesteps)[0])
        self._run.finish(exit_code=exit_code)

    def _send_timesteps(self, step: int) -> None:
        self._timesteps = self._timesteps[-TIMESTEPS_KEPT:]
        self._sent_timesteps_at = step
        if step < self._first_step:
            return
        table = wandb.Table(columns=["global_step", "timestep"], data=[list(point) for point in self._timesteps])
        chart = wandb.plot.scatter(table, "global_step", "timestep", title="Timesteps trained")
        self._run.log({"timesteps_scatter": chart}, step=step)


def previous_id(output_dir: Path) -> str | None:
    """Id of the run to continue; None if the file is missing or damaged."""
    try:
        return str(json.loads((output_dir / RUN_FILE).read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
