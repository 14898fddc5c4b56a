"""One optimizer step in several variants of the settings, assembled as a run assembles it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import RandomAdapter, lora_targets, make_accelerator, make_batch, make_config
from simpletuner.diffusion.batch import Batch
from simpletuner.distributed.world import World
from simpletuner.models.lora_layers import Targets
from simpletuner.reporting.events import StepReport
from simpletuner.run.settings import assembly_settings
from simpletuner.techniques.base import Technique
from simpletuner.training import assemble as assembling
from simpletuner.training.assemble import assemble
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from simpletuner.training.step import optimizer_step

RATE = 1e-4
Settings = Mapping[str, Any]
# Settings of every variant that does not set them.
COMMON: Settings = {"gradient_checkpointing": True, "lora_rank": 16, "learning_rate": RATE}


class OneBatch:
    """Stands in for the loader: the same batch without end, from page-locked memory on a GPU."""

    epoch = 1
    epochs_done = 0

    def __init__(self, batch: Batch, device: str) -> None:
        self.batch = batch.pin_memory() if device == "cuda" else batch

    def __next__(self) -> Batch:
        return self.batch


@dataclass(frozen=True)
class Outcome:
    """Time and memory of a variant's steps.

    Attributes:
        reports: of the steps that count.
        peak_bytes: of the device, weights included; None on a CPU.
        cpu_seconds: of this process, per step.
    """

    reports: Sequence[StepReport]
    peak_bytes: int | None
    cpu_seconds: Sequence[float]

    @property
    def seconds(self) -> float:
        """Median wall time of a step."""
        return statistics.median(report.seconds for report in self.reports)

    @property
    def weights_share(self) -> float:
        """Share of the time in which computing waited for streamed weights."""
        waited = sum(report.weights_seconds or 0.0 for report in self.reports)
        return waited / sum(report.seconds for report in self.reports)


class Variant:
    """An assembly that steps on one batch."""

    def __init__(
        self,
        size: str,
        device: str,
        settings: Settings,
        techniques: Sequence[Technique] = (),
        *,
        samples: int = 1,
        latents: tuple[int, int, int] | None = None,
        targets: Targets = "",
        world: World = World(),
    ) -> None:
        precision = "no" if device == "cpu" else "bf16"
        config = make_config(size, **{"mixed_precision": precision, **COMMON, **settings})
        intent = TrainingSpec(
            lora_targets=targets or lora_targets(size),
            seed=0,
            total_steps=100_000,
            learning_rate=RATE,
        )
        adapter = RandomAdapter(config, size, device)
        accelerator = assembling.make_accelerator() if world.size > 1 else make_accelerator(device)
        self.assembly: Assembly = assemble(
            assembly_settings(config, intent), adapter, techniques, accelerator, world
        )
        self.assembly.transformer.train()
        self.loader: Any = OneBatch(make_batch(size, samples, latents), device)
        self.steps = 0

    def step(self) -> StepReport:
        """One more optimizer step; it waits for the device."""
        report = optimizer_step(self.assembly, self.loader, self.steps)
        self.steps = report.step
        return report


def measure(
    size: str,
    device: str,
    settings: Settings,
    techniques: Sequence[Technique] = (),
    *,
    samples: int = 1,
    targets: Targets = "",
    warm: int = 2,
    steps: int = 5,
) -> Outcome:
    """Run steps of a variant that has the device for itself, and free its memory.

    Args:
        targets: of its LoRA; by default those of its family.
        warm: steps that do not count: compiling, and the optimizer's state.
    """
    forget(device)
    variant = Variant(size, device, settings, techniques, samples=samples, targets=targets)
    for _ in range(warm):
        variant.step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    reports = []
    spent = []
    for _ in range(steps):
        before = time.process_time()
        reports.append(variant.step())
        spent.append(time.process_time() - before)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    del variant
    forget(device)
    return Outcome(reports, peak, spent)


def forget(device: str) -> None:
    """Free the memory of the previous variant."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
