"""Train the video demo's transformer on the clip world, starting from the picture demo's.

    python scripts/demo/train_video_transformer.py PICTURE_CHECKPOINT CHECKPOINT_FOLDER [--steps N]

The folder holds the video VAE, the text encoders and the tokenizers already. Training differs from
that on pictures in the template, in clips of five latent frames, and in 17 more input channels,
which an i2v model would read.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLHunyuanVideo, Kandinsky5Transformer3DModel
from torch import Tensor
from train_transformer import TextEncoders, batches, build_groups, fit, load_transformer
from train_video_vae import encode, to_pixels
from video_world import draw, sample

SHIFT = 2.0
"""Noise levels lean upwards: where a shape will go is decided at the noisy end."""


def inflate(pictures: Kandinsky5Transformer3DModel) -> Kandinsky5Transformer3DModel:
    """The same transformer with 33 input channels: latents, a first frame and its mask.

    For t2v, the first frame and its mask are zero.
    """
    settings = {name: value for name, value in pictures.config.items() if not name.startswith("_")}
    transformer = Kandinsky5Transformer3DModel(**{**settings, "visual_cond": True})
    weights = pictures.state_dict()
    name = "visual_embeddings.in_layer.weight"
    channels = pictures.config.in_visual_dim
    wider = torch.zeros_like(transformer.state_dict()[name]).unflatten(1, (-1, 2 * channels + 1))
    wider[..., :channels] = weights[name].unflatten(1, (-1, channels))
    transformer.load_state_dict({**weights, name: wider.flatten(1)})
    return transformer


@torch.no_grad()
def encode_clips(vae: AutoencoderKLHunyuanVideo, clips: np.ndarray) -> Tensor:
    """Latents as the transformer sees them, B F H W C: a sample times the scaling factor."""
    with torch.autocast("cpu", torch.bfloat16):
        latents = encode(vae, to_pixels(clips)).sample()
    return (latents.float() * vae.config.scaling_factor).permute(0, 2, 3, 4, 1).contiguous()


def draw_pairs(count: int, seed: int) -> list[tuple[np.ndarray, str]]:
    """`count` random clips, each with its caption."""
    random = np.random.default_rng(seed)
    clips = [sample(random) for _ in range(count)]
    return [(draw(clip, random), clip.caption()) for clip in clips]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clips", type=int, default=3072)
    parser.add_argument(
        "--resume", action="store_true", help="start from the transformer in the checkpoint"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    encoders = TextEncoders(arguments.checkpoint, "video")
    vae = AutoencoderKLHunyuanVideo.from_pretrained(
        arguments.checkpoint, subfolder="vae", torch_dtype=torch.float32
    )
    pairs = draw_pairs(arguments.clips, arguments.seed)
    groups = build_groups(pairs, partial(encode_clips, vae), encoders)
    source = batches(
        groups, encoders.encode([""]), arguments.batch_size, np.random.default_rng(arguments.seed)
    )
    if arguments.resume:
        transformer = load_transformer(arguments.checkpoint)
    else:
        transformer = inflate(load_transformer(arguments.pictures))
    fit(
        transformer,
        source,
        arguments.checkpoint / "transformer",
        steps=arguments.steps,
        shift=SHIFT,
    )


if __name__ == "__main__":
    main()
