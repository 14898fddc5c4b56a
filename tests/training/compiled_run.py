"""Short runs of several processes, compiled and uncompiled, and the gradients of their steps."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch._dynamo.utils import counters

from simpletuner.annexes.processes.joining import connect, set_rendezvous
from simpletuner.distributed.world import World
from simpletuner.errors import Problems
from simpletuner.models.blocks import DynamicSizes
from simpletuner.training import assemble, sharding, step
from tests.tools.processes import PATIENCE
from tests.tools.sharded_run import Case, Run
from tests.tools.torch_settings import mark_no_sizes, trace

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"fsdp_enable": False, "gradient_checkpointing": False},
    "fsdp2": {"fsdp_enable": True, "model_type": "full", "gradient_checkpointing": True},
}
# DDP splits graphs while they are traced, whatever becomes of them, so they run as they are: a
# third of the time. With shards the first process compiles for all, since what is exchanged is
# outside of the graphs.
TRACED = ("ddp",)
# A bucket ends with nearly every weight.
SMALL = partial(DistributedDataParallelKwargs, bucket_cap_mb=0.001)


def train(checkpoint: Path, world: World, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train some steps; returns their gradients and how many graphs were compiled by then."""
    gradients: list[list[Tensor]] = []
    graphs: list[int] = []

    def note(parameters: Iterable[nn.Parameter], *limits: Any) -> None:
        gradients.append(
            [
                sharding.gathered(parameter.grad).clone()
                for parameter in parameters
                if parameter.grad is not None
            ]
        )

    counters.clear()
    with (
        patch.object(assemble, "DistributedDataParallelKwargs", SMALL),
        patch.object(step.guard, "clip_gradients", note),
        patch.object(DynamicSizes, "mark", mark_no_sizes),
    ):
        run = Run(
            checkpoint,
            Case({"use_ema": False, "optimizer": "torch-sgd", **settings}),
            world,
            folder,
        )
        run.assembly.transformer.train()
        for number in range(STEPS):
            # Without a dispatch mode around it, under which torch would not compile.
            step.optimizer_step(run.assembly, run.loader, number)
            graphs.append(counters["stats"]["unique_graphs"])
    model = run.assembly.transformer
    buckets = ""
    if hasattr(model, "reducer"):  # DDP
        buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return {
        "gradients": [gradient for gradient in gradients if gradient],
        "graphs": graphs,
        "buckets": buckets,
    }


def results_of(name: str, checkpoint: Path, world: World, folder: Path) -> list[dict[str, Any]]:
    """The results of a case without a compiler, and with it."""
    context: Any = nullcontext()
    if name in TRACED or not world.is_main:
        context = patch.object(torch, "compile", trace)
    results = []
    with context:
        for backend in ("no", "aot_eager"):
            settings = {**CASES[name], "dynamo_backend": backend}
            results.append(train(checkpoint, world, folder, settings))
    return results


def main(place: World, checkpoint: Path, folder: Path) -> None:
    """Run all cases in one of several processes; its results are a file in the folder."""
    set_rendezvous(place, os.environ, Problems())  # for accelerate
    results = {}
    with connect(place, f"file://{folder}/meeting", limit=PATIENCE) as world:
        for name in CASES:
            results[name] = results_of(name, checkpoint, world, folder)
    torch.save(results, folder / f"results-{place.rank}.pt")
