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
from simpletuner.diffusion.seeds import step_seed
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
    """A loader of the given batches."""

    epoch = 1
    epochs_done = 0
    index = 0

    def __init__(self, *batches: Batch) -> None:
        self.batches = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.batches)


def part(batch: Batch, samples: slice) -> Batch:
    return Batch(batch.latents[samples], batch.embeds[samples], batch.names[samples])


@pytest.fixture(autouse=True)
def noise_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that depends on the sample alone, so that a batch can be split without effect."""
    monkeypatch.setattr(NoiseSource, "add", lambda source, batch, *place: fixed_noise(batch))


def weights_after(assembly: Assembly, *batches: Batch) -> dict[str, Tensor]:
    step.optimizer_step(assembly, Batches(*batches), 0)
    return {name: parameter.detach().clone() for name, parameter in assembly.parameters.items()}


def gradients_of(assembly: Assembly) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }


def gradients(assembly: Assembly, batch: Batch) -> dict[str, Tensor]:
    step.run_micro_step(assembly, batch, 0, 0, Losses())
    return gradients_of(assembly)


def test_accumulation_equals_a_larger_batch(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    whole = make_assembly(t2i_checkpoint)
    accumulating = make_assembly(t2i_checkpoint, gradient_accumulation_steps=2)
    losses = Losses()

    expected = gradients(whole, batch)
    step.run_micro_step(accumulating, part(batch, slice(0, 2)), 0, 0, losses)
    step.run_micro_step(accumulating, part(batch, slice(2, 4)), 0, 1, losses)

    assert any(gradient.abs().max() > 1e-4 for gradient in expected.values()), (
        "gradients of zero would prove nothing"
    )
    assert distance(gradients_of(accumulating), expected) < ROTATION


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
    results = []
    for checkpointing in (False, True):
        assembly = make_assembly(t2i_checkpoint, gradient_checkpointing=checkpointing, **settings)
        torch.manual_seed(1)  # of dropout
        results.append(gradients(assembly, batch))

    plain, checkpointed = results

    assert distance(checkpointed, plain) < ROTATION


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
    assert all(parameter.grad is None for parameter in frozen)


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
    """Doubles the loss, and adds an extra one."""

    def weigh(self, noisy: NoisyBatch, prediction: Tensor, loss: Tensor) -> Tensor:
        assert loss.shape == prediction.shape
        return 2 * loss

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> dict[str, Tensor]:
        return {"extra": prediction.sum() * 0 + 1.5}


def test_a_technique_that_overrides_nothing_equals_plain_training(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    plain = make_assembly(t2i_checkpoint)
    neutral = replace(make_assembly(t2i_checkpoint), techniques=[Technique(TechniqueSpec())])

    expected = weights_after(plain, batch)
    weights = weights_after(neutral, batch)

    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_techniques_weigh_the_loss_and_add_to_it(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    doubled = replace(make_assembly(t2i_checkpoint), techniques=[Doubled(TechniqueSpec())])

    metrics = step.optimizer_step(doubled, Batches(batch), 0).metrics

    assert metrics["extra"] == 1.5
    assert metrics["optimization_loss"] == pytest.approx(2 * metrics["train_loss"] + 1.5)
    assert metrics["diffusion_loss"] == pytest.approx(2 * metrics["train_loss"])


def all_gradients(parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None])


@pytest.mark.parametrize("method", ["value", "norm"])
def test_gradients_are_clipped_to_max_grad_norm(method: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, -4.0, 0.5])
    parameters[1].grad = torch.tensor([0.0, 12.0])
    unlimited = OptimizerConfig(max_grad_norm=0.0, grad_clip_method=method)
    limited = OptimizerConfig(max_grad_norm=2.0, grad_clip_method=method)

    sizes = {name: size.item() for name, size in gradient_size(parameters, unlimited).items()}
    clip_gradients(parameters, unlimited, sizes)
    unclipped = all_gradients(parameters)
    clip_gradients(parameters, limited, sizes)
    clipped = all_gradients(parameters)

    assert unclipped.tolist() == [3.0, -4.0, 0.5, 0.0, 12.0]

    if method == "value":
        assert sizes == {"grad_absmax": 12.0}
        assert clipped.tolist() == [2.0, -2.0, 0.5, 0.0, 2.0]
    else:
        # sqrt(9 + 16 + 0.25 + 144)
        assert sizes == {"grad_norm": pytest.approx(13.0096, rel=1e-4)}
        assert clipped.norm().item() == pytest.approx(2.0)
        assert clipped[0] / clipped[1] == pytest.approx(-0.75), "the direction stays"


@pytest.mark.parametrize("method", ["value", "norm"])
def test_norms_allow_for_empty_shards(method: str) -> None:
    """A weight with fewer rows than processes has empty shards, which count as 0."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (0, 2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    config = OptimizerConfig(max_grad_norm=1.0, grad_clip_method=method)

    sizes = {name: size.item() for name, size in gradient_size(parameters, config).items()}
    clip_gradients(parameters, config, sizes)

    (size,) = sizes.values()
    if method == "value":
        assert size == 3.0
        assert all_gradients(parameters).tolist() == [1.0, 1.0]
    else:
        assert size == pytest.approx(18**0.5)  # sqrt(3^2 + 3^2)
        assert all_gradients(parameters).tolist() == pytest.approx([0.5**0.5, 0.5**0.5])


def test_an_empty_shard_is_finite() -> None:
    tensors = {"empty": torch.zeros(0), "spoilt": torch.tensor([1.0, torch.nan])}

    assert not_finite(tensors) == ["spoilt"]


def test_noise_depends_only_on_the_position_in_the_run(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # real noise
    assembly = make_assembly(t2i_checkpoint)
    batch = make_batch(t2i_checkpoint, CAPTIONS)

    first = assembly.noise.add(batch, 4, 0)
    torch.randn(100)
    again = assembly.noise.add(batch, 4, 0)

    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.sigmas, again.sigmas)

    for global_step, micro_step in ((5, 0), (4, 1)):
        elsewhere = assembly.noise.add(batch, global_step, micro_step)
        assert not torch.equal(elsewhere.noise, first.noise)
        assert not torch.equal(elsewhere.sigmas, first.sigmas)


def test_the_draws_of_a_step_keep_their_names(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name a continued run would draw other numbers."""
    monkeypatch.undo()  # real noise
    asked: list[str] = []

    def recorded(*place: Any) -> int:
        asked.append(place[-1])
        return step_seed(*place)

    monkeypatch.setattr("simpletuner.diffusion.seeds.step_seed", recorded)
    assembly = make_assembly(
        t2i_checkpoint, gradient_accumulation_steps=3, input_perturbation=0.1, noise_offset=0.1
    )

    ahead = assembly.noise.draw_ahead(make_batch(t2i_checkpoint, CAPTIONS), 4 * 3 + 1)
    assembly.noise.add(ahead, 4, 1)

    assert {*asked} == {"forward", "slices", "sigmas", "noise", "perturbation", "offset"}
    assert ahead.noise is not None
    for number, noise in enumerate(ahead.noise):
        seed = step_seed(assembly.settings.seed, 4, 1, number, "noise")
        alone = torch.Generator().manual_seed(seed)
        assert torch.equal(noise, torch.randn(noise.shape, generator=alone))


def test_a_timestep_offset_raises_the_noise_levels_of_its_dataset(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # real noise
    assembly = make_assembly(t2i_checkpoint)
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    settings = replace(assembly.settings, timestep_offsets={batch.dataset_id: 1.0})
    shifted = replace(assembly, settings=settings)

    plain = assembly.noise.add(batch, 4, 0)

    assert (shifted.noise.add(batch, 4, 0).sigmas > plain.sigmas).all()


def test_noise_drawn_ahead_equals_noise_drawn_in_the_step(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # real noise
    assembly = make_assembly(t2i_checkpoint, gradient_accumulation_steps=3)
    batch = make_batch(t2i_checkpoint, CAPTIONS)

    ahead = assembly.noise.draw_ahead(batch, 4 * 3 + 1)  # step 4, micro-step 1

    for position in ((4, 1), (4, 2), (5, 0)):
        drawn = assembly.noise.add(ahead, *position).noise
        assert torch.equal(drawn, assembly.noise.add(batch, *position).noise)
        is_used = drawn is ahead.noise
        assert is_used == (position == (4, 1)), "noise for another position is drawn again"
