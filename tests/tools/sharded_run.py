"""Short runs of several processes that shard the weights, or of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from simpletuner.annexes.processes.joining import connect, set_rendezvous
from simpletuner.config.schema import CheckpointConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.config.types import Size
from simpletuner.diffusion.batch import Batch
from simpletuner.distributed.world import World
from simpletuner.errors import Problems
from simpletuner.planning.checkpoint_folder import Identity, open_checkpoint
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.reporting.events import EventStream
from simpletuner.run.settings import assembly_settings
from simpletuner.techniques.base import Technique
from simpletuner.techniques.tread import Tread
from simpletuner.training import assemble as assembling
from simpletuner.training import sharding, update
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.checkpoints import CheckpointWriter, UnfinishedCheckpoint, load_checkpoint
from simpletuner.training.ema import Ema
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import TrainState
from simpletuner.training.step import optimizer_step, predict_now
from simpletuner.training.weight_note import WeightNote
from simpletuner.validation.quiet import quiet
from tests.tools.assembly import fixed_noise
from tests.tools.families import CPU, make_adapter, make_config
from tests.training.test_frozen import files_behind

TARGETS = ["to_query", "to_key", "to_value"]
LEG = 2  # steps of a case, and of every run of a relay
BATCH_FILE = "batch.pt"


@dataclass(frozen=True)
class Case:
    """Settings of a run.

    Attributes:
        fused: use the fused kernel of the optimizer, as on a GPU.
        adapter: loads the family's adapter.
        batch: name of the file with its batch.
    """

    settings: Mapping[str, Any]
    techniques: Callable[[], list[Technique]] = list
    fused: bool = False
    adapter: Callable[[Path], Any] = make_adapter
    batch: str = BATCH_FILE


CLIPPED = {"grad_clip_method": "norm", "max_grad_norm": 0.05, "gradient_accumulation_steps": 2}
CASES = {
    "full": Case({"model_type": "full", "max_grad_norm": 0.01}, fused=True),
    "full-accumulated": Case(
        {
            "model_type": "full",
            "gradient_checkpointing": True,
            "fsdp_reshard_after_forward": False,
            **CLIPPED,
        }
    ),
    "full-bf16": Case(
        {"model_type": "full", "mixed_precision": "bf16", "gradient_checkpointing": True}
    ),
    "lora": Case({"gradient_checkpointing": True, **CLIPPED}),
    "lora-tread": Case({}, lambda: [Tread(TreadSpec([Route(0.5, 1, 1)]))]),
}
# Cases continued by other numbers of processes; the case itself is the first run of the relay.
RELAYED = ("full", "lora")
# The case that is interrupted and must continue bit for bit.
EXACT = "full-bf16"
# Cases saved before the first step; the files of all others would be the same.
SAVED = ("full", "full-bf16", "lora")


@dataclass
class Batches:
    """A loader that yields this process's part of one batch again and again."""

    batch: Batch
    index: int = 0
    epoch = 1
    epochs_done = 0

    def __next__(self) -> Batch:
        self.index += 1
        return self.batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["position"]


@dataclass
class Run:
    """A run of one case in this process."""

    checkpoint: Path
    case: Case
    world: World
    folder: Path
    losses: list[float] = field(default_factory=list)
    places: set[str] = field(default_factory=set)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = {
            "mixed_precision": "no",
            "use_ema": True,
            "lora_rank": 4,
            "fsdp_enable": True,
            **self.case.settings,
        }
        config = make_config(self.checkpoint, **settings)
        spec = TrainingSpec(lora_targets=TARGETS, seed=3, total_steps=20, learning_rate=1e-3)
        adapter = self.case.adapter(self.checkpoint)
        kernel = (lambda *size, **where: "fused") if self.case.fused else update.update_kernel
        with (
            patch.object(assembling, "shard", self.shard),
            patch.object(update, "update_kernel", kernel),
        ):
            self.assembly: Any = assemble(
                assembly_settings(config, spec),
                adapter,
                self.case.techniques(),
                make_accelerator(),
                self.world,
            )
        self.assembly.trained.ema = self.ema = Ema(self.assembly.parameters, config.ema, CPU)
        # Encoding takes longer than everything else.
        batch = torch.load(self.folder / self.case.batch, weights_only=False)
        samples = samples_of(batch, self.assembly.data_parallel)
        self.loader: Any = Batches(
            Batch(batch.latents[samples], batch.embeds[samples], batch.names[samples])
        )
        self.state = TrainState()

    def shard(
        self, transformer: nn.Module, blocks: Sequence[nn.Module], *settings: Any, **more: Any
    ) -> None:
        """Record the files behind the memory of the blocks' weights before they are sharded."""
        addresses = []
        for block in blocks:
            for name, parameter in block.named_parameters():
                if "lora_" not in name:
                    addresses.append(parameter.data_ptr())
        self.places = {str(file) for file in files_behind(addresses)}
        sharding.shard(transformer, blocks, *settings, **more)

    def train(self, steps: int) -> None:
        self.assembly.transformer.train()
        is_fused = bool(self.assembly.optimizer.param_groups[0].get("fused"))
        assert is_fused == self.case.fused, "also after a resume"
        for _ in range(steps):
            report = optimizer_step(self.assembly, self.loader, self.state.global_step)
            self.state.global_step = report.step
            self.ema.update(report.step)
            self.metrics.append(report.metrics)
            self.losses.append(report.metrics["train_loss"])

    def predictions(self) -> list[Tensor]:
        """The predictions for the whole batch: of the weights, of their average, and again.

        The last show that the average restores the weights.
        """
        predictions = []
        with quiet(self.assembly):
            for average in (False, True, False):
                with self.ema.applied() if average else quiet(self.assembly):
                    noisy = self.assembly.adapter.prepare(fixed_noise(self.loader.batch))
                    prediction = predict_now(self.assembly, noisy)
                gathered = self.assembly.data_parallel.gather(prediction)
                predictions.append(torch.cat(gathered))
        return predictions

    def norms(self) -> list[float]:
        """The sizes of the gradients, step by step."""
        return [
            metrics[size]
            for metrics in self.metrics
            for size in metrics
            if size.startswith("grad_")
        ]

    def weights(self) -> dict[str, Tensor]:
        return {
            name: sharding.gathered(parameter)
            for name, parameter in self.assembly.parameters.items()
        }

    def save(self, folder: Path, *, in_shards: bool, meanwhile: int = 0) -> None:
        """Save, and train some steps before the checkpoint is complete."""
        unfinished: UnfinishedCheckpoint | None = None
        if self.assembly.writes:
            identity = Identity("kandinsky5-image", "t2i-lite-sft", "full", 4, 3, "x", {})
            writer = CheckpointWriter(
                folder,
                CheckpointConfig(),
                self.loader,
                identity,
                {},
                EventStream(print),
                WeightNote("kandinsky5-image/t2i-lite-sft", "a run", Size(64, 64)),
                in_shards=in_shards,
            )
            unfinished = writer.write(folder, self.assembly, self.state)
        self.train(meanwhile)
        if unfinished is not None:
            unfinished.complete()
        self.world.barrier()

    def load(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        assert checkpoint is not None
        self.state = load_checkpoint(checkpoint, self.assembly, self.loader, same_data=True)


def run_case(name: str, checkpoint: Path, world: World, folder: Path) -> dict[str, Any]:
    """Train a case, and save some cases before the first step; returns what happened."""
    run = Run(checkpoint, CASES[name], world, folder)
    held = sum(
        sharding.local(parameter).numel()
        for parameter in run.assembly.trained.transformer.parameters()
    )
    if name in SAVED:
        run.save(folder / f"{name}-start-{world.size}" / "checkpoint-0", in_shards=True)
    exact = True
    if name == EXACT and world.size > 1:
        checkpoint_folder = folder / f"{name}-half" / "checkpoint-1"
        run.train(1)
        run.save(checkpoint_folder, in_shards=True, meanwhile=1)
        exact = continues_exactly(run, checkpoint_folder)
    else:
        run.train(LEG)
    if name in RELAYED and world.size > 1:
        run.save(folder / name / "checkpoint-0", in_shards=True)
    return {
        "losses": run.losses,
        "norms": run.norms(),
        "exact": exact,
        "predictions": run.predictions(),
        "held": held,
        "places": [*run.places],
    }


def relay(name: str, checkpoint: Path, world: World, folder: Path, leg: int) -> list[float]:
    """Continue from the checkpoint of the previous leg, train, and save the next one."""
    run = Run(checkpoint, CASES[name], world, folder)
    run.load(folder / name / f"checkpoint-{leg - 1}")
    run.train(LEG)
    run.save(folder / name / f"checkpoint-{leg}", in_shards=leg != 2)
    return run.losses


def continues_exactly(uninterrupted: Run, checkpoint: Path) -> bool:
    """Whether a run from a checkpoint ends with the same bits as the run that wrote it."""
    resumed = Run(
        uninterrupted.checkpoint, uninterrupted.case, uninterrupted.world, uninterrupted.folder
    )
    resumed.load(checkpoint)
    resumed.train(len(uninterrupted.losses) - resumed.state.global_step)
    is_equal = all(
        torch.equal(sharding.local(weight), sharding.local(expected))
        for weight, expected in zip(
            resumed.assembly.parameters.values(),
            uninterrupted.assembly.parameters.values(),
            strict=True,
        )
    )
    if not all(uninterrupted.world.gather(is_equal)):
        return False
    return resumed.losses == uninterrupted.losses[-len(resumed.losses) :]


def samples_of(batch: Batch, world: World) -> slice:
    """This process's samples of a batch."""
    count = len(batch.names)
    return slice(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def main(place: World, checkpoint: Path, folder: Path, leg: int, cases: Sequence[str]) -> None:
    """Train cases and a leg of the relay in one of several processes.

    Its results are a file in the folder.
    """
    set_rendezvous(place, os.environ, Problems())  # for accelerate
    results: dict[str, Any] = {}
    with connect(place, f"file://{folder}/meeting-{leg}") as world:
        for name in cases:
            results[name] = run_case(name, checkpoint, world, folder)
        for name in RELAYED:
            if leg == 0:  # the case itself
                losses = results[name]["losses"]
            else:
                losses = relay(name, checkpoint, world, folder, leg)
            results[f"{name}-relay"] = losses
    torch.save(results, folder / f"results-{leg}-{place.rank}.pt")
