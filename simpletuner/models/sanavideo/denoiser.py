"""Conversions between the common batch layout and `SanaVideoTransformer3DModel`, and its latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simpletuner.diffusion.batch import TextEmbeds, upload
from simpletuner.errors import UserError
from simpletuner.models.adapter import Compiler, Forward
from simpletuner.models.blocks import FreeSizes
from simpletuner.models.loading import VaeEncoder
from simpletuner.models.sanavideo.cost import TEXT_LENGTH


def collate_text(embeds: Sequence[TextEmbeds], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embeddings `B 300 D`, zero-padded on the right, and the mask `B 300` of real tokens."""
    prompts = [one["prompt_embeds"] for one in embeds]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    text = torch.stack([functional.pad(prompt, (0, 0, 0, TEXT_LENGTH - len(prompt))) for prompt in prompts])
    mask = torch.arange(TEXT_LENGTH) < lengths[:, None]
    return text.to(dtype), upload(mask.long(), text.device)


def token_timesteps(timesteps: Tensor, latents: Tensor, patch: int) -> Tensor:
    """Timesteps per token, 0 on frame 0: `B 1 F H/patch W/patch` from timesteps `B` and latents `B C F H W`."""
    _, _, frames, height, width = latents.shape
    spread = timesteps.view(-1, 1, 1, 1, 1).repeat(1, 1, frames, height // patch, width // patch)
    spread[:, :, 0] = 0
    return spread


class DistinctTimesteps:
    """In training, embeds each distinct timestep of a batch once instead of once per token.

    A clip has two, one for the given frame and one for the rest (`token_timesteps`), and an embedding is six times as
    wide as a token. Hooks before and after the embedding module reduce its input to those and expand its output.
    """

    def __init__(self) -> None:
        self._places: Tensor | None = None

    def install(self, transformer: nn.Module) -> None:
        """Attach to the timestep embedding of a transformer."""
        time_embed = transformer.get_submodule("time_embed")
        time_embed.register_forward_pre_hook(self.before, with_kwargs=True)
        time_embed.register_forward_hook(self.after)

    def before(self, module: nn.Module, inputs: tuple[Tensor], settings: dict[str, Any]) -> Any:
        """Replace the timesteps by their distinct values, except in sampling or with one timestep per sample."""
        (timesteps,) = inputs
        if not torch.is_grad_enabled() or timesteps.numel() <= settings["batch_size"]:
            return None
        tokens = timesteps.view(settings["batch_size"], -1)  # `unique` would synchronise with the device
        given, others = tokens[:, 0], tokens[:, -1]
        clips = torch.arange(len(tokens), device=tokens.device)[:, None]
        self._places = (2 * clips + (tokens != given[:, None])).flatten()
        return (torch.stack([given, others], dim=1).flatten(),), settings

    def after(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor]) -> Any:
        """Expand the embeddings to all tokens: (modulation, embedding), each `tokens D`."""
        places, self._places = self._places, None
        return None if places is None else tuple(functional.embedding(places, output) for output in outputs)


def on_grid(
    block: nn.Module, hidden: Tensor, text: Tensor, mask: Tensor, timestep: Tensor, rotary: Sequence[Tensor]
) -> Tensor:
    """`forward` of a block with tokens, timesteps and rotary tables as `B T H W C`, whose shape gives the grid. With
    tokens as `B S C` and separate sizes, compiled code would specialise on the sizes, or contain symbolic quotients
    such as S / (T H), on which inductor fails.
    """
    for each in (text, mask, timestep):
        torch._check(len(each) == len(hidden))  # else the batch would have a symbol in each of them
    tokens, tables = hidden.flatten(1, 3), tuple(each.flatten(1, 3) for each in rotary)
    out: Tensor = type(block).forward(
        block, tokens, None, text, mask, timestep.flatten(1, 3), *hidden.shape[1:4], tables
    )
    return out


class CompiledOnGrid:
    """`forward` of a block, compiled for a grid of any size and batches of one, or of more."""

    def __init__(self, compiler: Compiler, forward: Forward) -> None:
        bound: Any = forward
        self.block, self.compiled, self.sizes = bound.__self__, compiler(on_grid), FreeSizes()

    def __call__(
        self, hidden: Tensor, no_mask: None, text: Tensor, mask: Tensor, timestep: Tensor,
        frames: int, height: int, width: int, rotary: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        grid = (frames, height, width)
        hidden, *tables = (each.unflatten(1, grid) for each in (hidden, *rotary))
        timestep = timestep.unflatten(1, grid if timestep.shape[1] > 1 else (1, 1, 1))
        inputs = (hidden, text, mask, timestep, *tables)
        self.sizes.mark(inputs, lambda tensor: range(4 if tensor.ndim > 3 else 1))  # batch and grid
        out: Tensor = self.compiled(self.block, hidden, text, mask, timestep, tables)
        return out


class WanLatentEncoder(VaeEncoder):
    """Latents of clips from the Wan VAE: the posterior's mode, normalised per channel with the VAE's own statistics."""

    def __init__(self, vae: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(vae, device, dtype)
        self.mean, self.std = (
            torch.as_tensor(values, dtype=torch.float32, device="cpu").view(1, -1, 1, 1, 1)
            for values in self.statistics(vae)
        )

    @staticmethod
    def statistics(vae: Any) -> tuple[Any, Any]:
        """Mean and standard deviation of each channel."""
        return vae.config.latents_mean, vae.config.latents_std

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 F H W` pixels in [-1, 1] with F = 4k + 1: float32, `B 16 k+1 H/8 W/8`, on the CPU.

        The LTX-2 VAE takes F = 8k + 1 and gives `B 128 k+1 H/32 W/32`.

        The mode is deterministic, so `seeds` has no effect.

        Raises:
            UserError: the VAE returned a value that is not finite.
        """
        mode = self.posterior(pixels).mode().float().cpu()
        if not bool(mode.isfinite().all()):
            raise UserError(f"The VAE gave values that are not finite ({self.dtype}); vae_dtype fp32 is the right one.")
        latents: Tensor = (mode - self.mean) * (1.0 / self.std)
        return latents

    def decode(self, z: Tensor) -> Tensor:
        return self.pixels(z * self.std.to(z.device) + self.mean.to(z.device))


class Ltx2LatentEncoder(WanLatentEncoder):
    """Latents of clips from the LTX-2 VAE, which keeps its statistics among its weights."""

    @staticmethod
    def statistics(vae: Any) -> tuple[Any, Any]:
        return vae.latents_mean.cpu(), vae.latents_std.cpu()
