"""Compiled flex attention from tiles to tiles, for NABLA on a GPU.

Flex attention computes the blocks of the score matrix that a `BlockMask` lists, here one block per
pair of tiles. Uncompiled it would ignore the lists, and compute all pairs.

A step goes through three stages. `tile_blocks` turns the visible tiles into the lists that the
kernels read. `compiled_flex` runs the forward kernel on them, with block sizes that divide a tile.
Between forward and backward pass, `RebuiltLists` keeps the visible tiles and drops the lists, which
take eight times as much memory.
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

from simpletuner.models.kandinsky5.options import TILE, heads_at_once

# (query, key, value, each `B S H D`; visible tiles, bool `B H N N`) -> `B S H D`.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Blocks of the forward kernel. They must divide a tile; torch's own have up to 128 rows.
FORWARD_BLOCKS = {"fwd_BLOCK_M": TILE, "fwd_BLOCK_N": TILE}
# In float32, two buffers of 64 keys and values need 128 kB for heads of 128, and GeForce GPUs have
# 99 kB of shared memory.
FORWARD_BLOCKS_FLOAT32 = {"fwd_BLOCK_M": TILE, "fwd_BLOCK_N": TILE // 2, "fwd_num_stages": 1}

# Sides of the backward kernel's blocks, which it uses in two loops: over queries (1) for the
# gradients of keys and values, and over keys (2) for those of queries.
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

    Blocks are tiles here, so they are visible as a whole, and nothing of size S x S is allocated. A
    block mask can list whole blocks apart from those that a function decides token by token. The
    kernel would then need both lists of every row, one of them empty: as long and as large. So all
    are listed as blocks that a function decides, which shows everything.

    They are listed twice. The forward pass, and the gradient of queries, run over the rows of the
    mask: for every query block, the key blocks that it sees. The gradients of keys and values run
    over its columns: for every key block, the query blocks that see it.
    """
    tokens = tiles.shape[-1] * TILE
    key_counts, key_blocks = _lists(tiles)
    query_counts, query_blocks = _lists(tiles.mT)
    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=key_counts,
        kv_indices=key_blocks,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=query_counts,
        q_indices=query_blocks,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=noop_mask,
    )


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
    """For every row: how many blocks are visible, and the numbers of all blocks, visible first.

    The row 0 1 1 0 1 has 3 visible blocks, and the numbers 1 2 4 0 3: a stable partition.
    `BlockMask.from_kv_blocks` sorts for it; a cumulative sum gives the positions too.

    A row has room for all blocks: the longest one is only known on the device, and reading it would
    wait for the device in every block.

    Args:
        blocks: bool `B H N N`.

    Returns:
        int32 `B H N` and int32 `B H N N`.
    """
    counts = blocks.sum(-1, dtype=torch.int32)
    order = torch.empty(blocks.shape, dtype=torch.int32, device=blocks.device)
    for part, numbers in in_parts(blocks, order):
        _partition(part, numbers)
    return counts, order


def in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of as many heads as are sorted at one time, from tensors `B H N N`."""
    samples, heads, tiles, _ = tensors[0].shape
    size = heads_at_once(samples, heads, tiles)
    return zip(*(tensor.split(size, dim=1) for tensor in tensors), strict=True)


def _partition(blocks: Tensor, order: Tensor) -> None:
    """Write the numbers of the blocks to `order`, in every row the visible ones first."""
    # Visible blocks up to here, this one included: 0 1 2 2 3.
    seen = blocks.contiguous().cumsum(-1, dtype=torch.int32)
    count = seen[..., -1:]
    numbers = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device)
    # A visible block comes after the visible ones before it. A hidden block comes after all visible
    # ones and after the hidden ones before it, which are `numbers - seen`: 3 0 1 4 2.
    positions = torch.where(blocks, seen - 1, count + numbers - seen).long()
    order.scatter_(-1, positions, numbers.expand_as(seen))


class RebuiltLists(saved_tensors_hooks):
    """Hooks that save the visible tiles in place of the lists of a block mask.

    A pair of tiles takes one byte, and eight in the lists (an int32 in each of two), which the
    backward pass makes again. All other tensors are saved as by the surrounding hooks.
    """

    def __init__(self, mask: BlockMask, tiles: Tensor) -> None:
        # A list is recognised by its storage, since autograd saves views of it.
        index_of = {
            tensor.untyped_storage()._cdata: index for index, tensor in enumerate(lists_of(mask))
        }
        # torch only calls the innermost hooks, which are these. Those around, of a checkpoint or a
        # streamed block, must be called from here.
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        keep, take = outer or (lambda tensor: tensor, lambda saved: saved)
        kept = keep(tiles)
        rebuilt: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> int | tuple[Any]:
            """The number of a list; any other tensor in a tuple, as the outer hooks save it."""
            index = index_of.get(tensor.untyped_storage()._cdata)
            return (keep(tensor),) if index is None else index

        def unpack(saved: int | tuple[Any]) -> Tensor:
            if isinstance(saved, tuple):
                return take(saved[0])
            if saved not in rebuilt:  # the first list of a backward pass
                rebuilt.update(enumerate(lists_of(tile_blocks(take(kept)))))
            # Removed, since these hooks live as long as the graph.
            return rebuilt.pop(saved)

        super().__init__(pack, unpack)


def lists_of(mask: BlockMask) -> list[Tensor]:
    """All tensors of a block mask, in a fixed order."""
    return [member for member in mask.as_tuple() if isinstance(member, Tensor)]


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
    # Imported here because it takes half a second, which runs without NABLA need not spend.
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
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]  # B H S D
        mask = tile_blocks(tiles)
        saved_lists = RebuiltLists(mask, tiles) if torch.is_grad_enabled() else nullcontext()
        with (
            V.set_choices_handler(block_choices()),
            # The backward pass is compiled here, since autograd's thread has its own compiler
            # settings, which would lack the choices.
            config.patch(force_non_lazy_backward_lowering=True),
            # See `configure_compiler`; flex attention does not compile with it.
            shapes.patch(backed_size_oblivious=False),
            saved_lists,
        ):
            out: Tensor = run(*heads_first, block_mask=mask, kernel_options=options)
        return out.transpose(1, 2)

    return attend
