"""A technique with a module and cached features trains, resumes, and leaves the result clean."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import hold_first_frame, make_noisy
from simpletuner.planning.plans import Plan
from simpletuner.planning.techniques.preservation import PreservationSpec
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.planning.techniques.table import chosen_techniques
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.rehearsal import rehearse_micro_step
from simpletuner.techniques.base import Predict, Technique
from simpletuner.techniques.preservation import Preservation
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly
from tests.techniques.alignment import CHANNELS, SPEC, TEACHER, Alignment, PatchTeacher
from tests.techniques.test_preservation import moved
from tests.tools.assembly import make_assembly, make_batch
from tests.tools.cases import first_of
from tests.tools.runs import assert_same_run
from tests.tools.tiny import WIDTH, make_checkpoint
from tests.tools.workspace import Workspace
from tests.training.test_step import Batches

SIDE = 16
TOKENS = 64
# A rate that does not depend on the length of the run, so that one can be made longer.
STEADY: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 3,
    "lr_scheduler": "constant",
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with enough blocks for a route around a watched one."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), visual_blocks=4)


@pytest.fixture(scope="module")
def batch(deep: Path) -> Batch:
    batch = make_batch(deep, ["a star", "two blue circles"], SIDE)
    return replace(
        batch, features={TEACHER.name: [PatchTeacher().encode(latent) for latent in batch.latents]}
    )


def gradients_of(assembly: Assembly, batch: Batch) -> dict[str, Tensor]:
    rehearse_micro_step(assembly, batch)
    own = {
        f"own.{name}": parameter
        for module in assembly.modules.values()
        for name, parameter in module.named_parameters()
    }
    result = {
        name: parameter.grad.clone()
        for name, parameter in (assembly.parameters | own).items()
        if parameter.grad is not None
    }
    assert len(result) == len(assembly.parameters) + len(own)
    return result


def test_a_techniques_module_is_trained(deep: Path, batch: Batch) -> None:
    assembly = make_assembly(deep, Alignment())
    module = assembly.modules["Alignment"]
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    losses = [step.optimizer_step(assembly, Batches(batch), index).metrics for index in range(8)]

    assert losses[-1]["alignment_loss"] < losses[0]["alignment_loss"] - 0.05
    assert losses[0]["optimization_loss"] == pytest.approx(
        losses[0]["train_loss"] + losses[0]["alignment_loss"]
    )
    assert all(
        not torch.equal(before[name], parameter) for name, parameter in module.named_parameters()
    )
    assert not any("project" in name for name in assembly.parameters), (
        "the moving average is of the LoRA alone"
    )
    assert [len(group["params"]) for group in assembly.optimizer.param_groups] == [
        len(assembly.parameters),
        2,
    ]


def test_initial_weights_depend_only_on_the_seed(deep: Path) -> None:
    torch.rand(5)
    first, second = (
        make_assembly(deep, Alignment()).modules["Alignment"].state_dict() for _ in range(2)
    )

    assert all(torch.equal(first[name], second[name]) for name in first)

    plain = make_assembly(deep)
    assert all(
        torch.equal(parameter, plain.parameters[name])
        for name, parameter in make_assembly(deep, Alignment()).parameters.items()
    ), "the LoRA starts as without it"


@pytest.mark.parametrize("method", ["norm", "value"])
def test_the_modules_gradient_is_clipped_separately(deep: Path, batch: Batch, method: str) -> None:
    limit = 1e-3
    assembly = make_assembly(
        deep, Alignment(), optimizer="torch-sgd", grad_clip_method=method, max_grad_norm=limit
    )
    results: list[dict[str, Tensor]] = []

    def look(optimizer: Any, *given: Any) -> None:
        for parameters in (assembly.parameters, assembly.module_parameters):
            results.append(
                {
                    name: parameter.grad.clone()
                    for name, parameter in parameters.items()
                    if parameter.grad is not None
                }
            )

    assembly.optimizer.register_step_pre_hook(look)
    step.optimizer_step(assembly, Batches(batch), 0)
    for gradients in results:
        joined = torch.cat([gradient.flatten() for gradient in gradients.values()])
        size = joined.norm() if method == "norm" else joined.abs().max()
        assert size.item() == pytest.approx(limit, rel=1e-5)

    assert len(results) == 2


@pytest.mark.parametrize("optimizer", ["muon", "optimi-lion", "torch-sgd"])
def test_every_optimizer_trains_the_modules_group(deep: Path, batch: Batch, optimizer: str) -> None:
    assembly = make_assembly(deep, Alignment(), optimizer=optimizer)
    before = [
        parameter.detach().clone() for parameter in assembly.modules["Alignment"].parameters()
    ]
    for number in range(2):
        step.optimizer_step(assembly, Batches(batch), number)
    after = list(assembly.modules["Alignment"].parameters())

    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.warns
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing_interval": 2},
        {"gradient_checkpointing": True, "enable_group_offload": True},
        {"enable_group_offload": True},
        {"gradient_checkpointing": True, "offload_block_inputs": True},
    ],
)
def test_recomputation_and_offload_change_no_gradient(
    deep: Path, batch: Batch, settings: dict[str, Any]
) -> None:
    plain = Alignment()
    other = Alignment()
    expected = gradients_of(make_assembly(deep, plain, gradient_checkpointing=False), batch)
    actual = gradients_of(
        make_assembly(deep, other, **{"gradient_checkpointing": False, **settings}), batch
    )

    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)
    assert plain.shapes == other.shapes == [torch.Size([2, TOKENS, WIDTH])], (
        "one look in each micro-step"
    )
    assert (
        max(gradient.abs().max() for name, gradient in actual.items() if name.startswith("own."))
        > 1e-3
    )


def test_hidden_states_are_freed_and_recomputed_ones_are_not_recorded(
    deep: Path, batch: Batch
) -> None:
    assembly = make_assembly(deep, Alignment(), gradient_checkpointing=True)
    rehearse_micro_step(assembly, batch)
    with pytest.raises(KeyError):
        assembly.hidden[1]


@pytest.mark.slow(3)
@pytest.mark.usefixtures("traced_only", "one_size")
def test_compiled_blocks_are_recorded_recomputed_and_run_without_gradients(
    deep: Path, batch: Batch
) -> None:
    """All ways in which techniques use blocks."""
    torch.compiler.reset()
    batch = replace(batch, other_embeds=batch.embeds[::-1])
    expected, actual = (
        gradients_of(
            moved(
                deep,
                Rollout(TechniqueSpec()),
                Alignment(),
                Preservation(PreservationSpec(1.0, 1.0)),
                **settings,
            ),
            batch,
        )
        for settings in ({}, {"dynamo_backend": "aot_eager"})
    )

    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("block", [1, 2])
def test_techniques_see_which_tokens_a_route_keeps(deep: Path, batch: Batch, block: int) -> None:
    """Also for the last block of the route, after which all tokens are present again."""
    aligned = Alignment(block=block)
    gradients_of(make_assembly(deep, Tread(TreadSpec([Route(0.5, 1, 2)])), aligned), batch)

    assert aligned.shapes == [torch.Size([2, TOKENS // 2, WIDTH])]

    assert aligned.kept is not None
    assert aligned.kept.shape == (2, TOKENS // 2)
    assert aligned.site.kept_tokens(block) is None, "the micro-step is over"
    assert aligned.site.kept_tokens(0) is None


class Rollout(Technique):
    """Takes two steps towards the data without gradients, and trains from there."""

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        start = noisy.noisy_latents
        for _ in range(2):
            velocity = predict(noisy)
            assert not velocity.requires_grad
            noisy = noisy.at_sigmas(noisy.sigmas - 0.01, noisy.noisy_latents - 0.01 * velocity)
        assert not torch.equal(start, noisy.noisy_latents)
        return noisy


def test_hooks_do_nothing_without_gradients(deep: Path, batch: Batch) -> None:
    aligned = Alignment()
    gradients_of(make_assembly(deep, Rollout(TechniqueSpec()), aligned), batch)
    assert len(aligned.shapes) == 1


def test_a_conditioning_first_frame_stays_clean_at_every_noise_level() -> None:
    latents = torch.randn(1, 16, 3, 4, 4)
    clip = Batch(latents, [], ["x"], condition=latents[:, :, :1])
    noisy = hold_first_frame(make_noisy(clip, torch.tensor([0.5]), torch.randn_like(latents)))
    moved = noisy.at_sigmas(torch.tensor([0.25]), torch.zeros_like(latents))

    assert torch.equal(moved.noisy_latents[:, :, :1], latents[:, :, :1])
    assert not moved.noisy_latents[:, :, 1:].any()
    assert moved.timesteps.tolist() == [250.0]
    assert torch.equal(moved.target, noisy.target)


def use_alignment(monkeypatch: pytest.MonkeyPatch, *, on: bool = True) -> None:
    """Enable or disable the technique in all plans from now on."""
    specs = (SPEC,) if on else ()
    monkeypatch.setattr(
        Plan, "techniques", property(lambda plan: chosen_techniques(plan.config) + specs)
    )


def run_of(folder: Path, checkpoint: Path, **settings: Any) -> Workspace:
    return Workspace.create(folder, checkpoint, pictures=4, use_ema=True, **{**STEADY, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_of(["lora", "full"]))
def test_runs_resume_bit_for_bit_and_do_not_publish_the_module(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_alignment(monkeypatch)
    straight = run_of(tmp_path / "straight", t2i_checkpoint, model_type=kind, learning_rate=1e-4)
    PatchTeacher.encoded = 0
    assert straight.train() == 0
    assert PatchTeacher.encoded == 4, "once a picture"

    broken = straight.stopped(tmp_path / "broken", 3)
    PatchTeacher.encoded = 0
    assert broken.train() == 0
    assert PatchTeacher.encoded == 0, "cached"
    assert_same_run(straight, broken)

    files = sorted(
        path.relative_to(tmp_path) for path in straight.path("output").rglob("*.safetensors")
    )
    owned = [path for path in files if load_file(tmp_path / path).keys() == {"weight", "bias"}]

    assert {path.name for path in owned} == {"Alignment.module.safetensors"}

    names = {name for path in files if path not in owned for name in load_file(tmp_path / path)}
    assert names
    assert not any("project" in name for name in names)


@pytest.mark.slow
def test_a_technique_can_be_switched_on_or_off_on_resume(
    tmp_path: Path,
    t2i_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = run_of(tmp_path, t2i_checkpoint)
    assert run.train("max_train_steps=2") == 0
    use_alignment(monkeypatch)
    assert run.train("max_train_steps=4") == 0
    assert "Alignment was off" in caplog.text
    assert math.isfinite(run.metrics()[-1]["alignment_loss"])

    use_alignment(monkeypatch, on=False)
    assert run.train("max_train_steps=6") == 0
    assert "Alignment was on" in caplog.text
    assert "alignment_loss" not in run.metrics()[-1]


def test_the_plan_counts_memory_and_flops_of_the_module() -> None:
    from simpletuner.budget.step_memory import StepModel
    from simpletuner.models.cost import Adapters, BatchShape
    from simpletuner.models.registry import FAMILIES
    from tests.budget.test_estimate import make_config

    family = FAMILIES["kandinsky5-image"].cost
    cost = family.of_flavour("t2i-lite-sft")
    adapters = Adapters(16, frozenset(["visual_transformer_blocks.0.self_attention.to_query"]))
    plain = StepModel(cost, make_config(optimizer="adamw"), adapters)
    load = BatchShape(2, 1, 32, 32, 100)
    before = plain.memory(load)
    after = replace(plain, techniques=(SPEC,)).memory(load)

    assert after.trained - before.trained == (cost.hidden * CHANNELS + CHANNELS) * 16
    assert after.inputs - before.inputs == 4 * 2 * 1024 * cost.hidden


def test_the_moving_average_excludes_the_module(deep: Path) -> None:
    from simpletuner.config.schema import EmaConfig

    assembly = make_assembly(deep, Alignment())

    assert (
        Ema(assembly.parameters, EmaConfig(), torch.device("cpu")).average.keys()
        == assembly.parameters.keys()
    )
    assert all("lora_" in name for name in assembly.parameters)
