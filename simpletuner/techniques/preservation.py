"""Prior preservation, with other captions or with other pictures.

Preservation needs no data: it keeps the LoRA from changing predictions for other captions. In a
share of the micro-batches, the model predicts the same noisy latents again, with the empty caption
or the class word instead of the trained caption. The loss has an extra term w mean |v - v_base|^2,
where v_base is the prediction without the LoRA. This is the prior preservation of DreamBooth (Ruiz
et al., arXiv 2208.12242) with the base model's predictions instead of generated pictures.

Regularisation data: for datasets marked `is_regularisation_data`, the target is the base model's
prediction (the transformer with its LoRA disabled), so that pictures of the same class do not drift
while a new concept is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.planning.techniques.preservation import PreservationSpec, RegularisationSpec
from simpletuner.techniques.base import ExtraPass, Predict, Technique


class Preservation(Technique):
    """Adds the loss of an extra forward pass to micro-batches with alternative captions."""

    def __init__(self, spec: PreservationSpec) -> None:
        self.weight = spec.weight
        self.probability = spec.probability

    def extra_passes(self, noisy: NoisyBatch) -> Sequence[ExtraPass]:
        embeds = noisy.batch.other_embeds
        if embeds is None or not noisy.is_drawn(self.probability, "preservation"):
            return ()
        with_other_captions = replace(noisy, batch=replace(noisy.batch, embeds=embeds))
        return (partial(self._change, with_other_captions),)

    def _change(self, noisy: NoisyBatch, forward: Predict) -> Mapping[str, Tensor]:
        """`preservation_loss`: the mean over all positions but a conditioning first frame."""
        with torch.no_grad(), self.site.disabled():
            base = forward(noisy)
        change = (forward(noisy) - base)[:, :, noisy.given_frames :]
        return {"preservation_loss": self.weight * change.square().mean()}


class Regularisation(Technique):
    """Replaces the target of samples from some datasets with the base model's prediction."""

    def __init__(self, spec: RegularisationSpec) -> None:
        self.dataset_ids = spec.dataset_ids

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        if noisy.batch.dataset_id not in self.dataset_ids:
            return noisy
        with self.site.disabled():
            return replace(noisy, target=predict(noisy))
