"""A Sana Video checkpoint of real classes with random weights, made in a second.

The tokenizer is built here, since Gemma's is large: its tokens are single characters, bytes for all
other characters, and the words of the pipeline's instruction, so that the instruction is a few
hundred tokens long as it is with the real one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from simpletuner.models.sanavideo.video import pipeline_instruction
from simpletuner.rounding import round_up
from tests.tools.tiny import WIDTH, cast, fill_zeros

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
CHARACTERS = [chr(code) for code in range(0x21, 0x7F)]
HEADS = 2
HEAD_WIDTH = 24


def build_tokenizer() -> GemmaTokenizer:
    """Gemma's tokenizer class with a small vocabulary.

    It puts `<bos>` before every text, as Gemma's does.
    """
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = dict.fromkeys([*SPECIAL, *bytes_as_tokens, "▁", "\n", *CHARACTERS])
    words = " ".join(pipeline_instruction()).split()
    # A merge per prefix of a word: ▁ + f, ▁f + o, ▁fo + r. Dictionaries keep the order.
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(set(words)):
        left = "▁"
        for character in word:
            merges[left, character] = None
            left += character
            tokens[left] = None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=list(merges))
    bos = ("<bos>", vocabulary["<bos>"])
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[bos]
    )
    return tokenizer


def build_gemma(vocabulary: int) -> Gemma2Model:
    """Gemma 2 of two layers; hidden states are `WIDTH` wide."""
    return Gemma2Model(
        Gemma2Config(
            vocab_size=round_up(vocabulary, 16),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.3,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
        )
    )


def build_wan_vae() -> AutoencoderKLWan:
    """A VAE like that of Wan 2.1: 16 latent channels, an eighth of the size, every 4th frame."""
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def build_ltx2_vae() -> AutoencoderKLLTX2Video:
    """A VAE like that of LTX-2: 128 latent channels, a 32nd of the size, every 8th frame."""
    vae = AutoencoderKLLTX2Video(
        block_out_channels=(16, 32, 32, 64),
        decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    vae.latents_mean.uniform_(-0.5, 0.5)
    vae.latents_std.uniform_(0.5, 1.5)
    return vae


def build_sana(flavour: str = "2b-480p") -> SanaVideoTransformer3DModel:
    """A Sana Video transformer of two blocks, with no zero-initialised parameter left."""
    channels = {}
    if flavour == "2b-720p":
        channels = {"in_channels": 128, "out_channels": 128, "patch_size": (1, 1, 1)}
    transformer = SanaVideoTransformer3DModel(
        **channels,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        num_layers=2,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=HEAD_WIDTH,
        cross_attention_dim=HEADS * HEAD_WIDTH,
        caption_channels=WIDTH,
        mlp_ratio=2,
    )
    fill_zeros(transformer)
    return transformer


def make_sana_checkpoint(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, flavour: str = "2b-480p"
) -> Path:
    """Write a Sana Video checkpoint of random weights, for t2v and i2v; returns its folder."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = SanaVideoPipeline(
            tokenizer=tokenizer,
            text_encoder=cast(build_gemma(len(tokenizer)), dtype),
            vae=build_ltx2_vae() if flavour == "2b-720p" else build_wan_vae(),
            transformer=cast(build_sana(flavour), dtype),
            scheduler=DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
            ),
        )
    pipeline.save_pretrained(folder)
    return folder
