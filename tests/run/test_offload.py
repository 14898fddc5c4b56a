"""Whole runs with offloading equal the same runs without it, file for file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel, SanaVideoTransformer3DModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from simpletuner.memory.offload import attach
from tests.tools.runs import LORA, SANA_RUN, assert_equal, assert_same_run
from tests.tools.streaming import AdversarialCopier
from tests.tools.tiny import TOKENIZERS, build_kandinsky, build_qwen, fill_zeros
from tests.tools.tiny_sana import build_sana
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(5)

RUN: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 2,
    "use_ema": True,
    "caption_dropout_probability": 0.3,
    "gradient_accumulation_steps": 2,
    "validation_disable": False,
    "validation_step_interval": 6,
    "validation_disable_unconditional": False,
}
OFFLOAD_EVERYTHING: dict[str, Any] = {
    "enable_group_offload": True,
    "group_offload_text_encoder": True,
    "group_offload_vae": True,
    "offload_block_inputs": True,
}
# Text encoder, encoder of the VAE, transformer and decoder of the VAE stream by a copier each.
ALL_COPIERS = 4


@pytest.fixture(scope="module")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Path:
    """A checkpoint with more blocks, and more layers in its text encoder, than there are slots."""
    folder = tmp_path_factory.mktemp("deep") / "checkpoint"
    shutil.copytree(t2i_checkpoint, folder)
    config = build_qwen(AutoTokenizer.from_pretrained(TOKENIZERS / "tokenizer")).config
    config.text_config.num_hidden_layers = 4
    config.text_config.layer_types = ["full_attention"] * 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build_kandinsky(visual_blocks=4).save_pretrained(folder / "transformer")
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "text_encoder")
    return folder


@pytest.fixture
def deep_sana_checkpoint(tmp_path: Path, sana_checkpoint: Path) -> Path:
    """A checkpoint of Sana Video with more blocks than there are slots."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(sana_checkpoint, folder)
    config = {**build_sana().config, "num_layers": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = SanaVideoTransformer3DModel.from_config(config)
        fill_zeros(transformer)
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path) -> Workspace:
    """The run without offloading, which all others must equal."""
    workspace = Workspace.create(tmp_path_factory.mktemp("plain") / "run", deep_checkpoint, **RUN)
    assert workspace.train() == 0
    return workspace


@pytest.fixture
def copiers(monkeypatch: pytest.MonkeyPatch) -> list[AdversarialCopier]:
    """All copiers of a run, which copy as late as a GPU may."""
    copiers: list[AdversarialCopier] = []

    def choose(*place: Any, **settings: Any) -> AdversarialCopier:
        copiers.append(AdversarialCopier())
        return copiers[-1]

    monkeypatch.setattr(attach, "choose_copier", choose)
    return copiers


def used(copiers: list[AdversarialCopier]) -> int:
    """How many copiers have copied something."""
    return len([copier for copier in copiers if copier.submitted])


def read_previews(workspace: Workspace) -> dict[str, bytes]:
    images = workspace.path("output/validation_images").iterdir()
    benchmarks = workspace.path("output/benchmarks").rglob("*.png")
    paths = [*images, *benchmarks]
    assert len(paths) >= 4
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("settings", "streams"),
    [
        (OFFLOAD_EVERYTHING, ALL_COPIERS),
        ({"enable_group_offload": True, "gradient_checkpointing": False}, 1),
    ],
)
def test_offloaded_training_is_bit_identical(
    tmp_path: Path,
    plain: Workspace,
    deep_checkpoint: Path,
    copiers: list[AdversarialCopier],
    settings: dict[str, Any],
    streams: int,
) -> None:
    offloaded = Workspace.create(tmp_path / "run", deep_checkpoint, **RUN, **settings)

    assert offloaded.train() == 0

    assert used(copiers) == streams
    assert_same_run(plain, offloaded)
    assert read_previews(offloaded) == read_previews(plain)


def test_streamed_quantised_weights_train_bit_identically(
    tmp_path: Path, deep_checkpoint: Path, copiers: list[AdversarialCopier]
) -> None:
    settings = {**RUN, "base_model_precision": "int4-quanto", "text_encoder_1_precision": "int8"}
    resident = Workspace.create(tmp_path / "resident", deep_checkpoint, **settings)
    assert resident.train() == 0
    offloaded = Workspace.create(
        tmp_path / "offloaded", deep_checkpoint, **settings, **OFFLOAD_EVERYTHING
    )

    assert offloaded.train() == 0

    assert used(copiers) == ALL_COPIERS
    assert_same_run(resident, offloaded)
    assert read_previews(offloaded) == read_previews(resident)


def test_offload_can_be_switched_between_sessions(
    tmp_path: Path, plain: Workspace, copiers: list[AdversarialCopier]
) -> None:
    switched_on = plain.stopped(tmp_path / "on", 2)
    assert switched_on.train("enable_group_offload=true") == 0
    assert_same_run(plain, switched_on)

    switched_off = switched_on.stopped(tmp_path / "off", 4)
    assert switched_off.train() == 0
    assert_same_run(plain, switched_off)

    assert len(copiers) == 1


def test_model_offload_moves_the_transformer_away_while_the_vae_decodes(
    tmp_path: Path, plain: Workspace, deep_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[str] = []
    move = Kandinsky5Transformer3DModel.to

    def record_and_move(model: Any, *device: Any, **settings: Any) -> Any:
        moves.append(str(device[0]))
        return move(model, *device, **settings)

    monkeypatch.setattr(Kandinsky5Transformer3DModel, "to", record_and_move)
    offloaded = Workspace.create(
        tmp_path / "run", deep_checkpoint, **RUN, enable_model_cpu_offload=True
    )

    assert offloaded.train() == 0

    # To the device at first, then away and back for each decoded preview. Both are the CPU here.
    assert moves == ["cpu"] * (1 + 2 * len(read_previews(offloaded)))
    assert_same_run(plain, offloaded)
    assert read_previews(offloaded) == read_previews(plain)


def test_offloaded_training_of_sana_video_is_bit_identical(
    tmp_path: Path, deep_sana_checkpoint: Path, copiers: list[AdversarialCopier]
) -> None:
    settings = {
        **SANA_RUN,
        "max_train_steps": 2,
        "validation_disable": False,
        "validation_num_video_frames": 5,
        "num_eval_images": 1,
        "disable_benchmark": True,
    }
    plain = Workspace.create(tmp_path / "plain", deep_sana_checkpoint, pictures=2, **settings)
    assert plain.train() == 0
    offloaded = Workspace.create(
        tmp_path / "offloaded",
        deep_sana_checkpoint,
        pictures=2,
        **settings,
        **OFFLOAD_EVERYTHING,
    )

    assert offloaded.train() == 0

    assert used(copiers) == 3, "text encoder, transformer and decoder"
    assert_equal(load_file(offloaded.path(LORA)), load_file(plain.path(LORA)))
