"""Whole runs, as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5T2IPipeline, Kandinsky5Transformer3DModel
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model, set_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file

from simpletuner.headers import METADATA, read_header
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.planning.lock import lock_output
from simpletuner.reporting import metrics
from simpletuner.reporting.metrics import MetricsFile
from simpletuner.training import step
from simpletuner.weights.lora_names import LORA_FILE, METADATA_KEY, STEP_NOTE
from tests.tools.hub import repository_of_loras
from tests.tools.tiny import make_checkpoint
from tests.tools.tolerances import ELEMENTWISE, assert_close
from tests.tools.workspace import DATASETS, Workspace

LORA = "output/pytorch_lora_weights.safetensors"


@pytest.mark.slow
def test_previews_have_the_sizes_and_prompts_of_their_file_names(workspace: Workspace) -> None:
    library = workspace.path("config/library.json")
    library.write_text(json.dumps({"anime_<token>": "a drawing", "नमस्ते": {"prompt": "hello"}}))
    workspace.write_config(
        validation_disable=False,
        validation_disable_unconditional=False,
        user_prompt_library="config/library.json",
        validation_resolution="128x160,144",
        use_ema=True,
        ema_validation="comparison",
    )
    assert workspace.train() == 0
    found = sorted(path.name for path in workspace.path("output/validation_images").iterdir())
    names = ("unconditional", "anime_token", "नमस्ते", "validation")
    for name in names:
        for size in ("128x160", "144x144"):
            for suffix in ("", "_ema"):
                assert f"step_4_{name}_0_{size}{suffix}.png" in found
    for path in workspace.path("output/validation_images").iterdir():
        with Image.open(path) as picture:
            assert f"{picture.width}x{picture.height}" in path.name
    base = sorted(path.name for path in workspace.path("output/benchmarks/base_model").iterdir())
    assert "unconditional_144x144.png" in base
    assert "<script" in workspace.path("output/training_report.html").read_text()


def test_lora_of_any_strength_draws_the_same_in_the_stock_pipeline(
    workspace: Workspace, t2i_checkpoint: Path
) -> None:
    workspace.write_config(lora_rank=4, lora_alpha=7, learning_rate=0.05, use_ema=True)
    assert workspace.train() == 0
    final = load_file(workspace.path(LORA))
    trained = load_file(workspace.path("output/checkpoint-4/training_state/trainable.safetensors"))
    name = "visual_transformer_blocks.0.self_attention.to_query.lora_{}"
    up = trained[name.format("B.default.weight")]
    assert torch.equal(final[f"transformer.{name.format('B.weight')}"], up * (7 / 4))
    assert up.abs().max() > 1e-3, "something was learned"
    pipeline = Kandinsky5T2IPipeline.from_pretrained(
        t2i_checkpoint, tokenizer=load_processor(t2i_checkpoint)
    )
    pipeline.load_lora_weights(workspace.path("output"))
    module = pipeline.transformer.get_submodule(
        "visual_transformer_blocks.0.self_attention.to_query"
    )
    assert list(module.scaling.values()) == [1.0]
    assert workspace.path("output/ema/pytorch_lora_weights.safetensors").exists()


@pytest.mark.slow
def test_comfyui_files_hold_the_trained_weights_and_can_be_continued(
    workspace: Workspace,
) -> None:
    workspace.write_config(
        lora_format="comfyui", lora_rank=4, lora_alpha=7, use_ema=True, learning_rate=0.05
    )
    assert workspace.train() == 0
    step4 = workspace.path("output/checkpoint-4")
    trained = load_file(step4 / "training_state/trainable.safetensors")
    folders = [workspace.path("output"), step4]
    for folder in [*folders, *(folder / "ema" for folder in folders)]:
        weights = load_file(folder / "pytorch_lora_weights.safetensors")
        assert all(name.startswith("diffusion_model.") for name in weights)
        if folder.name != "ema":
            for name, tensor in trained.items():
                expected = tensor * (7 / 4) if ".lora_B." in name else tensor
                assert torch.equal(
                    weights[f"diffusion_model.{name.replace('.default.', '.')}"], expected
                )
    assert workspace.train("max_train_steps=5") == 0, (
        "a checkpoint is taken up whatever its files are called"
    )
    assert [line["step"] for line in workspace.metrics()] == [1, 2, 3, 4, 5]
    start = (
        "init_lora=output",
        "output_dir=second",
        "lora_format=diffusers",
        "learning_rate=1e-12",
        "lr_end=0",
    )
    first = load_file(workspace.path(LORA))
    assert workspace.train(*start) == 0
    for name, tensor in load_file(
        workspace.path("second/pytorch_lora_weights.safetensors")
    ).items():
        expected = first[name.replace("transformer.", "diffusion_model.")]
        assert_close(tensor, expected, terms=ELEMENTWISE)


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_the_average_of_a_dora_has_the_same_tensors_as_the_dora(
    workspace: Workspace, form: str
) -> None:
    workspace.write_config(
        use_dora=True, use_ema=True, lora_format=form, lora_rank=4, max_train_steps=1
    )
    assert workspace.train() == 0
    average = load_file(workspace.path("output/ema/pytorch_lora_weights.safetensors"))
    assert average.keys() == load_file(workspace.path(LORA)).keys()
    assert (
        len([name for name in average if name.endswith(("dora_scale", "lora_magnitude_vector"))])
        == len(average) / 3
    )


@pytest.mark.parametrize(
    ("targets", "init"),
    [
        ('["to_query", "feed_forward.in_layer"]', "default"),
        *(("all-linear", init) for init in ("default", "gaussian", "pissa", "olora")),
    ],
)
def test_every_lora_target_and_initialisation_is_verified(
    workspace: Workspace, targets: str, init: str
) -> None:
    workspace.write_config(
        peft_lora_target_modules=targets, lora_init_type=init, lora_rank=4, max_train_steps=2
    )
    assert workspace.train() == 0, "publishing verifies every tensor through the stock loader"
    modules = {name.rpartition(".lora_")[0] for name in load_file(workspace.path(LORA))}
    assert not any("modulation" in name or "time_embeddings" in name for name in modules)
    assert any("feed_forward.in_layer" in name for name in modules)
    assert any(name.endswith("out_layer") for name in modules) == (targets == "all-linear")
    assert "transformer.out_layer.out_layer" not in modules


def test_pissa_is_saved_as_a_difference_to_the_base_model(
    workspace: Workspace, t2i_checkpoint: Path
) -> None:
    """With a learning rate of almost 0 the trained pissa model is the base model, and so must its
    file be.
    """
    workspace.write_config(
        lora_init_type="pissa", lora_rank=4, learning_rate=1e-12, lr_end=0, max_train_steps=1
    )
    assert workspace.train() == 0
    weights = load_file(workspace.path(LORA))
    for name in [name for name in weights if ".lora_A." in name]:
        update = weights[name.replace(".lora_A.", ".lora_B.")] @ weights[name]
        assert update.abs().max() < 1e-5


def test_a_lora_on_the_hub_is_checked_before_anything_is_encoded(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    remote = repository_of_loras(tmp_path, monkeypatch)
    layer = "transformer.visual_transformer_blocks.0.self_attention.to_query"
    weights = {
        f"{layer}.lora_A.weight": torch.zeros(8, 32),
        f"{layer}.lora_B.weight": torch.zeros(32, 8),
    }
    save_file(weights, remote / LORA_FILE)

    code = workspace.train(
        "init_lora=someone/lora", "lora_rank=4", "cache_dir=empty", "cache_dir_text=empty"
    )

    assert code == 2
    assert "has rank 8, lora_rank is 4." in capsys.readouterr().err
    assert not [path for path in workspace.path("empty").rglob("*") if path.is_file()]


@pytest.mark.slow(3)
def test_init_lora_reads_every_naming_scheme(workspace: Workspace) -> None:
    workspace.write_config(learning_rate=0.05)
    assert workspace.train() == 0
    first = workspace.path(LORA)
    trained = load_file(first)
    for form in ("transformer.", "base_model.model.", "diffusion_model."):
        renamed = {
            form + name.removeprefix("transformer."): tensor for name, tensor in trained.items()
        }
        torch_file = workspace.path(f"{form}safetensors")
        from safetensors.torch import save_file

        save_file(renamed, torch_file)
        output = f"out-{form.strip('.')}"
        settings = (
            f"output_dir={output}",
            f"init_lora={torch_file}",
            "learning_rate=1e-12",
            "lr_end=0",
        )
        assert workspace.train(*settings) == 0
        again = load_file(workspace.path(f"{output}/pytorch_lora_weights.safetensors"))
        for name, tensor in trained.items():
            assert_close(again[name], tensor, terms=ELEMENTWISE)


def test_a_full_fine_tune_with_an_average_is_a_pipeline_of_the_average(
    workspace: Workspace,
) -> None:
    workspace.write_config(model_type="full", use_ema=True, learning_rate=1e-3)
    assert workspace.train() == 0
    folder = workspace.path("output/pipeline")
    pipeline = Kandinsky5T2IPipeline.from_pretrained(folder, tokenizer=load_processor(folder))
    averaged = load_file(
        workspace.path("output/checkpoint-4/transformer_ema/diffusion_pytorch_model.safetensors")
    )
    name = "visual_transformer_blocks.0.feed_forward.in_layer.weight"
    assert torch.equal(pipeline.transformer.get_parameter(name), averaged[name])
    trained = load_file(
        workspace.path("output/checkpoint-4/transformer/diffusion_pytorch_model.safetensors")
    )
    assert not torch.equal(trained[name], averaged[name])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_to_a_finite_loss(workspace: Workspace, precision: str) -> None:
    workspace.write_config(mixed_precision=precision)
    assert workspace.train() == 0
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float32}[precision]
    weights = load_file(workspace.path("output/checkpoint-4/training_state/trainable.safetensors"))
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert all(line["train_loss"] < 10 for line in workspace.metrics())


def test_the_published_file_describes_its_run(trained: Workspace) -> None:
    """By the output folder, since the user gave no name."""
    header = read_header(trained.path(LORA))[METADATA]

    assert {key: value for key, value in header.items() if key != "modelspec.date"} == {
        **{key: header[key] for key in ("format", METADATA_KEY)},
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "kandinsky5-image/t2i-lite-sft/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "output",
        "modelspec.resolution": "128x128",
        STEP_NOTE: "4",
    }
    assert date.fromisoformat(header["modelspec.date"]) <= datetime.now(UTC).date()


def test_kandinskys_own_program_can_load_the_result(
    trained: Workspace, t2i_checkpoint: Path
) -> None:
    """It makes peft's adapter from config_lora.json, and reads the weights without their prefix."""
    settings = json.loads(trained.path("output/config_lora.json").read_text())
    weights = load_file(trained.path(LORA))
    transformer = Kandinsky5Transformer3DModel.from_pretrained(
        t2i_checkpoint, subfolder="transformer"
    )

    inject_adapter_in_model(PeftConfig(**settings), transformer)
    plain = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    result = set_peft_model_state_dict(transformer, plain)

    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora_" in name]
    layer = transformer.get_submodule("visual_transformer_blocks.0.self_attention.to_query")
    assert layer.scaling == {"default": 1.0}


def test_a_second_run_does_not_load_an_encoder(
    trained: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*arguments: Any) -> None:
        raise AssertionError("an encoder was loaded although everything is cached")

    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_text_encoder", refuse)
    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_latent_encoder", refuse)
    assert trained.train("max_train_steps=6") == 0
    assert trained.train("--output_dir=other", "cache_dir_vae=output/cache/vae") == 0


def test_only_new_pictures_and_captions_are_encoded(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(
        trained.path("datasets/pictures/p0.png"), trained.path("datasets/pictures/copy.png")
    )
    trained.path("datasets/pictures/copy.txt").write_text("a new caption")
    Image.new("RGB", (64, 64), "red").save(trained.path("datasets/pictures/red.png"))
    trained.path("datasets/pictures/red.txt").write_text("red")
    capsys.readouterr()
    assert trained.train("max_train_steps=6") == 0
    output = capsys.readouterr().out
    assert "Encoding pictures: 1 picture in" in output
    assert "Encoding captions: 2 captions" in output


def test_a_damaged_cache_entry_is_encoded_again(trained: Workspace) -> None:
    before = trained.metrics()
    entries = list(trained.path("output/cache/vae").rglob("*.safetensors.zst"))
    originals = {path: path.read_bytes() for path in entries}
    for path in entries[:3]:
        path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    shutil.move(trained.path("output"), trained.path("aside"))
    shutil.copytree(trained.path("aside/cache"), trained.path("output/cache"))
    assert trained.train() == 0
    losses = [[line["train_loss"] for line in record] for record in (before, trained.metrics())]
    assert losses[1] == losses[0]
    assert {path: path.read_bytes() for path in entries} == originals
    assert trained.run("cache", "verify") == 0


def test_regularisation_data_keep_the_base_model(workspace: Workspace) -> None:
    """On regularisation data the untrained LoRA is already right: the loss is 0 until other data
    are trained.
    """
    held = {**DATASETS[0], "id": "held", "is_regularisation_data": True}
    workspace.write_datasets([held, {**DATASETS[0], "start_step": 4}, DATASETS[1]])

    assert workspace.train("max_train_steps=8") == 0

    losses = [line["train_loss"] for line in workspace.metrics()]
    assert losses[:3] == [0.0, 0.0, 0.0]
    assert any(losses[3:])


def test_a_loss_that_is_not_finite_stops_before_the_update(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = step.elementwise_loss

    def broken(prediction: torch.Tensor, noisy: Any, config: Any) -> torch.Tensor:
        loss = original(prediction, noisy, config)
        return loss * float("nan") if broken_from() else loss

    calls = iter(range(100))

    def broken_from() -> bool:
        return next(calls) == 2

    opened: list[MetricsFile] = []
    monkeypatch.setattr(step, "elementwise_loss", broken)
    monkeypatch.setattr(
        metrics, "MetricsFile", lambda *given: opened.append(MetricsFile(*given)) or opened[0]
    )
    workspace.write_config(checkpoint_step_interval=1)
    assert workspace.train() == 1
    monkeypatch.chdir(workspace.folder)
    with pytest.raises(ValueError, match="closed file"):
        opened[0].append(3, {})
    message = capsys.readouterr().err
    assert "pictures/p" in message
    assert "weights were not updated" in message
    assert [line["step"] for line in workspace.metrics()] == [1, 2]
    assert "stopped" in workspace.path("output/training_report.html").read_text()
    monkeypatch.undo()
    assert workspace.train() == 0, "it goes on from the checkpoint before"


@pytest.mark.slow
def test_i2i_trains_and_previews_from_its_sources(tmp_path: Path, i2i_checkpoint: Path) -> None:
    workspace = Workspace.create(tmp_path / "run", i2i_checkpoint, model_flavour="i2i-lite-sft")
    workspace.add_pictures("datasets/sources", 8, seed=5)
    source = {**DATASETS[0], "id": "sources", "instance_data_dir": "datasets/sources"}
    source.update(dataset_type="conditioning", conditioning_type="reference_strict")
    workspace.write_datasets(
        [{**DATASETS[0], "conditioning_data": ["sources"]}, source, DATASETS[1]]
    )
    workspace.write_config(
        validation_disable=False, num_eval_images=2, caption_dropout_probability=0.5
    )
    assert workspace.train() == 0
    names = [path.name for path in workspace.path("output/validation_images").iterdir()]
    assert any("validation-1_0_128x128" in name for name in names)
    texts = list(workspace.path("cache/text").rglob("*.safetensors*"))
    # Every caption and the empty one with each of eight sources, and three prompts with two of
    # them.
    assert len(texts) >= 8 * 3


@pytest.mark.slow
def test_photographs_with_spaces_and_unicode_in_their_paths_train(tmp_path: Path) -> None:
    """Real pictures, mixed ratios and names, another checkpoint, all the way to previews and
    report.
    """
    skimage_data = pytest.importorskip("skimage.data")
    checkpoint = make_checkpoint(tmp_path / "model with spaces")
    workspace = Workspace.create(
        tmp_path / "मेरा काम 我的", checkpoint, pictures=0, max_train_steps=3
    )
    folder = workspace.path("datasets/pictures/sub folder")
    folder.mkdir(parents=True)
    for name in ("astronaut", "coffee", "cat", "rocket", "camera", "page"):
        Image.fromarray(getattr(skimage_data, name)()).save(folder / f"{name} तस्वीर.jpg")
        (folder / f"{name} तस्वीर.txt").write_text(
            f"a photograph: {name}\n照片 {name}\n", encoding="utf-8"
        )
    workspace.write_config(validation_disable=False, train_batch_size=1)
    assert workspace.train() == 0
    assert workspace.path(LORA).exists()
    report = workspace.path("output/training_report.html").read_text(encoding="utf-8")
    assert "astronaut तस्वीर.jpg" in report


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PYTORCH_ALLOC_CONF", None, "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "backend:native", "backend:native"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", None),
    ],
)
def test_gpu_memory_uses_expandable_segments_unless_the_user_configures_it(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str | None,
    expected: str | None,
) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(each, "to be restored")
        monkeypatch.delenv(each)
    if value is not None:
        monkeypatch.setenv(name, value)
    with lock_output(workspace.path("output")):
        assert workspace.train() == 2, "the plan is made, and nothing begins"
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
