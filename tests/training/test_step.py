"""The step: what accumulation, checkpointing and clipping do to gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from simpletuner.config.schema import OptimizerConfig
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.techniques.base import Technique
from simpletuner.training import step
from simpletuner.training.guard import clip_gradients, gradient_size, not_finite
from simpletuner.training.losses import Losses
from simpletuner.training.noise import NoiseSource
from simpletuner.training.state import Assembly
from simpletuner.training.update import RATE_RATIO, SEED
from tests.tools.assembly import fixed_noise, make_assembly, make_batch
from tests.tools.tolerances import ROTATION, distance

CAPTIONS = ["a star", "two blue circles", "a green square on black", "x"]


class Batches:
    """Hands out the given batches, like a loader."""

    epoch = 1
    epochs_done = 0
    index = 0

    def __init__(self, *batches: Batch) -> None:
        self.batches = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.batches)


def part(batch: Batch, which: slice) -> Batch:
    return Batch(batch.latents[which], batch.embeds[which], batch.names[which])


@pytest.fixture(autouse=True)
def noise_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that follows the sample, so that a batch can be cut in two without changing what is
    learned.
    """
    monkeypatch.setattr(NoiseSource, "add", lambda source, batch, *place: fixed_noise(batch))


def weights_after(assembly: Assembly, *batches: Batch) -> dict[str, Tensor]:
    step.optimizer_step(assembly, Batches(*batches), 0)
    return {name: parameter.detach().clone() for name, parameter in assembly.parameters.items()}


def gradients(assembly: Assembly, batch: Batch) -> dict[str, Tensor]:
    losses = Losses()
    step.run_micro_step(assembly, batch, 0, 0, losses)
    return {
        name: parameter.grad
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }


def test_accumulation_equals_a_larger_batch(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    whole = make_assembly(t2i_checkpoint)
    halves = make_assembly(t2i_checkpoint, gradient_accumulation_steps=2)
    one = gradients(whole, batch)
    losses = Losses()
    for index in range(2):
        step.run_micro_step(halves, part(batch, slice(2 * index, 2 * index + 2)), 0, index, losses)
    assert any(gradient.abs().max() > 1e-4 for gradient in one.values()), (
        "a test on gradients of zero shows nothing"
    )
    found = {
        name: parameter.grad
        for name, parameter in halves.parameters.items()
        if parameter.grad is not None
    }
    assert distance(found, one) < ROTATION


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing_interval": 2},
        {"gradient_checkpointing_kept_blocks": 1},
        {"lora_dropout": 0.2},
    ],
)
def test_checkpointing_changes_no_gradient(t2i_checkpoint: Path, settings: dict[str, Any]) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    found = []
    for checkpointing in (False, True):
        assembly = make_assembly(t2i_checkpoint, gradient_checkpointing=checkpointing, **settings)
        torch.manual_seed(1)
        found.append(gradients(assembly, batch))
    assert distance(found[1], found[0]) < ROTATION


def test_a_step_updates_weights_and_reports_its_figures(t2i_checkpoint: Path) -> None:
    assembly = make_assembly(t2i_checkpoint)
    before = {name: parameter.detach().clone() for name, parameter in assembly.parameters.items()}
    report = step.optimizer_step(assembly, Batches(make_batch(t2i_checkpoint, CAPTIONS)), 0)
    assert (report.step, report.epoch, report.epochs_done) == (1, 1, 0)
    assert len(report.timesteps) == len(CAPTIONS)
    assert report.metrics["train_loss"] == report.metrics["optimization_loss"] > 0
    assert report.metrics["learning_rate"] == 1e-2
    assert report.metrics["grad_absmax"] > 0
    assert any(
        not torch.equal(before[name], parameter) for name, parameter in assembly.parameters.items()
    )
    frozen = [
        parameter for parameter in assembly.transformer.parameters() if not parameter.requires_grad
    ]
    assert frozen
    assert all(each.grad is None for each in frozen)


def test_every_parameter_group_gets_its_rate_and_the_seed_of_the_step(t2i_checkpoint: Path) -> None:
    assembly = make_assembly(t2i_checkpoint)
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    group = assembly.optimizer.param_groups[0]
    seeds = {0}
    group |= {RATE_RATIO: 4.0, SEED: 0}
    for global_step in range(2):
        report = step.optimizer_step(assembly, Batches(batch), global_step)
        assert group["lr"] == 4 * report.metrics["learning_rate"]
        assert report.passes == 1
        seeds.add(group[SEED])
    assert len(seeds) == 3


class Doubled(Technique):
    """Opens the doors that weigh and add."""

    def weigh(self, noisy: NoisyBatch, prediction: Tensor, loss: Tensor) -> Tensor:
        assert loss.shape == prediction.shape
        return 2 * loss

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> dict[str, Tensor]:
        return {"extra": prediction.sum() * 0 + 1.5}


def test_every_method_of_a_technique_is_called_in_a_step(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    plain = make_assembly(t2i_checkpoint)
    neutral = replace(make_assembly(t2i_checkpoint), techniques=[Technique(TechniqueSpec())])
    assert weights_after(plain, batch).keys() == weights_after(neutral, batch).keys()
    for name, parameter in plain.parameters.items():
        assert torch.equal(parameter, neutral.parameters[name]), (
            "a technique with closed doors is plain training"
        )
    doubled = replace(make_assembly(t2i_checkpoint), techniques=[Doubled(TechniqueSpec())])
    metrics = step.optimizer_step(doubled, Batches(batch), 0).metrics
    assert metrics["extra"] == 1.5
    assert metrics["optimization_loss"] == pytest.approx(2 * metrics["train_loss"] + 1.5)
    assert metrics["diffusion_loss"] == pytest.approx(2 * metrics["train_loss"])


@pytest.mark.parametrize("method", ["value", "norm"])
def test_gradients_are_clipped_to_max_grad_norm(method: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, -4.0, 0.5])
    parameters[1].grad = torch.tensor([0.0, 12.0])
    untouched = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    config = OptimizerConfig(max_grad_norm=0.0, grad_clip_method=method)
    measured = {name: size.item() for name, size in gradient_size(parameters, config).items()}
    clip_gradients(parameters, config, measured)
    assert all(
        torch.equal(p.grad, g)
        for p, g in zip(parameters, untouched, strict=True)
        if p.grad is not None
    )
    assert measured == (
        {"grad_absmax": 12.0}
        if method == "value"
        else {"grad_norm": pytest.approx(13.0096, rel=1e-4)}
    )
    clip_gradients(parameters, config.model_copy(update={"max_grad_norm": 2.0}), measured)
    flat = torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None])
    if method == "value":
        assert flat.tolist() == [2.0, -2.0, 0.5, 0.0, 2.0]
    else:
        assert flat.norm().item() == pytest.approx(2.0)
        assert flat[0] / flat[1] == pytest.approx(-0.75)


@pytest.mark.parametrize("method", ["value", "norm"])
def test_norms_allow_for_empty_shards(method: str) -> None:
    """One with fewer rows than processes; its part counts as 0."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (0, 2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    config = OptimizerConfig(max_grad_norm=1.0, grad_clip_method=method)
    measured = {name: size.item() for name, size in gradient_size(parameters, config).items()}
    assert list(measured.values()) == [pytest.approx(3.0 if method == "value" else 18**0.5)]
    clip_gradients(parameters, config, measured)
    assert parameters[1].grad is not None
    assert (
        parameters[1].grad.tolist() == [pytest.approx(1.0 if method == "value" else 0.5**0.5)] * 2
    )
    assert not_finite({"nothing": parameters[0], "all": torch.tensor([1.0, torch.nan])}) == ["all"]


def test_noise_depends_only_on_the_position_in_the_run(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assembly = make_assembly(t2i_checkpoint)
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    first = assembly.noise.add(batch, 4, 0)
    torch.randn(100)
    again = assembly.noise.add(batch, 4, 0)
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.sigmas, again.sigmas)
    for place in ((5, 0), (4, 1)):
        other = assembly.noise.add(batch, *place)
        assert not torch.equal(other.noise, first.noise)
        assert not torch.equal(other.sigmas, first.sigmas)
    noisier = replace(assembly.settings, timestep_offsets={batch.dataset_id: 1.0})
    assert (replace(assembly, settings=noisier).noise.add(batch, 4, 0).sigmas > first.sigmas).all()


def test_noise_drawn_ahead_equals_noise_drawn_in_the_step(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assembly = make_assembly(t2i_checkpoint, gradient_accumulation_steps=3)
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    ahead = assembly.noise.draw_ahead(batch, 4 * 3 + 1)
    for place in ((4, 1), (4, 2), (5, 0)):  # for other places it is not used
        drawn = assembly.noise.add(ahead, *place).noise
        assert torch.equal(drawn, assembly.noise.add(batch, *place).noise)
        assert (drawn is ahead.noise) == (place == (4, 1))
