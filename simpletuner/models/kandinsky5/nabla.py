"""NABLA, Kandinsky's block-sparse attention, for training.

Queries and keys are grouped in tiles of 64 tokens. Each tile of queries attends to the tiles of keys selected by a
coarse map of averaged scores. The implementations, and the self-test that picks one for a device, come first; then the
attention processor that replaces diffusers' own.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask
from torch.nn.functional import pad

from simpletuner.config.speed import is_installed
from simpletuner.models.adapter import TileCounts
from simpletuner.models.blocks import DEVICE_FAILURES, KERNELS, milliseconds, torch_attention
from simpletuner.models.kandinsky5.blocks import Kernel, replace_attention
from simpletuner.models.kandinsky5.options import TILE, TILE_SIDE

logger = logging.getLogger(__name__)

TIMED = 128  # tiles per side when two implementations are timed
HEADS = 2  # heads in the self-test if the model's number is unknown

# (query, key, value, each `B S H D`; visible tiles, bool `B H N N`) -> `B S H D`.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_masked(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
    """Attention on every device, with gradients. The queries of a tile share one mask row, so memory is linear."""
    rows = zip(query.split(TILE, dim=1), tiles.unbind(dim=2), strict=True)
    masked = [torch_attention(part, key, value, row.repeat_interleave(TILE, -1)[:, :, None]) for part, row in rows]
    return torch.cat(masked, dim=1)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
    """Dense attention, ignoring the tiles."""
    return torch_attention(query, key, value)


def tile_blocks(tiles: Tensor) -> BlockMask:
    """One kernel block per tile; all blocks are full, so nothing of size S x S is allocated."""
    tokens, part = tiles.shape[-1] * TILE, torch.zeros_like(tiles)
    # The CPU kernel does not compile if two lists are the same tensor.
    lists = (*_lists(part), *_lists(tiles), *_lists(part.mT), *_lists(tiles.mT))
    return BlockMask((tokens, tokens), *lists, BLOCK_SIZE=(TILE, TILE), mask_mod=noop_mask)


def paired_blocks(tiles: Tensor) -> BlockMask:
    """Blocks of two by two tiles, the usual block size of the kernels; a mask covers partly visible blocks."""
    tokens, odd = tiles.shape[-1] * TILE, tiles.shape[-1] % 2
    padded = pad(tiles, (0, odd, 0, odd)) if odd else tiles
    fours = padded.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # B H n 2 n 2
    some, every = fours.any(-1).any(-2), fours.all(-1).all(-2)

    def is_on(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return padded[batch, head, query // TILE, key // TILE]

    part = some & ~every
    lists = (*_lists(part), *_lists(every), *_lists(part.mT), *_lists(every.mT))
    return BlockMask((tokens, tokens), *lists, BLOCK_SIZE=(2 * TILE, 2 * TILE), mask_mod=is_on)


class RebuiltLists(saved_tensors_hooks):
    """Hooks that save the visible tiles, one byte each, for the lists of a block mask, which take sixteen; the backward
    pass makes the lists again. All other tensors are saved as by the surrounding hooks.
    """

    def __init__(self, mask: BlockMask, blocks: Callable[[Tensor], BlockMask], tiles: Tensor) -> None:
        places = {each.untyped_storage()._cdata: index for index, each in enumerate(lists_of(mask))}
        # torch only calls the innermost hooks: of a checkpoint or a streamed block, these would be the outer ones.
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        keep, take = outer or (lambda tensor: tensor, lambda saved: saved)
        kept, again = keep(tiles), dict[int, Tensor]()

        def pack(tensor: Tensor) -> int | tuple[Any]:
            index = places.get(tensor.untyped_storage()._cdata)
            return (keep(tensor),) if index is None else index

        def unpack(saved: int | tuple[Any]) -> Tensor:
            if isinstance(saved, tuple):
                return take(saved[0])
            if saved not in again:
                again.update(enumerate(lists_of(blocks(take(kept)))))
            # Removed, since these hooks live as long as the graph.
            return again.pop(saved)

        super().__init__(pack, unpack)


def lists_of(mask: BlockMask) -> list[Tensor]:
    return [each for each in mask.as_tuple() if isinstance(each, Tensor)]


@contextmanager
def exempt() -> Iterator[None]:
    """Leave torch's deterministic mode, which refuses row sums and expands indices of scatters. Neither is needed here:
    one thread block sums a row in a fixed order, and no index is written twice.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on)


@exempt()
def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of visible key blocks per query block, int32 `B H N`, and all key blocks, visible first, `B H N N`.
    `BlockMask.from_kv_blocks` sorts for the same lists; a cumulative sum gives the positions as well.
    """
    seen = blocks.contiguous().cumsum(-1, dtype=torch.int32)
    count, numbers = seen[..., -1:], torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device)
    places = torch.where(blocks, seen - 1, count + numbers - seen).long()
    order = torch.empty_like(seen).scatter_(-1, places, numbers.expand_as(seen))
    return count[..., 0].contiguous(), order


def dividing(offered: list[Any]) -> list[Any]:
    """The compiler's configurations of the backward pass whose blocks divide a tile, or else one with blocks of a tile.

    The default for H100 and B200 has sides of 128, which the compiler refuses for tiles of 64; the only alternative
    would be a search of minutes.
    """
    sides = ("block_m1", "block_n1", "block_m2", "block_n2")
    fitting = [each for each in offered if all(TILE % vars(each)[side] == 0 for side in sides)]
    # Two stages and four warps are torch's own choice for these blocks on an A100, and need little shared memory.
    return fitting or [replace(offered[-1], **dict.fromkeys(sides, TILE), num_stages=2, num_warps=4)]


@functools.cache
def dividing_choices() -> Any:
    """A context in which the compiler only chooses `dividing` blocks."""
    # Imported here: it takes half a second, which starts without NABLA save.
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        def get_flex_attention_bwd_configs(self, *given: Any, **named: Any) -> list[Any]:
            return dividing(super().get_flex_attention_bwd_configs(*given, **named))

    return Choices()


def compiled(blocks: Callable[[Tensor], BlockMask], kernel: dict[str, Any] | None = None) -> Attend:
    """Compiled flex attention over the blocks that `blocks` makes of the visible tiles; `kernel` has its options."""
    from torch._functorch import config
    from torch._inductor.virtualized import V

    shapes: Any = torch.fx.experimental._config
    # With fullgraph torch raises after too many recompilations, instead of running uncompiled and dense.
    run: Any = torch.compile(flex_attention, fullgraph=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))  # views: checkpointing recomputes what they show
        mask = blocks(tiles)
        # Compile the backward pass with the forward pass: autograd's thread has separate compiler settings.
        with (
            V.set_choices_handler(dividing_choices()),
            config.patch(force_non_lazy_backward_lowering=True),
            shapes.patch(backed_size_oblivious=False),  # see `settle_compiler`; flex attention does not compile with it
            RebuiltLists(mask, blocks, tiles) if torch.is_grad_enabled() else nullcontext(),
        ):
            out: Tensor = run(*heads_first, block_mask=mask, kernel_options=kernel)
        return out.transpose(1, 2)

    return attend


SMALL_BLOCKS = {"fwd_BLOCK_M": TILE, "fwd_BLOCK_N": TILE}
# Flex attention has no backward pass on a CPU; on the others it is not compiled, and would ignore the mask.
WITHOUT_FLEX = ("cpu", "mps", "xpu")
# In order of preference.
IMPLEMENTATIONS: dict[str, Callable[[], Attend]] = {
    "blocks of 64": functools.cache(partial(compiled, tile_blocks, SMALL_BLOCKS)),
    "blocks of 128": functools.cache(partial(compiled, paired_blocks)),
}
# FlashAttention 4 through flex attention, an alternative to the first implementation that works.
FLASH = "FlashAttention 4, blocks of 128"
ALTERNATIVES = {FLASH: functools.cache(partial(compiled, paired_blocks, {"BACKEND": "FLASH"}))}


@functools.cache
def choose_attend(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int = HEADS) -> Attend:
    """The implementation stored for this device; else the first with correct results and gradients, or an installed
    FlashAttention 4 if it is correct and faster; else dense, with a warning.
    """
    if device.type in WITHOUT_FLEX:
        return attend_masked
    mode = ", deterministic" if torch.are_deterministic_algorithms_enabled() else ""
    call = f"block-sparse attention (NABLA), {heads} heads of {head_dim}, {str(dtype)[6:]}{mode}"
    ways = IMPLEMENTATIONS | ALTERNATIVES
    name = KERNELS.choose(device, call, ways, lambda: _fastest_correct(device, dtype, head_dim, heads))
    return ways[name]() if name in ways else attend_dense


def _fastest_correct(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> str:
    faults = []
    for name, build in IMPLEMENTATIONS.items():
        fault = find_fault(build(), device, dtype, head_dim, heads)
        if fault is None:
            if is_installed("flash_attn.cute") and _is_better(FLASH, build(), device, dtype, head_dim, heads):
                name = FLASH
            logger.info("Block-sparse attention (NABLA) runs compiled, in %s.", name)
            return name
        faults.append(f"{name}: {fault}")
    logger.warning(
        "This checkpoint was trained with block-sparse attention (NABLA), but on %s every implementation failed its "
        "test (%s). Training uses dense attention instead: slower, and different from sampling elsewhere.",
        device, "; ".join(faults),
    )  # fmt: skip
    return "dense"


def _is_better(name: str, present: Attend, device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> bool:
    """Whether an alternative is correct and faster, in forward plus backward."""
    attend = ALTERNATIVES[name]()
    fault = find_fault(attend, device, dtype, head_dim, heads)
    if fault is not None:
        logger.info("Block-sparse attention (NABLA) cannot use %s: %s.", name, fault)
        return False
    generator, shape = torch.Generator(device).manual_seed(0), (1, TIMED * TILE, heads, head_dim)
    draws = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)]
    tiles = torch.rand(1, heads, TIMED, TIMED, generator=generator, device=device) < 0.2
    tiles = tiles | torch.eye(TIMED, dtype=torch.bool, device=device)
    before, after = (milliseconds(partial(_results, way, draws, tiles, True)) for way in (present, attend))
    return after < before


def find_fault(
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads: int = HEADS,
    *,
    backward: bool = True,
) -> str | None:
    """Compare an implementation with `attend_masked` on the CPU in float64; returns what is wrong, or None.

    Args:
        heads: of the model, since the compiler recompiles a size that changes between calls as dynamic.
        backward: also compare gradients.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, 5 * TILE, heads, head_dim)
    draws = [(torch.randn(shape, generator=generator) / 2).to(dtype) for _ in range(4)]
    tiles = torch.rand(2, heads, 5, 5, generator=generator) < 0.4
    tiles = tiles | torch.eye(5, dtype=torch.bool)
    wanted = _results(attend_masked, [draw.double() for draw in draws], tiles, backward)
    try:
        results = _results(attend, [draw.to(device) for draw in draws], tiles.to(device), backward)
    except DEVICE_FAILURES:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:  # compilers and kernels refuse with any error
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # Relative errors, in Euclidean norms.
    distance = max(
        ((one.cpu() - other).norm() / other.norm()).item() for one, other in zip(results, wanted, strict=True)
    )
    limit = tolerance(device, dtype)
    return None if distance <= limit else f"off by {distance:.1e}, more than {limit:.1e}"


def _results(attend: Attend, draws: list[Tensor], tiles: Tensor, backward: bool) -> list[Tensor]:
    """The output, and with `backward` the gradients of query, key and value."""
    query, key, value = (each.detach().requires_grad_(backward) for each in draws[:3])
    with torch.set_grad_enabled(backward):
        out = attend(query, key, value, tiles)
    return [out, *torch.autograd.grad(out, (query, key, value), draws[3])] if backward else [out]


def tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """The accepted error: four times the machine epsilon; in float32, of TF32 if it is allowed, else 2^-18.

    float32 on a GPU may have the 10 bits of TF32. Otherwise, sums of some hundred products and fast exponentials (off
    by up to 2^-22) still round differently from the reference. Ignoring the tiles gives an error of over 0.5.
    """
    if dtype == torch.float32:
        tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        return 4 * 2**-10 if tf32 else 2**-18
    return 4 * torch.finfo(dtype).eps


def window_mask(
    frames: int, rows: int, columns: int, config: dict[str, Any], device: torch.device | None = None
) -> Tensor:
    """The window of visible tiles by distance in time, height and width: bool, `1 1 N N` with N tiles.

    Args:
        rows, columns: tiles per frame: latent height and width divided by 16.
        device: where the mask is created; copying it there would synchronise with the device.
    """
    sides = ((frames, config["attention_wT"]), (rows, config["attention_wH"]), (columns, config["attention_wW"]))
    mask = torch.ones((1, 1), dtype=torch.bool, device=device)
    for count, window in sides:  # each tile of the axes before, then of this one
        place = torch.arange(count, device=device)
        mask = torch.kron(mask, (place[:, None] - place).abs() <= window // 2)
    return mask[None, None]


def sparse_params(latents_shape: tuple[int, ...], config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The `sparse_params` of the stock pipelines for latents of shape `B F H W C`."""
    _, frames, height, width, _ = latents_shape
    rows, columns = height // 2, width // 2
    return {
        **{name: config[f"attention_{name}"] for name in ("P", "wT", "wW", "wH", "add_sta", "method")},
        "attention_type": config["attention_type"],
        "sta_mask": window_mask(frames, rows // TILE_SIDE, columns // TILE_SIDE, config, device),
        "to_fractal": True,
        "visual_shape": (frames, rows, columns),
    }


@exempt()
def tile_mask(query: Tensor, key: Tensor, window: Tensor, mass: float) -> Tensor:
    """Which key tiles each query tile attends to: bool, `B H N N`, from `B S H D`.

    Tiles are ranked by the softmax over tile means. The lowest that together hold 1 - `mass` are dropped, then the
    window is added.
    """
    means = [x.transpose(1, 2).unflatten(2, (-1, TILE)).mean(-2) for x in (query, key)]  # B H N D
    scores = torch.softmax(means[0] @ means[1].transpose(-2, -1) / math.sqrt(query.shape[-1]), dim=-1)
    values, order = scores.sort(-1)
    kept = values.cumsum(-1) >= 1 - mass
    return torch.empty_like(kept).scatter_(-1, order, kept) | window


class TileAttention:
    """Sparse attention of a transformer; its processors share the implementation chosen for the device."""

    def __init__(self) -> None:
        self._attend: dict[int, Attend] = {}  # by number of heads, which processes may share
        self._visible: TileCounts = {}

    def settle(self, device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> None:
        """Choose an implementation now, outside all blocks: compilation and checkpointing must not trace the test."""
        self._attend[heads] = choose_attend(device, dtype, head_dim, heads)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any]) -> Tensor:
        """Attention of `B S H D` queries to the tiles chosen for them; `B S H D`."""
        if query.shape[-2] not in self._attend:  # pipelines do not call `settle`
            self.settle(query.device, query.dtype, query.shape[-1], query.shape[-2])
        with torch.no_grad():
            tiles = tile_mask(query, key, params["sta_mask"], params["P"])
        if torch.is_grad_enabled():
            # On the device, since reading the number would synchronise.
            visible, pairs = self._visible.get(query.shape[1], (0, 0))
            self._visible[query.shape[1]] = visible + tiles.sum(), pairs + tiles.numel()
        attend: Any = self._attend[query.shape[-2]]
        return attend(query, key, value, tiles)

    def take_counts(self) -> TileCounts:
        """The tiles of the forward passes with gradients since the last call."""
        counts, self._visible = self._visible, {}
        return counts

    def kernel(self, params: dict[str, Any] | None) -> Kernel | None:
        """The attention of a step with these `sparse_params`; None without, where it is dense."""
        return None if params is None else partial(self, params=params)


def install(transformer: nn.Module) -> TileAttention:
    """Let the visual self-attentions attend to NABLA's tiles; returns the attention that they share."""
    attention = TileAttention()
    replace_attention(transformer, attention.kernel, lambda name: name.endswith("self_attention") and "visual" in name)
    return attention
