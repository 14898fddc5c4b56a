"""The loss on held-out data, with fixed noise at fixed noise levels.

The training loss is noisy, because every step draws new noise and noise levels. Here, both are
fixed per sample, so two values differ only by the training in between. Training is unaffected:
evaluation runs without gradients, and the random states are restored.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from simpletuner.config.schema import EvaluationConfig, LossConfig
from simpletuner.data.entries import ProgressBar
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import diffusion_loss, make_noisy, sample_noise
from simpletuner.diffusion.seeds import generator_for
from simpletuner.encoding.sharing import share_items
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.reporting.events import (
    EVALUATION,
    Evaluated,
    EventStream,
    PhaseStarted,
    StepReport,
)
from simpletuner.reporting.intervals import Interval
from simpletuner.reporting.metrics import EVALUATED
from simpletuner.training.loop import Callback
from simpletuner.training.state import Assembly, TrainState
from simpletuner.validation.quiet import quiet, weights_to_use

# (with the moving average, dataset id, sample).
Evaluation = tuple[bool, str, Sample]


@dataclass
class EvaluationLoss(Callback):
    """Callback that publishes `loss/val/<dataset id>` at intervals and after the last step.

    Attributes:
        datasets: samples to evaluate, at least one, by dataset id.
        read: reads a sample as a batch of one, with its first caption.
        steps_per_epoch: optimizer steps per epoch, possibly fractional.
        ema_validation: weights to evaluate; see `EmaConfig`.
        is_missing: the record lacks the evaluation of the step from which the session resumes.
    """

    config: EvaluationConfig
    datasets: Mapping[str, Sequence[Sample]]
    read: Callable[[Sample], Batch]
    steps_per_epoch: float
    ema_validation: str
    events: EventStream
    is_missing: bool = False

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        if self.is_missing and state.global_step > 0:
            self.on_step_end(assembly, state)

    def on_step_end(
        self, assembly: Assembly, state: TrainState, report: StepReport | None = None
    ) -> None:
        if self.is_due(state.global_step, assembly.settings.total_steps):
            means = self.evaluate(assembly, state.global_step)
            self.events.publish(Evaluated(state.global_step, means))

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """Does nothing: `on_step_end` has evaluated the last step if it was due."""

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether the run or an interval in steps or epochs ends with this step."""
        if step >= total_steps:  # so that the result can be compared with the checkpoints
            return True
        by_step = Interval(self.config.eval_steps_interval)
        by_epoch = Interval((self.config.eval_epoch_interval or 0) * self.steps_per_epoch)
        return by_step.is_due(step) or by_epoch.is_due(step)

    def evaluate(self, assembly: Assembly, step: int) -> dict[str, float]:
        """The mean loss of each dataset by metric name, with the weights of `ema_validation`.

        The processes split the samples; the means are bit-identical to those of one process.
        """
        weights = weights_to_use(assembly.trained.ema, self.ema_validation)
        samples: list[Evaluation] = []
        for use_ema in weights:
            for name, dataset in self.datasets.items():
                samples += [(use_ema, name, sample) for sample in dataset]
        # A sample counts once per noise level, since each is a forward pass.
        total = len(samples) * self.config.eval_timesteps
        phase = PhaseStarted(f"Evaluating at step {step}", total, "timesteps", EVALUATION)
        measure = partial(self._measure, assembly)
        # With FSDP2, a forward pass gathers weights from all processes, so they evaluate every
        # sample together.
        losses = share_items(
            assembly.world, self.events, phase, samples, measure, in_lockstep=assembly.is_sharded
        )
        device = assembly.accelerator.device
        losses_of = defaultdict[tuple[bool, str], list[Tensor]](list)
        for (use_ema, name, _), loss in zip(samples, losses, strict=True):
            losses_of[use_ema, name].append(loss.to(device))
        means: dict[str, float] = {}
        for use_ema in weights:
            # If only one set of weights is evaluated, it keeps the plain name, as in a run without
            # EMA.
            suffix = "/ema" if use_ema and len(weights) > 1 else ""
            means_of_datasets = []
            for name in self.datasets:
                mean = torch.cat(losses_of[use_ema, name]).mean().item()
                means[f"{EVALUATED}{name}{suffix}"] = mean
                means_of_datasets.append(mean)
            if self.config.eval_dataset_pooling:
                means[f"{EVALUATED}pooled{suffix}"] = fmean(means_of_datasets)
        return means

    def _measure(
        self, assembly: Assembly, samples: Sequence[Evaluation], bar: ProgressBar
    ) -> Iterator[Tensor]:
        """The losses of each sample at all noise levels, with or without the moving average."""
        with quiet(assembly):
            # `samples` are ordered by weights, so the average is applied once, not per sample.
            for use_ema, group in itertools.groupby(samples, key=lambda evaluation: evaluation[0]):
                with assembly.averaged(use_ema):
                    for _, _, sample in group:
                        losses = []
                        for loss in self._losses(assembly, sample):
                            losses.append(loss)
                            bar.advance(1, sample.name)
                        # In host memory, for the exchange between processes.
                        yield torch.cat(losses).cpu()

    def _losses(self, assembly: Assembly, sample: Sample) -> Iterator[Tensor]:
        """The losses of a sample, one noise level after the other."""
        settings = assembly.settings
        sigmas = even_sigmas(self.config.eval_timesteps)
        batch = self.read(sample).to(assembly.accelerator.device)
        return sample_losses(
            assembly.adapter, assembly.transformer, batch, sigmas, settings.seed, settings.loss
        )


def sample_losses(
    adapter: FamilyAdapter,
    transformer: nn.Module,
    batch: Batch,
    sigmas: Sequence[float],
    seed: int,
    loss: LossConfig,
) -> Iterator[Tensor]:
    """The loss of a batch of one sample at each noise level, shape `1`."""
    for index, sigma in enumerate(sigmas):
        # Seeded by the sample's name, so that samples keep their noise when others are added or
        # removed.
        purpose = f"evaluate {batch.names[0]}"
        generator = generator_for(seed, global_step=0, micro_step=index, slot=0, purpose=purpose)
        noise = sample_noise(batch.latents, [generator])
        noisy = adapter.prepare(make_noisy(batch, torch.tensor([sigma]), noise))
        yield diffusion_loss(adapter.predict(transformer, noisy), noisy, loss)


def even_sigmas(count: int) -> list[float]:
    """The midpoints of `count` equal parts of [0, 1], which exclude clean inputs and pure noise."""
    return [(index + 0.5) / count for index in range(count)]
