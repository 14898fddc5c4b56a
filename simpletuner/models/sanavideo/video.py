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
from simpletuner.models.blocks import FreeSizes
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
    return (
        inspect.signature(SanaVideoPipeline.__call__)
        .parameters["complex_human_instruction"]
        .default
    )


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
        self.max_length = adapter.spec.words.length(adapter.text)
        self.device = device
        options = adapter.options.of(SanaOptions)
        self.motion_score = options.sana_motion_score
        instruction = options.sana_complex_human_instruction
        self.instruction = "\n".join(pipeline_instruction() if instruction is True else instruction)
        with user_errors(source["tokenizer"]):
            self.tokenizer: PreTrainedTokenizerBase = GemmaTokenizer.from_pretrained(
                source["tokenizer"].fetch()
            )
        self.tokenizer.padding_side = "right"
        self.start = PromptStart(self.tokenizer.encode(self.instruction), self._length(bare=False))
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
        cut = self.tokenizer(self._compose(TextRequest(caption)))["input_ids"][
            self._length(bare=False) :
        ]
        return str(self.tokenizer.decode(cut)) if cut else None

    def _compose(self, request: TextRequest) -> str:
        """The full prompt of a request."""
        caption = clean_caption(request.caption)
        return (
            caption
            if request.bare
            else self.instruction + with_motion_score(caption, self.motion_score)
        )

    def _length(self, bare: bool) -> int:
        """Length of Gemma's input in tokens. The pipeline adds the instruction's tokens, less two,
        to `max_length`.
        """
        if bare or not self.instruction:
            return self.max_length
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
        self.from_text, self.from_picture = (
            stock_pipeline(
                pipeline,
                adapter.source,
                transformer=transformer,
                vae=self.vae,
                scheduler=adapter.load_sampler(
                    None, from_picture=pipeline is SanaImageToVideoPipeline
                ),
            )
            for pipeline in (SanaVideoPipeline, SanaImageToVideoPipeline)
        )

    def render(self, request: PreviewRequest) -> list[Image.Image]:
        """Sample one clip of exactly the requested size and length."""
        inputs = self._inputs(request)
        if request.source is None:
            return list(self.from_text(**inputs).frames[0])
        return list(self.from_picture(**inputs, image=request.start).frames[0])

    def _inputs(self, request: PreviewRequest) -> dict[str, Any]:
        text, mask = collate_text(
            [request.embeds, request.negative], request.embeds["prompt_embeds"].dtype
        )
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
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    text = torch.stack(
        [nn.functional.pad(prompt, (0, 0, 0, TEXT_LENGTH - len(prompt))) for prompt in prompts]
    )
    mask = torch.arange(TEXT_LENGTH) < lengths[:, None]
    return text.to(dtype), upload(mask.long(), text.device)


def embed_distinct(embed: Forward, timesteps: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """`forward` of the timestep embedding, which in training embeds each distinct timestep once,
    not once per token.

    A clip has two timesteps: of the given frame, and of the rest. An embedding is six times as wide
    as a token.

    Returns:
        modulation and embedding, each `tokens D`.
    """
    samples = settings["batch_size"]
    if not torch.is_grad_enabled() or timesteps.numel() <= samples:  # one timestep per sample
        return embed(timesteps, **settings)
    tokens = timesteps.view(samples, -1)  # `unique` would synchronise with the device
    given = tokens[:, 0]
    others = tokens[:, -1]
    clips = torch.arange(samples, device=tokens.device)[:, None]
    places = (2 * clips + (tokens != given[:, None])).flatten()
    outputs = embed(torch.stack([given, others], dim=1).flatten(), **settings)
    return tuple(nn.functional.embedding(places, output) for output in outputs)


class CompiledOnGrid:
    """`forward` of a block, compiled for a grid of any size and batches of one, or of more."""

    def __init__(self, compiler: Compiler, forward: Forward) -> None:
        bound: Any = forward
        self.block = bound.__self__
        self.compiled = compiler(run_block)
        self.sizes = FreeSizes()

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
        hidden, *tables = (each.unflatten(1, grid) for each in (hidden, *rotary))
        timestep = timestep.unflatten(1, grid if timestep.shape[1] > 1 else (1, 1, 1))
        inputs = (hidden, text, mask, timestep, *tables)
        self.sizes.mark(inputs, lambda tensor: range(4 if tensor.ndim > 3 else 1))  # batch and grid
        return self.compiled(self.block, hidden, text, mask, timestep, tables)


class SanaVideoAdapter(FamilyAdapter):
    """One Sana Video checkpoint.

    A batch with a condition is trained as i2v, any other as t2v; likewise previews with a source
    picture. There are no fast blocks: these spend their time in convolutions and linear attention.
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
        """The transformer blocks, without routing: the feed-forward convolves the whole token
        grid.
        """
        model: Any = transformer
        name = "transformer_blocks"
        settings = model.config
        width = settings["num_attention_heads"] * settings["attention_head_dim"]
        return BlockLayout(
            {name: model.get_submodule(name)}, visual=name, width=width, compiled=CompiledOnGrid
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
        is_i2v = usage.task == "i2v"
        pipeline = "SanaImageToVideoPipeline" if is_i2v else "SanaVideoPipeline"
        solver = usage.solver or ("euler" if is_i2v else None)
        shift = f"{I2V_SHIFT:g}" if is_i2v else "pipe.scheduler.config.flow_shift"
        return snippet(
            usage,
            pipeline,
            [f"pipe = {pipeline}.from_pretrained({text(usage.model)}, dtype=torch.{usage.dtype})"],
            scheduler=solver_code(solver, shift) if solver else None,
            more=(f"frames={usage.frames}", "use_resolution_binning=False"),
        )

    def _timesteps(self, noisy: NoisyBatch) -> Tensor:
        """Timesteps as in the pipelines: whole numbers `B` for t2v; with a given frame 0 one per
        token, `B 1 F H/patch W/patch`, and 0 on that frame.
        """
        if noisy.batch.condition is None or noisy.noisy_latents.shape[2] == 1:
            return noisy.timesteps.floor()
        _, _, frames, height, width = noisy.noisy_latents.shape
        patch = self.spec.patch_size
        spread = noisy.timesteps.view(-1, 1, 1, 1, 1).repeat(
            1, 1, frames, height // patch, width // patch
        )
        spread[:, :, 0] = 0
        return spread
