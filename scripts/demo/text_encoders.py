"""The demo's text encoders: random, frozen, and made so that different words come out far apart.

A trained language model would be by far larger than the rest of the checkpoint. For a world of
sixty words, random ones are enough: every token keeps its direction (embeddings of variance 1,
blocks that add little), and CLIP's pooled vector is a mixture of all words of the caption
(attention near uniform, with a strong value path).
"""

from __future__ import annotations

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from simpletuner.rounding import round_up

TEXT_DIM = 64


def padded_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The vocabulary's size rounded up to a multiple of 16, which quantised kernels need."""
    return round_up(len(tokenizer), 16)


def build_qwen(
    tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with two layers and a vision tower of two. Hidden states are B L 64."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": padded_size(tokenizer),
            "hidden_size": TEXT_DIM,
            "intermediate_size": 2 * TEXT_DIM,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
            "initializer_range": 0.05,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": TEXT_DIM,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        # The output layer is never used; tied to the embeddings it takes no room.
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return model.requires_grad_(False).eval()


def build_clip(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> CLIPTextModel:
    """CLIP's text model with two layers. The pooled output is B 64."""
    config = CLIPTextConfig(
        vocab_size=padded_size(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=TEXT_DIM,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = CLIPTextModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("token_embedding.weight"):
            torch.nn.init.normal_(parameter)
        elif name.endswith(("v_proj.weight", "out_proj.weight")):
            # A mean over a dozen words is a third as long as one word; the gain compensates for it.
            torch.nn.init.orthogonal_(parameter, gain=2.0)
    return model.requires_grad_(False).eval()
