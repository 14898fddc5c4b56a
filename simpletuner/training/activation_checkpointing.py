"""Recompute block activations in the backward pass instead of keeping them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from simpletuner.config.schema import PrecisionConfig
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.models.adapter import BlockLayout


def enable_checkpointing(
    transformer: nn.Module,
    layout: BlockLayout,
    config: PrecisionConfig,
    *,
    dropout: bool,
    block_inputs: BlockInputs | None = None,
) -> None:
    """Checkpoint every block, or every n-th one with `gradient_checkpointing_interval`.

    Args:
        dropout: whether blocks draw random numbers, whose state must then be put back for the recomputation.
        block_inputs: keeps the hidden states of checkpointed blocks in host memory.
    """
    if not config.gradient_checkpointing:
        return
    interval = config.gradient_checkpointing_interval or 1
    chosen = {id(block) for index, block in enumerate(layout.blocks) if index % interval == 0}

    def run_block(block: nn.Module, *inputs: Any) -> Any:
        if id(block) not in chosen:
            return block(*inputs)
        with nullcontext() if block_inputs is None else block_inputs.around(inputs[0]):
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=dropout)

    model: Any = transformer
    model.enable_gradient_checkpointing(run_block)


def checkpoints_all(config: PrecisionConfig) -> bool:
    """Whether no block keeps what it saves until the backward pass."""
    return config.gradient_checkpointing and (config.gradient_checkpointing_interval or 1) == 1
