"""What a run that continues is compared with, and which result it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from simpletuner.config.optimizers import AMSGRAD, OPTIMIZERS
from simpletuner.headers import METADATA, read_header
from simpletuner.models.adapter import PreviewRequest, TextRequest
from simpletuner.models.kandinsky5.blocks import TextPadding
from simpletuner.models.kandinsky5.image import StockPipeline
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.planning import resume
from simpletuner.planning.checkpoint_folder import NOTE_FILE
from tests.tools.families import CPU, make_adapter
from tests.tools.runs import LORA
from tests.tools.tiny import PIPELINES, make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
THOROUGH = pytest.mark.thorough
TWO_STEPS: dict[str, Any] = {"max_train_steps": 2, "lr_scheduler": "constant"}
FULL: dict[str, Any] = {"model_type": "full", "learning_rate": 1e-4}
# The checkpoint that runs of the fixture `trained` continue from.
TRAINED_WITH = "output/checkpoint-4 was trained with"


def published_step(result: Path) -> str:
    """The step that a LoRA file or a pipeline folder was published at."""
    if result.is_dir():
        notes = json.loads((result / NOTE_FILE).read_text())
    else:
        notes = read_header(result)[METADATA]
    return str(notes["simpletuner.step"])


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("lora", LORA),
        ("full", "output/pipeline"),
    ],
)
def test_a_result_of_an_earlier_step_is_published_again(
    tmp_path: Path, t2i_checkpoint: Path, kind: str, result: str
) -> None:
    """A run that is killed between its last checkpoint and publishing leaves an old result."""
    settings = {**TWO_STEPS, "model_type": kind, "learning_rate": 1e-4}
    run = Workspace.create(tmp_path, t2i_checkpoint, **settings)
    assert run.train() == 0
    run.path(result).rename(run.path("old"))
    assert run.train("max_train_steps=4") == 0
    run.path(result).rename(run.path("new"))
    run.path("old").rename(run.path(result))
    assert published_step(run.path(result)) == "2"

    assert run.train("max_train_steps=4") == 0

    assert published_step(run.path(result)) == "4"
    assert len(run.metrics()) == 4, "nothing is trained twice"


def test_a_published_model_samples_with_the_shift_of_its_previews(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    run = Workspace.create(
        tmp_path,
        t2i_checkpoint,
        **TWO_STEPS,
        **FULL,
        flow_schedule_shift=4.0,
        validation_disable=False,
        disable_benchmark=True,
        validation_guidance=1.0,
        validation_resolution="128x128",
        validation_disable_unconditional=True,
    )
    assert run.train() == 0
    (path,) = run.path("output/validation_images").glob("step_2_*.png")
    preview = np.asarray(Image.open(path))
    folder = run.path("output/pipeline")
    pipeline = PIPELINES["t2i"].from_pretrained(folder, tokenizer=load_processor(folder))
    pipeline.set_progress_bar_config(disable=True)
    adapter = make_adapter(t2i_checkpoint)
    prompts = [TextRequest("a red square"), TextRequest("", bare=True)]
    embeds, negative = adapter.load_text_encoder(CPU, torch.float32).encode(prompts)
    encoder = adapter.load_latent_encoder(CPU, torch.float32)
    request = PreviewRequest(
        embeds, negative, 128, 128, num_inference_steps=2, guidance_scale=1.0, seed=7
    )

    def render() -> np.ndarray:
        stock = StockPipeline(pipeline, encoder, CPU, "t2i", TextPadding())
        return np.asarray(stock.render(request)[0])

    assert np.array_equal(render(), preview)
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, shift=1.0)
    assert not np.array_equal(render(), preview), "another shift gives another picture"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"lora_alpha": 3},
            ["lora_alpha", "with 16, not 3"],
        ),
        (
            {"lora_init_type": "gaussian"},
            ["lora_init_type", "default", "gaussian"],
        ),
        (
            {"optimizer": "torch-sgd"},
            ["optimizer", "not torch-sgd"],
        ),
        (
            {"peft_lora_target_modules": ["to_key"]},
            ["peft_lora_target_modules", "to_query"],
        ),
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
    trained: Workspace, capsys: Capture, change: dict[str, Any], words: list[str]
) -> None:
    trained.write_config(**change, max_train_steps=6)

    assert trained.train() == 2

    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_another_base_model_is_refused(trained: Workspace, tmp_path: Path, capsys: Capture) -> None:
    second_model = make_checkpoint(tmp_path / "second", seed=1)
    trained.write_config(pretrained_model_name_or_path=str(second_model), max_train_steps=6)

    assert trained.train() == 2

    error = capsys.readouterr().err
    assert "another transformer" in error
    assert "another vae" in error


def test_changed_settings_and_datasets_are_reported(trained: Workspace, capsys: Capture) -> None:
    changed = {"resolution": 80, "timestep_sampling_offset": 0.25}
    trained.write_datasets([{**DATASETS[0], **changed}, DATASETS[1]])
    trained.path("datasets/pictures/p0.txt").write_text("another text")
    trained.write_config(
        max_train_steps=6,
        seed=8,
        loss_type="huber",
        text_template="diffusers",
        mixed_precision="bf16",
        optimizer="adamw",
        scheduled_sampling_max_step_offset=1,
        scheduled_sampling_probability=0.5,
        crepa_lambda=0.1,
    )
    capsys.readouterr()

    assert trained.train() == 0

    output = capsys.readouterr().out
    assert "seed" in output
    assert "with 7, not 8" in output
    assert f"loss_type: {TRAINED_WITH} l2, not huber" in output
    for values in ("official, not diffusers", "0.0, not 0.5", "0.5, not 0.1", "0.0, not 0.25"):
        assert f"with {values}" in output
    for key in ("mixed_precision.compute", "text_encoder_1_precision", "vae_dtype"):
        change = f"{key}: {TRAINED_WITH} fp32, not bf16; the new value applies from here on"
        assert change in output
    assert "pictures.captions" in output
    assert "pictures.resolution" in output
    assert "80" in output


def test_learning_rate_steps_and_intervals_change_silently(
    trained: Workspace, capsys: Capture
) -> None:
    trained.write_config(max_train_steps=6, learning_rate=5e-4, checkpoint_step_interval=3)
    capsys.readouterr()

    assert trained.train() == 0

    assert "was trained with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ({"adam_weight_decay": 0.5}, "weight_decay", "0.01, not 0.5"),
        ({"optimizer_config": "eps=0.1"}, "eps", "1e-08, not 0.1"),
        pytest.param({"adam_beta1": 0.5}, "beta1", "0.9, not 0.5", marks=THOROUGH),
        pytest.param(
            {"optimizer_beta1": 0.9, "optimizer_beta2": 0.5},
            "beta2",
            "0.999, not 0.5",
            marks=THOROUGH,
        ),
        pytest.param({"adam_epsilon": 0.1}, "eps", "1e-08, not 0.1", marks=THOROUGH),
    ],
)
def test_changed_optimizer_settings_apply_and_are_reported(
    trained: Workspace,
    tmp_path: Path,
    capsys: Capture,
    change: dict[str, Any],
    key: str,
    values: str,
) -> None:
    unchanged = trained.copy(tmp_path / "unchanged", max_train_steps=5)
    assert unchanged.train() == 0
    trained.write_config(**change, max_train_steps=5)
    capsys.readouterr()

    assert trained.train() == 0

    expected = (
        f"optimizer_config.{key}: {TRAINED_WITH} {values}; the new value applies from here on"
    )
    assert expected in capsys.readouterr().out
    assert trained.path(LORA).read_bytes() != unchanged.path(LORA).read_bytes()


@pytest.mark.slow(3)
def test_a_run_that_began_with_another_default_continues_bit_for_bit(
    filled: Workspace, tmp_path: Path, capsys: Capture
) -> None:
    with pytest.MonkeyPatch.context() as earlier_version:
        earlier = replace(OPTIMIZERS["adamw"], settings=AMSGRAD | {"eps": 1e-3})
        earlier_version.setitem(cast(Any, OPTIMIZERS), "adamw", earlier)
        whole = filled.copy(tmp_path / "whole", max_train_steps=4)
        assert whole.train() == 0
        begun = filled.copy(tmp_path / "begun", max_train_steps=2)
        assert begun.train() == 0
    capsys.readouterr()

    for steps in (3, 4):  # what a continued run keeps, the next one keeps too
        assert begun.train(f"max_train_steps={steps}") == 0

    assert "was trained with" not in capsys.readouterr().out
    assert begun.path(LORA).read_bytes() == whole.path(LORA).read_bytes()
    assert begun.metrics() == whole.metrics()


def test_a_run_can_switch_to_half_precision_and_back(trained: Workspace) -> None:
    assert trained.train("mixed_precision=fp16", "max_train_steps=5") == 0
    assert trained.train("mixed_precision=no", "max_train_steps=6") == 0

    assert [row["step"] for row in trained.metrics()] == [1, 2, 3, 4, 5, 6]


def test_an_average_enabled_later_starts_from_the_trained_weights(trained: Workspace) -> None:
    """Its first update would be in step 100, and the run ends before."""
    assert trained.train("max_train_steps=5", "use_ema=true", "ema_update_interval=100") == 0

    before = load_file(trained.path("output/checkpoint-4/pytorch_lora_weights.safetensors"))
    averaged = load_file(trained.path("output/ema/pytorch_lora_weights.safetensors"))
    assert all(torch.equal(averaged[name], weight) for name, weight in before.items())


def replace_pictures(run: Workspace) -> None:
    """Point the dataset to a folder of pictures that the run has not seen."""
    run.add_pictures("datasets/other", 8, seed=5)
    run.write_datasets([{**DATASETS[0], "instance_data_dir": "datasets/other"}, DATASETS[1]])


@pytest.mark.parametrize(
    ("settings", "can_start_a_lora"),
    [
        pytest.param({}, True, id="lora"),
        pytest.param({"lora_type": "lokr"}, False, id="lokr"),
        pytest.param(FULL, False, id="full"),
    ],
)
def test_a_dataset_without_any_trained_file_is_refused(
    tmp_path: Path,
    filled: Workspace,
    capsys: Capture,
    settings: dict[str, Any],
    can_start_a_lora: bool,
) -> None:
    run = filled.copy(tmp_path / "two-steps", **settings, **TWO_STEPS)
    assert run.train() == 0
    replace_pictures(run)
    capsys.readouterr()

    assert run.train("max_train_steps=4") == 2

    error = capsys.readouterr().err
    assert "has none of the files that output/checkpoint-2 was trained on" in error
    assert "choose another output_dir" in error
    assert ("init_lora=output/checkpoint-2" in error) == can_start_a_lora
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
    replace_pictures(trained)

    assert trained.train("max_train_steps=5", *remedy) == 0


def test_a_dataset_that_keeps_one_trained_file_continues(trained: Workspace) -> None:
    """Files are compared by their content, whatever their names are."""
    replace_pictures(trained)
    renamed = trained.path("datasets/other/elsewhere.png")
    renamed.write_bytes(trained.path("datasets/pictures/p0.png").read_bytes())
    renamed.with_suffix(".txt").write_text("a picture")

    assert trained.train("max_train_steps=5") == 0


def test_a_checkpoint_without_file_digests_continues_with_a_replaced_dataset(
    trained: Workspace, capsys: Capture
) -> None:
    """Earlier versions recorded no digests of files."""
    path = trained.path("output/checkpoint-4/manifest.json")
    content = json.loads(path.read_text())
    del content["identity"]["files"]
    path.write_text(json.dumps(content))
    replace_pictures(trained)

    assert trained.train("max_train_steps=5") == 0

    assert "the datasets are not those of checkpoint-4" in capsys.readouterr().out


def test_recorded_file_digests_do_not_depend_on_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest digests are recorded, so that lists with the same files share some of them."""
    monkeypatch.setattr(resume, "FILES_RECORDED", 20)
    contents = [sha256(bytes([number])).hexdigest() for number in range(200)]

    def recorded(contents: list[str]) -> set[str]:
        samples = [SimpleNamespace(content=content) for content in contents]
        dataset: Any = SimpleNamespace(samples=samples)
        return set(resume.file_digests([dataset]).split())

    digests = recorded(contents)

    assert len(digests) == 20
    rest = {content[: resume.DIGITS] for content in contents} - digests
    assert max(digests) < min(rest)
    assert recorded(contents[::-1]) == digests
