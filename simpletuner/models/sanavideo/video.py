"""Sana Video: text to clip, and picture to clip with the same checkpoint.

Captions become embeddings as in the pipelines: Gemma encodes instruction and caption, padded on the
right to a fixed length; the transformer gets token 0 and the last `max_length - 1` tokens with
their mask. Padding is not stored: masked tokens have a weight of exactly zero, so zeros can replace
them. The instruction is encoded once for all captions (`prompt_start`). Previews and conversions to
the layout of `SanaVideoTransformer3DModel` follow, then the adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaImageToVideoPipeline, SanaVideoPipeline
from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformer3DModel
from PIL import Image
from torch import Tensor, nn
from transformers import Gemma2Model, GemmaTokenizer, PreTrainedTokenizerBase

from simpletuner.diffusion.batch import NoisyBatch, TextEmbeds, upload
from simpletuner.diffusion.flow import hold_first_frame
from simpletuner.models.adapter import (
    BlockLayout,
    Compiler,
    EncoderQuantiser,
    FamilyAdapter,
    Forward,
    PreviewPipeline,
    PreviewRequest,
    TextEncoder,
    TextRequest,
)
from simpletuner.models.blocks import DynamicSizes
from simpletuner.models.loading import load_whole, stock_pipeline, user_errors, with_solver
from simpletuner.models.prompt_start import PromptStart
from simpletuner.models.sanavideo.cost import TEXT_LENGTH
from simpletuner.models.sanavideo.fast import run_block
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.sanavideo.spec import SANA_VIDEO, clean_caption, with_motion_score
from simpletuner.models.usage import Usage, snippet, solver_code, text
from simpletuner.models.wan_vae import WanLatentEncoder

# Linear layers that can be quantised.
GEMMA_LAYERS = r"layers\.\d+\..+"


def pipeline_instruction() -> list[str]:
    """The default instruction of the installed pipeline."""
    parameters = inspect.signature(SanaVideoPipeline.__call__).parameters
    return parameters["complex_human_instruction"].default


class SanaTextEncoder(TextEncoder):
    """Gemma 2 with the instruction.

    Args:
        device, dtype: compute device and precision of the encoder.
        quantise: quantises Gemma's weights.

    Attributes:
        max_length: number of tokens passed to the transformer.
    """

    def __init__(
        self,
        adapter: SanaVideoAdapter,
        device: torch.device,
        dtype: torch.dtype,
        quantise: EncoderQuantiser | None,
    ) -> None:
        source = adapter.source
        self.max_length = adapter.spec.captions.length(adapter.text)
        self.device = device
        options = adapter.options.of(SanaOptions)
        self.motion_score = options.sana_motion_score
        lines = options.sana_complex_human_instruction
        if lines is True:
            lines = pipeline_instruction()
        self.instruction = "\n".join(lines)
        with user_errors(source["tokenizer"]):
            self.tokenizer: PreTrainedTokenizerBase = GemmaTokenizer.from_pretrained(
                source["tokenizer"].fetch()
            )
        self.tokenizer.padding_side = "right"
        self.start = PromptStart(
            tokens=self.tokenizer.encode(self.instruction), length=self._length(bare=False)
        )
        gemma: Any = load_whole(Gemma2Model, source["text_encoder"], dtype=dtype)
        if quantise is not None:
            quantise(gemma, GEMMA_LAYERS, encoder=1)
        self.gemma = gemma.requires_grad_(False).eval().to(device)

    @property
    def models(self) -> Sequence[nn.Module]:
        return [self.gemma]

    def encode_alike(self, requests: Sequence[TextRequest]) -> list[TextEmbeds]:
        """`prompt_embeds` (L, D) of each caption, L up to `max_length`, on the CPU.

        Bare requests are encoded without instruction and motion score.
        """
        texts = [self._compose(request) for request in requests]
        length = self.padded_length(requests[0])
        inputs = self.tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(self.device)
        ids = inputs.input_ids
        mask = inputs.attention_mask
        if requests[0].bare or not self.instruction:
            hidden = self.gemma(ids, attention_mask=mask, use_cache=False).last_hidden_state
        else:
            hidden = self.start.read(self.gemma, ids, mask)
        # The start token and the end of the row, as in the pipeline: the instruction drops out.
        kept = [0, *range(-self.max_length + 1, 0)]
        rows = zip(hidden[:, kept].cpu(), mask[:, kept].bool().cpu(), strict=True)
        return [{"prompt_embeds": row[is_real]} for row, is_real in rows]

    def padded_length(self, request: TextRequest) -> int:
        """Gemma's input is padded, so all captions have one length."""
        return self._length(request.bare)

    def truncated(self, caption: str) -> str | None:
        """The end of a caption that does not fit, or None."""
        ids = self.tokenizer(self._compose(TextRequest(caption)))["input_ids"]
        truncated = ids[self._length(bare=False) :]
        return str(self.tokenizer.decode(truncated)) if truncated else None

    def _compose(self, request: TextRequest) -> str:
        """The full prompt of a request."""
        caption = clean_caption(request.caption)
        if request.bare:
            return caption
        return self.instruction + with_motion_score(caption, self.motion_score)

    def _length(self, bare: bool) -> int:
        """Length of Gemma's input in tokens."""
        if bare or not self.instruction:
            return self.max_length
        # As in the pipeline: the two are the start token and one more, which both terms count.
        return len(self.tokenizer.encode(self.instruction)) + self.max_length - 2


# Clips that start from a picture are sampled with Euler steps and this shift; the checkpoint's
# scheduler is for t2v.
I2V_SHIFT = 8.0


class StockSanaPipelines(PreviewPipeline):
    """The t2v pipeline, and the i2v pipeline for previews with a source picture.

    Both use the transformer in training, and the VAE in float32; each has its own scheduler.
    Decoding in float32 changes settings of the process, so it cannot go on beside training.
    """

    def __init__(
        self, adapter: SanaVideoAdapter, transformer: nn.Module, device: torch.device
    ) -> None:
        self.encoder = adapter.load_latent_encoder(device, torch.float32)
        self.vae = self.encoder.vae
        self.device = device

        def build(pipeline_class: Any, *, from_picture: bool) -> Any:
            return stock_pipeline(
                pipeline_class,
                adapter.source,
                transformer=transformer,
                vae=self.vae,
                scheduler=adapter.load_sampler(None, from_picture=from_picture),
            )

        self.from_text = build(SanaVideoPipeline, from_picture=False)
        self.from_picture = build(SanaImageToVideoPipeline, from_picture=True)

    def render(self, request: PreviewRequest) -> list[Image.Image]:
        """Sample one clip of exactly the requested size and length."""
        inputs = self._inputs(request)
        if request.source is None:
            return list(self.from_text(**inputs).frames[0])
        return list(self.from_picture(**inputs, image=request.start).frames[0])

    def _inputs(self, request: PreviewRequest) -> dict[str, Any]:
        """The arguments that both pipelines take."""
        dtype = request.embeds["prompt_embeds"].dtype
        text, mask = collate_text([request.embeds, request.negative], dtype)
        return {
            "prompt_embeds": text[:1].to(self.device),
            "prompt_attention_mask": mask[:1].to(self.device),
            "negative_prompt_embeds": text[1:].to(self.device),
            "negative_prompt_attention_mask": mask[1:].to(self.device),
            # The default is a string, which the pipeline rejects together with embeddings.
            "negative_prompt": None,
            "frames": request.num_frames,
            # Otherwise the pipeline samples the nearest of its sizes, and resizes.
            "use_resolution_binning": False,
            "output_type": "pil",
            **request.inputs(lambda latents: latents),
        }


def collate_text(embeds: Sequence[TextEmbeds], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embeddings `B 300 D`, zero-padded on the right, and the mask `B 300` of real tokens."""
    prompts = [embed["prompt_embeds"] for embed in embeds]
    lengths = [len(prompt) for prompt in prompts]
    padded = [
        nn.functional.pad(prompt, (0, 0, 0, TEXT_LENGTH - length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    text = torch.stack(padded)
    mask = torch.arange(TEXT_LENGTH) < torch.tensor(lengths)[:, None]
    return text.to(dtype), upload(mask.long(), text.device)


def embed_distinct(embed: Forward, timesteps: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """`forward` of the timestep embedding, which in training embeds a timestep once per clip.

    diffusers embeds it once per token, and an embedding is six times as wide as a token. A clip has
    two timesteps: that of the given frame, which has the first tokens, and that of the rest.

    Args:
        embed: the stock forward.

    Returns:
        modulation and embedding, `B·S D` each.
    """
    samples = settings["batch_size"]
    if not torch.is_grad_enabled() or timesteps.numel() <= samples:  # one timestep per sample
        return embed(timesteps, **settings)
    by_token = timesteps.view(samples, -1)  # `unique` would synchronise with the device
    given = by_token[:, 0]
    rest = by_token[:, -1]
    distinct = torch.stack([given, rest], dim=1).flatten()
    outputs = embed(distinct, **settings)
    # Clip i has the rows 2 i (given) and 2 i + 1 (rest).
    clips = torch.arange(samples, device=by_token.device)[:, None]
    rows = (2 * clips + (by_token != given[:, None])).flatten()
    # As `output[rows]`, whose gradient would be slower.
    return tuple(nn.functional.embedding(rows, output) for output in outputs)


class CompiledOnGrid:
    """`forward` of a block, compiled for a grid of any size and batches of one, or of more."""

    def __init__(self, compiler: Compiler, forward: Forward) -> None:
        bound: Any = forward
        self.block = bound.__self__
        self.compiled = compiler(run_block)
        self.sizes = DynamicSizes()

    def __call__(
        self,
        hidden: Tensor,
        no_mask: None,
        text: Tensor,
        mask: Tensor,
        timestep: Tensor,
        frames: int,
        height: int,
        width: int,
        rotary: Sequence[Tensor],
    ) -> Tensor:
        grid = (frames, height, width)
        hidden = hidden.unflatten(1, grid)
        tables = [table.unflatten(1, grid) for table in rotary]
        is_per_token = timestep.shape[1] > 1
        timestep = timestep.unflatten(1, grid if is_per_token else (1, 1, 1))
        self.sizes.mark((hidden, text, mask, timestep, *tables), _free_dimensions)
        return self.compiled(self.block, hidden, text, mask, timestep, tables)


def _free_dimensions(tensor: Tensor) -> range:
    """The dimensions that vary between calls: the batch, and the grid of `B T H W ...`."""
    return range(4) if tensor.ndim > 3 else range(1)


class SanaVideoAdapter(FamilyAdapter):
    """One Sana Video checkpoint.

    A batch with a condition is trained as i2v, any other as t2v; likewise previews with a source
    picture. There are no fast blocks, since blocks spend their time in convolutions and linear
    attention.
    """

    spec = SANA_VIDEO
    encoder_class = WanLatentEncoder
    transformer_class = SanaVideoTransformer3DModel
    pipeline_class = SanaVideoPipeline
    text_encoder = "simpletuner.models.sanavideo.video:SanaTextEncoder"

    def load_transformer(self, dtype: torch.dtype, *, empty: bool = False) -> nn.Module:
        transformer = super().load_transformer(dtype, empty=empty)
        time_embed = transformer.get_submodule("time_embed")
        time_embed.forward = partial(embed_distinct, time_embed.forward)
        return transformer

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        return hold_first_frame(noisy)

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        text, mask = collate_text(noisy.batch.embeds, self.dtype)
        velocity: Tensor = transformer(
            hidden_states=noisy.noisy_latents.to(self.dtype),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            timestep=self._timesteps(noisy),
            return_dict=False,
        )[0]
        return velocity.float()

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        """The transformer blocks, without routing: the feed-forward convolves the token grid."""
        model: Any = transformer
        name = "transformer_blocks"
        return BlockLayout(
            groups={name: model.get_submodule(name)},
            visual=name,
            width=model.config["num_attention_heads"] * model.config["attention_head_dim"],
            compiled=CompiledOnGrid,
        )

    def load_sampler(self, shift: float | None, *, from_picture: bool) -> Any:
        if from_picture:
            return with_solver(FlowMatchEulerDiscreteScheduler(shift=I2V_SHIFT), self.solver)
        return super().load_sampler(None, from_picture=False)

    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> StockSanaPipelines:
        """Both pipelines have fixed schedules; `shift` has no effect."""
        return StockSanaPipelines(self, transformer, device)

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        """Python code that reproduces the preview of the same prompt and seed."""
        if usage.task == "i2v":
            pipeline = "SanaImageToVideoPipeline"
            scheduler = solver_code(usage.solver or "euler", f"{I2V_SHIFT:g}")
        else:
            pipeline = "SanaVideoPipeline"
            scheduler = None  # the checkpoint's own
            if usage.solver:
                scheduler = solver_code(usage.solver, "pipe.scheduler.config.flow_shift")
        load = f"pipe = {pipeline}.from_pretrained({text(usage.model)}, dtype=torch.{usage.dtype})"
        return snippet(
            usage,
            pipeline,
            [load],
            scheduler=scheduler,
            more=(f"frames={usage.frames}", "use_resolution_binning=False"),
        )

    def _timesteps(self, noisy: NoisyBatch) -> Tensor:
        """Timesteps as in the pipelines.

        Returns:
            whole numbers `B` for t2v; with a given frame 0 one per token, `B 1 F H/patch W/patch`,
            and 0 on that frame.
        """
        if not noisy.given_frames:
            return noisy.timesteps.floor()
        _, _, frames, height, width = noisy.noisy_latents.shape
        patch = self.spec.patch_size
        per_sample = noisy.timesteps.view(-1, 1, 1, 1, 1)
        per_token = per_sample.repeat(1, 1, frames, height // patch, width // patch)
        per_token[:, :, 0] = 0
        return per_token
