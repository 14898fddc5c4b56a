"""CREPA: aligns hidden states of a block, frame by frame, with the features of a frozen teacher.

Hwang et al., "Cross-Frame Representation Alignment for Fine-Tuning Video Diffusion Models", arXiv
2506.09229. With a frame f, the teacher's features y, the block's tokens h, a trained projector phi,
and sim the mean cosine over the positions of a frame:

    score(f) = sim(y_f, phi(h_f)) + sum over k of exp(-|k - f| / tau) * sim(y_k, phi(h_f))
    loss     = -weight * mean over f of score(f)

The sum runs over the neighbours k of frame f.

The teacher is a vision encoder (`techniques.teacher`) or a later block.

Tokens are first put back on the grid of their frames, whatever their order in the blocks. Tokens
that a TREAD route drops are missing from the grid and excluded from every mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from simpletuner.caching.catalogue import FeatureKind
from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.diffusion.batch import NoisyBatch, upload
from simpletuner.models.adapter import FamilyAdapter, LatentEncoder
from simpletuner.planning.techniques.crepa import CrepaSpec, TeacherFeatures
from simpletuner.techniques.base import FeatureEncoder, Predict, Site, Technique
from simpletuner.techniques.teacher import load_teacher

FEATURES = "crepa"


@dataclass(frozen=True)
class Grid:
    """Tokens on the grid of their frames.

    Attributes:
        values: `B F h w D`; zero at positions without a token.
        present: 1 at positions with a token, else 0; `B F h w`.
    """

    values: Tensor
    present: Tensor

    def mean(self) -> Tensor:
        """The mean over the tokens of each frame, `B F 1 1 D`."""
        # A route may leave a frame without tokens.
        count = self.present.sum((2, 3)).clamp(min=1)
        total = (self.values * self.present[..., None]).sum((2, 3), keepdim=True)
        return total / count[..., None, None, None]

    def pooled(self) -> Grid:
        """The grid of frame means, one token per frame."""
        return Grid(self.mean(), self.present.amax((2, 3), keepdim=True))

    def unit(self) -> Grid:
        """The grid with every token scaled to unit length."""
        return replace(self, values=normalize(self.values, dim=-1))


@dataclass(frozen=True)
class Alignment:
    """Alignment of the frames of a batch; tensors `B F`.

    Attributes:
        total: weighted sum of similarities to the teacher's features of the same frame and its
            neighbours.
        weights: sum of the weights; 0 for a frame without tokens.
        own: similarity to the features of the same frame only.
    """

    total: Tensor
    weights: Tensor
    own: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the frames with tokens, then over samples."""
        frames = (self.weights > 0).sum(1).clamp(min=1)
        return (values.sum(1) / frames).mean()

    @property
    def score(self) -> Tensor:
        """`total` per weight: at most 1, unlike the sum."""
        return self.total / self.weights.clamp(min=1e-6)


def align(student: Grid, teacher: Grid, neighbours: Mapping[int, float]) -> Alignment:
    """Compare unit tokens of a student and a teacher.

    Args:
        neighbours: weights by frame offset; 0 is the frame itself.
    """
    own, exists = similarity(student, teacher, 0)
    total = own
    weights = exists
    for shift, weight in neighbours.items():
        similar, exists = similarity(student, teacher, shift)
        total = total + weight * similar
        weights = weights + weight * exists
    return Alignment(total, weights, own)


def similarity(student: Grid, teacher: Grid, shift: int) -> tuple[Tensor, Tensor]:
    """The mean cosine of each frame with the teacher's frame `shift` later.

    Returns:
        the mean, and 1 if that frame exists, else 0; both `B F`.
    """
    frames = student.values.shape[1]
    # The frames that have such a neighbour: all but the first for shift -1, all but the last for 1.
    before = max(-shift, 0)
    after = max(shift, 0)
    frame = slice(before, frames - after)
    neighbour = slice(after, frames - before)
    both = student.present[:, frame] * teacher.present[:, neighbour]
    cosines = (student.values[:, frame] * teacher.values[:, neighbour]).sum(-1)
    count = both.sum((2, 3))
    mean = (cosines * both).sum((2, 3)) / count.clamp(min=1)
    # A frame at the end of the clip has no such neighbour: similarity 0 with weight 0.
    return pad(mean, (before, after)), pad((count > 0).float(), (before, after))


def neighbours_of(config: CrepaConfig, frames: int) -> dict[int, float]:
    """Weights by frame offset, before and after, within a clip of this many frames."""
    furthest = min(config.crepa_adjacent_distance, frames - 1)
    if furthest == 0:
        return {}
    # With distance 2: offsets -2 and 2; cumulative: -1, 1, -2 and 2.
    first = 1 if config.crepa_cumulative_neighbors else furthest
    weights: dict[int, float] = {}
    for distance in range(first, furthest + 1):
        weight = math.exp(-distance / config.crepa_adjacent_tau)
        weights[-distance] = weight
        weights[distance] = weight
    return weights


class Crepa(Technique):
    """Adds the alignment loss."""

    def __init__(self, spec: CrepaSpec) -> None:
        self.spec = spec
        self.config = spec.config
        self.width = spec.width
        self._average: Tensor | None = None
        self._is_off = False
        self._log: dict[str, Tensor] = {}

    @classmethod
    def load_encoder(
        cls,
        kind: FeatureKind,
        adapter: FamilyAdapter,
        load_vae: Callable[[], LatentEncoder],
        device: torch.device,
    ) -> FeatureEncoder:
        assert isinstance(kind, TeacherFeatures)
        return load_teacher(kind.encoder, kind.config, adapter, load_vae, device)

    def attach(self, site: Site) -> None:
        super().attach(site)
        config = self.config
        self._student = config.crepa_block_index or 0
        self._teacher = config.crepa_teacher_block_index or 0
        site.hidden.watch(self._student)
        if config.from_backbone:
            site.hidden.watch(self._teacher)
        inner = site.layout.width
        # Features of a block are as wide as the model.
        outer = inner if config.from_backbone else self.width
        self._project: nn.Module = nn.Sequential(nn.LayerNorm(inner), nn.Linear(inner, outer))
        # With cached features, neither encoder nor VAE is needed on the device.
        self._encoders = []
        for kind in self.spec.features:
            if not kind.is_cached:
                encoder = self.load_encoder(
                    kind, site.adapter, site.load_latent_encoder, site.device
                )
                self._encoders.append(encoder)

    def module(self) -> nn.Module:
        return self._project

    def adopt(self, module: nn.Module) -> None:
        self._project = module

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        """Set the weight of this micro-step, and compute uncached features.

        Before the forward pass, whose activations take memory.
        """
        step = noisy.place_for("CREPA").global_step
        cutoff = self.config.crepa_cutoff_step
        self._scheduled = 0.0
        if noisy.batch.dataset_id not in self.spec.regularised:
            self._scheduled = scheduled_weight(self.config, step, self.spec.total_steps)
        self._follow_threshold()
        self._is_cut = self._is_off or 0 < cutoff <= step
        if not self._encoders or not self._measures:
            return noisy
        encoded = [
            encoder.encode(latent) for encoder in self._encoders for latent in noisy.batch.latents
        ]
        features = {**noisy.batch.features, FEATURES: encoded}
        return replace(noisy, batch=replace(noisy.batch, features=features))

    @property
    def _measures(self) -> bool:
        """Whether to compute the similarity in this micro-step.

        For the loss or, while that is off, to see whether it falls below the threshold again.
        """
        if self._scheduled <= 0:
            return False
        return not self._is_off or self.config.crepa_threshold_mode == "recoverable"

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        weight = 0.0 if self._is_off else self._scheduled
        self._log = {
            "crepa_weight": torch.tensor(weight),
            "crepa_cutoff": torch.tensor(float(self._is_cut)),
        }
        if self._measures:
            # At weight 0, only the score is needed: a recoverable cutoff ends when it falls.
            with nullcontext() if weight > 0 else torch.no_grad():
                loss = self._measure(noisy)
            if weight > 0:
                return {"crepa_loss": weight * loss}
        # Gradient synchronisation requires the projector in every step.
        token = torch.zeros(1, 1, 1, 1, self.site.layout.width, device=prediction.device)
        return {"crepa_loss": 0.0 * self._project(token).sum()}

    def metrics(self) -> Mapping[str, Tensor]:
        return self._log

    def state_dict(self) -> dict[str, Any]:
        return {
            "average": None if self._average is None else self._average.item(),
            "off": self._is_off,
            "threshold": self.config.crepa_similarity_threshold,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        average = state["average"]
        threshold = self.config.crepa_similarity_threshold
        # A cutoff belongs to its threshold: another one decides anew, and without one nothing is
        # cut off.
        is_same = state.get("threshold", threshold) == threshold  # older states lack it
        self._is_off = state["off"] and is_same and threshold is not None
        self._average = None if average is None else torch.tensor(average, device=self.site.device)

    def _follow_threshold(self) -> None:
        """Switch off at the threshold, and on again below it unless the cutoff is permanent."""
        threshold = self.config.crepa_similarity_threshold
        if threshold is not None and self._average is not None:
            stays_off = self._is_off and self.config.crepa_threshold_mode == "permanent"
            # `item` synchronises, once per micro-step and only with a threshold.
            self._is_off = stays_off or self._average.item() >= threshold

    def _measure(self, noisy: NoisyBatch) -> Tensor:
        """The alignment loss before its weight."""
        config = self.config
        student = self._tokens(noisy, self._student)
        student = replace(student, values=self._project(student.values))
        teacher = self._features(noisy)
        if not config.crepa_spatial_align:
            student = student.pooled()
            teacher = teacher.pooled()
        frames = student.values.shape[1]
        alignment = align(student.unit(), teacher.unit(), neighbours_of(config, frames))
        self._record(alignment)
        score = alignment.score if config.crepa_normalize_neighbour_sum else alignment.total
        if config.crepa_normalize_by_frames:
            return -alignment.mean(score)
        return -score.sum(1).mean()  # the paper's plain sum over the frames

    def _record(self, alignment: Alignment) -> None:
        """Update the moving average and the logged metrics."""
        score = alignment.mean(alignment.score.detach())
        decay = self.config.crepa_similarity_ema_decay
        world = self.site.world
        if world.size > 1 and self.config.crepa_similarity_threshold is not None:
            # All processes must decide alike about the threshold.
            score = score.new_tensor(world.mean([score.item()])[0])
        if self._average is None:
            self._average = score  # from 0, the threshold would be reached too late
        else:
            self._average = decay * self._average + (1 - decay) * score
        self._log |= {
            "crepa_alignment_score": score,
            "crepa_alignment_score_ema": self._average,
            "crepa_alignment_sum": alignment.mean(alignment.total.detach()),
            "crepa_similarity_self": alignment.mean(alignment.own.detach()),
        }

    @torch.no_grad()
    def _features(self, noisy: NoisyBatch) -> Grid:
        """The teacher's features `B F h w E`."""
        if self.config.from_backbone:
            return self._tokens(noisy, self._teacher)
        features = torch.stack(noisy.batch.features[FEATURES]).float()
        return Grid(features, torch.ones_like(features[..., 0]))

    def _tokens(self, noisy: NoisyBatch, block: int) -> Grid:
        """The hidden states of a block on the grid, float32."""
        hidden = self.site.hidden[block].float()
        patch = self.site.adapter.spec.patch_size
        frames, height, width = noisy.noisy_latents.shape[2:]
        grid = frames, height // patch, width // patch
        order = upload(self.site.layout.order(*grid), hidden.device)
        kept = self.site.kept_tokens(block)
        positions = order.expand(len(hidden), -1) if kept is None else order[kept]  # B S
        values = hidden.new_zeros(len(hidden), math.prod(grid), hidden.shape[-1])
        values = values.scatter(1, positions[..., None].expand_as(hidden), hidden)
        present = torch.zeros_like(values[..., 0]).scatter(1, positions, 1.0)
        return Grid(values.unflatten(1, grid), present.unflatten(1, grid))


def scheduled_weight(crepa: CrepaConfig, step: int, total_steps: int) -> float:
    """The scheduled weight after `step` optimizer steps.

    Linear warm-up, decay, and 0 from the cutoff on. The decay runs from the end of the warm-up to
    `crepa_decay_steps`, both counted from step 0.
    """
    start = crepa.crepa_lambda
    end = crepa.crepa_lambda_end
    warmup = crepa.crepa_warmup_steps
    if 0 < crepa.crepa_cutoff_step <= step:
        return 0.0
    if step < warmup:
        return start * step / warmup
    length = max((crepa.crepa_decay_steps or total_steps) - warmup, 1)
    remaining = 1 - min((step - warmup) / length, 1.0)  # of the decay: 1 at its start, 0 at its end
    match crepa.crepa_scheduler:
        case "linear":
            return end + (start - end) * remaining
        case "cosine":
            return end + (start - end) * (1 - math.cos(math.pi * remaining)) / 2
        case "polynomial":
            return end + (start - end) * float(remaining**crepa.crepa_power)
        case "constant":
            return start
