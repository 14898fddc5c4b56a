"""A preview from cached embeddings is the clip that the stock pipeline makes from the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simpletuner.models.adapter import PreviewRequest, TextRequest
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from tests.tools.families import CPU, picture
from tests.tools.sana_family import (
    FRAMES,
    PROMPT,
    SEED,
    SIZE,
    first_frame,
    make_sana_adapter,
    stock_pipeline,
)

NEGATIVE_PROMPT = SANA_VIDEO.defaults["validation_negative_prompt"]


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_a_preview_equals_the_stock_pipelines_clip(sana_checkpoint: Path, task: str) -> None:
    pipeline = stock_pipeline(sana_checkpoint, task)
    width, height = SIZE
    source = {"image": first_frame()} if task == "i2v" else {}
    expected = pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        width=width,
        height=height,
        frames=FRAMES,
        num_inference_steps=4,
        guidance_scale=6.0,
        generator=torch.Generator().manual_seed(SEED),
        use_resolution_binning=False,
        output_type="pil",
        **source,
    ).frames[0]

    adapter = make_sana_adapter(sana_checkpoint)
    encoder = adapter.load_text_encoder(CPU, torch.float32)
    embeds, negative = encoder.encode(
        [TextRequest(PROMPT), TextRequest(NEGATIVE_PROMPT, bare=True)]
    )
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, 1.0)
    request = PreviewRequest(
        embeds, negative, *SIZE, 4, 6.0, SEED, source=source.get("image"), num_frames=FRAMES
    )
    frames = stock.render(request)

    assert len(frames) == FRAMES
    for frame, expected_frame in zip(frames, expected, strict=True):
        difference = np.asarray(frame).astype(int) - np.asarray(expected_frame)
        assert np.abs(difference).max() <= 1  # two loads of one file may differ in the last bits


def test_a_source_of_another_ratio_is_cropped(sana_checkpoint: Path) -> None:
    """The stock pipeline would stretch it."""
    adapter = make_sana_adapter(sana_checkpoint)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("")])[0]
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, None)
    processor = stock.from_picture.video_processor
    preprocess = processor.preprocess
    source_sizes = []

    def noted(image: Any, **size: Any) -> Any:
        source_sizes.append(image.size)
        return preprocess(image, **size)

    processor.preprocess = noted
    source = picture(64, 192)
    request = PreviewRequest(embeds, embeds, *SIZE, 1, 1.0, SEED, source=source, num_frames=5)

    frames = stock.render(request)

    assert [frame.size for frame in frames] == [SIZE] * 5
    assert source_sizes == [SIZE]
