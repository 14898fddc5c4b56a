"""The interface of a model family: what an adapter loads, predicts and samples.

An adapter loads the parts of one checkpoint and translates between the family's conventions and the
common ones (`diffusion.batch`). It contains no training logic, and the training code is independent
of families.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from PIL import ImageOps
from PIL.Image import Image, Resampling
from torch import Tensor, nn

from simpletuner.config.schema import CachingConfig, FamilyOptions, TextConfig
from simpletuner.config.types import Size
from simpletuner.diffusion.batch import NoisyBatch, TextEmbeds
from simpletuner.models import loading
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.models.usage import Usage


@dataclass(frozen=True)
class TextRequest:
    """One caption to encode, with the picture in its prompt (i2i), if any.

    `bare` marks negative prompts and dropped captions, which some families encode without their
    prompt template.
    """

    caption: str
    picture: Image | None = None
    bare: bool = False


class EncoderQuantiser(Protocol):
    """Applies `text_encoder_1_precision` and `text_encoder_2_precision` to loaded encoders."""

    def __call__(self, model: nn.Module, layers: str, *, encoder: int) -> None:
        """Quantise, in place, the linear layers whose path matches a regular expression.

        `encoder` is 1 or 2; a plain precision leaves it unchanged.
        """


class Encoder(Protocol):
    """Networks of the text encoder's part of a checkpoint.

    Attributes:
        device: compute device of the models.
        models: the networks of the encoder.
    """

    device: torch.device

    @property
    def models(self) -> Sequence[nn.Module]: ...


class TextEncoder(Encoder):
    """Encodes captions exactly as the family's pipeline does at inference."""

    @torch.no_grad()
    def encode(self, requests: Sequence[TextRequest]) -> list[TextEmbeds]:
        """Encode requests, batched by length; returns unpadded embeddings on the CPU."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            size = None if request.picture is None else request.picture.size
            alike[self.padded_length(request), request.bare, size].append(index)
        embeds: dict[int, TextEmbeds] = {}
        for indices in alike.values():
            encoded = self.encode_alike([requests[index] for index in indices])
            embeds.update(zip(indices, encoded, strict=True))
        return [embeds[index] for index in range(len(requests))]

    @abstractmethod
    def encode_alike(self, requests: Sequence[TextRequest]) -> list[TextEmbeds]:
        """Encode requests of one padded length, all or none bare, with pictures of one size."""

    @abstractmethod
    def padded_length(self, request: TextRequest) -> int:
        """Padded length of a prompt in tokens, where a picture counts as one.

        Prompts of one length share a batch.
        """

    @abstractmethod
    def truncated(self, caption: str) -> str | None:
        """The truncated end of a caption, or None."""


class LatentEncoder(ABC):
    """Converts pixels to the transformer's latents, and back."""

    def __init__(self, vae: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.vae = vae
        self.device = device
        self.dtype = dtype

    @abstractmethod
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """Encode `B 3 F H W` in [-1, 1] to z `B C F H W`, float32, on the CPU.

        `seeds` has one number per sample. If the family samples the VAE's posterior, the draw
        depends only on that number, so latents are independent of batching.
        """

    @abstractmethod
    def decode(self, z: Tensor) -> Tensor:
        """Decode z `B C F H W` to pixels `B 3 F H W` in [-1, 1], float32, on the encoder's device.

        Gradients flow through it; callers that need none use `torch.no_grad`.
        """

    def posterior(self, pixels: Tensor) -> Any:
        """The VAE's distribution of latents."""
        return self.vae.encode(pixels.to(self.device, self.dtype)).latent_dist

    def pixels(self, latents: Tensor) -> Tensor:
        """The VAE's pixels in [-1, 1], float32."""
        return self.vae.decode(latents.to(self.device, self.dtype)).sample.float().clamp(-1, 1)

    def use_less_memory(self) -> bool:
        """Enable a setting that lowers peak memory and changes latents only by rounding.

        Returns False if no setting is left.
        """
        return False


def raster_order(frames: int, rows: int, columns: int) -> Tensor:
    """Raster order of tokens: frame by frame, row by row."""
    return torch.arange(frames * rows * columns)


@dataclass(frozen=True)
class TokenRouting:
    """How the visual blocks run on a subset of the tokens.

    A block takes the tokens, `B S D`, as its first positional argument.

    Attributes:
        unit: number of consecutive tokens kept or dropped together: a tile of block-sparse
            attention, else 1.
        tables: positional arguments of a block with one entry per token, by position, and the
            function that selects the kept entries: (argument, indices of the kept tokens `B K`) ->
            argument.
    """

    unit: int
    tables: Mapping[int, Callable[[Any, Tensor], Any]]


# By tokens of a sample: tile pairs that block-sparse attention visited, as a number on the device,
# and all tile pairs.
TileCounts = dict[int, tuple[Tensor, int]]
Forward = Callable[..., Any]
Compiler = Callable[[Forward], Forward]


@dataclass(frozen=True)
class BlockLayout:
    """The repeated blocks of a transformer, and how visual tokens pass through them.

    Attributes:
        groups: the blocks by the name of their list, in the order of the forward pass.
        visual: name of the group that processes visual tokens; techniques count its blocks from 0.
        width: of a token.
        order: (frames, rows, columns) of the grid of tokens -> for each token of a visual block, in
            their order there, its index in the flattened grid; int64, `S`.
        routing: None if a visual block needs all tokens.
        rope: position of a visual block's argument with the rotary embeddings of all tokens,
            `B S ...`; None without sequence parallelism.
        compiled: (compiler, forward of a block) -> that forward, compiled for all sizes; None to
            compile every size.
        take_tiles: returns the tiles visited by block-sparse attention in training since the last
            call.
    """

    groups: Mapping[str, nn.ModuleList]
    visual: str
    width: int
    order: Callable[[int, int, int], Tensor] = raster_order
    routing: TokenRouting | None = None
    rope: int | None = None
    compiled: Callable[[Compiler, Forward], Forward] | None = None
    take_tiles: Callable[[], TileCounts] = dict

    @property
    def blocks(self) -> list[nn.Module]:
        """All repeated blocks, in the order of the forward pass."""
        return list(itertools.chain.from_iterable(self.groups.values()))

    @property
    def visual_blocks(self) -> list[nn.Module]:
        """The blocks that process visual tokens."""
        return list(self.groups[self.visual])


@dataclass(frozen=True)
class PreviewRequest:
    """One picture (or clip) to render with the stock pipeline.

    Attributes:
        embeds: embeddings of the prompt.
        negative: embeddings of the negative prompt.
        width, height: exact size in pixels.
        source: the source picture of an i2i or i2v preview, of any size.
        num_frames: frames of a clip; 1 for pictures.
        batched: run both passes of guidance as one batch, even if the pipeline would run them in
            turn.
        between_steps: called after each sampling step; an exception stops the rendering.
        watch: called after each sampling step with (steps done, timestep, sigma, z `1 C F H W`).
    """

    embeds: TextEmbeds
    negative: TextEmbeds
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    # A CPU draws the same noise for a seed on every machine; a GPU's generator depends on the
    # model.
    seed_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    source: Image | None = None
    num_frames: int = 1
    batched: bool = False
    between_steps: Callable[[], None] = lambda: None
    watch: Callable[[int, float, float, Tensor], None] | None = None

    def inputs(self, z_of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Arguments that the calls of all stock pipelines take.

        Args:
            z_of: the pipeline's latents -> z.
        """

        def after_step(
            pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            self.between_steps()
            if self.watch is not None:
                # These are the latents after the step, so at the next noise level; `sigmas` has one
                # more entry than the timesteps, the final 0.
                sigma = float(pipeline.scheduler.sigmas[index + 1])
                self.watch(index + 1, float(timestep), sigma, z_of(tensors["latents"]))
            return {}  # tensors in it would replace those of diffusers

        return {
            "height": self.height,
            "width": self.width,
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "generator": torch.Generator(self.seed_device).manual_seed(self.seed),
            "callback_on_step_end": after_step,
        }

    @property
    def start(self) -> Image | None:
        """The source picture, resized and cropped to the requested size.

        Stock pipelines would stretch it.
        """
        if self.source is None:
            return None
        size = (self.width, self.height)
        return ImageOps.fit(self.source.convert("RGB"), size, Resampling.LANCZOS)


class PreviewPipeline(ABC):
    """The family's stock diffusers pipeline, ready to sample from cached embeddings.

    Attributes:
        encoder: around the same VAE.
    """

    vae: Any
    encoder: LatentEncoder

    @abstractmethod
    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one picture or clip of exactly the requested size; returns its frames in order."""

    def sample(self, request: PreviewRequest) -> Callable[[], list[Image]]:
        """Sample, and return a function that decodes; together bit-identical to `render`.

        A family that cannot decode apart from sampling does both at once.
        """
        frames = self.render(request)
        return lambda: frames


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of a run that concern its model family.

    Attributes:
        text: how captions are encoded.
        caching: how the VAE encodes.
        options: options of all families.
        solver: value of `validation_noise_scheduler`.
    """

    text: TextConfig
    caching: CachingConfig
    options: FamilyOptions
    solver: str | None


class FamilyAdapter(ABC):
    """One checkpoint of one family.

    Args:
        settings: settings for captions, the VAE, the family and the sampler.
        source: locations of the components.
        use_size: (width, height) for sampling from the result; None if unknown.

    Attributes:
        spec: the family's spec, with the changes of the flavour.
        transformer_class: class of diffusers, like `pipeline_class`.
        encoder_class: wraps the VAE.
        text_encoder: `module:Class` of a `TextEncoder`, called with (adapter, device, dtype,
            quantise). It imports transformers' models, which a run with full caches never needs.
        dtype: dtype of the loaded transformer.
    """

    spec: FamilySpec
    transformer_class: Any
    encoder_class: type[LatentEncoder]
    text_encoder: str

    def __init__(
        self,
        settings: AdapterSettings,
        flavour: Flavour,
        source: ModelSource,
        use_size: Size | None = None,
    ) -> None:
        self.text = settings.text
        self.caching = settings.caching
        self.options = settings.options
        self.solver = settings.solver
        self.source = source
        self.flavour = flavour
        self.task = flavour.task
        self.use_size = use_size
        self.spec = self.spec.for_flavour(flavour.name)
        self.dtype = torch.float32

    @property
    @abstractmethod
    def pipeline_class(self) -> Any:
        """The diffusers pipeline for the task."""

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> TextEncoder:
        """Load text encoders and tokenizers onto a device, quantising them during loading."""
        return resolve_name(self.text_encoder)(self, device, dtype, quantise)

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Load the VAE onto a device."""
        return loading.load_vae(self.spec, self.source, self.caching, device, dtype)

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
        """Load the VAE onto a device, wrapped to encode latents."""
        return self.encoder_class(self.load_vae(device, dtype), device, dtype)

    def load_transformer(self, dtype: torch.dtype, *, empty: bool = False) -> nn.Module:
        """Load the transformer onto the CPU, with layers that must stay float32 in float32.

        With `empty`, no weights are read, and parameters are on `meta`, possibly not in their final
        dtype. A family without support for this reads them.
        """
        self.dtype = dtype
        return loading.load_denoiser(
            self.transformer_class, self.source["transformer"], dtype, empty=empty
        )

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        """Apply the flavour's changes to a noisy batch, before all other code.

        For i2v, frame 0 is the clean condition and is excluded from the loss; other flavours return
        the batch unchanged.
        """
        return noisy

    @abstractmethod
    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        """The velocity `noise - z` that the transformer predicts, float32, `B C F H W`."""

    @abstractmethod
    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        """The repeated blocks of a loaded transformer."""

    def use_fast_blocks(self, transformer: nn.Module) -> FastBlocks | None:
        """Replace the forward of the repeated blocks with a faster equivalent.

        Returns:
            their state, or None for a family without fast blocks.
        """
        return None

    def store_modulation_in_bf16(self, transformer: nn.Module) -> None:  # noqa: B027 - a family may have none
        """Store frozen float32 modulation weights that bf16 represents exactly in bf16."""

    def load_sampler(self, shift: float | None, *, from_picture: bool) -> Any:
        """The diffusers scheduler of previews; `shift`, if set, replaces the scheduler's.

        `from_picture` selects the scheduler for clips with a conditioning first frame.
        """
        overrides = {} if shift is None else {"shift": shift}
        scheduler = loading.load_scheduler(self.source["scheduler"], **overrides)
        return loading.with_solver(scheduler, self.solver)

    @abstractmethod
    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> PreviewPipeline:
        """The stock pipeline around the transformer in training, with its VAE.

        `shift`, if set, replaces the scheduler's.
        """

    @staticmethod
    @abstractmethod
    def usage_snippet(usage: Usage) -> str:
        """Python code that loads a result into the stock pipeline and reproduces its preview."""

    def load_bare_pipeline(self) -> Any:
        """A new stock pipeline whose transformer has no weights, to load LoRA files into."""
        part = self.source["transformer"]
        settings = {**self.transformer_class.load_config(part.fetch()), **part.overrides}
        bare = loading.build_bare(self.transformer_class, settings)
        transformer = loading.share_zero_weights(bare)
        return loading.stock_pipeline(self.pipeline_class, self.source, transformer=transformer)


def load_adapter(spec: FamilySpec) -> type[FamilyAdapter]:
    """Import the adapter class that a spec names."""
    adapter: type[FamilyAdapter] = resolve_name(spec.adapter)
    return adapter
