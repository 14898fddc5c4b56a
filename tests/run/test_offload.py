"""Whole runs with offloading equal the same runs without it, file for file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel, SanaVideoTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from simpletuner.memory.offload import attach
from tests.tools.runs import assert_same_run
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
RESULT = "output/pytorch_lora_weights.safetensors"


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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path) -> Workspace:
    """The run that all others must equal."""
    workspace = Workspace.create(tmp_path_factory.mktemp("plain") / "run", deep_checkpoint, **RUN)
    assert workspace.train() == 0
    return workspace


@pytest.fixture
def copiers(monkeypatch: pytest.MonkeyPatch) -> list[AdversarialCopier]:
    """Every copier of a run is adversarial."""
    made: list[AdversarialCopier] = []

    def choose(*place: Any, **settings: Any) -> AdversarialCopier:
        made.append(AdversarialCopier())
        return made[-1]

    monkeypatch.setattr(attach, "choose_copier", choose)
    return made


def previews(workspace: Workspace) -> dict[str, bytes]:
    files = [
        *workspace.path("output/validation_images").iterdir(),
        *workspace.path("output/benchmarks").rglob("*.png"),
    ]
    assert len(files) >= 4
    return {path.name: path.read_bytes() for path in files}


EVERYTHING: dict[str, Any] = {
    "enable_group_offload": True,
    "group_offload_text_encoder": True,
    "group_offload_vae": True,
    "offload_block_inputs": True,
}


@pytest.mark.parametrize(
    ("settings", "streaming"),
    [(EVERYTHING, 4), ({"enable_group_offload": True, "gradient_checkpointing": False}, 1)],
)
def test_offloaded_training_is_bit_identical(
    tmp_path: Path,
    plain: Workspace,
    deep_checkpoint: Path,
    copiers: list[AdversarialCopier],
    settings: dict[str, Any],
    streaming: int,
) -> None:
    offloaded = Workspace.create(tmp_path / "run", deep_checkpoint, **RUN, **settings)
    assert offloaded.train() == 0
    used = [copier for copier in copiers if copier.submitted]
    assert len(used) == streaming, (
        "text encoder; encoder of the VAE; transformer; decoder of the VAE"
    )
    assert_same_run(plain, offloaded)
    assert previews(plain) == previews(offloaded)


def test_streamed_quantised_weights_train_bit_identically(
    tmp_path: Path, deep_checkpoint: Path, copiers: list[AdversarialCopier]
) -> None:
    settings = {**RUN, "base_model_precision": "int4-quanto", "text_encoder_1_precision": "int8"}
    resident = Workspace.create(tmp_path / "resident", deep_checkpoint, **settings)
    assert resident.train() == 0
    offloaded = Workspace.create(tmp_path / "offloaded", deep_checkpoint, **settings, **EVERYTHING)
    assert offloaded.train() == 0
    assert len([copier for copier in copiers if copier.submitted]) == 4
    assert_same_run(resident, offloaded)
    assert previews(resident) == previews(offloaded)


def test_offload_can_be_switched_between_sessions(
    tmp_path: Path, plain: Workspace, copiers: list[AdversarialCopier]
) -> None:
    came = plain.stopped(tmp_path / "came", 2)
    assert came.train("enable_group_offload=true") == 0
    assert_same_run(plain, came)
    went = came.stopped(tmp_path / "went", 4)
    assert went.train() == 0
    assert_same_run(plain, went)
    assert len(copiers) == 1


def test_model_offload_moves_the_transformer_away_while_the_vae_decodes(
    tmp_path: Path, plain: Workspace, deep_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VAE decodes while the transformer is away; pictures and training are what they were."""
    moves: list[str] = []
    to = Kandinsky5Transformer3DModel.to

    def noted(model: Any, *where: Any, **settings: Any) -> Any:
        moves.append(str(where[0]))
        return to(model, *where, **settings)

    monkeypatch.setattr(Kandinsky5Transformer3DModel, "to", noted)
    offloaded = Workspace.create(
        tmp_path / "run", deep_checkpoint, **RUN, enable_model_cpu_offload=True
    )
    assert offloaded.train() == 0
    assert moves == ["cpu"] * len(moves)
    assert len(moves) == 1 + 2 * len(previews(offloaded)), (
        "to the device at first, then away and back for each decode"
    )
    assert_same_run(plain, offloaded)
    assert previews(plain) == previews(offloaded)


def test_offloaded_training_of_sana_video_is_bit_identical(
    tmp_path: Path, sana_checkpoint: Path, copiers: list[AdversarialCopier]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(sana_checkpoint, checkpoint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = SanaVideoTransformer3DModel.from_config(
            {**build_sana().config, "num_layers": 4}
        )
        fill_zeros(transformer)
    transformer.save_pretrained(checkpoint / "transformer")
    settings = {
        "model_family": "sanavideo",
        "model_flavour": "2b-480p",
        "max_train_steps": 2,
        "pictures": 2,
    }
    found: list[dict[str, Tensor]] = []
    for name, offload in (("plain", {}), ("offloaded", EVERYTHING)):
        workspace = Workspace.create(tmp_path / name, checkpoint, **settings, **offload)
        settings_of_previews = (
            "--validation_disable=false",
            "--validation_num_video_frames=5",
            "--num_eval_images=1",
        )
        assert workspace.train(*settings_of_previews, "--disable_benchmark") == 0
        found.append(load_file(workspace.path(RESULT)))
    assert len([copier for copier in copiers if copier.submitted]) == 3, (
        "encoder, transformer and decoder"
    )
    for key, weight in found[0].items():
        assert torch.equal(found[1][key], weight), key
