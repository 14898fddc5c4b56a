"""Train the demo's VAE: 96 px pictures to 16 latent channels at an eighth of the size, and back.

    python scripts/demo/train_vae.py OUTPUT_FOLDER [--steps 2200]

The finished VAE has unit-variance, zero-mean latents at the scaling factor of the real model. That
is not trained but measured afterwards and folded into the two 1x1 convolutions around the latents.
As in the Kandinsky pipelines the shift factor stays in the config and is not used.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from muon import Muon, split_parameters
from storage import save_bf16
from torch import Tensor
from torch.nn import functional as F
from world import SIZE, draw, sample

SCALING_FACTOR = 0.3611
SHIFT_FACTOR = 0.1159
LATENT_CHANNELS = 16


def build_vae() -> AutoencoderKL:
    """An `AutoencoderKL` of 0.85 M parameters, eight times smaller latents, 16 channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 48, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=2,
        sample_size=SIZE,
        scaling_factor=SCALING_FACTOR,
        shift_factor=SHIFT_FACTOR,
        mid_block_add_attention=False,
    )


def to_pixels(pictures: np.ndarray) -> Tensor:
    """B H W 3 in 0..255 to B 3 H W in -1..1, channels last in memory for faster convolutions."""
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    return pixels.contiguous(memory_format=torch.channels_last)


def draw_pictures(count: int, seed: int, *, held_out: bool = False) -> np.ndarray:
    """`count` pictures of the world. Shape: B H W 3, uint8."""
    random = np.random.default_rng(seed)
    return np.stack([draw(sample(random, held_out=held_out), random) for _ in range(count)])


def decibels(vae: AutoencoderKL, pictures: np.ndarray) -> float:
    """Peak signal-to-noise ratio of the reconstruction through the latents' mean."""
    with torch.no_grad():
        pixels = to_pixels(pictures)
        latents = vae.encode(pixels).latent_dist.mode()
        restored = vae.decode(latents).sample.clamp(-1, 1)
        error = F.mse_loss(restored, pixels)
    # Pixels lie in -1..1, so the square of the largest difference is 4.
    return 10 * math.log10(4.0 / error.item())


@torch.no_grad()
def fold_statistics(
    vae: AutoencoderKL | AutoencoderKLHunyuanVideo, posterior: DiagonalGaussianDistribution
) -> None:
    """Rescale the latents so that `scaling_factor * z` has mean 0 and variance 1 in every channel.

    With the posterior's moments m, log v and per-channel mean a and deviation b of z, the encoder's
    last 1x1 convolution is changed to yield (m - a) / (b s) and log v - 2 log(b s), and the
    decoder's first one to undo it.
    """
    means = posterior.mean.transpose(0, 1).flatten(1)  # channel, sample
    variances = posterior.var.transpose(0, 1).flatten(1)
    mean = means.mean(dim=1)
    # The variance of a sample is that of the means plus the posterior's own.
    deviation = (means.var(dim=1) + variances.mean(dim=1)).sqrt()
    scale = deviation * vae.config.scaling_factor

    last = vae.quant_conv
    first = vae.post_quant_conv
    last.bias[:LATENT_CHANNELS].sub_(mean).div_(scale)
    last.weight[:LATENT_CHANNELS].transpose(0, -1).div_(scale)
    last.bias[LATENT_CHANNELS:].sub_(2 * scale.log())
    first.bias.add_(first.weight.flatten(1) @ mean)
    first.weight.transpose(1, -1).mul_(scale)


def train_vae(
    steps: int, *, seed: int = 0, batch_size: int = 16, pool_size: int = 16384
) -> AutoencoderKL:
    """Train and fold the statistics. The loss is L1 + L2 + a little Kullback-Leibler."""
    torch.manual_seed(seed)
    vae = build_vae().to(memory_format=torch.channels_last)
    matrices, vectors = split_parameters(vae)
    optimizers = [
        (Muon(matrices), 0.01),
        (torch.optim.AdamW(vectors, betas=(0.9, 0.99), weight_decay=0.0), 3e-3),
    ]
    pool = draw_pictures(pool_size, seed)
    unseen = draw_pictures(64, seed + 1)
    random = np.random.default_rng(seed)

    for step in range(1, steps + 1):
        pixels = to_pixels(pool[random.integers(pool_size, size=batch_size)])
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            restored = vae.decode(posterior.sample()).sample
        error = restored.float() - pixels
        # Kullback-Leibler of the posterior from a standard normal distribution.
        terms = posterior.mean**2 + posterior.var - 1.0 - posterior.logvar
        divergence = 0.5 * terms.float().mean()
        loss = error.abs().mean() + 2.0 * error.square().mean() + 2e-4 * divergence
        loss.backward()
        warmup = min(1.0, step / 50)
        decay = 1 - step / (steps + 1)  # to zero: edges become sharp in the last fifth
        for optimizer, peak_rate in optimizers:
            optimizer.param_groups[0]["lr"] = peak_rate * warmup * decay
            optimizer.step()
            optimizer.zero_grad()
        if step % 200 == 0:
            print(
                f"step {step} loss {loss.item():.4f} kl {divergence.item():.2f} "
                f"{decibels(vae, unseen):.1f} dB"
            )

    with torch.no_grad():
        fold_statistics(vae, vae.encode(to_pixels(pool[:1024])).latent_dist)
    held_out = draw_pictures(64, seed + 2, held_out=True)
    print(
        f"{steps} steps: {decibels(vae, unseen):.1f} dB, purple stars "
        f"{decibels(vae, held_out):.1f} dB"
    )
    return vae


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    save_bf16(train_vae(arguments.steps, seed=arguments.seed), arguments.output)


if __name__ == "__main__":
    main()
