"""Short runs with techniques, in one or several processes, and their collectives."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.annexes.processes.joining import connect, set_rendezvous
from simpletuner.diffusion.batch import Batch
from simpletuner.distributed.world import World
from simpletuner.errors import NonFiniteError, Problems
from simpletuner.planning.techniques.spec import TrainedData
from simpletuner.planning.techniques.table import chosen_techniques
from simpletuner.techniques.base import Technique
from simpletuner.techniques.load import make_techniques
from simpletuner.training.sharding import local
from tests.techniques.cases import CASES
from tests.techniques.facing import Facing, FacingSpec
from tests.tools.families import make_config
from tests.tools.sharded_run import Batches, Case, Run, samples_of
from tests.training.test_guarded_step import Constant

STEPS = 2
FACING = FacingSpec.name  # a technique of the tests that deals the noise
KNOWN = "known"  # the dataset of every second micro-batch


def names_in(run: str) -> list[str]:
    """The techniques of a run."""
    return [name for name, case in CASES.items() if run in case.runs]


# Techniques that a LoRA or a full fine-tune may have together.
TOGETHER: dict[str, dict[str, Any]] = {
    "lora": {"names": [FACING, *names_in("lora")]},
    "full": {"names": names_in("full"), "model_type": "full", "masked_loss_prior": 0.0},
}


class Collectives(TorchDispatchMode):
    """Lists the collectives of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@dataclass
class Alternating(Batches):
    """Yields the batch as one of two datasets in turn."""

    def __next__(self) -> Batch:
        return replace(super().__next__(), dataset_id=KNOWN if self.index % 2 else "new")


def techniques_of(
    checkpoint: Path, names: Sequence[str], settings: Mapping[str, Any]
) -> list[Technique]:
    """The techniques of a run, as its plan would build them."""
    config = make_config(checkpoint, **settings)
    regularised = {KNOWN: 0.5} if "regularisation" in names else {}
    strengths = {KNOWN: -1.0, "new": 1.0} if "slider" in names else {}
    masked = float("masked loss" in names)
    specs = chosen_techniques(config, TrainedData(20, regularised, strengths, masked))
    dealing = [Facing(FacingSpec())] if FACING in names else []
    return [*make_techniques(specs), *dealing]


def train(
    checkpoint: Path,
    batch: Batch,
    world: World,
    folder: Path,
    names: Sequence[str],
    **settings: Any,
) -> dict[str, Any]:
    """Train some steps; returns metrics, collectives and forward passes of this process."""
    for name in names:
        if name != FACING:
            settings = {**CASES[name].settings, **settings}
    settings = {
        "gradient_accumulation_steps": 2,
        "use_ema": False,
        "optimizer": "torch-sgd",
        **settings,
    }
    run = Run(
        checkpoint,
        Case(settings, lambda: techniques_of(checkpoint, names, settings)),
        world,
        folder,
    )
    samples = samples_of(batch, world)
    assert batch.other_embeds is not None
    assert batch.loss_mask is not None
    run.loader = Alternating(
        Batch(
            batch.latents[samples],
            batch.embeds[samples],
            batch.names[samples],
            loss_mask=batch.loss_mask[samples] if "masked loss" in names else None,
            other_embeds=batch.other_embeds[samples] if "preservation" in names else None,
        )
    )
    run.train(STEPS - 1)
    with Collectives() as collectives:  # of the last step only: it slows down every operation
        run.train(1)
    return {
        "metrics": run.metrics,
        "exchanges": collectives.names,
        "passes": run.assembly.passes,
        "refused": error_of_a_nan_step(run, world),
    }


def error_of_a_nan_step(run: Run, world: World) -> str:
    """The error of a step in which the last process has a loss of NaN.

    Empty if there was none, or if it changed a weight of this process.
    """
    weights = [local(parameter) for parameter in run.assembly.parameters.values()]
    before = [weight.detach().clone() for weight in weights]
    if world.rank == world.size - 1:
        run.assembly.techniques.append(Constant(math.nan, later=False))
    try:
        run.train(1)
    except NonFiniteError as error:
        if all(map(torch.equal, weights, before)):
            return str(error)
    return ""


def main(
    place: World, checkpoint: Path, folder: Path, cases: Mapping[str, Mapping[str, Any]]
) -> None:
    """Train cases in one of several processes; its results are a file in the folder."""
    set_rendezvous(place, os.environ, Problems())  # for accelerate
    batch = torch.load(folder / "batch.pt", weights_only=False)
    with connect(place, f"file://{folder}/meeting", limit=180) as world:
        results = {
            name: train(checkpoint, batch, world, folder, **case) for name, case in cases.items()
        }
    torch.save(results, folder / f"results-{place.rank}.pt")
