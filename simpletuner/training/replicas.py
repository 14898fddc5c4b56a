"""Replicas of trained weights in several processes, whose gradients DDP averages."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(transformer: nn.Module, accelerator: Accelerator, *, sharded: bool) -> nn.Module:
    """Wrap the transformer for gradient synchronisation, without frozen weights. Collective."""
    frozen = [name for name, weight in transformer.named_parameters() if not weight.requires_grad]
    frozen += [name for name, _ in transformer.named_buffers()]
    # Otherwise DDP would broadcast the whole frozen model at the start.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, frozen)
    if not sharded:
        return replicate_whole(transformer, accelerator)
    # accelerate assumes that DDP would synchronise sharded weights.
    assert accelerator.ddp_handler is not None
    replica = DistributedDataParallel(transformer, **accelerator.ddp_handler.to_kwargs())
    arrange_buckets(replica)
    return replica


def replicate_whole(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Wrap a module on its device for gradient synchronisation. Collective.

    In a single process, the module is returned unchanged.
    """
    replica: nn.Module = accelerator.prepare(module, device_placement=[False])
    if isinstance(replica, DistributedDataParallel):
        arrange_buckets(replica)
    return replica


def arrange_buckets(replica: DistributedDataParallel) -> None:
    """Let DDP arrange its buckets before the first step. Collective.

    After its first backward pass, DDP arranges the buckets anew, in the order in which the
    gradients arrived. The sum over more than two processes rounds by the place of a number in its
    bucket, so the first step of a continued run would differ in its last bits from the same step of
    a run that went on. Here, that first pass is one of zeros whose gradients arrive from the last
    parameter to the first, as in training.
    """
    weights = [weight for weight in replica.module.parameters() if weight.requires_grad]
    with torch.enable_grad():
        # One node per weight; the backward pass runs through them in reverse.
        zeros = [weight.flatten()[:1].float().sum() * 0 for weight in weights]
        replica.reducer.prepare_for_forward()
        replica.reducer.prepare_for_backward([])
        torch.autograd.backward(zeros)
    replica.reducer._rebuild_buckets()
    for weight in weights:
        weight.grad = None
