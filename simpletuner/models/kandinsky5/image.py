"""Kandinsky 5 Image: text to image and image to image, and what it shares with Kandinsky 5 Video.

Previews come first; then conversions between the common batch layout and
`Kandinsky5Transformer3DModel`, with the order of visual tokens in the blocks; then the adapter of
any checkpoint, and that of checkpoints for pictures.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Transformer3DModel
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from simpletuner.diffusion.batch import NoisyBatch, TextEmbeds, upload
from simpletuner.models.adapter import (
    BlockLayout,
    FamilyAdapter,
    LatentEncoder,
    PreviewPipeline,
    PreviewRequest,
    TokenRouting,
    raster_order,
)
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.kandinsky5 import blocks
from simpletuner.models.kandinsky5.cost import TRANSFORMER_CLASS
from simpletuner.models.kandinsky5.options import (
    TILE,
    TILE_SIDE,
    KandinskyOptions,
    RopeScale,
    is_sparse,
    transformer_overrides,
)
from simpletuner.models.kandinsky5.spec import IMAGE_SIZES, KANDINSKY5_IMAGE, TEMPLATES
from simpletuner.models.kandinsky5.templates import OFFICIAL
from simpletuner.models.loading import stock_pipeline
from simpletuner.models.spec import OriginalWeights, Task
from simpletuner.models.usage import EULER, Usage, snippet, solver_code, text

VIDEO_TASKS = ("t2v", "i2v")


class StockPipeline(PreviewPipeline):
    """The flavour's diffusers pipeline, called with cached embeddings."""

    def __init__(
        self,
        pipeline: Any,
        encoder: LatentEncoder,
        device: torch.device,
        task: Task,
        padding: blocks.TextPadding,
    ) -> None:
        self.pipeline = pipeline
        self.vae = pipeline.vae
        self.encoder = encoder
        self.device = device
        self.task = task
        self.padding = padding

    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one picture or clip of exactly the requested size and length."""
        frames = self._call(request, "pil")
        return list(frames[0] if self.task in VIDEO_TASKS else frames[:1])

    def sample(self, request: PreviewRequest) -> Callable[[], list[Image]]:
        return partial(self._decode, self._call(request, "latent"))

    def _decode(self, latents: Tensor) -> list[Image]:
        """Decode as the end of the pipeline's call does."""
        is_clip = self.task in VIDEO_TASKS
        z = self.z_of(latents).to(self.vae.dtype)
        # Merged to the VAE's dimensions as the pipeline does: strides, even of one sample, decide
        # how convolutions round.
        z = z.unsqueeze(1).flatten(0, 1) if is_clip else z.flatten(2, 3)
        pixels = self.vae.decode(z / self.vae.config.scaling_factor).sample
        if is_clip:
            return list(self.pipeline.video_processor.postprocess_video(pixels, "pil")[0])
        return list(self.pipeline.image_processor.postprocess(pixels, "pil"))

    def _call(self, request: PreviewRequest, output_type: str) -> Any:
        """Call the pipeline; the output has its dimensions, as pictures or latents."""
        inputs = {**request.inputs(self.z_of), "output_type": output_type}
        inputs |= self._prompt_inputs("", request.embeds)
        inputs |= self._prompt_inputs("negative_", request.negative)
        if self.task in ("i2i", "i2v"):
            inputs["image"] = request.start
        guidance: AbstractContextManager[None] = nullcontext()
        if request.batched and request.guidance_scale > 1:
            guidance = batched_guidance(self.pipeline.transformer, self.padding, request)
        with guidance:
            if self.task in VIDEO_TASKS:
                return self.pipeline(**inputs, num_frames=request.num_frames).frames
            # The pipeline rounds every request to its list of sizes, so the list is set to the
            # requested size.
            self.pipeline.resolutions = [(request.width, request.height)]
            return self.pipeline(**inputs).image

    def _prompt_inputs(self, prefix: str, embeds: TextEmbeds) -> dict[str, Tensor]:
        """The pipeline's arguments for one prompt, a batch of one."""
        hidden = embeds["prompt_embeds"]
        pooled = embeds["pooled_prompt_embeds"]
        cumulative_lengths = torch.tensor([0, len(hidden)], dtype=torch.int32, device=self.device)
        return {
            f"{prefix}prompt_embeds_qwen": hidden[None].to(self.device),
            f"{prefix}prompt_embeds_clip": pooled[None].to(self.device),
            f"{prefix}prompt_cu_seqlens": cumulative_lengths,
        }

    def z_of(self, latents: Tensor) -> Tensor:
        """z `B C F H W` from the pipeline's `B F H W C'`, where z may precede a condition."""
        channels = self.pipeline.transformer.config.out_visual_dim
        return latents[..., :channels].movedim(-1, 1)


@contextmanager
def batched_guidance(
    transformer: Any, padding: blocks.TextPadding, request: PreviewRequest
) -> Iterator[None]:
    """Predict for the prompt and the negative prompt in one batch.

    In each sampling step, the pipeline calls the transformer twice: for the prompt, and with the
    same latents for the negative prompt. The first call predicts both, and keeps the second result
    for the second call.
    """
    forward = transformer.forward
    replaced = vars(transformer).get("forward")  # of an instance that was wrapped before
    waiting: list[Any] = []  # the prediction for the negative prompt, between the calls

    def predict_both(**inputs: Any) -> Any:
        if waiting:
            return waiting.pop()
        like = inputs["encoder_hidden_states"]
        embeds = [
            {name: tensor.to(like.device) for name, tensor in prompt.items()}
            for prompt in (request.embeds, request.negative)
        ]
        text, pooled, mask = collate_text(embeds, like.dtype)
        inputs["hidden_states"] = torch.cat([inputs["hidden_states"]] * 2)
        inputs["timestep"] = torch.cat([inputs["timestep"]] * 2)
        inputs["encoder_hidden_states"] = text
        inputs["pooled_projections"] = pooled
        inputs["text_rope_pos"] = torch.arange(text.shape[1], device=like.device)
        with padding.hidden(mask):
            both = forward(**inputs)
        positive, negative = both.sample.split(1)
        waiting.append(type(both)(sample=negative))
        return type(both)(sample=positive)

    transformer.forward = predict_both
    try:
        yield
    finally:
        if replaced is None:  # a bound method in its place would keep the model alive
            del transformer.forward
        else:
            transformer.forward = replaced


def pipeline_name(task: Task) -> str:
    """The class of diffusers that samples a task."""
    return f"Kandinsky5{task.upper()}Pipeline"


PATCH = 2  # latent positions per token, on each side


def channels_last(latents: Tensor) -> Tensor:
    """`B C F H W` to the transformer's `B F H W C`."""
    return latents.permute(0, 2, 3, 4, 1)


def collate_text(
    embeds: Sequence[TextEmbeds], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Embeddings of a batch, zero-padded on the right.

    Returns:
        text `B L D`, pooled `B D2`, and the mask `B L` of real tokens, None without padding.
    """
    prompts = [embed["prompt_embeds"] for embed in embeds]
    text = pad_sequence(prompts, batch_first=True).to(dtype)
    pooled = torch.stack([embed["pooled_prompt_embeds"] for embed in embeds]).to(dtype)
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == max(lengths):  # compared on the host: no synchronisation with the device
        return text, pooled, None
    mask = torch.arange(text.shape[1]) < torch.tensor(lengths)[:, None]
    return text, pooled, upload(mask, text.device)


# Positions of arguments of a visual block, after the tokens, the text and the time embedding.
ROPE = 3
SPARSE_PARAMS = 4
TEXT_BLOCKS = "text_transformer_blocks"
VISUAL_BLOCKS = "visual_transformer_blocks"


def tile_order(frames: int, rows: int, columns: int) -> Tensor:
    """Token order of NABLA: frame by frame, tile by tile, row by row within a tile."""
    grid = raster_order(frames, rows, columns)
    # Frames, rows of tiles, rows in a tile, columns of tiles, columns in a tile.
    tiles = grid.view(frames, rows // TILE_SIDE, TILE_SIDE, columns // TILE_SIDE, TILE_SIDE)
    return tiles.transpose(2, 3).flatten()


def cut_rope(rope: Tensor, kept: Tensor) -> Tensor:
    """The rotations of the kept tokens: `B K 1 D/2 2 2` from `B S 1 D/2 2 2`, or from `1 S ...`."""
    samples = torch.arange(len(kept), device=kept.device)[:, None]
    return rope.expand(len(kept), *rope.shape[1:])[samples, kept]


def cut_window(params: dict[str, Any] | None, kept: Tensor) -> dict[str, Any] | None:
    """Parameters of block-sparse attention, whose window `1 1 N N` is cut to the kept `B 1 n n`."""
    if params is None:
        return None
    # The tokens of a tile are consecutive, so the first one gives its number.
    tiles = kept[:, ::TILE] // TILE
    window = params["sta_mask"][0, 0][tiles[:, :, None], tiles[:, None, :]]
    return {**params, "sta_mask": window[:, None]}


class SampledLatents(LatentEncoder):
    """Latents of pictures or clips: a sample from the VAE's posterior times the scaling factor."""

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of pixels in [-1, 1], drawn with one seed per sample; float32, on the CPU."""
        posterior = self.posterior(pixels)
        mean = posterior.mean.float().cpu()
        std = posterior.std.float().cpu()
        # On the CPU with one generator per sample, so that the draw is independent of device and
        # batch.
        noise = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            noise.append(torch.randn(mean.shape[1:], generator=generator))
        return (mean + std * torch.stack(noise)) * self.vae.config.scaling_factor

    def decode(self, z: Tensor) -> Tensor:
        return self.pixels(z.to(self.device, self.dtype) / self.vae.config.scaling_factor)


class Kandinsky5Adapter(FamilyAdapter):
    """One Kandinsky 5 checkpoint.

    Attributes:
        padding: the text mask of the loaded transformer.
    """

    transformer_class = Kandinsky5Transformer3DModel
    text_encoder = "simpletuner.models.kandinsky5.text:Kandinsky5TextEncoder"
    padding: blocks.TextPadding

    @property
    def pipeline_class(self) -> Any:
        return getattr(diffusers, pipeline_name(self.task))

    @property
    def takes_picture(self) -> bool:
        """Whether the task starts from a picture."""
        return self.task in ("i2i", "i2v")

    @property
    def rope_scale(self) -> RopeScale:
        """Divisors of the positions in time, height and width."""
        return 1.0, 1.0, 1.0  # pipelines of pictures never scale

    def load_transformer(self, dtype: torch.dtype, *, empty: bool = False) -> nn.Module:
        transformer: Any = super().load_transformer(dtype, empty=empty)
        # diffusers keeps the frequencies of the timestep embedding in a plain attribute, which `to`
        # does not move: every forward pass would copy them from the host and synchronise with the
        # GPU.
        embeddings = transformer.time_embeddings
        frequencies = embeddings.freqs
        del embeddings.freqs
        embeddings.register_buffer("freqs", frequencies, persistent=False)
        self.padding = blocks.mask_padding(transformer)
        return transformer

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        """Text blocks, then visual blocks.

        With NABLA, the tokens of a tile are consecutive, and kept or dropped together.
        """
        model: Any = transformer
        is_tiled = is_sparse(model.config)
        routing = TokenRouting(
            unit=TILE if is_tiled else 1,
            tables={ROPE: cut_rope, SPARSE_PARAMS: cut_window},
        )
        return BlockLayout(
            groups={name: model.get_submodule(name) for name in (TEXT_BLOCKS, VISUAL_BLOCKS)},
            visual=VISUAL_BLOCKS,
            width=model.config["model_dim"],
            order=tile_order if is_tiled else raster_order,
            routing=routing,
            rope=ROPE,
        )

    def use_fast_blocks(self, transformer: nn.Module) -> FastBlocks:
        return blocks.use_fast_blocks(transformer, self.padding)

    def store_modulation_in_bf16(self, transformer: nn.Module) -> None:
        blocks.store_in_bf16(transformer)

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        """Python code that reproduces the preview of the same prompt and seed."""
        pipeline = pipeline_name(usage.task)
        imports, load = _loading_code(usage, pipeline)
        arguments = []
        if usage.task in VIDEO_TASKS:
            arguments.append(f"num_frames={usage.frames}")
        elif usage.size not in IMAGE_SIZES:  # the pipeline would round it to the nearest of these
            load.append(f"pipe.resolutions = [{tuple(usage.size)}]  # sample exactly this size")
        return snippet(
            usage,
            pipeline,
            load,
            imports=imports,
            scheduler=_scheduler_code(usage),
            more=arguments,
            packages=["torchvision"],  # which the pipelines' own processor imports
        )

    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> PreviewPipeline:
        vae = self.load_vae(device, self.dtype)
        sampler = self.load_sampler(shift, from_picture=self.takes_picture)
        pipeline = stock_pipeline(
            self.pipeline_class, self.source, transformer=transformer, vae=vae, scheduler=sampler
        )
        encoder = self.encoder_class(vae, device, self.dtype)
        return StockPipeline(pipeline, encoder, device, self.task, self.padding)

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        """Run the transformer as the pipelines do."""
        latents = channels_last(noisy.noisy_latents)
        states = torch.cat([latents, *self.condition_channels(noisy)], dim=-1)
        text, pooled, mask = collate_text(noisy.batch.embeds, self.dtype)
        _, frames, height, width, _ = states.shape
        device = states.device
        grid = frames, height // PATCH, width // PATCH
        sparse_params = self.sparsity(noisy)
        with self.padding.hidden(mask):
            sample: Tensor = transformer(
                hidden_states=states.to(self.dtype),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=noisy.timesteps,  # float32, since bfloat16 would be off by up to 2
                visual_rope_pos=[torch.arange(side, device=device) for side in grid],
                text_rope_pos=torch.arange(text.shape[1], device=device),
                scale_factor=self.rope_scale,
                sparse_params=sparse_params,
                return_dict=False,
            )
        return sample.float().permute(0, 4, 1, 2, 3)

    @abstractmethod
    def condition_channels(self, noisy: NoisyBatch) -> tuple[Tensor, ...]:
        """Input channels after the noisy latents, `B F H W C`."""

    def sparsity(self, noisy: NoisyBatch) -> dict[str, Any] | None:
        """Parameters of block-sparse attention for a batch; None for dense checkpoints."""
        return None


class FluxLatentEncoder(SampledLatents):
    """Latents of pictures from the Flux VAE.

    The VAE's `shift_factor` is not applied, because the Kandinsky pipelines decode without it.
    """

    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 1 H W` pixels: `B 16 1 H/8 W/8`."""
        return super().encode(pixels[:, :, 0], seeds).unsqueeze(2)

    def decode(self, z: Tensor) -> Tensor:
        return super().decode(z[:, :, 0]).unsqueeze(2)


class Kandinsky5ImageAdapter(Kandinsky5Adapter):
    """One Kandinsky 5 Image checkpoint."""

    spec = KANDINSKY5_IMAGE
    encoder_class = FluxLatentEncoder

    def condition_channels(self, noisy: NoisyBatch) -> tuple[Tensor, ...]:
        """The source picture's latents, and a mask channel of ones."""
        if not self.takes_picture:
            return ()
        if noisy.batch.condition is None:
            raise RuntimeError("an i2i batch needs the latents of its source pictures")
        source = channels_last(noisy.batch.condition)
        return source, torch.ones_like(source[..., :1])


def _scheduler_code(usage: Usage) -> str | None:
    """An expression for the scheduler; None if the checkpoint's own is right."""
    shift = f"{usage.shift:g}" if usage.shift else ""
    if usage.solver not in (None, "euler"):
        return solver_code(usage.solver, shift or "pipe.scheduler.config.shift")
    if shift:
        return f"{EULER}.from_config(pipe.scheduler.config, shift={shift})"
    return None


def _original_code(original: OriginalWeights, dtype: str) -> list[str]:
    """Lines of Python that create `transformer` from its original file.

    diffusers loads folders, so the lines make one, with a link to the file and the config.json of
    `model`.
    """
    return [
        f"weights = hf_hub_download({text(original.repository)}, {text(original.file)})",
        f'config = {TRANSFORMER_CLASS}.load_config(model, subfolder="transformer") | '
        f"{dict(original.config)}",
        'folder = Path("transformer-in-diffusers-form")',
        "folder.mkdir(exist_ok=True)",
        '(folder / "config.json").write_text(json.dumps(config))',
        'link = folder / "diffusion_pytorch_model.safetensors"',
        "if not link.exists():",
        "    link.symlink_to(Path(weights).resolve())",
        f"transformer = {TRANSFORMER_CLASS}.from_pretrained(folder, dtype=torch.{dtype})",
    ]


def _loading_code(usage: Usage, pipeline: str) -> tuple[list[str], list[str]]:
    """Lines of Python that import, and lines that create `pipe` with the prompt template."""
    package = "simpletuner.models.kandinsky5"
    imports: list[str] = []
    processor = ""
    if not usage.alone:  # this program's processor needs no torchvision
        imports.append(f"from {package}.loading import load_processor")
        processor = "tokenizer=load_processor(model), "
    load = [f"model = {text(usage.model)}"]
    transformer = ""
    if usage.original is not None:
        imports += [
            "import json",
            "from pathlib import Path",
            f"from diffusers import {TRANSFORMER_CLASS}",
            "from huggingface_hub import hf_hub_download",
        ]
        load += _original_code(usage.original, usage.dtype)
        transformer = "transformer=transformer, "
    load.append(
        f"pipe = {pipeline}.from_pretrained(model, "
        f"{transformer}{processor}dtype=torch.{usage.dtype})"
    )
    options = usage.options.of(KandinskyOptions)
    overrides = transformer_overrides(options.model_dump())
    # A full fine-tune has them in its own config.json.
    if usage.lora is not None and usage.task in VIDEO_TASKS:
        for key, value in overrides.items():
            load.append(f"pipe.transformer.register_to_config({key}={text(str(value))})")
    if options.text_template != "official":
        return imports, load  # the pipeline's own
    name = TEMPLATES[usage.task]
    if usage.alone:
        template = f'"""{OFFICIAL[name].text}"""'
        crop = str(OFFICIAL[name].crop)
    else:
        imports.append(f"from {package}.templates import OFFICIAL")
        template = f'OFFICIAL["{name}"].text'
        crop = f'OFFICIAL["{name}"].crop'
    load.append(f"pipe.prompt_template = {template}")
    load.append(f"pipe.prompt_template_encode_start_idx = {crop}")
    return imports, load
