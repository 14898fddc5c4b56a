"""Attention from tiles to tiles: all implementations agree, and the self-test rejects others."""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.models.cost import BatchShape, Kernels
from simpletuner.models.kandinsky5 import flex, options, tile_attention
from simpletuner.models.kandinsky5.cost import VIDEO_COST
from simpletuner.models.kandinsky5.nabla import TileAttention, tile_mask
from simpletuner.speed.compile import configure_compiler
from tests.tools.peak_memory import Peak
from tests.tools.saved_tensors import saved_bytes
from tests.tools.tolerances import MODEL, assert_close

CPU = torch.device("cpu")
HEAD_DIM = 16
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)


def draw(tiles: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Query, key and value `2 S 2 D`, and visible tiles with gaps."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, tiles * 64, 2, HEAD_DIM, generator=generator) for _ in range(3)]
    chosen = torch.rand(2, 2, tiles, tiles, generator=generator) < 0.4
    return inputs, chosen | torch.eye(tiles, dtype=torch.bool)


def with_a_large_mask(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
    """The definition: a boolean for each pair of tokens."""
    mask = tiles.repeat_interleave(64, -1).repeat_interleave(64, -2)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def test_masked_attention_equals_the_definition() -> None:
    inputs, tiles = draw(7)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9))
    results = []
    for attend in (tile_attention.attend_masked, with_a_large_mask):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend(*leaves, tiles)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])

    for tensor, expected in zip(*results, strict=True):
        assert_close(tensor, expected, terms=MODEL)
    dense = tile_attention.attend_dense(*inputs, tiles)
    assert (results[0][0] - dense).abs().max() > 0.1


def test_masked_attention_saves_memory_linear_in_tokens() -> None:
    inputs, tiles = draw(24)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    bytes_by_storage = {}

    def note_size(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note_size, lambda saved: saved):
        tile_attention.attend_masked(*inputs, tiles)

    tokens = 24 * 64
    boolean_mask = 2 * 2 * tokens * tokens  # of two samples with two heads
    assert sum(bytes_by_storage.values()) < boolean_mask / 4


def test_a_block_mask_lists_the_visible_tiles() -> None:
    _, tiles = draw(5)

    mask = flex.tile_blocks(tiles)

    assert mask.shape == (2, 2, 5 * 64, 5 * 64)
    assert torch.equal(mask.to_dense().bool(), tiles)


def test_a_block_mask_has_no_empty_lists() -> None:
    _, tiles = draw(5)

    lists = flex.lists_of(flex.tile_blocks(tiles))

    counts = 2 * tiles[..., 0].numel()
    numbers = 2 * tiles.numel()  # of the tiles that a tile sees, and of those that see it
    assert sum(tensor.numel() for tensor in lists) == counts + numbers


def test_heads_in_parts_have_the_tiles_and_lists_of_all_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (query, key, _), _ = draw(5)
    window = torch.eye(5, dtype=torch.bool)
    tiles = tile_mask(query, key, window, 0.5)
    lists = flex.lists_of(flex.tile_blocks(tiles))

    monkeypatch.setattr(options, "PAIRS_AT_ONCE", 2 * 5**2)  # one head of two samples
    tiles_in_parts = tile_mask(query, key, window, 0.5)
    lists_in_parts = flex.lists_of(flex.tile_blocks(tiles))

    assert len([*flex.in_parts(tiles)]) == 2
    assert torch.equal(tiles_in_parts, tiles)
    assert all(map(torch.equal, lists_in_parts, lists))


@pytest.mark.parametrize(
    ("frames", "rows", "columns"),
    [(31, 32, 48), (31, 48, 80), (61, 48, 80)],
    ids=["pro 768x512", "pro 1280x768", "pro 1280x768 10s"],
)
def test_the_planned_bytes_of_tile_lists_are_those_that_making_them_takes(
    frames: int, rows: int, columns: int
) -> None:
    tokens = frames * rows * columns
    tiles = tokens // 64
    cost = VIDEO_COST.of_flavour("t2v-pro-sft-5s-hd", Kernels(tile_lists=True))
    saved, making = cost.tiles(BatchShape(1, frames, rows, columns, 256), 2)
    with FakeTensorMode():
        query = torch.empty(1, tokens, 32, 128, dtype=torch.bfloat16)
        key = torch.empty_like(query)
        window = torch.empty(1, 1, tiles, tiles, dtype=torch.bool)
        with Peak([query, key, window]) as peak:
            flex.tile_blocks(tile_mask(query, key, window, 0.8))

    assert saved == 32 * tiles**2
    assert (saved + making) / peak.most == pytest.approx(1, abs=0.06)


class Sorts(TorchDispatchMode):
    """Counts sorts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sort" in func.overloadpacket.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_block_lists_are_made_without_sorting() -> None:
    """They are those that `from_kv_blocks` sorts for. Only the coarse map of scores is sorted."""
    (query, key, _), tiles = draw(5)

    with Sorts() as sorts:
        tile_mask(query, key, torch.eye(5, dtype=torch.bool), 0.5)
        mask = flex.tile_blocks(tiles)

    assert sorts.count == 1
    expected: Any = BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        seq_lengths=mask.seq_lengths,
    )
    for name in ("q_num_blocks", "q_indices"):
        blocks = getattr(mask, name)
        expected_blocks = getattr(expected, name)
        assert torch.equal(blocks, expected_blocks), name
        assert blocks.dtype == expected_blocks.dtype
        assert blocks.stride() == expected_blocks.stride()


def differentiable_flex(monkeypatch: pytest.MonkeyPatch) -> flex.Attend:
    """Flex attention with gradients on a CPU, which torch only refuses.

    Without a compiler it ignores the lists, and is dense.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    attend: flex.Attend = flex.compiled_flex.__wrapped__(torch.float32)
    return attend


def test_the_backward_pass_rebuilds_the_lists_of_a_block_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_saved(differentiable_flex(monkeypatch), *draw(6), monkeypatch)


def check_saved(
    attend: flex.Attend, inputs: list[Tensor], tiles: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are bit-equal to those of saved lists, for which one byte per pair is saved.

    The bytes are counted by surrounding hooks, through which everything is saved.
    """
    inputs = [tensor.requires_grad_() for tensor in inputs]

    with saved_bytes(inputs) as meter:
        out = attend(*inputs, tiles)
    with monkeypatch.context() as unhooked:
        unhooked.setattr(flex, "RebuiltLists", lambda mask, tiles: nullcontext())
        expected_out = attend(*inputs, tiles)

    log_sum_exp = 4 * out.numel() // HEAD_DIM  # bytes of a float32 per query and head
    assert meter.bytes == out.nbytes + log_sum_exp + tiles.nbytes
    assert torch.equal(out, expected_out)
    gradients = torch.autograd.grad(out.sum(), inputs)
    expected_gradients = torch.autograd.grad(expected_out.sum(), inputs)
    assert all(map(torch.equal, gradients, expected_gradients))


def test_the_kept_tiles_hold_the_mass() -> None:
    (query, key, _), _ = draw(7)
    no_window = torch.zeros(7, 7, dtype=torch.bool)

    kept = tile_mask(query, key, no_window, mass=0.7)

    query_means, key_means = (
        x.transpose(1, 2).unflatten(2, (-1, 64)).mean(-2) for x in (query, key)
    )
    scores = torch.softmax(query_means @ key_means.mT / HEAD_DIM**0.5, dim=-1)
    values, order = scores.sort(-1)
    ranks = order.argsort(-1)
    expected = (values.cumsum(-1) >= 0.3).gather(-1, ranks)  # 0.3 = 1 - mass
    assert torch.equal(kept, expected)
    assert 0 < expected.float().mean() < 1


def test_tiles_are_chosen_outside_the_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse sums along rows on a GPU, which are in a fixed order there as well."""
    modes: list[bool] = []
    cumsum = Tensor.cumsum

    def noted(self: Tensor, *inputs: Any, **settings: Any) -> Tensor:
        modes.append(torch.are_deterministic_algorithms_enabled())
        return cumsum(self, *inputs, **settings)

    (query, key, _), tiles = draw(5)
    monkeypatch.setattr(Tensor, "cumsum", noted)

    torch.use_deterministic_algorithms(True)
    try:
        tile_mask(query, key, torch.eye(5, dtype=torch.bool), 0.5)
        flex.tile_blocks(tiles)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)

    # The map of scores, and the lists of rows and of columns.
    assert modes == [False] * (1 + 2)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_blocks_of_the_backward_pass_divide_a_tile_on_every_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    (blocks,) = flex.block_choices().get_flex_attention_bwd_configs(
        head_dim, torch.bfloat16, "cuda"
    )

    assert {64 % getattr(blocks, side) for side in flex.SIDES} == {0}


def test_autotuning_does_not_change_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing could choose differently in the next run, and other blocks round differently."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    choices = flex.block_choices()
    expected = choices.get_flex_attention_bwd_configs(128, torch.bfloat16, "cuda")

    with torch._inductor.config.patch(max_autotune=True):
        blocks = choices.get_flex_attention_bwd_configs(128, torch.bfloat16, "cuda")

    assert blocks == expected


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("usual_vectors")
def test_compiled_flex_attention_equals_the_definition() -> None:
    configure_compiler(ones_are_sizes=True)  # as the compiled parts of a block leave it
    attend = flex.compiled_flex(torch.float32)
    assert tile_attention.find_fault(attend, CPU, torch.float32, HEAD_DIM, backward=False) is None
    fault = tile_attention.find_fault(
        tile_attention.attend_dense, CPU, torch.float32, HEAD_DIM, backward=False
    )
    assert "more than 3.8e-06" in str(fault)
    with torch.no_grad():
        for count in (4, 5, 6, 7):  # several shapes, none of which may fall back
            inputs, tiles = draw(count, seed=count)
            assert_close(attend(*inputs, tiles), with_a_large_mask(*inputs, tiles), terms=MODEL)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_self_test_rejects_uncompiled_flex_attention() -> None:
    def eager(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out: Any = flex_attention(query, key, value, block_mask=flex.tile_blocks(tiles))
        return out.transpose(1, 2)

    fault = tile_attention.find_fault(eager, CPU, torch.float32, HEAD_DIM, backward=False)

    assert fault is not None
    assert "off by" in fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_self_test_accepts_rounding_and_rejects_dense_attention(
    dtype: torch.dtype, head_dim: int
) -> None:
    assert tile_attention.find_fault(tile_attention.attend_masked, CPU, dtype, head_dim) is None
    assert tile_attention.find_fault(with_a_large_mask, CPU, dtype, head_dim) is None
    assert "off by" in str(
        tile_attention.find_fault(tile_attention.attend_dense, CPU, dtype, head_dim)
    )


def test_the_self_test_uses_the_heads_of_the_model() -> None:
    heads: list[int] = []

    def attend(query: Tensor, *inputs: Tensor) -> Tensor:
        heads.append(query.shape[2])
        return tile_attention.attend_masked(query, *inputs)

    assert tile_attention.find_fault(attend, CPU, torch.float32, HEAD_DIM, heads=7) is None
    assert heads == [7]


def test_the_self_test_rejects_wrong_gradients() -> None:
    class DenseGradient(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, out: Tensor, dense: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(context: Any, upstream: Tensor) -> tuple[None, Tensor]:
            return None, upstream

    def attend(*inputs: Tensor) -> Tensor:
        out = tile_attention.attend_masked(*inputs)
        dense = tile_attention.attend_dense(*inputs)
        result: Tensor = DenseGradient.apply(out, dense)
        return result

    assert tile_attention.find_fault(attend, CPU, torch.float32, HEAD_DIM, backward=False) is None
    assert "off by" in str(tile_attention.find_fault(attend, CPU, torch.float32, HEAD_DIM))


META = torch.device("meta")  # stands for a GPU


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., flex.Attend]:
    """`choose_attend` without its cache, and with masks in place of compiled flex attention."""
    monkeypatch.setattr(tile_attention, "compiled_flex", lambda dtype: tile_attention.attend_masked)
    choose: Callable[..., flex.Attend] = tile_attention.choose_attend.__wrapped__
    return choose


def test_a_cpu_gets_masked_attention(
    choose: Callable[..., flex.Attend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_attention, "compiled_flex", lambda dtype: 1 / 0)
    assert choose(CPU, torch.float32, 64) is tile_attention.attend_masked


def test_a_gpu_gets_flex_attention_that_passes_the_self_test(
    choose: Callable[..., flex.Attend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_attention, "find_fault", lambda *given: None)
    assert choose(META, torch.float32, 64) is tile_attention.attend_masked


def test_a_gpu_gets_dense_attention_if_flex_fails_the_self_test(
    choose: Callable[..., flex.Attend],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tile_attention, "find_fault", lambda *given: "no kernel")
    assert choose(META, torch.bfloat16, 64) is tile_attention.attend_dense
    (record,) = caplog.records

    assert "on meta compiled flex attention failed its test (no kernel)" in record.getMessage()
    assert "dense attention instead" in record.getMessage()


def test_an_implementation_that_raises_fails_the_self_test() -> None:
    def attend(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this\nand a long story")

    assert tile_attention.find_fault(attend, CPU, torch.float32, HEAD_DIM) == "no kernel for this"


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_failure_of_the_device_passes_through_the_self_test(failure: type[RuntimeError]) -> None:
    def attend(*inputs: Tensor) -> Tensor:
        raise failure("of the device")

    with pytest.raises(failure, match="of the device"):
        tile_attention.find_fault(attend, CPU, torch.float32, HEAD_DIM)


def test_the_processor_attends_to_the_chosen_tiles() -> None:
    (query, key, value), _ = draw(6)
    params = {"sta_mask": torch.eye(6, dtype=torch.bool)[None, None], "P": 0.8}
    attended = TileAttention()(query, key, value, params)

    tiles = tile_mask(query, key, params["sta_mask"], 0.8)
    assert_close(attended, with_a_large_mask(query, key, value, tiles), terms=MODEL)


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flex_attention_is_exact_on_a_gpu(dtype: torch.dtype, head_dim: int) -> None:
    device = torch.device("cuda")
    attend = tile_attention.choose_attend(device, dtype, head_dim)
    assert attend is not tile_attention.attend_dense
    assert tile_attention.find_fault(attend, device, dtype, head_dim) is None
    limit = tile_attention.tolerance(device, dtype)
    for count in (3, 8, 12, 21):  # other shapes than that of the self-test
        draws, tiles = draw(count)
        tiles = tiles.to(device)
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in draws]
        out = attend(*inputs, tiles)
        exact = tile_attention.attend_masked(*(tensor.double() for tensor in inputs), tiles)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=limit)
        gradients = torch.autograd.grad(out.sum(), inputs)
        exact_gradients = torch.autograd.grad(exact.sum(), inputs)
        for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
            torch.testing.assert_close(gradient, exact_gradient, rtol=0, atol=4 * limit)


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_backward_pass_rebuilds_the_lists_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    draws, tiles = draw(6)
    inputs = [tensor.to(device, torch.bfloat16) for tensor in draws]
    attend = tile_attention.choose_attend(device, torch.bfloat16, HEAD_DIM)

    check_saved(attend, inputs, tiles.to(device), monkeypatch)


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_is_deterministic_on_a_gpu() -> None:
    device = torch.device("cuda")
    draws, _ = draw(21)
    inputs = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in draws]
    window = torch.eye(21, dtype=torch.bool, device=device)

    torch.use_deterministic_algorithms(True)
    try:
        attend = tile_attention.choose_attend.__wrapped__(device, torch.bfloat16, HEAD_DIM)
        tiles = tile_mask(inputs[0], inputs[1], window, 0.5)
        first, *repetitions = (
            torch.autograd.grad(attend(*inputs, tiles).sum(), inputs) for _ in range(3)
        )
    finally:
        torch.use_deterministic_algorithms(False)

    for gradients in repetitions:
        assert all(map(torch.equal, first, gradients))
