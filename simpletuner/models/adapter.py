"""What the rest of the house may ask of a model family.

An adapter loads the parts of one checkpoint and translates between the family's conventions and the common ones
(`diffusion.batch`). It holds no training logic, and training holds no family knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from PIL import ImageOps
from PIL.Image import Image, Resampling
from torch import Tensor, nn

from simpletuner.config.load import FamilyOptions, RunConfig
from simpletuner.config.schema import CachingConfig, TextConfig
from simpletuner.diffusion.batch import NoisyBatch, TextEmbeds
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.models.usage import Usage


@dataclass(frozen=True)
class TextRequest:
    """One caption to encode, with the picture its prompt holds (i2i) if there is one.

    `bare` marks negative prompts and captions that are left out: around them some families put no words of their own.
    """

    caption: str
    picture: Image | None = None
    bare: bool = False


class EncoderQuantiser(Protocol):
    """What `text_encoder_1_precision` and `text_encoder_2_precision` do to encoders that have just been loaded."""

    def __call__(self, model: nn.Module, layers: str, *, encoder: int) -> None:
        """Quantise, in place, the linear layers whose path matches a regular expression.

        `encoder` is 1 or 2; nothing happens where its key says so.
        """
        ...


class TextEncoder(Protocol):
    """Captions to embeddings, exactly as the family's pipeline makes them at inference.

    Attributes:
        device: where inputs go, and where the models compute.
        models: the networks inside.
    """

    device: torch.device

    @property
    def models(self) -> Sequence[nn.Module]: ...

    def encode(self, requests: Sequence[TextRequest]) -> list[TextEmbeds]:
        """Embeddings of each request, without padding, on the CPU."""
        ...

    def truncated(self, caption: str) -> str | None:
        """What of a caption is cut off because it is too long, or None."""
        ...


class LatentEncoder(Protocol):
    """Pixels to latents as the transformer sees them."""

    vae: Any

    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """Encode `B 3 F H W` in [-1, 1] to z `B C F H W`, float32, on the CPU.

        `seeds` has one number per sample; where the VAE draws from its posterior, the draw depends on that number
        alone, so that batching never changes a latent.
        """
        ...

    def use_less_memory(self) -> bool:
        """Switch on what lowers the peak of memory and changes latents by rounding at most.

        Returns False when there is nothing of that kind left.
        """
        ...


def raster_order(frames: int, rows: int, columns: int) -> Tensor:
    """The usual order of tokens: frame by frame, row by row."""
    return torch.arange(frames * rows * columns)


@dataclass(frozen=True)
class TokenRouting:
    """How the visual blocks run with a part of the tokens.

    A block takes the tokens, `B S D`, as its first positional argument.

    Attributes:
        unit: how many tokens in a row stay together, since attention knows them only as one tile; 1 where it does not.
        tables: further positional arguments of a block that hold something for each token: how to cut them to the
            kept ones, (argument, indices of the kept tokens `B K`) -> argument.
    """

    unit: int
    tables: Mapping[int, Callable[[Any, Tensor], Any]]


@dataclass(frozen=True)
class BlockLayout:
    """Where the repeated blocks of a transformer are, and how the tokens of pictures and clips run through them.

    Attributes:
        groups: the blocks by the name of their list, in the order of the forward pass.
        visual: the group that the tokens of pictures run through; techniques count its blocks from 0.
        width: of a token.
        order: (frames, rows, columns) of the grid of tokens -> for each token of a visual block, in their order there,
            its index in the flattened grid; int64, `S`.
        select: (number of a visual block, what it returns) -> its tokens, `B S D`; None where it returns nothing else.
        routing: None where a visual block needs all tokens together.
    """

    groups: Mapping[str, nn.ModuleList]
    visual: str
    width: int
    order: Callable[[int, int, int], Tensor] = raster_order
    select: Callable[[int, Any], Tensor] | None = None
    routing: TokenRouting | None = None

    @property
    def blocks(self) -> list[nn.Module]:
        """All repeated blocks in the order in which the forward pass enters them."""
        return [block for group in self.groups.values() for block in group]

    @property
    def visual_blocks(self) -> list[nn.Module]:
        """Those that the tokens of pictures run through."""
        return list(self.groups[self.visual])

    def tokens_of(self, block: int, output: Any) -> Tensor:
        """The hidden states `B S D` in what a visual block returned."""
        tokens: Tensor = output if self.select is None else self.select(block, output)
        return tokens


@dataclass(frozen=True)
class PreviewRequest:
    """One picture (or clip) to render with the stock pipeline.

    Attributes:
        embeds: embeddings of the prompt.
        negative: embeddings of the negative prompt.
        width, height: size in pixels, exactly.
        source: the picture an i2i or i2v flavour starts from, of any size.
        num_frames: length of a clip; 1 for pictures.
        between_steps: called after each sampling step; what it raises ends the rendering.
    """

    embeds: TextEmbeds
    negative: TextEmbeds
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    seed_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    source: Image | None = None
    num_frames: int = 1
    between_steps: Callable[[], None] = lambda: None

    def on_step_end(self, pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """What diffusers' pipelines take as `callback_on_step_end`; changes nothing."""
        self.between_steps()
        return {}

    @property
    def start(self) -> Image | None:
        """The source resized and cropped to the requested size: a stock pipeline would stretch it."""
        if self.source is None:
            return None
        return ImageOps.fit(self.source.convert("RGB"), (self.width, self.height), Resampling.LANCZOS)


class PreviewPipeline(Protocol):
    """The family's stock diffusers pipeline, ready to sample from cached embeddings."""

    vae: Any

    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one picture or clip of exactly the requested size; the frames, in order."""
        ...


@dataclass(frozen=True)
class CheckpointSetup:
    """Which checkpoint an adapter is for, and how it reads it.

    Attributes:
        source: where its parts are.
        text, options, caching: what decides about captions, what only a family knows, what decides about the VAE.
        use_size: the (width, height) that the result will be sampled at, None when it is not known.
    """

    flavour: Flavour
    source: ModelSource
    text: TextConfig
    options: FamilyOptions
    caching: CachingConfig
    use_size: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, config: RunConfig, flavour: Flavour, source: ModelSource, use_size: tuple[int, int] | None = None
    ) -> CheckpointSetup:
        """The setup of a run."""
        return cls(flavour, source, config.text, config.family, config.caching, use_size)


class FamilyAdapter(Protocol):
    """One checkpoint of one family."""

    spec: FamilySpec

    def __init__(self, setup: CheckpointSetup) -> None: ...

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> TextEncoder:
        """Load text encoders and tokenizers onto a device, quantised on the way."""
        ...

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
        """Load the VAE onto a device."""
        ...

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """Load the transformer onto the CPU; parts that must stay float32 do."""
        ...

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        """What the flavour changes about a noisy batch before anything else sees it.

        For i2v: frame 0 is the clean condition and is left out of the loss. Other flavours change nothing.
        """
        ...

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        """The velocity `noise - z` that the transformer predicts, float32, `B C F H W`."""
        ...

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        """The repeated blocks of a loaded transformer."""
        ...

    def use_fast_blocks(self, transformer: nn.Module) -> FastBlocks | None:
        """Replace the forward of the repeated blocks by one of less work and equal result; None: there is none."""
        ...

    def store_modulation_in_bf16(self, transformer: nn.Module) -> int:
        """Halve frozen float32 modulation weights that are bf16 numbers; results stay equal. The bytes it saved."""
        ...

    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> PreviewPipeline:
        """The stock pipeline around the transformer being trained; `shift` replaces its scheduler's when given."""
        ...

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        """Python that loads a result into the stock pipeline and samples what its preview shows."""
        ...

    def load_bare_pipeline(self) -> Any:
        """A fresh stock pipeline whose transformer has the right layers and no weights, to load LoRA files into."""
        ...
