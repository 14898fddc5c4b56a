"""Captions of unequal length in one batch: no token ever attends to padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel

from simpletuner.diffusion.batch import Batch, TextEmbeds
from simpletuner.diffusion.flow import make_noisy
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.image import channels_last, collate_text
from simpletuner.speed.recomputation import enable_checkpointing
from tests.tools.families import CPU, make_adapter, make_config
from tests.tools.tolerances import ROTATION, distance

SIGMAS = torch.tensor([0.3, 0.6, 0.9])
CAPTIONS = ("a star", "two blue circles on a white ground, seen from far away", "तारा 你好")


def make_batch(embeds: list[TextEmbeds]) -> Batch:
    latents = torch.randn(len(embeds), 16, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    return Batch(latents, embeds, [str(index) for index in range(len(embeds))])


def noise_like(latents: torch.Tensor) -> torch.Tensor:
    return torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def embeds(t2i_checkpoint: Path) -> list[TextEmbeds]:
    encoder = make_adapter(t2i_checkpoint).load_text_encoder(CPU, torch.float32)
    embeds = encoder.encode([TextRequest(caption) for caption in CAPTIONS])
    assert len({len(embed["prompt_embeds"]) for embed in embeds}) == 3, "lengths differ"
    return embeds


def test_padded_captions_do_not_affect_each_other(
    t2i_checkpoint: Path, embeds: list[TextEmbeds]
) -> None:
    adapter = make_adapter(t2i_checkpoint)
    transformer = adapter.load_transformer(torch.float32)
    batch = make_batch(embeds)
    noise = noise_like(batch.latents)
    batched = adapter.predict(transformer, make_noisy(batch, SIGMAS, noise))

    for index, embed in enumerate(embeds):
        row = slice(index, index + 1)
        single = make_noisy(Batch(batch.latents[row], [embed], ["x"]), SIGMAS[row], noise[row])
        expected = adapter.predict(transformer, single)
        assert distance({"": batched[row]}, {"": expected}) < ROTATION


def test_stock_attention_would_attend_to_padding(
    t2i_checkpoint: Path, embeds: list[TextEmbeds]
) -> None:
    """Without the mask, the same batch differs by far more than rounding."""
    adapter = make_adapter(t2i_checkpoint)
    transformer = adapter.load_transformer(torch.float32)
    batch = make_batch(embeds)
    noisy = make_noisy(batch, SIGMAS, noise_like(batch.latents))
    masked = adapter.predict(transformer, noisy)
    stock = Kandinsky5Transformer3DModel.from_pretrained(t2i_checkpoint / "transformer")
    text, pooled, _ = collate_text(embeds, torch.float32)
    inputs = channels_last(noisy.noisy_latents)
    positions = [torch.arange(1), torch.arange(2), torch.arange(3)]
    unmasked = stock(
        inputs,
        text,
        noisy.timesteps,
        pooled,
        positions,
        torch.arange(text.shape[1]),
        return_dict=False,
    )

    assert (unmasked.permute(0, 4, 1, 2, 3) - masked).abs().max() > 1e-3


def test_recomputation_uses_the_mask_of_its_forward_pass(
    t2i_checkpoint: Path, embeds: list[TextEmbeds]
) -> None:
    gradients = []
    for checkpointing in (False, True):
        adapter = make_adapter(t2i_checkpoint)
        transformer = adapter.load_transformer(torch.float32)
        config = make_config(t2i_checkpoint, gradient_checkpointing=checkpointing)
        layout = adapter.block_layout(transformer)
        enable_checkpointing(transformer, layout, config.precision, dropout=False)
        transformer.train()
        batch = make_batch(embeds)
        noisy = make_noisy(batch, SIGMAS, noise_like(batch.latents))
        adapter.predict(transformer, noisy).square().mean().backward()
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in transformer.named_parameters()
                if parameter.grad is not None
            }
        )

    assert distance(gradients[1], gradients[0]) < ROTATION


def test_sampling_after_training_is_not_masked(
    t2i_checkpoint: Path, embeds: list[TextEmbeds]
) -> None:
    """A mask that training left behind must not reach a pipeline, which runs without gradients."""
    adapter = make_adapter(t2i_checkpoint)
    transformer = adapter.load_transformer(torch.float32)
    batch = make_batch(embeds)
    adapter.predict(transformer, make_noisy(batch, SIGMAS, noise_like(batch.latents)))
    padding = adapter.padding

    assert padding.mask is not None, "the recomputation in backward still needs it"
    with torch.no_grad():
        assert padding.mask is None
