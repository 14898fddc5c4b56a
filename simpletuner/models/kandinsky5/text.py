"""Encodes captions like the Kandinsky 5 pipelines.

Qwen2.5-VL encodes the caption inside a template, with one vector per token after the template's
crop; CLIP encodes the caption alone into one pooled vector. Embeddings are not padded.

Two parts of the pipelines' computation are skipped, which changes only rounding: the language head,
whose logits are unused, and the template before the caption, which is encoded once for all captions
(`prompt_start`). The head never moves to the device, nor does the vision tower if prompts contain
no pictures; transformers maps the files, so their pages are not even read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import (
    CLIPTextModel,
    CLIPTokenizer,
    ProcessorMixin,
    Qwen2_5_VLForConditionalGeneration,
)

from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.models.adapter import EncoderQuantiser, TextEncoder, TextRequest
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.options import KandinskyOptions
from simpletuner.models.kandinsky5.spec import COMPONENTS, TEMPLATES
from simpletuner.models.kandinsky5.templates import (
    OFFICIAL,
    TemplateName,
    TextTemplate,
    clean_caption,
)
from simpletuner.models.loading import load_whole, user_errors
from simpletuner.models.prompt_start import PromptStart, lengthen
from simpletuner.rounding import round_up

if TYPE_CHECKING:
    from simpletuner.models.kandinsky5.image import Kandinsky5Adapter

CLIP_LENGTH = 77
POSITIONS = 1024  # text tokens in the transformer's position table
# Prompts are padded to a multiple of this, and a batch has prompts of one length: attention kernels
# round differently by length. So embeddings depend on the batch size at most, not on the rest of
# the batch. On a GPU, where reading the weights takes the time, padding is free.
STEP = 32
CPU_STEP = 8
PROMPT_PICTURE_SCALE = 2  # Qwen gets the source picture at half its size, as in the pipeline
# Linear layers that can be quantised. The vision tower, embeddings and the pooled projection keep
# their dtype.
QWEN_LAYERS = r"model\.language_model\.layers\.\d+\..+"
CLIP_LAYERS = r"(text_model\.)?encoder\.layers\.\d+\..+"


def select_template(words: Literal["official", "diffusers"], name: TemplateName) -> TextTemplate:
    """The official template, or the installed diffusers'."""
    if words == "official":
        return OFFICIAL[name]
    from diffusers import Kandinsky5I2IPipeline, Kandinsky5T2IPipeline, Kandinsky5T2VPipeline

    classes = {
        "image": Kandinsky5T2IPipeline,
        "image_edit": Kandinsky5I2IPipeline,
        "video": Kandinsky5T2VPipeline,
    }
    pipeline = classes[name](**dict.fromkeys(COMPONENTS))
    return TextTemplate(pipeline.prompt_template, pipeline.prompt_template_encode_start_idx)


class Kandinsky5TextEncoder(TextEncoder):
    """Qwen2.5-VL and CLIP together.

    Args:
        device, dtype: compute device and precision of the encoders.
        quantise: quantises the encoders' weights.

    Attributes:
        template: the prompt template.
        max_length: longest caption in tokens, including the closing tokens of the template.
    """

    def __init__(
        self,
        adapter: Kandinsky5Adapter,
        device: torch.device,
        dtype: torch.dtype,
        quantise: EncoderQuantiser | None,
    ) -> None:
        source = adapter.source
        captions = adapter.spec.captions
        options = adapter.options.of(KandinskyOptions)
        self.device = device
        self.template = select_template(options.text_template, TEMPLATES[adapter.task])
        self.max_length = captions.length(adapter.text)
        with user_errors(source["tokenizer"]):
            self.processor: ProcessorMixin = load_processor(source["tokenizer"].fetch().parent)
        with user_errors(source["tokenizer_2"]):
            self.clip_tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(
                source["tokenizer_2"].fetch()
            )
        before_caption = self.template.text.partition("{}")[0]
        self.start = PromptStart(
            tokens=self.processor.tokenizer(before_caption)["input_ids"],
            length=self.template.crop + self.max_length,
        )
        self.qwen = load_whole(
            Qwen2_5_VLForConditionalGeneration, source["text_encoder"], dtype=dtype
        )
        self.qwen.lm_head = nn.Identity()
        if adapter.task not in captions.picture_tasks:
            self.qwen.model.visual = None
        self.clip = load_whole(CLIPTextModel, source["text_encoder_2"], dtype=dtype)
        if quantise is not None:
            quantise(self.qwen, QWEN_LAYERS, encoder=1)
            quantise(self.clip, CLIP_LAYERS, encoder=2)
        for model in self.models:
            model.requires_grad_(False).eval().to(device)

    @property
    def models(self) -> Sequence[nn.Module]:
        return [self.qwen, self.clip]

    def encode_alike(self, requests: Sequence[TextRequest]) -> list[TextEmbeds]:
        """`prompt_embeds` (L, D) and `pooled_prompt_embeds` (D2) of each caption, on the CPU.

        Attention is causal, so neither padding after a caption nor other captions of the batch
        affect its embeddings, but for rounding; see `STEP`.

        Raises:
            ValueError: a prompt with its picture takes more tokens than the transformer has
                positions for.
        """
        captions = [self._fit(clean_caption(request.caption)) for request in requests]
        inputs = [
            self._tokenize(caption, request.picture)
            for caption, request in zip(captions, requests, strict=True)
        ]
        rows = zip(self._encode_qwen(inputs), self._encode_clip(captions), strict=True)
        return [
            {"prompt_embeds": hidden, "pooled_prompt_embeds": pooled.clone()}
            for hidden, pooled in rows
        ]

    def padded_length(self, request: TextRequest) -> int:
        """Padded length of a prompt in tokens, counting its picture as one."""
        text = self.template.format(self._fit(clean_caption(request.caption)))
        return self._length_for(len(self.processor.tokenizer(text)["input_ids"]))

    def truncated(self, caption: str) -> str | None:
        """The truncated end of a caption, or None."""
        cleaned = clean_caption(caption)
        kept = self._fit(cleaned)
        return None if kept == cleaned else cleaned.removeprefix(kept)

    def _fit(self, caption: str) -> str:
        """Truncate a cleaned caption, so that it and the template's end fit into `max_length`."""
        tokenizer = self.processor.tokenizer
        # What follows the caption, without the picture's tokens, whose number depends on its size.
        suffix = self.template.text.partition("{}")[2].partition("<|vision_start|>")[0]
        room = self.max_length - len(tokenizer(suffix)["input_ids"])
        ids = tokenizer(caption)["input_ids"]
        return caption if len(ids) <= room else tokenizer.decode(ids[:room])

    def _tokenize(self, caption: str, picture: Image | None) -> dict[str, Tensor]:
        """Qwen's inputs for one prompt: tokens `1 L`, and the patches of its picture, if any."""
        images = None
        if picture is not None:
            width, height = picture.size
            size = (width // PROMPT_PICTURE_SCALE, height // PROMPT_PICTURE_SCALE)
            images = [picture.resize(size)]
        prompt = self.template.format(caption)
        inputs = dict(self.processor(text=[prompt], images=images, return_tensors="pt"))
        length = inputs["input_ids"].shape[1] - self.template.crop
        if length > POSITIONS:
            raise ValueError(
                f"a prompt with its picture takes {length} tokens; the model has {POSITIONS} "
                "positions"
            )
        return inputs

    def _encode_qwen(self, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        """Qwen's hidden states of each prompt after the template's crop, (L, D)."""
        padded = [self._padded(prompt) for prompt in inputs]
        batch = {
            name: torch.cat([prompt[name] for prompt in padded]).to(self.device)
            for name in padded[0]
        }
        if "pixel_values" in batch:
            # Not with `prompt_start`: the tokens before the caption are only a tenth of a prompt
            # with a picture.
            rows = self.qwen.model(**batch, use_cache=False).last_hidden_state
        else:
            rows = self.start.read(self.qwen.model.language_model, batch["input_ids"])
        crop = self.template.crop
        embeds = []
        for row, prompt in zip(rows[:, crop:].cpu(), inputs, strict=True):
            length = prompt["input_ids"].shape[1] - crop  # without padding
            embeds.append(row[:length].clone())
        return embeds

    def _padded(self, prompt: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a prompt, with per-token tensors padded to its padded length."""
        ids = prompt["input_ids"]
        picture_tokens = int((ids == self.qwen.config.image_token_id).sum())
        # The picture counts as one token, as in `padded_length`.
        uncounted = max(0, picture_tokens - 1)
        length = self._length_for(ids.shape[1] - uncounted) + uncounted
        padded = {}
        for name, tensor in prompt.items():
            is_per_token = tensor.shape == ids.shape
            padded[name] = lengthen(tensor, length) if is_per_token else tensor
        return padded

    def _length_for(self, tokens: int) -> int:
        """The padded length for a number of tokens."""
        step = CPU_STEP if self.device.type == "cpu" else STEP
        return round_up(tokens, step)

    def _encode_clip(self, captions: list[str]) -> Tensor:
        """CLIP's pooled vectors of the captions, `B D2`."""
        inputs = self.clip_tokenizer(
            captions,
            max_length=CLIP_LENGTH,
            truncation=True,
            padding="max_length",
            return_tensors="pt",
        ).to(self.device)
        return self.clip(**inputs).pooler_output.cpu()
