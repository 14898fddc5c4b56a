"""Captions to embeddings, as the Sana Video pipelines make them.

Gemma encodes instruction and caption, padded on the right to a fixed length; the transformer gets token 0 and the last
`max_length - 1` tokens with their mask. Padding is not stored: masked tokens have a weight of exactly zero, so zeros
can replace them. The instruction is encoded once for all captions (`prompt_start`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma2Model, GemmaTokenizer, PreTrainedTokenizerBase

from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.models.adapter import EncoderQuantiser, TextRequest
from simpletuner.models.loading import load_whole, told_plainly
from simpletuner.models.prompt_start import PromptStart
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.sanavideo.spec import clean_caption, with_motion_score
from simpletuner.models.source import ModelSource

# Linear layers that can be quantised.
GEMMA_LAYERS = r"layers\.\d+\..+"


def pipeline_instruction() -> list[str]:
    """The default instruction of the installed pipeline."""
    from diffusers import SanaVideoPipeline

    parameters = inspect.signature(SanaVideoPipeline.__call__).parameters
    lines: list[str] = parameters["complex_human_instruction"].default
    return lines


class SanaTextEncoder:
    """Gemma 2 with the instruction.

    Args:
        source: the checkpoint's components.
        options: instruction and motion score.
        max_length: tokens that the transformer gets.
        device, dtype: where and in which precision the encoder runs.
        quantise: quantises Gemma's weights.
    """

    def __init__(
        self,
        source: ModelSource,
        options: SanaOptions,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        quantise: EncoderQuantiser | None = None,
    ) -> None:
        self.max_length, self.device = max_length, device
        self.motion_score = options.sana_motion_score
        instruction = options.sana_complex_human_instruction
        self.instruction = "\n".join(pipeline_instruction() if instruction is True else instruction)
        with told_plainly(source["tokenizer"]):
            self.tokenizer: PreTrainedTokenizerBase = GemmaTokenizer.from_pretrained(source["tokenizer"].fetch())
        self.tokenizer.padding_side = "right"
        self.start = PromptStart(self.tokenizer.encode(self.instruction), self._length(bare=False))
        gemma: Any = load_whole(Gemma2Model, source["text_encoder"], dtype=dtype)
        if quantise is not None:
            quantise(gemma, GEMMA_LAYERS, encoder=1)
        self.gemma = gemma.requires_grad_(False).eval().to(device)

    @property
    def models(self) -> Sequence[nn.Module]:
        return [self.gemma]

    @torch.no_grad()
    def encode(self, requests: Sequence[TextRequest]) -> list[TextEmbeds]:
        """`prompt_embeds` (L, D) of each caption, L up to `max_length`, on the CPU.

        Bare requests are encoded without instruction and motion score.
        """
        embeds: list[TextEmbeds] = [{} for _ in requests]
        for bare in (False, True):
            members = [index for index, request in enumerate(requests) if request.bare is bare]
            texts = [self._compose(requests[index]) for index in members]
            for index, hidden in zip(members, self._encode(texts, bare) if texts else [], strict=True):
                embeds[index] = {"prompt_embeds": hidden}
        return embeds

    def padded_length(self, request: TextRequest) -> int:
        """Gemma's input is padded, so all captions have one length."""
        return self._length(request.bare)

    def truncated(self, caption: str) -> str | None:
        """The end of a caption that does not fit, or None."""
        request = TextRequest(caption)
        ids = self.tokenizer(self._compose(request))["input_ids"]
        cut = ids[self._length(request.bare) :]
        return str(self.tokenizer.decode(cut)) if cut else None

    def _compose(self, request: TextRequest) -> str:
        """The full prompt of a request."""
        caption = clean_caption(request.caption)
        return caption if request.bare else self.instruction + with_motion_score(caption, self.motion_score)

    def _length(self, bare: bool) -> int:
        """Length of Gemma's input in tokens. The pipeline adds the instruction's tokens, less two, to `max_length`."""
        if bare or not self.instruction:
            return self.max_length
        return len(self.tokenizer.encode(self.instruction)) + self.max_length - 2

    def _encode(self, texts: list[str], bare: bool) -> list[Tensor]:
        inputs = self.tokenizer(
            texts, padding="max_length", max_length=self._length(bare), truncation=True, return_tensors="pt"
        ).to(self.device)
        hidden = self._read(inputs.input_ids, inputs.attention_mask, bare)
        kept = [0, *range(-self.max_length + 1, 0)]
        rows = zip(hidden[:, kept].cpu(), inputs.attention_mask[:, kept].bool().cpu(), strict=True)
        return [row[mask].clone() for row, mask in rows]

    def _read(self, ids: Tensor, mask: Tensor, bare: bool) -> Tensor:
        """Hidden states `B L D`."""
        if bare or not self.instruction:
            hidden: Tensor = self.gemma(ids, attention_mask=mask, use_cache=False).last_hidden_state
            return hidden
        return self.start.read(self.gemma, ids, mask)
