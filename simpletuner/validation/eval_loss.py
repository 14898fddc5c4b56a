"""The loss on held-out data, with fixed noise at fixed noise levels.

The training loss is noisy, because every step draws other noise at other levels. Here both are fixed for each sample,
so two values differ only by what was learned in between. Training is not affected: there are no gradients, and the
random states are restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from simpletuner.config.schema import EvaluationConfig
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import make_noisy, sample_noise
from simpletuner.diffusion.loss import diffusion_loss
from simpletuner.diffusion.seeds import generator_for
from simpletuner.reporting.events import EVALUATED, EVALUATION, Evaluated, EventStream, RunningPhase
from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import StepReport
from simpletuner.validation.runner import quiet, weights_to_use

POOLED = "pooled"


@dataclass
class EvaluationLoss:
    """Callback that publishes `loss/val/<dataset id>` at the configured intervals.

    Attributes:
        datasets: the samples to evaluate, by dataset id.
        read: returns a sample as a batch of one, with its first caption.
        seed: of the run; the noise depends on it and on the sample's name.
        steps_per_epoch: optimizer steps, may be a fraction.
        ema_validation: which weights to evaluate; see `EmaConfig`.
        lacking: whether the record lacks the evaluation of the step that the session resumes from.
    """

    config: EvaluationConfig
    datasets: Mapping[str, Sequence[Sample]]
    read: Callable[[Sample], Batch]
    seed: int
    steps_per_epoch: float
    ema: Ema | None
    ema_validation: str
    events: EventStream
    lacking: bool = False

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        if self.lacking and state.global_step > 0:
            self._evaluate_if_due(assembly, state)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        self._evaluate_if_due(assembly, state)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """If due, the last step was evaluated in `on_step_end`."""

    def _evaluate_if_due(self, assembly: Assembly, state: TrainState) -> None:
        if self.is_due(state.global_step) and assembly.world.is_main:
            self.events.publish(Evaluated(state.global_step, self.evaluate(assembly, state.global_step)))

    def is_due(self, step: int) -> bool:
        """Whether the interval in steps or the one in epochs ends with this step."""
        if not any(self.datasets.values()):
            return False
        steps, epochs = self.config.eval_steps_interval, self.config.eval_epoch_interval
        return (steps is not None and step % steps == 0) or (
            epochs is not None and self._intervals(step, epochs) > self._intervals(step - 1, epochs)
        )

    def evaluate(self, assembly: Assembly, step: int) -> dict[str, float]:
        """The mean loss of each dataset by its metric's name, with the weights that `ema_validation` selects."""
        weights = weights_to_use(self.ema, self.ema_validation)
        total = len(weights) * self.config.eval_timesteps * sum(map(len, self.datasets.values()))
        losses: dict[str, float] = {}
        title = f"Evaluating at step {step}"
        with self.events.phase(title, total, "timesteps", EVALUATION) as phase, quiet(assembly):
            for use_ema in weights:
                suffix = "/ema" if use_ema and len(weights) > 1 else ""
                with self.ema.applied() if use_ema and self.ema else nullcontext():
                    means = {name: self._mean(assembly, samples, phase) for name, samples in self.datasets.items()}
                losses |= {f"{EVALUATED}{name}{suffix}": mean for name, mean in means.items()}
                if self.config.eval_dataset_pooling:
                    losses[f"{EVALUATED}{POOLED}{suffix}"] = fmean(means.values())
        return losses

    def _mean(self, assembly: Assembly, samples: Sequence[Sample], phase: RunningPhase) -> float:
        losses = []
        for sample in samples:
            for loss in self._losses(assembly, sample):
                losses.append(loss)
                phase.advance(1, sample.name)
        return torch.cat(losses).mean().item()

    def _losses(self, assembly: Assembly, sample: Sample) -> Iterator[Tensor]:
        """The loss of a sample at each noise level, each of shape `1`."""
        batch = self.read(sample).to(assembly.accelerator.device)
        for index, sigma in enumerate(even_sigmas(self.config.eval_timesteps)):
            noise = sample_noise(batch.latents, [generator_for(self.seed, 0, index, 0, f"evaluate {sample.full_name}")])
            noisy = assembly.adapter.prepare(make_noisy(batch, torch.tensor([sigma]), noise))
            prediction = assembly.adapter.predict(assembly.transformer, noisy)
            yield diffusion_loss(prediction, noisy, assembly.settings.loss)

    def _intervals(self, step: int, epochs: float) -> int:
        """The number of complete intervals of `epochs` epochs by the end of a step."""
        # The tolerance keeps rounding from moving the end of an interval to the next step.
        return math.floor(step / (self.steps_per_epoch * epochs) + 1e-9)


def even_sigmas(count: int) -> list[float]:
    """The midpoints of `count` equal parts of [0, 1], which exclude a clean input and pure noise."""
    return [(index + 0.5) / count for index in range(count)]
