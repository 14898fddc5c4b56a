"""Flow matching: noise levels, noisy inputs, and the loss of the predicted velocity.

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
    draws = [
        torch.rand(1, generator=generator, dtype=torch.float64)
        for generator in place.generators("sigmas")
    ]
    shares = torch.cat(draws)
    if not flow.disable_segmented_timestep_sampling:
        # Slice k of n covers the shares [k / n, (k + 1) / n). One permutation for all processes,
        # so that no two samples of the group get the same slice.
        permutation = torch.randperm(place.group, generator=place.shared_generator("slices"))
        slices = permutation[list(place.slots)]
        shares = (slices + shares) / place.group
    sigmas = shift_sigmas(law_quantiles(shares, flow, offset), shift)
    return sigmas.clamp(SMALLEST_SIGMA, 1.0).float()


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
        quantiles = [beta_quantile(share, alpha, beta) for share in shares.tolist()]
        return torch.tensor(quantiles, dtype=torch.float64)
    # `ndtri` is the inverse CDF of the standard normal distribution.
    return torch.sigmoid(offset + flow.flow_sigmoid_scale * torch.special.ndtri(shares))


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """`k s / (1 + (k - 1) s)`: k > 1 shifts the schedule towards noise, k = 1 is the identity.

    0 and 1 stay where they are.
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
    if flow.flow_schedule_shift is None:
        return 1.0  # the identity
    return flow.flow_schedule_shift


def sample_noise(latents: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Standard normal noise of the shape of `latents`, float32, with one generator per sample.

    It is drawn on the CPU and moved to the device of `latents`.
    """
    shape = latents.shape[1:]
    draws = [torch.randn(shape, generator=generator) for generator in generators]
    return upload(torch.stack(draws), latents.device)


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
    noise, input_noise = _changed_noise(latents, noise, loss, place)
    sigmas = upload(sigmas.float(), latents.device)
    share = sigmas.view(-1, 1, 1, 1, 1)
    return NoisyBatch(
        batch=batch,
        noise=noise,
        sigmas=sigmas,
        noisy_latents=(1 - share) * latents + share * input_noise,
        timesteps=1000 * sigmas,
        target=noise - latents,
        place=place,
    )


def _changed_noise(
    latents: Tensor, noise: Tensor, loss: LossConfig, place: Place | None
) -> tuple[Tensor, Tensor]:
    """The noise with its offset, for the target, and the same perturbed, for the input.

    Raises:
        ValueError: random numbers are needed, and there is no position in the run.
    """
    if not loss.noise_offset and not loss.input_perturbation:
        return noise, noise
    if place is None:
        raise ValueError(
            "noise_offset and input_perturbation draw random numbers: pass the position in the run"
        )
    # Offset and perturbation draw from the same generators, so the offset comes first: the order
    # of the draws decides the numbers.
    generators = place.generators("perturbation")
    if loss.noise_offset:
        noise = noise + _noise_offset(latents, loss, place, generators)
    perturbation = loss.input_perturbation_at(place.global_step)
    if not perturbation:
        return noise, noise
    return noise, noise + perturbation * sample_noise(latents, generators)


def _noise_offset(
    latents: Tensor, loss: LossConfig, place: Place, generators: Sequence[torch.Generator]
) -> Tensor:
    """The shift of every channel's mean, `B C 1 1 1`; 0 for samples that are not chosen."""
    is_shifted = [
        torch.rand(1, generator=generator) < loss.noise_offset_probability
        for generator in place.generators("offset")
    ]
    chosen = upload(torch.cat(is_shifted).view(-1, 1, 1, 1, 1), latents.device)
    one_position = latents[..., :1, :1, :1]
    return loss.noise_offset * chosen * sample_noise(one_position, generators)


# torch has no incomplete beta function and no inverse of it, and scipy is not a dependency. The
# beta schedule needs the inverse for one number per sample and step, so a slow and exact method
# will do: bisection of the CDF, which is a continued fraction.

BISECTIONS = 60  # halve [0, 1] beyond the 53 bits of a double
TINY = 1e-300  # in place of a zero denominator in Lentz's method


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

    I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) / fraction, with the beta function B(a, b) =
    gamma(a) gamma(b) / gamma(a + b).

    Source: NIST Digital Library of Mathematical Functions, 8.17.22 (continued fraction) and 8.17.4
    (symmetry).
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    # The fraction converges quickly only for x below about the mean of the distribution. Above it,
    # the symmetry I_x(a, b) = 1 - I_{1-x}(b, a) leads back below.
    if x > (alpha + 1) / (alpha + beta + 2):
        return 1 - beta_cdf(1 - x, beta, alpha)
    # In logarithms, since powers and gamma functions leave the range of doubles.
    log_front = alpha * math.log(x) + beta * math.log1p(-x)
    log_front += math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return math.exp(log_front) / (alpha * _continued_fraction(x, alpha, beta))


def _continued_fraction(
    x: float, a: float, b: float, limit: int = 1000, tolerance: float = 1e-15
) -> float:
    """1 + d1/(1 + d2/(1 + ...)) of DLMF 8.17.22, evaluated forwards by Lentz's method.

    Let A_n / B_n be the fraction cut off after d_n. Both A and B obey the recurrence
    A_n = A_{n-1} + d_n A_{n-2} and may overflow, so the method (Lentz 1976, modified by Thompson
    and Barnett) keeps only the ratios of neighbours: A_n / A_{n-1} (`numerators`) and
    B_{n-1} / B_n (`denominators`). Their product is the factor from one value to the next, and
    the value has converged when it is 1.
    """
    value = 1.0
    numerators = 1.0
    denominators = 0.0
    for n in range(1, limit):
        m = n // 2
        if n % 2:  # d_{2m+1}
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:  # d_{2m}
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        # A ratio of exactly 0 would be divided by in the next round.
        denominators = 1 / ((1 + d * denominators) or TINY)
        numerators = (1 + d / numerators) or TINY
        factor = numerators * denominators
        value *= factor
        if abs(factor - 1) < tolerance:
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
    later_frames = noisy.noisy_latents[:, :, 1:]
    noisy_latents = torch.cat([condition.to(later_frames), later_frames], dim=2)
    is_first = (torch.arange(frames) == 0).view(1, 1, -1, 1, 1)
    weights = torch.where(is_first, 0.0, frames / (frames - 1))
    return replace(
        noisy,
        noisy_latents=noisy_latents,
        frame_weights=upload(weights, noisy_latents.device),
        # All frames depend on the first, so techniques that drop tokens must keep all of it.
        protected=is_first,
    )


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
    coverage = noisy.coverage
    return loss if coverage is None else loss * coverage


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
