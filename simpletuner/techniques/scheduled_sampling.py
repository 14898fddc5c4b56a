"""Scheduled sampling: replaces some inputs with rollouts, so that the model meets its own errors.

A plain input is the exact mix of data and noise, but the states of a sampler drift from it, and the
model is never trained on drifted states (exposure bias). Here, a sample starts some sampler steps
noisier, with the same noise, and the model takes these steps down to the drawn noise level, without
gradients, routes, guidance or dropout. The step then trains on the resulting state.

The loss of these samples is ReflexFlow, Huang et al., arXiv 2512.04904: the prediction must point
from the data to the drifted input (anti-drift rectification), and positions where sampling lost
content have more weight (frequency compensation). The paper's weights are normalised to a mean of 1
+ alpha, whatever the size of a sample.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from simpletuner.diffusion.batch import NoisyBatch, upload
from simpletuner.diffusion.flow import per_sample
from simpletuner.diffusion.seeds import Place
from simpletuner.planning.techniques.scheduled_sampling import ScheduledSamplingSpec
from simpletuner.techniques.base import Predict, Site, Technique

logger = logging.getLogger(__name__)

SOLVERS = {"unipc": "UniPCMultistepScheduler", "dpm": "DPMSolverMultistepScheduler"}
# By default, these diffusers solvers predict noise, and end at the data.
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
UNFINISHED = {"lower_order_final": False, "final_sigmas_type": "sigma_min"}
# Below 1, where the solvers' logarithms are infinite.
LARGEST_SIGMA = 1 - 1e-6
# If the rectification exceeds the loss by this factor for so many steps, the run learns little
# else.
DOMINANT_RATIO = 5.0
DOMINANT_STEPS = 100
ADR = "reflexflow_adr"
FLOW_LOSS = "reflexflow_flow_loss"


class ScheduledSampling(Technique):
    """Replaces inputs with rollouts of the model."""

    def __init__(self, spec: ScheduledSamplingSpec) -> None:
        self._config = spec.config
        self._steps = spec.steps
        self._shift = spec.shift
        self._skipped = spec.skipped
        self._sampled: _Sampled | None = None
        self._watch = _Watch()

    def attach(self, site: Site) -> None:
        self._is_sharded = site.is_sharded
        self._grids: dict[bool, np.ndarray] = {}
        # Sana Video uses another grid (shift 8) for clips with a conditioning first frame.
        for from_picture in (False, True):
            sampler = site.adapter.load_sampler(self._shift, from_picture=from_picture)
            sampler.set_timesteps(self._steps)
            self._grids[from_picture] = sampler.sigmas.double().numpy()

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        """Replace the inputs of the samples drawn for a rollout."""
        place = noisy.place_for("scheduled sampling")
        self._sampled = None
        self._watch.begin(place.global_step)
        if noisy.batch.dataset_id in self._skipped:
            return noisy
        offsets = self._offsets(place)
        if not any(offsets):
            return noisy
        paths = self._paths(noisy, offsets[place.slots.start : place.slots.stop])
        states = self._roll_out(noisy, paths, predict)
        clean = noisy.target
        if self._config.compares_clean:
            clean = self._clean_predictions(noisy, paths, predict)
        if self._is_sharded:
            # Passes of other processes need this process, whatever it predicts in them.
            longest_anywhere = max(offsets)
            longest_here = max(len(path) for path in paths) - 1
            for _ in range(self._passes(longest_anywhere) - self._passes(longest_here)):
                predict(noisy.subset([0]))
        drawn = upload(torch.tensor([bool(path) for path in paths]), states.device)
        # Computed on the device: an `if` would synchronise in every micro-step.
        is_finite = (states.isfinite() & clean.isfinite()).flatten(1).all(1)
        usable = is_finite & drawn
        lost = (drawn & ~usable).sum()
        self._sampled = _Sampled(usable, lost, clean)
        inputs = torch.where(_per_latent(usable), states, noisy.noisy_latents)
        return noisy.at_sigmas(noisy.sigmas, inputs)

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        """The anti-drift rectification, in [0, 4 beta1]."""
        if self._sampled is None or not self._config.scheduled_sampling_reflexflow:
            return {}
        beta1 = self._config.scheduled_sampling_reflexflow_beta1
        rectification = misdirections(noisy, prediction) * beta1
        self._sampled.rectification = rectification * self._sampled.usable
        return {ADR: self._sampled.rectification.mean()}

    def weigh(self, noisy: NoisyBatch, prediction: Tensor, loss: Tensor) -> Tensor:
        """The frequency compensation."""
        sampled = self._sampled
        config = self._config
        if sampled is None:
            return loss
        sampled.losses = per_sample(loss.detach()) * sampled.usable
        self._watch.add(sampled, sampled.losses)
        if not config.scheduled_sampling_reflexflow:
            return loss
        change = (sampled.clean - prediction.detach()).abs()
        alpha = config.scheduled_sampling_reflexflow_alpha
        weights = content_weights(change, noisy.coverage, alpha)
        weighed = config.scheduled_sampling_reflexflow_beta2 * weights * loss
        return torch.where(_per_latent(sampled.usable), weighed, loss)

    def metrics(self) -> Mapping[str, Tensor]:
        """The loss of the rollouts, with 0 for plain inputs, as in the rectification."""
        sampled = self._sampled
        if sampled is None or sampled.rectification is None or sampled.losses is None:
            return {}
        return {FLOW_LOSS: sampled.losses.mean()}

    def summary(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The share of the rectification in the sum of both."""
        total = metrics.get(ADR, 0.0) + metrics.get(FLOW_LOSS, 0.0)
        if not total:
            return {}
        return {"reflexflow_adr_share": metrics[ADR] / total}

    def state_dict(self) -> dict[str, Any]:
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch = _Watch(**state)

    def _offsets(self, place: Place) -> list[int]:
        """The rollout lengths of the samples of all processes; 0 for plain inputs.

        Every process draws all of them, so that all can run the same number of passes.
        """
        probability = self._config.probability_at(place.global_step)
        everywhere = replace(place, slots=range(place.group))
        offsets = []
        for generator in everywhere.generators("scheduled sampling"):
            # Both are drawn for every sample: a higher probability adds rollouts without changing
            # the lengths of others.
            gate, share = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
            offset = 0
            if gate < probability:
                offset = self._config.offset_at(share)
            offsets.append(offset)
        return offsets

    def _paths(self, noisy: NoisyBatch, offsets: Sequence[int]) -> list[list[float]]:
        """The noise levels of each sample's rollout; empty for a plain input."""
        grid = self._grids[noisy.given_frames > 0]
        paths: list[list[float]] = []
        for sigma, offset in zip(noisy.host_sigmas, offsets, strict=True):
            paths.append(path_to(sigma, offset, grid) if offset else [])
        return paths

    def _passes(self, steps: int) -> int:
        """Number of forward passes for rollouts of at most so many steps.

        One more if their plain inputs are compared.
        """
        if steps <= 0:
            return 0
        return steps + 1 if self._config.compares_clean else steps

    def _roll_out(
        self, noisy: NoisyBatch, paths: Sequence[Sequence[float]], predict: Predict
    ) -> Tensor:
        """The states at the ends of the paths, `B C F H W`; samples without a path are unchanged.

        All samples finish in the last pass, so the longest path sets the number of passes.
        """
        states = list(noisy.noisy_latents)
        solvers = {row: self._solver(path) for row, path in enumerate(paths) if path}
        for row in solvers:
            start = paths[row][0]
            # The same noise as the plain input: a perfect model would return to that input.
            states[row] = (1 - start) * noisy.batch.latents[row].float() + start * noisy.noise[row]
        longest = max(len(path) for path in paths) - 1
        for steps_left in range(longest, 0, -1):
            rows = [row for row in solvers if len(paths[row]) > steps_left]
            sigmas = torch.tensor([paths[row][-steps_left - 1] for row in rows])
            inputs = torch.stack([states[row] for row in rows])
            velocities = predict(
                noisy.subset(rows).at_sigmas(upload(sigmas, noisy.sigmas.device), inputs)
            )
            for row, velocity in zip(rows, velocities, strict=True):
                solver = solvers[row]
                # After `set_begin_index` a solver counts its steps and does not read the timestep.
                timestep = solver.timesteps[0]
                result = solver.step(velocity, timestep, states[row], return_dict=False)
                states[row] = result[0]
        return torch.stack(states)

    def _clean_predictions(
        self, noisy: NoisyBatch, paths: Sequence[Sequence[float]], predict: Predict
    ) -> Tensor:
        """Predictions for the plain inputs of samples with a path.

        For all other samples the target, which is not used.
        """
        predictions = list(noisy.target)
        rows = [row for row, path in enumerate(paths) if path]
        if rows:
            for row, prediction in zip(rows, predict(noisy.subset(rows)), strict=True):
                predictions[row] = prediction
        return torch.stack(predictions)

    def _solver(self, path: Sequence[float]) -> Any:
        """A diffusers scheduler that takes one sample along a path."""
        name = self._config.scheduled_sampling_sampler
        if name == "euler":
            solver: Any = diffusers.FlowMatchEulerDiscreteScheduler()
        else:
            # The path ends at the drawn noise level, not at the data, so the last step needs no
            # lower order.
            order = self._config.scheduled_sampling_order
            solver = getattr(diffusers, SOLVERS[name])(**FLOW, solver_order=order, **UNFINISHED)
        solver.sigmas = torch.tensor(path, dtype=torch.float64)
        solver.timesteps = 1000 * solver.sigmas[:-1]
        solver.num_inference_steps = len(path) - 1
        solver.set_begin_index(0)
        return solver


@dataclass
class _Sampled:
    """The rollouts of a micro-step.

    Attributes:
        usable: samples with a finite rollout, bool, `B`.
        lost: number of samples whose rollout was not finite.
        clean: predictions for the plain inputs, if needed, `B C F H W`.
        rectification: weighted rectification per sample, `B`.
        losses: unweighted loss per sample, 0 for plain inputs, `B`.
    """

    usable: Tensor
    lost: Tensor
    clean: Tensor
    rectification: Tensor | None = None
    losses: Tensor | None = None


class _Watch:
    """Warns about predictions that are not finite, and about a dominating rectification.

    The numbers of a step stay on the device until the next step, when reading them no longer
    blocks.

    Args:
        lost: number of samples so far whose rollout was not finite.
        dominated: consecutive steps in which the rectification dominated.
    """

    def __init__(self, lost: int = 0, dominated: int = 0) -> None:
        self._lost = lost
        self._dominated = dominated
        self._step = 0
        self._numbers: list[Tensor] = []

    def begin(self, step: int) -> None:
        """Read the numbers of the previous step."""
        if step != self._step:
            self._read()
        self._step = step

    def add(self, sampled: _Sampled, losses: Tensor) -> None:
        """Record a micro-step and the losses of its rollouts, `B`."""
        rectification = losses.new_zeros(())
        if sampled.rectification is not None:
            rectification = sampled.rectification.detach().sum()
        self._numbers.append(torch.stack([sampled.lost, rectification, losses.sum()]))

    def state_dict(self) -> dict[str, int]:
        self._read()
        return {"lost": self._lost, "dominated": self._dominated}

    def _read(self) -> None:
        """Count what happened in the last step, and warn about it."""
        if not self._numbers:
            return
        lost, rectification, loss = torch.stack(self._numbers).sum(0).tolist()
        self._numbers.clear()
        if lost:
            self._lost += int(lost)
            logger.warning(
                "Step %d: %d sampled inputs were not finite and were replaced by plain inputs (%d "
                "so far).",
                self._step + 1,
                lost,
                self._lost,
            )
        if loss:  # otherwise this process had no rollout
            if rectification > DOMINANT_RATIO * loss:
                self._dominated += 1
            else:
                self._dominated = 0
        # Warn once, not in every later step.
        if self._dominated == DOMINANT_STEPS:
            logger.warning(
                "reflexflow_adr has been above %g times the loss of the same samples for %d "
                "steps; a smaller scheduled_sampling_reflexflow_beta1 would leave more weight to "
                "the loss.",
                DOMINANT_RATIO,
                DOMINANT_STEPS,
            )


def path_to(sigma: float, offset: int, grid: np.ndarray) -> list[float]:
    """Noise levels from `offset` sampler steps above `sigma` down to `sigma`.

    Levels between two grid points keep their relative position between neighbours. The path starts
    at most at pure noise, with a shorter first step. Empty if no noisier level exists.

    Args:
        grid: the sampler's noise levels, descending to 0.
    """
    rising = grid[::-1]
    indices = np.arange(len(grid), dtype=float)
    # Positions on the grid may be fractions: 2.5 is halfway between the levels 2 and 3.
    position = float(np.interp(sigma, rising, indices))
    noisiest = indices[-1]
    positions = {min(position + step, noisiest) for step in range(1, offset + 1)}
    levels = np.interp(sorted(positions, reverse=True), indices, rising)
    levels = levels.clip(max=LARGEST_SIGMA).tolist()
    path = [level for level in levels if level > sigma]
    if not path:
        return []
    return [*path, sigma]


def content_weights(change: Tensor, coverage: Tensor | None, alpha: float) -> Tensor:
    """`1 + alpha change / mean(change)`, `B C F H W`; the mean is over what the loss covers.

    Args:
        change: of the prediction, at least 0, `B C F H W`.
        coverage: weight of each position in the loss, broadcastable to `B 1 F H W`, or None.
    """
    limits = torch.finfo(change.dtype)
    covered = torch.ones_like(change[:, :1])
    if coverage is not None:
        covered = coverage.expand_as(change[:, :1])
    means = per_sample(change * covered) / per_sample(covered).clamp_min(limits.tiny)
    # Clamped: if nothing is covered, an infinite weight times a loss of 0 would be NaN.
    return 1 + alpha * change / _per_latent(means.clamp_min(limits.eps))


def misdirections(noisy: NoisyBatch, prediction: Tensor) -> Tensor:
    """Squared distance of two unit vectors: the prediction, and from data to input; `B`.

    In [0, 4]. Only positions that the loss covers count; a conditioning first frame has no
    direction.
    """
    away = noisy.noisy_latents - noisy.batch.latents
    if noisy.coverage is not None:
        covered = noisy.coverage > 0
        prediction = prediction * covered
        away = away * covered
    # |a - b|^2 = 2 - 2 ab for unit vectors.
    return 2 - 2 * cosine_similarity(prediction.flatten(1), away.flatten(1), dim=1)


def _per_latent(values: Tensor) -> Tensor:
    """Reshape one value per sample, `B`, to broadcast with latents."""
    return values.view(-1, 1, 1, 1, 1)
