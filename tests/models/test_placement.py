"""Where a checkpoint's weights begin in its files does not affect what is computed from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.schema import OffloadConfig, PrecisionConfig
from simpletuner.distributed.world import World
from simpletuner.encoding.encoders import load_encoder
from simpletuner.models.placement import ALIGNMENT, place
from simpletuner.run.settings import transformer_settings
from simpletuner.training.assemble import load_frozen
from tests.memory.test_precision import gradients
from tests.tools.assembly import make_assembly, make_batch
from tests.tools.families import CPU, make_adapter, make_config
from tests.tools.processes import run_together


def copy_with_longer_headers(checkpoint: Path, folder: Path, spaces: int) -> Path:
    """A copy of a checkpoint whose safetensors files begin with longer headers."""
    shutil.copytree(checkpoint, folder)
    for file in folder.rglob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length] + b" " * spaces
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return folder


def unaligned(model: nn.Module) -> list[str]:
    """The names of weights that do not begin at a multiple of `ALIGNMENT`."""
    named = chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if tensor.data_ptr() % ALIGNMENT]


@pytest.fixture(scope="module")
def copies(t2i_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Two copies of a checkpoint, one of which has its weights 8 bytes further back."""
    folder = tmp_path_factory.mktemp("copies")
    return [
        copy_with_longer_headers(t2i_checkpoint, folder / f"{spaces}", spaces) for spaces in (0, 8)
    ]


@pytest.mark.parametrize("on_host", [False, True])
def test_all_weights_of_a_transformer_on_a_cpu_are_aligned(
    copies: Sequence[Path], on_host: bool
) -> None:
    for checkpoint in copies:
        config = make_config(checkpoint, mixed_precision="no", speed="reference")
        transformer, _ = load_frozen(
            transformer_settings(config), make_adapter(checkpoint), CPU, on_host=on_host
        )
        # The assembly places the layers outside of blocks.
        place(transformer, CPU)

        assert unaligned(transformer) == []


@pytest.mark.parametrize("streams", [False, True])
def test_all_weights_of_text_encoders_on_a_cpu_are_aligned(
    copies: Sequence[Path], streams: bool
) -> None:
    offload = OffloadConfig(group_offload_text_encoder=streams)
    precision = PrecisionConfig(mixed_precision="no")
    for checkpoint in copies:
        load = make_adapter(checkpoint).load_text_encoder
        encoder = load_encoder(load, precision, offload, CPU)

        assert [unaligned(model) for model in encoder.models] == [[], []]


def test_all_weights_of_a_vae_on_a_cpu_are_aligned(copies: Sequence[Path]) -> None:
    for checkpoint in copies:
        vae = make_adapter(checkpoint).load_vae(CPU, torch.float32)

        assert unaligned(vae) == []


def test_placing_a_model_keeps_its_values_and_its_shared_weights() -> None:
    memory = torch.arange(17.0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.data = memory[1:].view(4, 4)
    model[1].weight = model[0].weight
    weight = model[0].weight

    place(model, CPU)

    assert model[0].weight is model[1].weight is weight
    assert torch.equal(weight, memory[1:].view(4, 4))
    assert unaligned(model) == []


def test_copies_of_a_checkpoint_train_alike_with_and_without_offload(
    copies: Sequence[Path],
) -> None:
    """On a CPU on which MKL's product of one row depends on the address of the weights."""
    run_together(1, compare_gradients, copies)


def compare_gradients(world: World, copies: Sequence[Path]) -> None:
    # MKL reads this at its first call. Other values make no difference on a CPU with AVX2.
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = "SSE4_2"
    batch = make_batch(copies[0], ["a star"])

    def gradients_of(checkpoint: Path, **settings: Any) -> dict[str, Tensor]:
        return gradients(make_assembly(checkpoint, **settings), batch)

    expected = gradients_of(copies[0])
    for checkpoint in copies:
        for offload in (False, True):
            result = gradients_of(checkpoint, enable_group_offload=offload)
            assert result.keys() == expected.keys()
            for name, gradient in result.items():
                assert torch.equal(gradient, expected[name]), (name, offload)
