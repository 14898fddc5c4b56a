"""Train the demo's transformer on the picture world, called as Kandinsky's pipelines call it.

    python scripts/demo/train_transformer.py CHECKPOINT_FOLDER [--steps 8500]

The folder holds the VAE, the text encoders and the tokenizers already; all of them stay as they
are, so that latents and text embeddings are computed once. A training step mixes x_t = (1 - s) z +
s noise, asks for noise - z at the timestep 1000 s, and reads captions through the official image
template. A batch holds captions of one length, because the transformer must never attend to
padding; one batch in ten holds the empty caption.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, Kandinsky5Transformer3DModel
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention
from muon import Muon
from storage import save_bf16
from text_encoders import TEXT_DIM
from torch import Tensor
from torch.nn import functional as F
from train_vae import to_pixels
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration
from world import draw, sample

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL, TemplateName

CAPTION_DROPOUT = 0.1
SAVE_EVERY = 1000


@dataclass(frozen=True)
class Captions:
    """Encoded captions of one token length."""

    embeds: Tensor  # B L C, after the template
    pooled: Tensor  # B C

    def pick(self, rows: Tensor) -> Captions:
        """The captions with these indices."""
        return Captions(self.embeds[rows], self.pooled[rows])


@dataclass(frozen=True)
class Group:
    """Samples whose captions have the same length."""

    latents: Tensor  # B 1 H W C
    captions: Captions


def build_transformer() -> Kandinsky5Transformer3DModel:
    """A Kandinsky 5 image transformer of 2.2 M parameters: 1 text and 6 visual blocks, 128 wide."""
    return Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        out_visual_dim=16,
        in_text_dim=TEXT_DIM,
        in_text_dim2=TEXT_DIM,
        time_dim=64,
        model_dim=128,
        ff_dim=512,
        num_text_blocks=1,
        num_visual_blocks=6,
        axes_dims=(8, 12, 12),
    )


class AttentionWithComplexRotation:
    """Kandinsky's attention with the rotary embedding as one complex product.

    It computes the same as the stock processor, which multiplies by 2 x 2 matrices and rounds to
    bfloat16, and halves the cost of a step.
    """

    def __call__(
        self,
        attn: Kandinsky5Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        by_head = (attn.num_heads, -1)
        # B L heads C
        query = attn.query_norm(attn.to_query(hidden_states).unflatten(-1, by_head))
        key = attn.key_norm(attn.to_key(source).unflatten(-1, by_head))
        value = attn.to_value(source).unflatten(-1, by_head)
        if rotary_emb is not None:
            # The matrix is [[cos, -sin], [sin, cos]]; its first column is the turn. 1 L 1 C/2
            turn = torch.complex(rotary_emb[..., 0, 0], rotary_emb[..., 1, 0])
            query = rotate(query, turn)
            key = rotate(key, turn)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        )
        return attn.out_layer(mixed.transpose(1, 2).flatten(-2))


def rotate(states: Tensor, turn: Tensor) -> Tensor:
    """Multiply neighbouring channels, read as complex numbers, by a turn."""
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


class TextEncoders:
    """The frozen text encoders of a checkpoint, behind an official template."""

    def __init__(self, checkpoint: Path, template: TemplateName = "image") -> None:
        self.template = OFFICIAL[template]
        self.tokenizer = load_processor(checkpoint).tokenizer
        self.clip_tokenizer = CLIPTokenizer.from_pretrained(checkpoint, subfolder="tokenizer_2")
        self.qwen = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            checkpoint, subfolder="text_encoder", dtype=torch.float32
        )
        self.clip = CLIPTextModel.from_pretrained(
            checkpoint, subfolder="text_encoder_2", dtype=torch.float32
        )

    @torch.no_grad()
    def encode(self, captions: list[str]) -> Captions:
        """Encode captions as the stock pipeline does; they must be equally long in tokens."""
        tokens = self.tokenizer(
            [self.template.format(caption) for caption in captions], return_tensors="pt"
        )
        hidden = self.qwen(**tokens, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
        padded = self.clip_tokenizer(
            captions, padding="max_length", max_length=77, return_tensors="pt"
        )
        return Captions(hidden[:, self.template.crop :].clone(), self.clip(**padded).pooler_output)

    def length(self, caption: str) -> int:
        """Number of tokens of a caption."""
        return len(self.tokenizer(caption).input_ids)


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, pictures: np.ndarray) -> Tensor:
    """Latents as the transformer sees them, B 1 H W C: a sample times the scaling factor."""
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(to_pixels(pictures)).latent_dist
    latents = posterior.sample().float() * vae.config.scaling_factor
    return latents.permute(0, 2, 3, 1).unsqueeze(1).contiguous()


def draw_pairs(count: int, seed: int) -> list[tuple[np.ndarray, str]]:
    """`count` random pictures, each with its caption."""
    random = np.random.default_rng(seed)
    pictures = [sample(random) for _ in range(count)]
    return [(draw(picture, random), picture.caption()) for picture in pictures]


def build_groups(
    pairs: list[tuple[np.ndarray, str]],
    encode_media: Callable[[np.ndarray], Tensor],
    encoders: TextEncoders,
) -> list[Group]:
    """Encode pictures or clips with their captions, sorted into groups of equal caption length."""
    by_length: dict[int, list[tuple[np.ndarray, str]]] = {}
    for medium, caption in pairs:
        by_length.setdefault(encoders.length(caption), []).append((medium, caption))
    groups = []
    for _, members in sorted(by_length.items()):
        latents = []
        embeds = []
        pooled = []
        for start in range(0, len(members), 64):
            media, captions = zip(*members[start : start + 64], strict=True)
            encoded = encoders.encode(list(captions))
            latents.append(encode_media(np.stack(media)))
            embeds.append(encoded.embeds)
            pooled.append(encoded.pooled)
        groups.append(Group(torch.cat(latents), Captions(torch.cat(embeds), torch.cat(pooled))))
    return groups


def predict(
    transformer: Kandinsky5Transformer3DModel, noisy: Tensor, sigmas: Tensor, captions: Captions
) -> Tensor:
    """The velocity that the transformer predicts for `noisy` (B F H W C) at `sigmas` (B).

    Clips count their positions in steps of 1 / 3.16, as the video pipelines do below 480 px, and
    have the zero channels of a first frame that is not given.
    """
    _, frames, height, width, _ = noisy.shape
    scale = (1.0, 1.0, 1.0)
    if transformer.visual_cond:
        noisy = torch.cat(
            [noisy, torch.zeros_like(noisy), torch.zeros_like(noisy[..., :1])], dim=-1
        )
        scale = (1.0, 3.16, 3.16)
    return transformer(
        hidden_states=noisy,
        encoder_hidden_states=captions.embeds,
        pooled_projections=captions.pooled,
        timestep=1000.0 * sigmas,
        visual_rope_pos=[torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)],
        text_rope_pos=torch.arange(captions.embeds.shape[1]),
        scale_factor=scale,
        return_dict=False,
    )


def flow_loss(
    transformer: Kandinsky5Transformer3DModel, latents: Tensor, captions: Captions, shift: float
) -> Tensor:
    """Mean squared error of the velocity at logit-normal noise levels, moved up by `shift`."""
    sigmas = torch.sigmoid(torch.randn(latents.shape[0]))
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    noise = torch.randn_like(latents)
    mix = sigmas.view(-1, 1, 1, 1, 1)
    noisy = (1 - mix) * latents + mix * noise
    return F.mse_loss(predict(transformer, noisy, sigmas, captions), noise - latents)


def batches(
    groups: list[Group], empty: Captions, batch_size: int, random: np.random.Generator
) -> Iterator[tuple[Tensor, Captions]]:
    """Endless random batches, each of one group; one batch in ten has the empty caption."""
    sizes = np.array([len(group.latents) for group in groups])
    while True:
        group = groups[random.choice(len(groups), p=sizes / sizes.sum())]
        rows = torch.from_numpy(random.integers(len(group.latents), size=batch_size))
        if random.random() < CAPTION_DROPOUT:
            captions = empty.pick(torch.zeros_like(rows))
        else:
            captions = group.captions.pick(rows)
        yield group.latents[rows], captions


def build_optimizers(
    transformer: Kandinsky5Transformer3DModel,
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Optimizers with their peak learning rates.

    Muon updates the matrices of attention and feed-forward, AdamW all other weights.
    """
    matrices = []
    remaining = []
    for name, parameter in transformer.named_parameters():
        is_in_block = "transformer_blocks" in name and "modulation" not in name
        if is_in_block and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            remaining.append(parameter)
    adam = torch.optim.AdamW(remaining, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [(Muon(matrices), 0.01), (adam, 2e-3)]


def fit(
    transformer: Kandinsky5Transformer3DModel,
    source: Iterator[tuple[Tensor, Captions]],
    folder: Path,
    *,
    steps: int,
    shift: float = 1.0,
) -> None:
    """Train on the batches of `source`; saves into `folder` as it goes."""
    transformer.set_attn_processor(AttentionWithComplexRotation())
    optimizers = build_optimizers(transformer)
    start = time.monotonic()
    running = 0.0
    for step in range(1, steps + 1):
        loss = flow_loss(transformer, *next(source), shift)
        loss.backward()
        # Up over 200 steps, flat, and linearly down to zero over the last fifth.
        level = min(1.0, step / 200, 1.25 * (1 - step / (steps + 1)))
        for optimizer, peak_rate in optimizers:
            optimizer.param_groups[0]["lr"] = peak_rate * level
            optimizer.step()
            optimizer.zero_grad()
        running += loss.item()
        if step % 250 == 0:
            seconds = (time.monotonic() - start) / step
            print(f"step {step} loss {running / 250:.4f} {seconds:.3f} s/step", flush=True)
            running = 0.0
        if step % SAVE_EVERY == 0 or step == steps:
            save_bf16(transformer, folder)


def load_transformer(checkpoint: Path) -> Kandinsky5Transformer3DModel:
    """The transformer of a checkpoint, in float32."""
    return Kandinsky5Transformer3DModel.from_pretrained(
        checkpoint, subfolder="transformer", torch_dtype=torch.float32
    )


def train_transformer(
    checkpoint: Path, *, steps: int, batch_size: int, pictures: int, seed: int, resume: bool = False
) -> None:
    """Train with the checkpoint's VAE and text encoders; saves into `checkpoint` as it goes.

    `resume` starts from the saved transformer, with a new schedule and new pictures.
    """
    torch.manual_seed(seed)
    encoders = TextEncoders(checkpoint)
    vae = AutoencoderKL.from_pretrained(checkpoint, subfolder="vae", torch_dtype=torch.float32)
    vae.to(memory_format=torch.channels_last)
    groups = build_groups(draw_pairs(pictures, seed), partial(encode_pictures, vae), encoders)
    source = batches(groups, encoders.encode([""]), batch_size, np.random.default_rng(seed))
    transformer = load_transformer(checkpoint) if resume else build_transformer()
    fit(transformer, source, checkpoint / "transformer", steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=8500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--pictures", type=int, default=32768)
    parser.add_argument(
        "--resume", action="store_true", help="start from the transformer in the checkpoint"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train_transformer(
        arguments.checkpoint,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        pictures=arguments.pictures,
        seed=arguments.seed,
        resume=arguments.resume,
    )


if __name__ == "__main__":
    main()
