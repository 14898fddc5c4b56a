"""What a run that continues is compared with, and which result it leaves."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from simpletuner.headers import METADATA, read_header
from simpletuner.models.adapter import PreviewRequest, TextRequest
from simpletuner.models.kandinsky5.blocks import TextPadding
from simpletuner.models.kandinsky5.image import StockPipeline
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.planning import resume
from simpletuner.planning.checkpoint_folder import NOTE_FILE
from tests.tools.families import make_adapter
from tests.tools.tiny import PIPELINES, make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

LORA = "output/pytorch_lora_weights.safetensors"
SHORT: dict[str, Any] = {"max_train_steps": 2, "lr_scheduler": "constant"}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_result_of_an_earlier_step_is_published_again(
    tmp_path: Path, t2i_checkpoint: Path, kind: str
) -> None:
    """Killed between the last checkpoint and publishing, a run has a result of an earlier step."""
    run = Workspace.create(tmp_path, t2i_checkpoint, model_type=kind, learning_rate=1e-4, **SHORT)
    result = run.path(LORA if kind == "lora" else "output/pipeline")
    assert run.train() == 0
    result.rename(run.path("old"))
    assert run.train("max_train_steps=4") == 0
    if result.is_dir():
        result.rename(run.path("new"))
    else:
        result.unlink()
    run.path("old").rename(result)
    assert step_of(result) == "2"
    assert run.train("max_train_steps=4") == 0
    assert step_of(result) == "4"
    assert len(run.metrics()) == 4, "nothing is trained twice"


def step_of(result: Path) -> str:
    notes = (
        json.loads((result / NOTE_FILE).read_text())
        if result.is_dir()
        else read_header(result)[METADATA]
    )
    return str(notes["simpletuner.step"])


def test_a_published_model_samples_with_the_shift_of_its_previews(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    run = Workspace.create(
        tmp_path,
        t2i_checkpoint,
        model_type="full",
        learning_rate=1e-4,
        flow_schedule_shift=4.0,
        validation_disable=False,
        disable_benchmark=True,
        validation_guidance=1.0,
        validation_resolution="128x128",
        validation_disable_unconditional=True,
        **SHORT,
    )
    assert run.train() == 0
    preview = next(run.path("output/validation_images").glob("step_2_*.png"))
    folder = run.path("output/pipeline")
    pipeline = PIPELINES["t2i"].from_pretrained(folder, tokenizer=load_processor(folder))
    pipeline.set_progress_bar_config(disable=True)
    cpu = torch.device("cpu")
    prompts = [TextRequest("a red square"), TextRequest("", bare=True)]
    adapter = make_adapter(t2i_checkpoint)
    embeds, negative = adapter.load_text_encoder(cpu, torch.float32).encode(prompts)
    encoder = adapter.load_latent_encoder(cpu, torch.float32)
    request = PreviewRequest(
        embeds, negative, 128, 128, num_inference_steps=2, guidance_scale=1.0, seed=7
    )

    def draw() -> np.ndarray:
        return np.asarray(
            StockPipeline(pipeline, encoder, cpu, "t2i", TextPadding()).render(request)[0]
        )

    assert np.array_equal(draw(), np.asarray(Image.open(preview)))
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, shift=1.0)
    assert not np.array_equal(draw(), np.asarray(Image.open(preview))), "the shift shows"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_alpha": 3}, ["lora_alpha", "with 16, not 3"]),
        ({"lora_init_type": "gaussian"}, ["lora_init_type", "default", "gaussian"]),
        ({"optimizer": "torch-sgd"}, ["optimizer", "not torch-sgd"]),
        ({"peft_lora_target_modules": ["to_key"]}, ["peft_lora_target_modules", "to_query"]),
        (
            {"optimizer": "optimi-adamw", "mixed_precision": "bf16"},
            ["mixed_precision", "with fp32, not bf16"],
        ),
        (
            {"optimizer_config": "amsgrad=true"},
            ["optimizer_config.amsgrad", "with false, not true; set it back"],
        ),
        (
            {"init_lora": "output/checkpoint-2"},
            ["init_lora", "did not start from 'output/checkpoint-2'"],
        ),
    ],
)
def test_settings_that_checkpoint_weights_depend_on_cannot_change(
    trained: Workspace, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: list[str]
) -> None:
    trained.write_config(**change, max_train_steps=6)
    assert trained.train() == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_another_base_model_is_refused(
    trained: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    trained.write_config(pretrained_model_name_or_path=str(other), max_train_steps=6)
    assert trained.train() == 2
    message = capsys.readouterr().err
    assert "another transformer" in message
    assert "another vae" in message


def test_changed_settings_and_datasets_are_reported(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"resolution": 80, "timestep_sampling_offset": 0.25}
    trained.write_datasets([{**DATASETS[0], **changed}, DATASETS[1]])
    trained.path("datasets/pictures/p0.txt").write_text("another text")
    sampled = {"scheduled_sampling_max_step_offset": 1, "scheduled_sampling_probability": 0.5}
    techniques = {**sampled, "crepa_lambda": 0.1, "mixed_precision": "bf16", "optimizer": "adamw"}
    trained.write_config(
        seed=8, loss_type="huber", text_template="diffusers", max_train_steps=6, **techniques
    )
    capsys.readouterr()
    assert trained.train() == 0
    said = capsys.readouterr().out
    assert "seed" in said
    assert "with 7, not 8" in said
    assert "loss_type" in said
    assert "with l2, not huber" in said
    assert "with official, not diffusers" in said
    assert "with 0.0, not 0.5" in said
    assert "with 0.5, not 0.1" in said
    for key in ("mixed_precision.compute", "text_encoder_1_precision", "vae_dtype"):
        assert (
            f"{key}: output/checkpoint-4 was trained with fp32, not bf16; the new value "
            "applies from here on" in said
        )
    assert "with 0.0, not 0.25" in said
    assert "pictures.captions" in said
    assert "pictures.resolution" in said
    assert "80" in said


def test_learning_rate_steps_and_intervals_change_silently(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert (
        trained.train("max_train_steps=6", "learning_rate=5e-4", "checkpoint_step_interval=3") == 0
    )
    assert "was trained with" not in capsys.readouterr().out


THOROUGH = pytest.mark.thorough
OPTIMIZER_KEYS = [
    (
        {"adam_weight_decay": 0.5},
        "weight_decay: output/checkpoint-4 was trained with 0.01, not 0.5",
    ),
    ({"optimizer_config": "eps=0.1"}, "eps: output/checkpoint-4 was trained with 1e-08, not 0.1"),
    *(
        pytest.param(
            change, f"{name}: output/checkpoint-4 was trained with {words}", marks=THOROUGH
        )
        for change, name, words in (
            ({"adam_beta1": 0.5}, "beta1", "0.9, not 0.5"),
            ({"optimizer_beta1": 0.9, "optimizer_beta2": 0.5}, "beta2", "0.999, not 0.5"),
            ({"adam_epsilon": 0.1}, "eps", "1e-08, not 0.1"),
        )
    ),
]


@pytest.mark.parametrize(("change", "words"), OPTIMIZER_KEYS)
def test_changed_optimizer_settings_apply_and_are_reported(
    trained: Workspace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    words: str,
) -> None:
    plain = trained.copy(tmp_path / "plain", max_train_steps=5)
    assert plain.train() == 0
    trained.write_config(**change, max_train_steps=5)
    capsys.readouterr()
    assert trained.train() == 0
    said = capsys.readouterr().out
    assert f"optimizer_config.{words}; the new value applies from here on" in said
    assert trained.path(LORA).read_bytes() != plain.path(LORA).read_bytes()


def test_a_run_can_switch_to_half_precision_and_back(trained: Workspace) -> None:
    assert trained.train("mixed_precision=fp16", "max_train_steps=5") == 0
    assert trained.train("mixed_precision=no", "max_train_steps=6") == 0
    assert [row["step"] for row in trained.metrics()] == [1, 2, 3, 4, 5, 6]


def test_an_average_enabled_later_starts_from_the_trained_weights(
    trained: Workspace,
) -> None:
    """Its first update would be in step 100, and the run ends before."""
    assert trained.train("max_train_steps=5", "use_ema=true", "ema_update_interval=100") == 0
    before = load_file(trained.path("output/checkpoint-4/pytorch_lora_weights.safetensors"))
    averaged = load_file(trained.path("output/ema/pytorch_lora_weights.safetensors"))
    assert all(torch.equal(averaged[name], weight) for name, weight in before.items())


def add_other_pictures(run: Workspace, folder: str = "other") -> None:
    """Make the dataset one of pictures that the run has not seen."""
    run.add_pictures(f"datasets/{folder}", 8, seed=5)
    run.write_datasets([{**DATASETS[0], "instance_data_dir": f"datasets/{folder}"}, DATASETS[1]])


@pytest.mark.parametrize("kind", ["lora", "lokr", "full"])
def test_a_dataset_without_any_trained_file_is_refused(
    tmp_path: Path, filled: Workspace, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    kinds = {
        "lora": {},
        "lokr": {"lora_type": "lokr"},
        "full": {"model_type": "full", "learning_rate": 1e-4},
    }
    run = filled.copy(tmp_path / kind, **kinds[kind], **SHORT)
    assert run.train() == 0
    add_other_pictures(run)
    capsys.readouterr()
    assert run.train("max_train_steps=4") == 2
    message = capsys.readouterr().err
    assert "has none of the files that output/checkpoint-2 was trained on" in message
    assert "choose another output_dir" in message
    assert ("init_lora=output/checkpoint-2" in message) == (kind == "lora")
    assert len(run.metrics()) == 2, "nothing is lost"


@pytest.mark.parametrize(
    "remedy",
    [
        ["override_dataset_config=true"],
        ["output_dir=second"],
        ["output_dir=second", "init_lora=output/checkpoint-4"],
    ],
)
def test_every_proposed_remedy_for_a_replaced_dataset_trains(
    trained: Workspace, remedy: list[str]
) -> None:
    add_other_pictures(trained)
    assert trained.train("max_train_steps=5", *remedy) == 0


def test_a_dataset_that_keeps_one_trained_file_continues(trained: Workspace) -> None:
    add_other_pictures(trained)
    kept = trained.path("datasets/pictures/p0.png")
    renamed = trained.path("datasets/other/elsewhere.png")
    renamed.write_bytes(kept.read_bytes())
    renamed.with_suffix(".txt").write_text("a picture")
    assert trained.train("max_train_steps=5") == 0


def test_a_checkpoint_without_file_digests_continues_with_a_replaced_dataset(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained.path("output/checkpoint-4/manifest.json")
    content = json.loads(path.read_text())
    del content["identity"]["files"]
    path.write_text(json.dumps(content))
    add_other_pictures(trained)
    assert trained.train("max_train_steps=5") == 0
    assert "the datasets are not those of checkpoint-4" in capsys.readouterr().out


def test_recorded_file_digests_do_not_depend_on_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume, "FILES_RECORDED", 20)
    contents = [sha256(bytes([number])).hexdigest() for number in range(200)]

    def digests(contents: list[str]) -> set[str]:
        dataset: Any = SimpleNamespace(
            samples=[SimpleNamespace(content=content) for content in contents]
        )
        return set(resume.file_digests([dataset]).split())

    recorded = digests(contents)
    rest = {content[: resume.DIGITS] for content in contents} - recorded
    assert len(recorded) == 20
    assert max(recorded) < min(rest), (
        "the same files whatever their order and whatever else is there"
    )
    assert digests(contents[::-1]) == recorded
