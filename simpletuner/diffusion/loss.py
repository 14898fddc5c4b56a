"""The distance between the predicted and the true velocity, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from simpletuner.config.loss import LossConfig
from simpletuner.diffusion.batch import NoisyBatch


def diffusion_loss(prediction: Tensor, noisy: NoisyBatch, config: LossConfig) -> Tensor:
    """Mean loss of each sample: float32, `B`. See `elementwise_loss`."""
    return per_sample(elementwise_loss(prediction, noisy, config))


def per_sample(loss: Tensor) -> Tensor:
    """The mean of each sample, `B`, of an elementwise loss `B C F H W`."""
    return loss.mean(dim=(1, 2, 3, 4))


def elementwise_loss(prediction: Tensor, noisy: NoisyBatch, config: LossConfig) -> Tensor:
    """The loss of each predicted number.

    If the batch has a mask, or its frames have weights, the loss of each position is multiplied by them, and the mean
    is still taken over all positions: black contributes nothing, a mask of ones changes nothing, and an all-black mask
        gives 0, not NaN.

    Args:
        prediction: of `noisy.target`, any float dtype, `B C F H W`.

    Returns:
        float32, `B C F H W`.
    """
    error = prediction.float() - noisy.target.float()  # B C F H W
    loss = _distance(error, noisy.sigmas, config)
    return loss if noisy.coverage is None else loss * noisy.coverage


def _distance(error: Tensor, sigmas: Tensor, config: LossConfig) -> Tensor:
    """Elementwise distance, not reduced.

    Both Huber kinds are the pseudo-Huber of Khrapov et al., arXiv 2403.16728: with d the error and c the scale,
    huber = 2c (sqrt(d^2 + c^2) - c), which is d^2 for small d and 2c|d| for large d; smooth_l1 = huber / c.
    """
    if config.loss_type == "l2":
        return error.square()
    scale = huber_scales(sigmas, config).view(-1, 1, 1, 1, 1)
    # d^2 / (sqrt(d^2 + c^2) + c) equals sqrt(d^2 + c^2) - c, without cancellation for small d.
    rise = error.square() / ((error.square() + scale.square()).sqrt() + scale)
    return 2 * scale * rise if config.loss_type == "huber" else 2 * rise


def huber_scales(sigmas: Tensor, config: LossConfig) -> Tensor:
    """The scale c of each sample; float32, `B`.

    The schedules of arXiv 2403.16728 for flow matching, with c0 = `huber_c`: exponential is exp(s log c0), which is 1
    without noise and c0 at pure noise. snr is (1 - c0) / (1 + r)^2 + c0 with the noise-to-signal ratio r, which is
    s / (1 - s) here, so that 1 / (1 + r) = 1 - s.
    """
    c = config.huber_c
    sigmas = sigmas.float()
    if config.huber_schedule == "constant":
        return torch.full_like(sigmas, c)
    if config.huber_schedule == "exponential":
        return torch.pow(c, sigmas)
    return (1 - c) * (1 - sigmas).square() + c
