"""Fast blocks equal the blocks of diffusers bit for bit, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simpletuner.models.kandinsky5 import blocks, nabla
from simpletuner.models.kandinsky5.blocks import store_in_bf16
from tests.tools.tiny import WIDTH, build_kandinsky

DTYPES = [torch.float32, torch.bfloat16]
# Positions of a text and of a grid of frames, rows and columns.
TEXT = 7
GRID = (3, 8, 8)


def build(dtype: torch.dtype, *, nabla: bool = False, visual_cond: bool = False) -> Any:
    """A transformer in which everything that diffusers keeps float32 is float32."""
    torch.manual_seed(0)
    model = build_kandinsky(nabla=nabla, visual_cond=visual_cond)
    for name, parameter in model.named_parameters():
        if not any(word in name for word in model._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return model.train()


def inputs(dtype: torch.dtype, samples: int, channels: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    frames, rows, columns = GRID
    draw = partial(torch.randn, generator=generator)
    return {
        "hidden_states": draw(samples, frames, 2 * rows, 2 * columns, channels).to(dtype),
        "encoder_hidden_states": draw(samples, TEXT, WIDTH).to(dtype),
        "pooled_projections": draw(samples, WIDTH).to(dtype),
        "timestep": 1000 * torch.rand(samples, generator=generator),
        "visual_rope_pos": [torch.arange(count) for count in GRID],
        "text_rope_pos": torch.arange(TEXT),
        "scale_factor": (1.0, 2.0, 2.0),
        "return_dict": False,
    }


def output_and_gradients(
    model: Any, padding: blocks.TextPadding, mask: Tensor | None, named: Any
) -> list[Tensor]:
    with padding.hidden(mask):
        out = model(**named)
    out.float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert gradients
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    return [out, *gradients]


def assert_same(stock: list[Tensor], fast: list[Tensor]) -> None:
    for expected, tensor in zip(stock, fast, strict=True):
        assert torch.equal(expected, tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("visual_cond", [False, True])
def test_fast_blocks_equal_diffusers_bit_for_bit(
    dtype: torch.dtype, padded: bool, visual_cond: bool
) -> None:
    """Every weight is trained here, so that gradients of modulation and norms are compared, too."""
    mask = torch.arange(TEXT) < torch.tensor([[TEXT], [3]]) if padded else None
    channels = 33 if visual_cond else 16
    results = []
    for is_fast in (False, True):
        model = build(dtype, visual_cond=visual_cond)
        padding = blocks.mask_padding(model)
        if is_fast:
            blocks.use_fast_blocks(model, padding)
        named = inputs(dtype, 2, channels)
        results.append(output_and_gradients(model, padding, mask, named))

    assert_same(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_blocks_with_nabla_equal_diffusers_bit_for_bit(dtype: torch.dtype) -> None:
    results = []
    named = inputs(dtype, 1)
    for is_fast in (False, True):
        model = build(dtype, nabla=True)
        padding = blocks.mask_padding(model)
        nabla.install(model)
        named["sparse_params"] = nabla.sparse_params(
            tuple(named["hidden_states"].shape), dict(model.config), torch.device("cpu")
        )
        if is_fast:
            blocks.use_fast_blocks(model, padding)
        results.append(output_and_gradients(model, padding, None, named))

    assert_same(*results)


def test_fast_blocks_take_other_positions_for_every_sample() -> None:
    """TREAD keeps other tokens of every sample, and cuts the positions accordingly."""
    generator = torch.Generator().manual_seed(2)
    hidden, text, time = (
        torch.randn(2, count, WIDTH, generator=generator) for count in (9, TEXT, 1)
    )
    angles = torch.rand(2, 9, 8, generator=generator) * 9
    entries = [angles.cos(), -angles.sin(), angles.sin(), angles.cos()]
    rope = torch.stack(entries, -1).view(2, 9, 1, 8, 2, 2)
    results = []
    for is_fast in (False, True):
        model = build(torch.float32)
        padding = blocks.mask_padding(model)
        if is_fast:
            blocks.use_fast_blocks(model, padding)
        results.append([model.visual_transformer_blocks[0](hidden, text, time[:, 0], rope, None)])

    assert_same(*results)


def test_rotary_tables_are_cached_as_long_as_their_tensor() -> None:
    cache = blocks.FastForward(blocks.FastBlocks({}), blocks.TextPadding())
    rope = torch.randn(1, 5, 1, 8, 2, 2)
    tables = cache.tables(rope, 2)
    assert cache.tables(rope, 2) is tables
    assert torch.equal(tables.cos, rope[..., 0, 0].expand(2, -1, -1, -1))
    assert torch.equal(tables.sin, rope[..., 1, 0].expand(2, -1, -1, -1))
    assert all(table.is_contiguous() and table._base is None for table in tables)
    del rope

    assert len(cache._tables) == 0


@pytest.mark.parametrize("is_exact", [False, True])
def test_modulation_is_stored_in_bf16_only_where_that_is_exact(is_exact: bool) -> None:
    results = []
    for is_stored in (False, True):
        model = build(torch.float32)
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "modulation" in name and is_exact:
                parameter.data = parameter.data.to(torch.bfloat16).float()
            parameter.requires_grad_("to_" in name)
        padding = blocks.mask_padding(model)
        blocks.use_fast_blocks(model, padding)
        if is_stored:
            store_in_bf16(model)
        results.append(output_and_gradients(model, padding, None, inputs(torch.float32, 1)))

    assert_same(*results)
    dtypes = [
        weight.dtype
        for name, weight in model.named_parameters()
        if "modulation.out_layer.weight" in name
    ]
    assert dtypes == [torch.bfloat16 if is_exact else torch.float32] * 4


def test_trained_modulation_stays_float32() -> None:
    model = build(torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    store_in_bf16(model)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_fast_blocks_call_hooks() -> None:
    model = build(torch.float32)
    padding = blocks.mask_padding(model)
    blocks.use_fast_blocks(model, padding)
    called: list[nn.Module] = []
    for block in model.visual_transformer_blocks:
        block.register_forward_pre_hook(lambda module, _: called.append(module))

    with padding.hidden(None):
        model(**inputs(torch.float32, 1))

    assert [id(block) for block in called] == [
        id(block) for block in model.visual_transformer_blocks
    ]


def test_recomputation_of_fast_blocks_calls_hooks() -> None:
    model = build(torch.float32)
    blocks.use_fast_blocks(model, blocks.mask_padding(model))
    called: list[nn.Module] = []
    for block in model.visual_transformer_blocks:
        block.register_forward_pre_hook(lambda module, _: called.append(module))
    model.enable_gradient_checkpointing(
        lambda block, *arguments: checkpoint(block, *arguments, use_reentrant=False)
    )

    model(**inputs(torch.float32, 1)).sum().backward()

    assert len(called) == 2 * len(model.visual_transformer_blocks), "forward and recomputation"
