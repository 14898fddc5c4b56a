"""Weights in NF4, as bitsandbytes quantises them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from simpletuner.memory.quantisation.formats import Packed, WeightFormat

NF4_BLOCK = 64  # weights per scale, as in QLoRA


@dataclass(frozen=True)
class NormalFloat(WeightFormat):
    """NF4 (QLoRA, arXiv:2305.14314): 4 bits per weight, and a scale per block.

    The bits are an index into quantiles of a normal distribution; the scale is the largest absolute
    value of the block.
    """

    dtype: torch.dtype
    shape: tuple[int, int]

    def unpack(self, *packed: Tensor) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        data, absmax, code = packed
        blocks = torch.Size((self.shape[0] * self.shape[1] // NF4_BLOCK, NF4_BLOCK))
        state = QuantState(absmax, blocks, code, NF4_BLOCK, "nf4", self.dtype)
        return dequantize_4bit(data, state).reshape(self.shape)


def pack_nf4(weight: Tensor, kind: str) -> Packed:
    """Quantise a weight; `kind` is bitsandbytes' name, nf4."""
    from bitsandbytes.functional import quantize_4bit

    # One block per row: on a CPU, blocks that span two rows give wrong results.
    data, state = quantize_4bit(weight.reshape(-1, NF4_BLOCK), blocksize=NF4_BLOCK, quant_type=kind)
    format_ = NormalFloat(weight.dtype, (weight.shape[0], weight.shape[1]))
    return format_, {"data": data, "absmax": state.absmax, "code": state.code}
