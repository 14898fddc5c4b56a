"""LayerSync: which tokens of which blocks are compared, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks import models
from simpletuner.config.techniques import Route
from simpletuner.diffusion.batch import Batch
from simpletuner.techniques.layersync import LayerSync
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.assemble import assemble
from simpletuner.training.losses import Losses
from simpletuner.training.noise import add_noise
from simpletuner.training.state import Assembly, TrainingSpec
from tests.closeness import ROTATION, distance
from tests.tiny import make_checkpoint
from tests.training.assembly import make_assembly, make_batch

WEIGHT = 0.5


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with blocks inside and outside of a route."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), visual_blocks=4)


@pytest.fixture(scope="module")
def batch(deep: Path) -> Batch:
    return make_batch(deep, ["a star", "two blue circles"], 16)


def gradients_of(assembly: Assembly, batch: Batch) -> dict[str, Tensor]:
    losses = Losses()
    step.micro_loss(assembly, step.noisy_batch(assembly, batch, 0, 0), losses).backward()
    assert -WEIGHT <= losses[0].extra["layersync_loss"] < 0
    return {name: each.grad for name, each in assembly.parameters.items() if each.grad is not None}


@pytest.mark.parametrize("size", ["tiny", "tiny-video", "tiny-sana"])
def test_the_loss_of_each_family(size: str) -> None:
    """Minus the mean cosine of the blocks' own outputs; only the student is pulled."""
    config = models.make_config(size, mixed_precision="no", gradient_checkpointing=True, lora_rank=4)
    intent = TrainingSpec(lora_targets=models.lora_targets(size), seed=0, total_steps=10, learning_rate=1e-4)
    adapter = models.RandomAdapter(config, size, "cpu")
    assembly = assemble(config, intent, adapter, [LayerSync(0, 1, WEIGHT)], models.make_accelerator("cpu"))
    outputs: list[Tensor] = []
    blocks = adapter.block_layout(assembly.transformer).visual_blocks
    for block in blocks[:2]:
        block.register_forward_hook(lambda block, inputs, output: outputs.append(output))
    losses = Losses()
    step.micro_loss(assembly, step.noisy_batch(assembly, models.make_batch(size, 2), 0, 0), losses).backward()
    expected = -WEIGHT * cosine_similarity(outputs[0], outputs[1], dim=-1).mean()
    torch.testing.assert_close(losses[0].extra["layersync_loss"], expected.detach())
    assert abs(expected.item()) > 1e-3


def test_only_the_student_is_pulled(deep: Path, batch: Batch) -> None:
    """Without the flow loss, nothing after the student has a gradient."""
    assembly = make_assembly(deep, LayerSync(1, 3, WEIGHT))
    for name, parameter in assembly.parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    technique = assembly.techniques[0]
    noisy = assembly.adapter.prepare(add_noise(assembly, batch, 0, 0))
    with assembly.hidden.open():
        prediction = assembly.adapter.predict(assembly.transformer, noisy)
        (loss,) = technique.extra_losses(noisy, prediction).values()
        loss.backward()
    pulled = {name.split("visual_transformer_blocks.")[1][0] for name, each in assembly.parameters.items()
              if "visual" in name and each.grad is not None and each.grad.abs().max() > 0}  # fmt: skip
    assert pulled == {"0", "1"}


def test_checkpointing_and_offload_change_nothing(deep: Path, batch: Batch) -> None:
    settings = {"gradient_checkpointing": True, "enable_group_offload": True, "offload_block_inputs": True}
    plain = gradients_of(make_assembly(deep, LayerSync(0, 2, WEIGHT), gradient_checkpointing=False), batch)
    assert distance(gradients_of(make_assembly(deep, LayerSync(0, 2, WEIGHT), **settings), batch), plain) < ROTATION


@pytest.mark.parametrize(("student", "teacher"), [(0, 1), (1, 2), (1, 3)], ids=["teacher", "both", "student"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_routes_leave_the_same_tokens_of_both(
    deep: Path, batch: Batch, student: int, teacher: int, checkpointing: bool
) -> None:
    routed, synced = Tread([Route(0.5, 1, 2)]), LayerSync(student, teacher, WEIGHT)
    assembly = make_assembly(deep, routed, synced, gradient_checkpointing=checkpointing)
    seen: dict[int, Tensor] = {}
    for number, block in enumerate(assembly.adapter.block_layout(assembly.transformer).visual_blocks):
        block.register_forward_hook(lambda block, inputs, output, number=number: seen.setdefault(number, output))
    losses = Losses()
    step.micro_loss(assembly, step.noisy_batch(assembly, batch, 0, 0), losses)
    kept = routed.kept_tokens(1)
    assert kept is not None
    both = []
    for place in (student, teacher):
        # What the route leaves out passes unchanged behind its last block, where these hooks see it.
        whole = seen[place].shape[1] == 64
        both.append(seen[place].gather(1, kept[..., None].expand(-1, -1, 32)) if whole else seen[place])
    expected = -WEIGHT * cosine_similarity(both[0], both[1], dim=-1).mean()
    torch.testing.assert_close(losses[0].extra["layersync_loss"], expected.detach())


def test_regularisation_data_is_left_alone(deep: Path, batch: Batch) -> None:
    losses = Losses()
    assembly = make_assembly(deep, LayerSync(0, 1, WEIGHT, frozenset([batch.dataset_id])))
    step.micro_loss(assembly, step.noisy_batch(assembly, batch, 0, 0), losses)
    assert losses[0].extra == {}
