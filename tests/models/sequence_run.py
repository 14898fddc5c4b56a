"""Short runs whose processes shard the tokens of samples, or of a single process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.annexes.processes.joining import connect, set_rendezvous
from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.distributed.world import World
from simpletuner.errors import Problems
from simpletuner.planning.techniques.crepa import CrepaSpec
from simpletuner.techniques.crepa import Crepa
from tests.tools.families import make_video_adapter
from tests.tools.sharded_run import CLIPPED, LEG, Case, Run


def nabla_adapter(checkpoint: Path) -> Any:
    """The adapter of a clip's checkpoint."""
    return make_video_adapter(checkpoint, "t2v")


def aligned() -> Crepa:
    """A block aligned with a later one, whose hidden states are gathered from all processes."""
    config = CrepaConfig(
        crepa_enabled=True,
        crepa_feature_source="backbone",
        crepa_block_index=0,
        crepa_teacher_block_index=1,
    )
    return Crepa(CrepaSpec(config, total_steps=10))


DDP = {"fsdp_enable": False, "use_ema": False, "optimizer": "torch-sgd", "lora_rank": 4}
CHECKPOINTED = {**DDP, "gradient_checkpointing": True}
CASES = {
    # Nine tokens, which neither two nor four processes divide.
    "uneven": Case(CHECKPOINTED | CLIPPED, lambda: [aligned()]),
    "stored": Case(DDP | {"speed_keep_attention": False}),
    "sharded": Case(
        DDP | {"fsdp_enable": True, "model_type": "full", "gradient_checkpointing": True}
    ),
    "nabla": Case(CHECKPOINTED, adapter=nabla_adapter, batch="clips.pt"),
}


def run_case(
    name: str, checkpoints: Mapping[str, Path], world: World, folder: Path, sequence: int
) -> dict[str, Any]:
    """Train a case; returns its losses, gradient norms, and the changes of the weights."""
    case = CASES[name]
    settings = {**case.settings, "sequence_parallel_size": sequence}
    case = Case(settings, case.techniques, adapter=case.adapter, batch=case.batch)
    run = Run(checkpoints.get(name, checkpoints["uneven"]), case, world, folder)
    token_counts = watch(run)
    before: dict[str, Tensor] = {name: weight.clone() for name, weight in run.weights().items()}
    run.train(LEG)
    return {
        "losses": run.losses,
        "norms": run.norms(),
        "moved": {name: weight - before[name] for name, weight in run.weights().items()},
        "token_counts": sorted(token_counts),
        "predictions": run.predictions(),
    }


def watch(run: Run) -> set[int]:
    """The numbers of tokens per sample that the last block trains on; filled during the run."""
    counts: set[int] = set()

    def note(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            counts.add(inputs[0].shape[1])

    last_block = run.assembly.trained.transformer.visual_transformer_blocks[-1]
    last_block.feed_forward.register_forward_pre_hook(note)
    return counts


def main(
    place: World, checkpoints: Mapping[str, Path], folder: Path, cases: Mapping[str, int]
) -> None:
    """One of several processes: train cases, each with its number of processes per sample."""
    set_rendezvous(place, os.environ, Problems())  # for accelerate
    with connect(place, f"file://{folder}/meeting-{place.size}-{len(cases)}") as world:
        results = {
            name: run_case(name.partition(" ")[0], checkpoints, world, folder, sequence)
            for name, sequence in cases.items()
        }
    torch.save(results, folder / f"results-{place.size}-{place.rank}.pt")
