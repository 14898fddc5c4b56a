"""Flow matching: samples noise levels, adds noise to a batch, and computes the loss of the
predicted velocity.

All families train on `x_s = (1 - s) z + s noise` with the target `noise - z` and the timestep
`1000 s`, s in (0, 1], where 1 is pure noise. All arithmetic is float32 or float64; a bf16 sigma
would be off by up to 0.4 %. Random numbers are drawn on the CPU and then moved, so that a seed
gives the same numbers on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from simpletuner.config.loss import LossConfig
from simpletuner.config.schema import FlowConfig
from simpletuner.diffusion.batch import Batch, NoisyBatch, upload
from simpletuner.diffusion.seeds import Place

# Below this, the noise is rounded away in the float32 mix.
SMALLEST_SIGMA = 1e-6


def sample_sigmas(place: Place, flow: FlowConfig, shift: float, offset: float = 0.0) -> Tensor:
    """Noise levels of one micro-batch.

    Uniform numbers go through the inverse CDF of the chosen distribution (logit-normal, uniform or
    beta), then through `shift_sigmas`. Segmented sampling gives each sample of the group (the
    micro-batch of all processes) its own slice of equal probability, in shuffled order, so that
    every group covers the schedule; a single sample still follows the distribution exactly.

    Args:
        shift: factor k of the schedule, see `choose_shift`.
        offset: added before the sigmoid of the logit-normal; above 0, samples are noisier.

    Returns:
        sigmas in (0, 1], float32, `B`, on the CPU.
    """
    # float64, since float32 would round shares close to 1 to 1, whose logit-normal quantile is
    # infinite.
    shares = torch.cat(
        [torch.rand(1, generator=draw, dtype=torch.float64) for draw in place.generators("sigmas")]
    )
    if not flow.disable_segmented_timestep_sampling:
        # One permutation for all processes, so that no two samples of the group share a slice.
        slices = torch.randperm(place.group, generator=place.shared_generator("slices"))[
            list(place.slots)
        ]
        shares = (slices + shares) / place.group
    return (
        shift_sigmas(law_quantiles(shares, flow, offset), shift).clamp(SMALLEST_SIGMA, 1.0).float()
    )


def law_quantiles(shares: Tensor, flow: FlowConfig, offset: float = 0.0) -> Tensor:
    """Quantiles of the chosen distribution: its inverse CDF at `shares`; float64, same shape.

    Logit-normal is sigmoid(offset + flow_sigmoid_scale * standard normal), as in Esser et al.,
    arXiv 2403.03206, section 3.1; the other distributions ignore the offset.
    """
    if flow.flow_use_uniform_schedule:
        return shares
    if flow.flow_use_beta_schedule:
        alpha = flow.flow_beta_schedule_alpha
        beta = flow.flow_beta_schedule_beta
        return torch.tensor(
            [beta_quantile(share, alpha, beta) for share in shares.tolist()], dtype=torch.float64
        )
    return torch.sigmoid(offset + flow.flow_sigmoid_scale * torch.special.ndtri(shares))


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """`k s / (1 + (k - 1) s)`: k > 1 shifts the schedule towards noise, k = 1 is the identity; 0
    and 1 are fixed.
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def choose_shift(
    flow: FlowConfig, tokens: int, auto_shift: Callable[[int], float], *, shift_is_explicit: bool
) -> float:
    """The shift for samples of `tokens` tokens.

    Args:
        auto_shift: the family's shift as a function of the token count, for
            `flow_schedule_auto_shift`.
        shift_is_explicit: the user set `flow_schedule_shift`, which overrides
            `flow_schedule_auto_shift`.
    """
    if flow.flow_schedule_auto_shift and not shift_is_explicit:
        return auto_shift(tokens)
    return 1.0 if flow.flow_schedule_shift is None else flow.flow_schedule_shift


def sample_noise(latents: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Standard normal noise like `latents`, float32, drawn on the CPU with one generator per
    sample, then moved.
    """
    shape = latents.shape[1:]
    return upload(
        torch.stack([torch.randn(shape, generator=generator) for generator in generators]),
        latents.device,
    )


def make_noisy(
    batch: Batch,
    sigmas: Tensor,
    noise: Tensor,
    loss: LossConfig = LossConfig(),
    place: Place | None = None,
) -> NoisyBatch:
    """Mix a batch with noise.

    `noise_offset` shifts the mean of the noise per sample and channel, in both input and target (N.
    Guttenberg, "Diffusion with Offset Noise", 2023), with `noise_offset_probability` per sample.
    `input_perturbation` adds fresh noise of that strength to the noise in the input only (Ning et
    al., arXiv 2301.11706).

    Args:
        sigmas: `B`, in (0, 1], on any device.
        noise: standard normal, shape of `batch.latents`.
        loss: strengths of noise offset and input perturbation.
        place: position in the run; required for random numbers of `loss` and of techniques.
    """
    latents = batch.latents.float()
    noise = upload(noise.float(), latents.device)
    in_input = noise
    if loss.noise_offset or loss.input_perturbation:
        if place is None:
            raise ValueError(
                "noise_offset and input_perturbation draw random numbers: pass the position "
                "in the run"
            )
        # Both draw from the same generators, so the order of the draws matters.
        generators = place.generators("perturbation")
        if loss.noise_offset:
            draws = (torch.rand(1, generator=draw) for draw in place.generators("offset"))
            shifted = [draw < loss.noise_offset_probability for draw in draws]
            strength = loss.noise_offset * upload(
                torch.cat(shifted).view(-1, 1, 1, 1, 1), latents.device
            )
            in_input = noise = noise + strength * sample_noise(
                latents[..., :1, :1, :1], generators
            )  # B C 1 1 1
        if perturbation := loss.input_perturbation_at(place.global_step):
            in_input = noise + perturbation * sample_noise(latents, generators)
    sigmas = upload(sigmas.float(), latents.device)
    share = sigmas.view(-1, 1, 1, 1, 1)
    return NoisyBatch(
        batch=batch,
        noise=noise,
        sigmas=sigmas,
        noisy_latents=(1 - share) * latents + share * in_input,
        timesteps=1000 * sigmas,
        target=noise - latents,
        place=place,
    )


TINY = 1e-300  # in place of a zero denominator in Lentz's method
BISECTIONS = 60  # of [0, 1], to the limit of double precision


# torch has no inverse of the incomplete beta function, and scipy is not a dependency.
def beta_quantile(share: float, alpha: float, beta: float) -> float:
    """Quantile of Beta(alpha, beta): the x with `beta_cdf(x) = share`, by bisection."""
    low = 0.0
    high = 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if beta_cdf(middle, alpha, beta) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def beta_cdf(x: float, alpha: float, beta: float) -> float:
    """The regularised incomplete beta function I_x(alpha, beta), for alpha and beta > 0.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22 (continued fraction) and 8.17.4
    (symmetry).
    """
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    # The fraction converges quickly only below the mean; above it, use the symmetry.
    if x > (alpha + 1) / (alpha + beta + 2):
        return 1 - beta_cdf(1 - x, beta, alpha)
    log_front = alpha * math.log(x) + beta * math.log1p(-x)
    log_front += math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return math.exp(log_front) / (alpha * _continued_fraction(x, alpha, beta))


def _continued_fraction(
    x: float, a: float, b: float, limit: int = 1000, tolerance: float = 1e-15
) -> float:
    """1 + d1/(1 + d2/(1 + ...)) of DLMF 8.17.22, evaluated forwards by Lentz's method."""
    value = numerators = 1.0
    denominators = 0.0
    for n in range(1, limit):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominators = 1 / ((1 + d * denominators) or TINY)
        numerators = (1 + d / numerators) or TINY
        value *= numerators * denominators
        if abs(numerators * denominators - 1) < tolerance:
            break
    return value


def hold_first_frame(noisy: NoisyBatch) -> NoisyBatch:
    """Replace frame 0 with the condition, exclude it from the loss and protect it.

    The loss stays a mean over the remaining frames, which have the weight F / (F - 1). Clips of one
    frame and batches without a condition are returned unchanged.
    """
    condition = noisy.batch.condition
    frames = noisy.noisy_latents.shape[2]
    if condition is None or frames == 1:
        return noisy
    noisy_latents = torch.cat(
        [condition.to(noisy.noisy_latents), noisy.noisy_latents[:, :, 1:]], dim=2
    )
    first = (torch.arange(frames) == 0).view(1, 1, -1, 1, 1)
    weights = upload(torch.where(first, 0.0, frames / (frames - 1)), noisy_latents.device)
    # All frames depend on the first, so techniques that drop tokens must keep all of it.
    return replace(noisy, noisy_latents=noisy_latents, frame_weights=weights, protected=first)


def diffusion_loss(prediction: Tensor, noisy: NoisyBatch, config: LossConfig) -> Tensor:
    """Mean loss per sample: float32, `B`. See `elementwise_loss`."""
    return per_sample(elementwise_loss(prediction, noisy, config))


def per_sample(loss: Tensor) -> Tensor:
    """Mean per sample, `B`, of an elementwise loss `B C F H W`."""
    return loss.mean(dim=(1, 2, 3, 4))


def elementwise_loss(prediction: Tensor, noisy: NoisyBatch, config: LossConfig) -> Tensor:
    """The elementwise loss of a prediction.

    huber and smooth_l1 are the pseudo-Huber loss of Khrapov et al., arXiv 2403.16728. With the
    error d and the scale c, huber = 2c (sqrt(d^2 + c^2) - c), which is d^2 for small d and 2c|d|
    for large d; smooth_l1 = huber / c.

    A mask and frame weights multiply the loss of each position, and the mean is still taken over
    all positions: black areas contribute nothing, a mask of ones changes nothing, and an all-black
    mask gives 0, not NaN.

    Args:
        prediction: prediction of `noisy.target`, any float dtype, `B C F H W`.

    Returns:
        float32, `B C F H W`.
    """
    error = prediction.float() - noisy.target.float()
    if config.loss_type == "l2":
        loss = error.square()
    else:
        scale = huber_scales(noisy.sigmas, config).view(-1, 1, 1, 1, 1)
        # d^2 / (sqrt(d^2 + c^2) + c) equals sqrt(d^2 + c^2) - c, without cancellation for small d.
        rise = error.square() / ((error.square() + scale.square()).sqrt() + scale)
        loss = 2 * scale * rise if config.loss_type == "huber" else 2 * rise
    return loss if noisy.coverage is None else loss * noisy.coverage


def huber_scales(sigmas: Tensor, config: LossConfig) -> Tensor:
    """The scale c per sample; float32, `B`.

    The schedules of arXiv 2403.16728 for flow matching, with c0 = `huber_c`: exponential is exp(s
    log c0), from 1 without noise to c0 at pure noise. snr is (1 - c0) / (1 + r)^2 + c0 with the
    noise-to-signal ratio r = s / (1 - s), so that 1 / (1 + r) = 1 - s.
    """
    c = config.huber_c
    sigmas = sigmas.float()
    if config.huber_schedule == "constant":
        return torch.full_like(sigmas, c)
    if config.huber_schedule == "exponential":
        return torch.pow(c, sigmas)
    return (1 - c) * (1 - sigmas).square() + c
