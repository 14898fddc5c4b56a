"""Train the video demo's VAE: clips of 17 frames to 5 latent frames of 16 channels, and back.

    python scripts/demo/train_video_vae.py PICTURE_VAE OUTPUT_FOLDER [--steps N] [--decoder-steps M]

Latent frames have an eighth of the size. Training starts from the picture demo's VAE: the last
temporal tap of each causal convolution gets the 2D weights, so that before the first step every
frame is coded as a picture. The first leg trains all weights. Then the latents are scaled to unit
variance and the encoder is frozen; the second leg sharpens the decoder. A transformer can be
trained on the latents as soon as the first leg has ended.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from muon import Muon, split_parameters
from storage import save_bf16
from torch import Tensor
from torch.nn import functional as F
from train_vae import fold_statistics
from video_world import draw_any

SAVE_EVERY = 100


def build_vae(pictures: AutoencoderKL) -> AutoencoderKLHunyuanVideo:
    """An `AutoencoderKLHunyuanVideo` of 2.5 M parameters with the weights of `pictures`.

    The kernels are mirrored in both directions: the strided convolutions of this VAE read the
    pixels 2i - 1 to 2i + 1, those of the picture VAE 2i to 2i + 2, which is the same seen in a
    mirror.
    """
    shared = {
        name: pictures.config[name]
        for name in ("block_out_channels", "layers_per_block", "norm_num_groups")
    }
    vae = AutoencoderKLHunyuanVideo(**shared, mid_block_add_attention=False)
    flat = pictures.state_dict()
    for name, weight in vae.state_dict().items():
        source = flat[name.replace(".conv.weight", ".weight").replace(".conv.bias", ".bias")]
        if weight.ndim == 5:
            weight.zero_()
            weight[:, :, -1] = source.flip(-1, -2)
        else:
            weight.copy_(source)
    return vae


def to_pixels(clips: np.ndarray) -> Tensor:
    """B F H W 3 in 0..255 to B 3 F H W in -1..1."""
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float().contiguous() / 127.5 - 1.0


def draw_clips(count: int, random: np.random.Generator) -> np.ndarray:
    """`count` clips for the VAE. Shape: B F H W 3, uint8."""
    return np.stack([draw_any(random) for _ in range(count)])


def encode(vae: AutoencoderKLHunyuanVideo, pixels: Tensor) -> DiagonalGaussianDistribution:
    """The posterior of whole clips.

    `vae.encode` would encode clips of more than 16 frames once more from frame 12 on, and discard
    the result.
    """
    return DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(pixels)))


def decibels(vae: AutoencoderKLHunyuanVideo, clips: np.ndarray) -> float:
    """Peak signal-to-noise ratio of the stock reconstruction through the latents' mean."""
    with torch.no_grad():
        pixels = to_pixels(clips)
        latents = vae.encode(pixels).latent_dist.mode()
        restored = vae.decode(latents).sample.clamp(-1, 1)
        error = F.mse_loss(restored, pixels)
    # Pixels lie in -1..1, so the square of the largest difference is 4.
    return 10 * math.log10(4.0 / error.item())


def keep_single_precision(convolution: torch.nn.Module) -> None:
    """Let a layer run in float32 under autocast.

    The gradient of the decoder's largest upsampling convolution comes out as NaN in bfloat16 on
    CPUs with AMX (torch 2.13): a fault of the kernel, gone without AMX and at other sizes.
    """
    plain = convolution.forward

    def forward(hidden_states: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return plain(hidden_states.float())

    convolution.forward = forward


def vae_loss(vae: AutoencoderKLHunyuanVideo, pixels: Tensor, *, frozen_encoder: bool) -> Tensor:
    """L1 + L2 + a little Kullback-Leibler; decoding in stock tiles trains their blend, too."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.set_grad_enabled(not frozen_encoder):
            posterior = encode(vae, pixels)
        restored = vae.decode(posterior.sample()).sample
    error = restored.float() - pixels
    # Kullback-Leibler of the posterior from a standard normal distribution.
    terms = posterior.mean**2 + posterior.var - 1.0 - posterior.logvar
    divergence = 0.5 * terms.float().mean()
    return error.abs().mean() + 2.0 * error.square().mean() + 2e-4 * divergence


def train(
    vae: AutoencoderKLHunyuanVideo,
    folder: Path,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    frozen_encoder: bool = False,
) -> None:
    """One leg, its learning rate down to zero; saves into `folder` as it goes."""
    torch.manual_seed(seed)
    vae.requires_grad_(True)
    keep_single_precision(vae.decoder.up_blocks[2].upsamplers[0].conv)
    if frozen_encoder:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    matrices, vectors = split_parameters(vae)
    optimizers = [
        # A third of the rates for random weights, to stay close to the picture VAE's.
        (Muon(matrices), 0.003),
        (torch.optim.AdamW(vectors, betas=(0.9, 0.99), weight_decay=0.0), 1e-3),
    ]
    random = np.random.default_rng(seed)
    unseen = draw_clips(16, np.random.default_rng(seed + 1000))
    start = time.monotonic()
    for step in range(1, steps + 1):
        pixels = to_pixels(draw_clips(batch_size, random))
        loss = vae_loss(vae, pixels, frozen_encoder=frozen_encoder)
        loss.backward()
        warmup = min(1.0, step / 50)
        decay = 1 - step / (steps + 1)
        for optimizer, peak_rate in optimizers:
            optimizer.param_groups[0]["lr"] = peak_rate * warmup * decay
            optimizer.step()
            optimizer.zero_grad()
        if step % 25 == 0:
            seconds = (time.monotonic() - start) / step
            print(
                f"step {step} loss {loss.item():.4f} {decibels(vae, unseen):.1f} dB "
                f"{seconds:.2f} s/step",
                flush=True,
            )
        if step % SAVE_EVERY == 0 or step == steps:
            save_bf16(vae, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--decoder-steps", type=int, default=700)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="start from the VAE in the output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {"batch_size": arguments.batch_size}
    if arguments.resume:
        vae = AutoencoderKLHunyuanVideo.from_pretrained(arguments.output, torch_dtype=torch.float32)
    else:
        vae = build_vae(
            AutoencoderKL.from_pretrained(arguments.pictures, torch_dtype=torch.float32)
        )
    if arguments.steps:
        train(vae, arguments.output, steps=arguments.steps, seed=arguments.seed, **settings)
        with torch.no_grad():
            pixels = to_pixels(draw_clips(64, np.random.default_rng(arguments.seed)))
            fold_statistics(vae, encode(vae, pixels))
        save_bf16(vae, arguments.output)
        # Stored weights are rounded to bfloat16: the decoder is trained on the latents of the
        # rounded encoder.
        vae = AutoencoderKLHunyuanVideo.from_pretrained(arguments.output, torch_dtype=torch.float32)
    train(
        vae,
        arguments.output,
        steps=arguments.decoder_steps,
        seed=arguments.seed + 1,
        frozen_encoder=True,
        **settings,
    )


if __name__ == "__main__":
    main()
