"""Masked loss: white areas of a mask are learned, black areas are not, grey areas in proportion.

A batch's mask is at latent resolution (`data.masks`), and `diffusion.flow` multiplies the loss by
it. This module turns the mask into weights: in a share of the batches, with a floor for black
areas, and optionally divided by the mean. TREAD never drops tokens in white areas.

The prior adds `w (1 - m) (v - v_base)^2` with the base model's prediction, so black areas stay as
before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from simpletuner.config.loss import LossConfig
from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.diffusion.flow import elementwise_loss
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.techniques.base import Predict, Technique

# Lower bound of the divisor: a tiny mask would otherwise give a huge gradient.
SMALLEST_MEAN = 0.05


class MaskedLoss(Technique):
    """Turns masks into loss weights, in a share of the batches."""

    def __init__(self, spec: MaskedLossSpec) -> None:
        self._config = spec.config
        self._prior: NoisyBatch | None = None

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        self._prior = None
        mask = noisy.batch.loss_mask
        if mask is None:
            return noisy
        if not noisy.is_drawn(self._config.masked_loss_probability, "masked loss"):
            return _masked(noisy, None)
        if self._config.masked_loss_prior:
            with self.site.disabled():
                self._prior = replace(_masked(noisy, 1 - mask), target=predict(noisy))
        # Routes must keep positions that are at least half white. They need them on the CPU, where
        # batches keep a copy of the mask.
        host_mask = mask if noisy.batch.host_mask is None else noisy.batch.host_mask
        protected = host_mask >= 0.5
        if noisy.protected is not None:
            protected = protected | noisy.protected.to(protected.device)
        weighted = _masked(noisy, self._weights(mask, noisy.frame_weights))
        return replace(weighted, protected=protected)

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        if self._prior is None:
            return {}
        distance = elementwise_loss(prediction, self._prior, LossConfig()).mean()
        return {"masked_prior_loss": self._config.masked_loss_prior * distance}

    def _weights(self, mask: Tensor, frame_weights: Tensor | None) -> Tensor:
        """The weight of each position, `B 1 F H W`."""
        floor = self._config.masked_loss_floor
        weights = floor + (1 - floor) * mask
        if not self._config.masked_loss_normalise:
            return weights
        # A conditioning first frame has weight 0, so its mask must not count in the mean.
        counted = weights if frame_weights is None else weights * frame_weights
        return weights / counted.mean(dim=(1, 2, 3, 4), keepdim=True).clamp(min=SMALLEST_MEAN)


def _masked(noisy: NoisyBatch, mask: Tensor | None) -> NoisyBatch:
    return replace(noisy, batch=replace(noisy.batch, loss_mask=mask))
