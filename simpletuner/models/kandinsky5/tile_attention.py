"""Attention from tiles to tiles: its implementations, and the self-test that chooses one."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from simpletuner.models.blocks import DEVICE_FAILURES, torch_attention
from simpletuner.models.kandinsky5.flex import Attend, compiled_flex
from simpletuner.models.kandinsky5.options import TILE

logger = logging.getLogger(__name__)

HEADS = 2  # heads in the self-test if the model's number is unknown
# On a CPU, flex attention has no backward pass. On the others it is not compiled, and would ignore
# the tiles.
WITHOUT_FLEX = ("cpu", "mps", "xpu")


def attend_masked(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
    """Attention on every device, with gradients, from `B S H D`.

    The queries of a tile share one row of the mask, so memory is linear in the tokens.
    """
    attended = []
    for tile, visible in zip(query.split(TILE, dim=1), tiles.unbind(dim=2), strict=True):
        mask = visible.repeat_interleave(TILE, -1)[:, :, None]  # B H 1 S, from B H N
        attended.append(torch_attention(tile, key, value, mask))
    return torch.cat(attended, dim=1)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
    """Dense attention, ignoring the tiles."""
    return torch_attention(query, key, value)


@functools.cache
def choose_attend(
    device: torch.device, dtype: torch.dtype, head_dim: int, heads: int = HEADS
) -> Attend:
    """Compiled flex attention if its results and gradients are correct on a device.

    Otherwise dense attention, with a warning. Devices without flex attention get masks.
    """
    if device.type in WITHOUT_FLEX:
        return attend_masked
    attend = compiled_flex(dtype)
    fault = find_fault(attend, device, dtype, head_dim, heads)
    if fault is None:
        logger.info("Block-sparse attention (NABLA) runs compiled.")
        return attend
    logger.warning(
        "This checkpoint was trained with block-sparse attention (NABLA), but on %s compiled flex "
        "attention failed its test (%s). Training uses dense attention instead: slower, and "
        "different from sampling elsewhere.",
        device,
        fault,
    )
    return attend_dense


def find_fault(
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads: int = HEADS,
    *,
    backward: bool = True,
) -> str | None:
    """Compare an implementation with `attend_masked` on the CPU in float64.

    Args:
        heads: of the model, since the compiler recompiles a size that changes between calls as
            dynamic.
        backward: also compare gradients.

    Returns:
        what is wrong, or None.
    """
    generator = torch.Generator().manual_seed(0)
    count = 5  # tiles
    shape = (2, count * TILE, heads, head_dim)
    # Query, key, value, and the gradient of the output.
    draws = [(torch.randn(shape, generator=generator) / 2).to(dtype) for _ in range(4)]
    tiles = torch.rand(2, heads, count, count, generator=generator) < 0.4
    tiles = tiles | torch.eye(count, dtype=torch.bool)  # softmax of no tile would be NaN
    expected = _results(attend_masked, [draw.double() for draw in draws], tiles, backward)
    try:
        results = _results(attend, [draw.to(device) for draw in draws], tiles.to(device), backward)
    except DEVICE_FAILURES:
        raise
    # Compilers and kernels refuse with any of these.
    except (RuntimeError, ValueError, AssertionError) as error:
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__

    errors = []
    for result, exact in zip(results, expected, strict=True):
        relative_error = (result.cpu() - exact).norm() / exact.norm()
        errors.append(relative_error.item())
    limit = tolerance(device, dtype)
    if max(errors) <= limit:
        return None
    return f"off by {max(errors):.1e}, more than {limit:.1e}"


def _results(attend: Attend, draws: list[Tensor], tiles: Tensor, backward: bool) -> list[Tensor]:
    """The output, and with `backward` the gradients of query, key and value."""
    query, key, value = (draw.detach().requires_grad_(backward) for draw in draws[:3])
    out_gradient = draws[3]
    with torch.set_grad_enabled(backward):
        out = attend(query, key, value, tiles)
    if not backward:
        return [out]
    return [out, *torch.autograd.grad(out, (query, key, value), out_gradient)]


def tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """The accepted error: four times the machine epsilon, or 2^-18 in float32 without TF32.

    float32 on a GPU may have the 10 bits of TF32. Otherwise, sums of some hundred products and fast
    exponentials (off by up to 2^-22) still round differently from the reference. Ignoring the tiles
    gives an error of over 0.5.
    """
    if dtype == torch.float32:
        tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        return 4 * 2**-10 if tf32 else 2**-18
    return 4 * torch.finfo(dtype).eps
