"""At its neutral setting, every technique equals plain training bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from simpletuner.diffusion.batch import Batch
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.techniques.base import Technique
from simpletuner.techniques.load import make_techniques
from simpletuner.training import step
from tests.techniques.cases import CASES, TRAINED
from tests.tools.assembly import make_assembly, make_batch
from tests.tools.tiny import make_checkpoint
from tests.training.test_step import Batches

SPECS = []
for name, case in CASES.items():
    SPECS += [
        pytest.param(spec, id=f"{name} {number}")
        for number, spec in enumerate(case.neutral, start=1)
    ]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("deep"), visual_blocks=4)


@pytest.fixture(scope="module")
def batch(deep: Path) -> Batch:
    """A batch with everything that techniques read, but no mask."""
    batch = make_batch(deep, ["a star", "two blue circles"], side=8)
    return replace(batch, dataset_id=TRAINED, other_embeds=batch.embeds[::-1])


@pytest.fixture(scope="module")
def plain(deep: Path, batch: Batch) -> dict[str, Tensor]:
    return trained(deep, batch)


def trained(checkpoint: Path, batch: Batch, *techniques: Technique) -> dict[str, Tensor]:
    """The weights after two steps. Dropout shows whether a technique draws random numbers."""
    assembly = make_assembly(checkpoint, *techniques, lora_dropout=0.1)
    for number in range(2):
        step.optimizer_step(assembly, Batches(batch), number)
    return {name: parameter.detach() for name, parameter in assembly.parameters.items()}


@pytest.mark.parametrize("spec", SPECS)
def test_a_neutral_technique_equals_plain_training(
    deep: Path, batch: Batch, plain: dict[str, Tensor], spec: TechniqueSpec
) -> None:
    if spec.name == "masked loss":
        mask = torch.zeros_like(batch.latents[:, :1])
        batch = replace(batch, loss_mask=mask)

    neutral = trained(deep, batch, *make_techniques([spec]))

    assert all(torch.equal(plain[name], neutral[name]) for name in plain)
