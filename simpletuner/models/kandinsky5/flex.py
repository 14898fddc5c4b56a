"""Compiled flex attention from tiles to tiles, for NABLA on a GPU.

Flex attention computes the blocks of the score matrix that a `BlockMask` lists, here one block per
pair of tiles. Uncompiled it would ignore the lists, and compute all pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

from simpletuner.models.kandinsky5.options import TILE

# (query, key, value, each `B S H D`; visible tiles, bool `B H N N`) -> `B S H D`.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Blocks of the forward kernel. They must divide a tile; torch's own have up to 128 rows.
FORWARD_BLOCKS = {"fwd_BLOCK_M": TILE, "fwd_BLOCK_N": TILE}
# In float32, two buffers of 64 keys and values need 128 kB for heads of 128, and GeForce GPUs have
# 99 kB of shared memory.
FORWARD_BLOCKS_FLOAT32 = {"fwd_BLOCK_M": TILE, "fwd_BLOCK_N": TILE // 2, "fwd_num_stages": 1}

SIDES = ("block_m1", "block_n1", "block_m2", "block_n2")
# (stages, warps) of the backward kernel with blocks of one tile, by architecture. They replace
# torch's own blocks where those have sides of 128, which do not divide a tile, so that the compiler
# refuses them: in torch 2.13 on H100 and B200 (heads of 64 to 128), on AMD (heads of 128), and
# elsewhere for heads below 64. These numbers are torch's own for sides of 64, on an A100 and on
# AMD; all of these GPUs have the shared memory that they need.
BACKWARD_BLOCKS = {
    "sm_8x": (2, 4),
    "sm_9x": (2, 4),
    "sm_10x": (2, 4),
    "sm_11x": (2, 4),
    "sm_12x": (2, 4),
    "ROCm": (1, 4),
}


def tile_blocks(tiles: Tensor) -> BlockMask:
    """The block mask that shows each query tile its visible key tiles (bool `B H N N`).

    A block mask lists two kinds of visible blocks: in partial ones, a function decides for every
    pair of tokens; full ones are visible as a whole. Blocks are tiles here, so all are full, and
    nothing of size S x S is allocated. Each kind is listed twice: the key blocks of every query
    block, and the query blocks of every key block (the transpose) for the gradients of keys and
    values.
    """
    tokens = tiles.shape[-1] * TILE
    none = torch.zeros_like(tiles)
    # The empty lists of partial blocks are two tensors, since the CPU kernel does not compile if
    # they are the same.
    lists = (*_lists(none), *_lists(tiles), *_lists(none.mT), *_lists(tiles.mT))
    return BlockMask((tokens, tokens), *lists, BLOCK_SIZE=(TILE, TILE), mask_mod=noop_mask)


@contextmanager
def exempt() -> Iterator[None]:
    """Leave torch's deterministic mode, which refuses row sums and expands indices of scatters.

    Neither is needed here: one thread block sums a row in a fixed order, and no index repeats.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on)


@exempt()
def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For every query block: how many key blocks are visible, and all key blocks, visible first.

    `BlockMask.from_kv_blocks` sorts for the same lists; a cumulative sum gives the positions too.

    Returns:
        int32 `B H N` and int32 `B H N N`.
    """
    # Visible blocks up to here, this one included.
    seen = blocks.contiguous().cumsum(-1, dtype=torch.int32)
    count = seen[..., -1:]
    numbers = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device)
    # A visible block comes after the visible ones before it. A hidden block comes after all visible
    # ones and after the hidden ones before it, which are `numbers - seen`.
    places = torch.where(blocks, seen - 1, count + numbers - seen).long()
    order = torch.empty_like(seen).scatter_(-1, places, numbers.expand_as(seen))
    return count[..., 0].contiguous(), order


class RebuiltLists(saved_tensors_hooks):
    """Hooks that save the visible tiles in place of the lists of a block mask.

    A pair of tiles takes one byte, and sixteen in the lists, which the backward pass makes again.
    All other tensors are saved as by the surrounding hooks.
    """

    def __init__(self, mask: BlockMask, tiles: Tensor) -> None:
        # Autograd saves views, which share only the storage with the lists.
        places = {each.untyped_storage()._cdata: index for index, each in enumerate(lists_of(mask))}
        # torch only calls the innermost hooks: of a checkpoint or a streamed block, these would be
        # the outer ones.
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        keep, take = outer or (lambda tensor: tensor, lambda saved: saved)
        kept = keep(tiles)
        rebuilt: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> int | tuple[Any]:
            index = places.get(tensor.untyped_storage()._cdata)
            return (keep(tensor),) if index is None else index

        def unpack(saved: int | tuple[Any]) -> Tensor:
            if isinstance(saved, tuple):
                return take(saved[0])
            if saved not in rebuilt:
                rebuilt.update(enumerate(lists_of(tile_blocks(take(kept)))))
            # Removed, since these hooks live as long as the graph.
            return rebuilt.pop(saved)

        super().__init__(pack, unpack)


def lists_of(mask: BlockMask) -> list[Tensor]:
    return [each for each in mask.as_tuple() if isinstance(each, Tensor)]


def backward_blocks(default: Any, architecture: str) -> Any:
    """The compiler's default configuration of the backward pass, or that of the table.

    The table is used where the sides of the default do not divide a tile.
    """
    divides_a_tile = all(TILE % getattr(default, side) == 0 for side in SIDES)
    if divides_a_tile or architecture not in BACKWARD_BLOCKS:
        # Without a row of the table, the compiler refuses the default, as the self-test reports.
        return default
    stages, warps = BACKWARD_BLOCKS[architecture]
    return replace(default, **dict.fromkeys(SIDES, TILE), num_stages=stages, num_warps=warps)


def gpu_architecture() -> str:
    """The row of `BACKWARD_BLOCKS` for the current GPU."""
    if torch.version.hip:
        return "ROCm"
    major, _ = torch.cuda.get_device_capability()
    return f"sm_{major}x"


@functools.cache
def block_choices() -> Any:
    """A context in which the compiler uses `backward_blocks`."""
    # Imported here: it takes half a second, which starts without NABLA save.
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        def get_flex_attention_bwd_configs(self, *given: Any, **named: Any) -> list[Any]:
            # The default is the last. With TORCHINDUCTOR_MAX_AUTOTUNE, others precede it; the
            # compiler would time all of them, and two runs could differ.
            default = super().get_flex_attention_bwd_configs(*given, **named)[-1]
            return [backward_blocks(default, gpu_architecture())]

    return Choices()


@functools.cache
def compiled_flex(dtype: torch.dtype) -> Attend:
    """Compiled flex attention over visible tiles, for inputs of a dtype."""
    from torch._functorch import config
    from torch._inductor.virtualized import V

    shapes: Any = torch.fx.experimental._config
    # With fullgraph, too many recompilations raise an error instead of running uncompiled: dense.
    run: Any = torch.compile(flex_attention, fullgraph=True)
    options = FORWARD_BLOCKS_FLOAT32 if dtype == torch.float32 else FORWARD_BLOCKS

    def attend(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        # Views, since checkpointing recomputes what they show.
        heads_first = (each.transpose(1, 2) for each in (query, key, value))
        mask = tile_blocks(tiles)
        # The backward pass is compiled here, since autograd's thread has its own compiler settings.
        with (
            V.set_choices_handler(block_choices()),
            config.patch(force_non_lazy_backward_lowering=True),
            # See `configure_compiler`; flex attention does not compile with it.
            shapes.patch(backed_size_oblivious=False),
            RebuiltLists(mask, tiles) if torch.is_grad_enabled() else nullcontext(),
        ):
            out: Tensor = run(*heads_first, block_mask=mask, kernel_options=options)
        return out.transpose(1, 2)

    return attend
