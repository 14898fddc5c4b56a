"""Attention from tiles to tiles: every way gives the same, and a way that does not is found out."""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.models.blocks import KernelChoices
from simpletuner.models.kandinsky5 import nabla
from simpletuner.models.kandinsky5.nabla import TileAttention, tile_mask
from simpletuner.speed.compile import settle_compiler
from tests.closeness import MODEL, assert_close
from tests.meter import saved_bytes

CPU = torch.device("cpu")
HEAD_DIM = 16
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BLOCKS = {"tile": nabla.tile_blocks, "paired": nabla.paired_blocks}


def draw(tiles: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of two samples with two heads, and a choice of tiles with gaps in it."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, tiles * 64, 2, HEAD_DIM, generator=generator) for _ in range(3)]
    chosen = torch.rand(2, 2, tiles, tiles, generator=generator) < 0.4
    return inputs, chosen | torch.eye(tiles, dtype=torch.bool)


def with_a_large_mask(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
    """The definition: a boolean for each pair of tokens."""
    mask = tiles.repeat_interleave(64, -1).repeat_interleave(64, -2)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def test_row_by_row_is_the_definition() -> None:
    inputs, tiles = draw(7)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9))
    results = []
    for attend in (nabla.attend_masked, with_a_large_mask):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = attend(*leaves, tiles)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, terms=MODEL)
    assert (results[0][0] - nabla.attend_dense(*inputs, tiles)).abs().max() > 0.1


def test_memory_is_linear() -> None:
    inputs, tiles = draw(24)
    kept = []

    def size(saved: Tensor) -> Tensor:
        kept.append((saved.untyped_storage().data_ptr(), saved.untyped_storage().nbytes()))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(size, lambda saved: saved):
        nabla.attend_masked(*(each.requires_grad_() for each in inputs), tiles)
    tokens = 24 * 64
    assert sum(dict(kept).values()) < 2 * 2 * tokens * tokens / 4, "a quarter of one boolean mask"


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("count", [4, 5])
def test_block_masks_hold_the_choice(blocks: Callable[[Tensor], BlockMask], count: int) -> None:
    _, tiles = draw(count)
    mask = blocks(tiles)
    assert mask.shape == (2, 2, count * 64, count * 64)
    assert max(each.numel() for each in mask.as_tuple() if isinstance(each, Tensor)) <= tiles.numel() * 9 // 4
    inputs = [x.transpose(1, 2) for x in draw(count)[0]]
    step = mask.BLOCK_SIZE[0] // 64
    coarse = mask.to_dense().bool().repeat_interleave(step, -1).repeat_interleave(step, -2)[..., :count, :count]
    assert not (tiles & ~coarse).any(), "no chosen tile is lost"
    if step == 1:
        assert torch.equal(coarse, tiles)
    positions = torch.arange(count) * 64
    batch, head = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1)
    within = mask.mask_mod(batch, head, positions.view(1, 1, -1, 1), positions.view(1, 1, 1, -1))
    assert torch.equal(coarse & within, tiles)
    assert inputs[0].shape[-2] == mask.seq_lengths[0]


class Sorts(TorchDispatchMode):
    """Counts sorts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "sort" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_only_the_coarse_map_is_sorted(blocks: Callable[[Tensor], BlockMask]) -> None:
    """And the lists are those that `from_kv_blocks` sorts for."""
    (query, key, _), tiles = draw(5)
    with Sorts() as sorts:
        tile_mask(query, key, torch.eye(5, dtype=torch.bool), 0.5)
        mask = blocks(tiles)
    assert sorts.count == 1
    rows: Any = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    expected: Any = BlockMask.from_kv_blocks(*rows, BLOCK_SIZE=mask.BLOCK_SIZE, seq_lengths=mask.seq_lengths)
    for name in ("full_q_num_blocks", "full_q_indices", "q_num_blocks", "q_indices"):
        one, other = getattr(mask, name), getattr(expected, name)
        assert torch.equal(one, other), name
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def differentiable_flex(monkeypatch: pytest.MonkeyPatch, blocks: Callable[[Tensor], BlockMask]) -> nabla.Attend:
    """Flex attention by its definition: torch only refuses its gradients on a CPU. It ignores full blocks, so that
    `tile_blocks` make it dense."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    return nabla.compiled(blocks, {}, {})


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_the_backward_pass_makes_the_lists_again(
    blocks: Callable[[Tensor], BlockMask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-equal gradients, and one byte is saved for each pair of tiles, through the surrounding hooks."""
    check_saved(differentiable_flex(monkeypatch, blocks), *draw(6), monkeypatch)


def check_saved(attend: nabla.Attend, inputs: list[Tensor], tiles: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [each.requires_grad_() for each in inputs]
    with saved_bytes(inputs) as meter:
        out = attend(*inputs, tiles)
    sums = 4 * out.numel() // HEAD_DIM
    assert meter.bytes == out.nbytes + sums + tiles.nbytes, "result, log-sum-exp and tiles"
    with monkeypatch.context() as unhooked:
        unhooked.setattr(nabla, "RebuiltLists", lambda *given: nullcontext())
        other = attend(*inputs, tiles)
    found, expected = ([each, *torch.autograd.grad(each.sum(), inputs)] for each in (out, other))
    assert all(map(torch.equal, found, expected))


def test_tiles_are_those_of_their_ranks() -> None:
    (query, key, _), _ = draw(7)
    window = torch.zeros(7, 7, dtype=torch.bool)
    means = [x.transpose(1, 2).unflatten(2, (-1, 64)).mean(-2) for x in (query, key)]
    values, order = torch.softmax(means[0] @ means[1].mT / HEAD_DIM**0.5, dim=-1).sort(-1)
    expected = (values.cumsum(-1) >= 0.3).gather(-1, order.argsort(-1))
    assert torch.equal(tile_mask(query, key, window, 0.7), expected)
    assert 0 < expected.float().mean() < 1


def test_tiles_are_found_in_the_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse sums along rows on a GPU, which are in a fixed order there as well."""
    modes, cumsum = list[bool](), Tensor.cumsum

    def watched(self: Tensor, *given: Any, **named: Any) -> Tensor:
        modes.append(torch.are_deterministic_algorithms_enabled())
        return cumsum(self, *given, **named)

    (query, key, _), tiles = draw(5)
    monkeypatch.setattr(Tensor, "cumsum", watched)
    torch.use_deterministic_algorithms(True)
    try:
        tile_mask(query, key, torch.eye(5, dtype=torch.bool), 0.5)
        nabla.tile_blocks(tiles)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(modes) == {False}
    assert len(modes) == 5


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_gpu_has_blocks_of_the_backward_pass_that_divide_a_tile(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    blocks = nabla.dividing_choices().get_flex_attention_bwd_configs(head_dim, torch.bfloat16, "cuda")
    assert blocks
    assert {64 % vars(each)[f"block_{side}"] for each in blocks for side in ("m1", "n1", "m2", "n2")} == {0}


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("usual_vectors")
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_compiled_flex_obeys(blocks: Callable[[Tensor], BlockMask]) -> None:
    settle_compiler(ones_are_sizes=True)  # as the compiled parts of a block leave it
    attend = nabla.compiled(blocks, nabla.SMALL_BLOCKS if blocks is nabla.tile_blocks else {}, {})
    assert nabla.find_fault(attend, CPU, torch.float32, HEAD_DIM, backward=False) is None
    assert "more than 3.8e-06" in str(
        nabla.find_fault(nabla.attend_dense, CPU, torch.float32, HEAD_DIM, backward=False)
    )
    with torch.no_grad():
        for count in (4, 5, 6, 7):  # several shapes, none of which may fall back
            inputs, tiles = draw(count, seed=count)
            assert_close(attend(*inputs, tiles), with_a_large_mask(*inputs, tiles), terms=MODEL)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_that_is_not_compiled_is_found_out() -> None:
    def eager(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out: Any = flex_attention(query, key, value, block_mask=nabla.tile_blocks(tiles))
        return out.transpose(1, 2)

    assert "off by" in str(nabla.find_fault(eager, CPU, torch.float32, HEAD_DIM, backward=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_test_lets_rounding_pass(dtype: torch.dtype, head_dim: int) -> None:
    assert nabla.find_fault(nabla.attend_masked, CPU, dtype, head_dim) is None
    assert nabla.find_fault(with_a_large_mask, CPU, dtype, head_dim) is None
    assert "off by" in str(nabla.find_fault(nabla.attend_dense, CPU, dtype, head_dim))


def test_the_example_has_the_heads_of_the_model() -> None:
    seen: list[int] = []

    def attend(query: Tensor, *others: Tensor) -> Tensor:
        seen.append(query.shape[2])
        return nabla.attend_masked(query, *others)

    assert nabla.find_fault(attend, CPU, torch.float32, HEAD_DIM, 7) is None
    assert seen == [7]


def test_wrong_gradients_are_found_out() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, out: Tensor, dense: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(context: Any, upstream: Tensor) -> tuple[None, Tensor]:
            return None, upstream

    def attend(*inputs: Tensor) -> Tensor:
        result: Tensor = Wrong.apply(nabla.attend_masked(*inputs), nabla.attend_dense(*inputs))
        return result

    assert nabla.find_fault(attend, CPU, torch.float32, HEAD_DIM, backward=False) is None
    assert "off by" in str(nabla.find_fault(attend, CPU, torch.float32, HEAD_DIM))


class TestChoice:
    """Which way a device gets."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nabla.choose_attend.cache_clear()
        monkeypatch.setattr(nabla, "KERNELS", KernelChoices())
        monkeypatch.setattr(nabla, "find_fault", self.find_fault)

    def find_fault(self, attend: Any, *_: Any) -> str | None:
        return None if attend is nabla.attend_masked else "no kernel"

    def test_cpu(self) -> None:
        assert nabla.choose_attend(CPU, torch.float32, 64) is nabla.attend_masked

    def test_the_first_that_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ways = {
            "bad": lambda: nabla.attend_dense,
            "good": lambda: nabla.attend_masked,
            "late": lambda: 1 / 0,
        }
        monkeypatch.setattr(nabla, "IMPLEMENTATIONS", ways)
        assert nabla.choose_attend(torch.device("meta"), torch.float32, 64) is nabla.attend_masked

    def test_the_one_of_the_run_is_not_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nabla, "IMPLEMENTATIONS", {"good": lambda: nabla.attend_masked})
        self.test_the_first_that_passes(monkeypatch)
        nabla.choose_attend.cache_clear()
        monkeypatch.setattr(nabla, "find_fault", lambda *given: 1 / 0)
        assert nabla.choose_attend(torch.device("meta"), torch.float32, 64) is nabla.attend_masked

    def test_none_passes(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(nabla, "IMPLEMENTATIONS", {"blocks of 7": lambda: nabla.attend_dense})
        with caplog.at_level(logging.WARNING):
            assert nabla.choose_attend(torch.device("meta"), torch.bfloat16, 64) is nabla.attend_dense
        assert not nabla.KERNELS.knows(torch.device("meta"), "block-sparse attention (NABLA), 2 heads of 64, bfloat16")
        (record,) = caplog.records
        assert "dense attention instead" in record.getMessage()
        assert "blocks of 7: no kernel" in record.getMessage()


@pytest.mark.parametrize(("right", "fast", "chosen"), [(True, True, True), (True, False, False), (False, True, False)])
def test_an_installed_flash_attention_must_be_right_and_faster(
    monkeypatch: pytest.MonkeyPatch, right: bool, fast: bool, chosen: bool
) -> None:
    def flash(*inputs: Tensor) -> Tensor:
        return nabla.attend_masked(*inputs) if right else nabla.attend_dense(*inputs)

    monkeypatch.setattr(nabla, "_seconds", lambda attend, *rest: 0.5 if (attend is flash) is fast else 1.0)
    monkeypatch.setattr(nabla, "ALTERNATIVES", {"flash": lambda: flash})
    assert nabla._is_better("flash", nabla.attend_masked, CPU, torch.float32, 16, 2) is chosen


def test_a_way_that_raises_is_at_fault() -> None:
    def attend(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this\nand a long story")

    assert nabla.find_fault(attend, CPU, torch.float32, HEAD_DIM) == "no kernel for this"


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_failure_of_the_device_is_no_fault_of_a_way(failure: type[RuntimeError]) -> None:
    def attend(*inputs: Tensor) -> Tensor:
        raise failure("of the device")

    with pytest.raises(failure, match="of the device"):
        nabla.find_fault(attend, CPU, torch.float32, HEAD_DIM)


def test_the_processors_way() -> None:
    (query, key, value), _ = draw(6)
    params = {"sta_mask": torch.eye(6, dtype=torch.bool)[None, None], "P": 0.8}
    tiles = tile_mask(query, key, params["sta_mask"], 0.8)
    found = TileAttention()(query, key, value, params)
    assert_close(found, with_a_large_mask(query, key, value, tiles), terms=MODEL)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_gpu_has_a_way(dtype: torch.dtype, head_dim: int) -> None:
    device = torch.device("cuda")
    attend = nabla.choose_attend(device, dtype, head_dim)
    assert attend is not nabla.attend_dense
    assert nabla.find_fault(attend, device, dtype, head_dim) is None
    for count in (3, 8, 12, 21):  # other shapes than that of the test
        inputs, tiles = draw(count)
        moved = [each.to(device, dtype).requires_grad_() for each in inputs]
        out = attend(*moved, tiles.to(device))
        wanted = nabla.attend_masked(*(each.double() for each in moved), tiles.to(device))
        limit = nabla.tolerance(device, dtype)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=limit)
        for one, other in zip(
            torch.autograd.grad(out.sum(), moved), torch.autograd.grad(wanted.sum(), moved), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=4 * limit)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_lists_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, (inputs, tiles) = torch.device("cuda"), draw(6)
    attend = nabla.choose_attend(device, torch.bfloat16, HEAD_DIM)
    check_saved(attend, [each.to(device, torch.bfloat16) for each in inputs], tiles.to(device), monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sums_in_a_fixed_order() -> None:
    """As torch's source says of flex attention."""
    device = torch.device("cuda")
    inputs = [each.to(device, torch.bfloat16).requires_grad_() for each in draw(21)[0]]
    torch.use_deterministic_algorithms(True)
    try:
        attend = nabla.choose_attend.__wrapped__(device, torch.bfloat16, HEAD_DIM)
        tiles = tile_mask(inputs[0], inputs[1], torch.eye(21, dtype=torch.bool, device=device), 0.5)
        first, *others = (torch.autograd.grad(attend(*inputs, tiles).sum(), inputs) for _ in range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
