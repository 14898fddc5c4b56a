"""Whole runs, as a user starts them."""

from __future__ import annotations

import json
import os
import re
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

from simpletuner.config.sources import parse_arguments
from simpletuner.headers import METADATA, read_header
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.planning.build import plan_training
from simpletuner.planning.entries import text_folder
from simpletuner.planning.lock import lock_output
from simpletuner.reporting import metrics
from simpletuner.reporting.metrics import MetricsFile
from simpletuner.run.train import sweep_strays
from simpletuner.training import step
from simpletuner.weights.lora_names import LORA_FILE, METADATA_KEY, STEP_NOTE
from tests.tools.hub import repository_of_loras
from tests.tools.runs import LORA
from tests.tools.tiny import make_checkpoint
from tests.tools.tolerances import ELEMENTWISE, assert_close
from tests.tools.workspace import DATASETS, Workspace, read_events

Capture = pytest.CaptureFixture[str]
QUERY = "visual_transformer_blocks.0.self_attention.to_query"
TRAINABLE = "output/checkpoint-4/training_state/trainable.safetensors"
# A scale of alpha / rank that is not a power of two, so that a rounded product would show.
SCALED_LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 7, "learning_rate": 0.05}
SCALE = 7 / 4
# Settings with which the weights of a run stay where they start.
STANDSTILL: dict[str, Any] = {"learning_rate": 1e-12, "lr_end": 0}


def test_a_run_names_its_stages_for_programs(finished: Workspace) -> None:
    events = read_events(finished.path("output/events.jsonl"))
    ended = [event["stage"] for event in events if event["type"] == "lifecycle.stage"]

    assert [stage["key"] for stage in ended if stage["status"] == "completed"] == [
        "init_torch",
        "init_text_embed_cache",
        "init_vae_cache",
        "init_load_base_model",
        "checkpoint_save",
        "checkpoint_save",
        "save_result",
        "training_complete",
    ]


def test_a_plain_run_warns_of_nothing(finished: Workspace) -> None:
    """Neither in its log nor to those who watch it; libraries may."""
    log = finished.path("debug.log").read_text(encoding="utf-8")
    events = read_events(finished.path("output/events.jsonl"))

    assert not re.findall(r"^.* (?:WARNING|ERROR) +simpletuner.*$", log, re.MULTILINE)
    assert {event["severity"] for event in events} == {"info", "success"}


def test_a_start_sweeps_what_a_killed_run_left(finished: Workspace, tmp_path: Path) -> None:
    run = finished.stopped(tmp_path / "run", 2)
    swept = [
        run.path(f"output/{folder}/.left.0123456789ab.tmp")
        for folder in (".", "ema", "validation_images", "benchmarks/base_model")
    ]
    swept.append(run.path("output/ema/pipeline-tmp/model"))
    swept.append(run.path("output/unverified-tmp/model"))
    with run.inside():
        plan = plan_training(parse_arguments([]))
        caches = [text_folder(plan).absolute(), plan.datasets[0].latent_dir.absolute()]
    old = [folder / ".old.0123456789ab.tmp" for folder in caches]
    new = [folder / ".new.0123456789ab.tmp" for folder in caches]
    for path in (*swept, *old, *new):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in old:
        os.utime(path, (0, 0))

    with run.inside():
        sweep_strays(plan)

    assert [path for path in (*swept, *old) if path.exists()] == []
    assert all(path.exists() for path in new), "another run may be writing it"


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

    paths = list(workspace.path("output/validation_images").iterdir())
    names = {path.name for path in paths}
    for prompt in ("unconditional", "anime_token", "नमस्ते", "validation"):
        for size in ("128x160", "144x144"):
            assert f"step_4_{prompt}_0_{size}.png" in names
            assert f"step_4_{prompt}_0_{size}_ema.png" in names
    for path in paths:
        with Image.open(path) as picture:
            assert f"{picture.width}x{picture.height}" in path.name
    base_model = workspace.path("output/benchmarks/base_model")
    assert (base_model / "unconditional_144x144.png").exists()
    assert "<script" in workspace.path("output/training_report.html").read_text()


def test_lora_of_any_strength_draws_the_same_in_the_stock_pipeline(
    workspace: Workspace, t2i_checkpoint: Path
) -> None:
    workspace.write_config(**SCALED_LORA, use_ema=True)

    assert workspace.train() == 0

    published = load_file(workspace.path(LORA))
    up = load_file(workspace.path(TRAINABLE))[f"{QUERY}.lora_B.default.weight"]
    assert up.abs().max() > 1e-3, "something was learned"
    assert torch.equal(published[f"transformer.{QUERY}.lora_B.weight"], up * SCALE)
    processor = load_processor(t2i_checkpoint)
    pipeline = Kandinsky5T2IPipeline.from_pretrained(t2i_checkpoint, tokenizer=processor)
    pipeline.load_lora_weights(workspace.path("output"))
    layer = pipeline.transformer.get_submodule(QUERY)
    assert list(layer.scaling.values()) == [1.0]
    assert workspace.path(f"output/ema/{LORA_FILE}").exists()


@pytest.mark.slow
def test_comfyui_files_hold_the_trained_weights_and_can_be_continued(workspace: Workspace) -> None:
    workspace.write_config(**SCALED_LORA, lora_format="comfyui", use_ema=True)

    assert workspace.train() == 0

    trained = load_file(workspace.path(TRAINABLE))
    expected = {}
    for name, tensor in trained.items():
        scale = SCALE if ".lora_B." in name else 1
        expected[f"diffusion_model.{name.replace('.default.', '.')}"] = tensor * scale
    for folder in ("output", "output/checkpoint-4"):
        weights = load_file(workspace.path(f"{folder}/{LORA_FILE}"))
        average = load_file(workspace.path(f"{folder}/ema/{LORA_FILE}"))
        assert weights.keys() == average.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)

    # Their names do not matter where a run continues, or where another one starts from them.
    assert workspace.train("max_train_steps=5") == 0
    assert [row["step"] for row in workspace.metrics()] == [1, 2, 3, 4, 5]
    first = load_file(workspace.path(LORA))
    workspace.write_config(**STANDSTILL)
    assert workspace.train("init_lora=output", "output_dir=second", "lora_format=diffusers") == 0
    for name, tensor in load_file(workspace.path(f"second/{LORA_FILE}")).items():
        start = first[name.replace("transformer.", "diffusion_model.")]
        assert_close(tensor, start, terms=ELEMENTWISE)


@pytest.mark.parametrize("naming", ["diffusers", "comfyui"])
def test_the_average_of_a_dora_has_the_same_tensors_as_the_dora(
    workspace: Workspace, naming: str
) -> None:
    workspace.write_config(
        use_dora=True, use_ema=True, lora_format=naming, lora_rank=4, max_train_steps=1
    )

    assert workspace.train() == 0

    average = load_file(workspace.path(f"output/ema/{LORA_FILE}"))
    assert average.keys() == load_file(workspace.path(LORA)).keys()
    # A third are magnitudes, beside the A and the B of every layer.
    magnitude = "dora_scale" if naming == "comfyui" else "lora_magnitude_vector"
    assert len([name for name in average if name.endswith(magnitude)]) == len(average) / 3


@pytest.mark.parametrize(
    ("targets", "initialisation"),
    [
        ('["to_query", "feed_forward.in_layer"]', "default"),
        ("all-linear", "default"),
        ("all-linear", "gaussian"),
        ("all-linear", "pissa"),
        ("all-linear", "olora"),
    ],
)
def test_every_lora_target_and_initialisation_is_verified(
    workspace: Workspace, targets: str, initialisation: str
) -> None:
    """A run only succeeds when every tensor is loaded by the stock loader as it was trained."""
    workspace.write_config(
        peft_lora_target_modules=targets,
        lora_init_type=initialisation,
        lora_rank=4,
        max_train_steps=2,
    )

    assert workspace.train() == 0

    modules = {name.rpartition(".lora_")[0] for name in load_file(workspace.path(LORA))}
    assert not any("modulation" in name or "time_embeddings" in name for name in modules)
    assert any("feed_forward.in_layer" in name for name in modules)
    assert any(name.endswith("out_layer") for name in modules) == (targets == "all-linear")
    assert "transformer.out_layer.out_layer" not in modules


def test_pissa_is_saved_as_a_difference_to_the_base_model(workspace: Workspace) -> None:
    """PiSSA moves a part of the base weights into the LoRA, which the file must not contain.

    With a learning rate of almost 0 the trained model is the base model: the file has no change.
    """
    workspace.write_config(**STANDSTILL, lora_init_type="pissa", lora_rank=4, max_train_steps=1)

    assert workspace.train() == 0

    weights = load_file(workspace.path(LORA))
    for name in [name for name in weights if ".lora_A." in name]:
        update = weights[name.replace(".lora_A.", ".lora_B.")] @ weights[name]
        assert update.abs().max() < 1e-5


def test_a_lora_on_the_hub_is_checked_before_anything_is_encoded(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    repository = repository_of_loras(tmp_path, monkeypatch)
    weights = {
        f"transformer.{QUERY}.lora_A.weight": torch.zeros(8, 32),
        f"transformer.{QUERY}.lora_B.weight": torch.zeros(32, 8),
    }
    save_file(weights, repository / LORA_FILE)
    caches = ("cache_dir=empty", "cache_dir_text=empty")

    assert workspace.train("init_lora=someone/lora", "lora_rank=4", *caches) == 2

    assert "has rank 8, lora_rank is 4." in capsys.readouterr().err
    assert not [path for path in workspace.path("empty").rglob("*") if path.is_file()]


@pytest.mark.slow(3)
def test_init_lora_reads_every_naming_scheme(workspace: Workspace) -> None:
    workspace.write_config(learning_rate=0.05)
    assert workspace.train() == 0
    trained = load_file(workspace.path(LORA))
    workspace.write_config(**STANDSTILL)

    for prefix in ("transformer.", "base_model.model.", "diffusion_model."):
        renamed = {
            prefix + name.removeprefix("transformer."): tensor for name, tensor in trained.items()
        }
        path = workspace.path(f"{prefix}safetensors")
        save_file(renamed, path)
        output = f"out-{prefix.strip('.')}"
        assert workspace.train(f"output_dir={output}", f"init_lora={path}") == 0

        weights = load_file(workspace.path(f"{output}/{LORA_FILE}"))
        for name, tensor in trained.items():
            assert_close(weights[name], tensor, terms=ELEMENTWISE)


def test_a_full_fine_tune_with_an_average_is_a_pipeline_of_the_average(
    workspace: Workspace,
) -> None:
    workspace.write_config(model_type="full", use_ema=True, learning_rate=1e-3)

    assert workspace.train() == 0

    folder = workspace.path("output/pipeline")
    pipeline = Kandinsky5T2IPipeline.from_pretrained(folder, tokenizer=load_processor(folder))
    checkpoint = workspace.path("output/checkpoint-4")
    file = "diffusion_pytorch_model.safetensors"
    averaged = load_file(checkpoint / "transformer_ema" / file)
    trained = load_file(checkpoint / "transformer" / file)
    name = "visual_transformer_blocks.0.feed_forward.in_layer.weight"
    assert torch.equal(pipeline.transformer.get_parameter(name), averaged[name])
    assert not torch.equal(trained[name], averaged[name])


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float32),
    ],
)
def test_half_precision_trains_to_a_finite_loss(
    workspace: Workspace, precision: str, dtype: torch.dtype
) -> None:
    """fp16 computes in half precision and keeps the trained weights in float32."""
    workspace.write_config(mixed_precision=precision)

    assert workspace.train() == 0

    weights = load_file(workspace.path(TRAINABLE))
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert all(row["train_loss"] < 10 for row in workspace.metrics())


def test_the_published_file_describes_its_run(trained: Workspace) -> None:
    """The title is the output folder, since the user gave no name."""
    header = read_header(trained.path(LORA))[METADATA]

    day = header.pop("modelspec.date")
    assert date.fromisoformat(day) <= datetime.now(UTC).date()
    assert header == {
        "format": header["format"],
        METADATA_KEY: header[METADATA_KEY],
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "kandinsky5-image/t2i-lite-sft/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "output",
        "modelspec.resolution": "128x128",
        STEP_NOTE: "4",
    }


def test_kandinskys_own_program_can_load_the_result(
    trained: Workspace, t2i_checkpoint: Path
) -> None:
    """It makes peft's adapter from config_lora.json, and reads the weights without their prefix."""
    settings = json.loads(trained.path("output/config_lora.json").read_text())
    weights = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(trained.path(LORA)).items()
    }
    transformer = Kandinsky5Transformer3DModel.from_pretrained(
        t2i_checkpoint, subfolder="transformer"
    )

    inject_adapter_in_model(PeftConfig(**settings), transformer)
    result = set_peft_model_state_dict(transformer, weights)

    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora_" in name]
    assert transformer.get_submodule(QUERY).scaling == {"default": 1.0}


def test_a_second_run_does_not_load_an_encoder(
    trained: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("an encoder was loaded although everything is cached")

    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_text_encoder", refuse)
    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_latent_encoder", refuse)

    assert trained.train("max_train_steps=6") == 0
    assert trained.train("--output_dir=other", "cache_dir_vae=output/cache/vae") == 0


def test_only_new_pictures_and_captions_are_encoded(trained: Workspace, capsys: Capture) -> None:
    """A copy of a picture has its latents already, whatever its name is."""
    pictures = trained.path("datasets/pictures")
    shutil.copy(pictures / "p0.png", pictures / "copy.png")
    (pictures / "copy.txt").write_text("a new caption")
    Image.new("RGB", (64, 64), "red").save(pictures / "red.png")
    (pictures / "red.txt").write_text("red")
    capsys.readouterr()

    assert trained.train("max_train_steps=6") == 0

    output = capsys.readouterr().out
    assert "Encoding pictures: 1 picture in" in output
    assert "Encoding captions: 2 captions" in output


@pytest.mark.warns
def test_a_damaged_cache_entry_is_encoded_again(trained: Workspace) -> None:
    losses = [row["train_loss"] for row in trained.metrics()]
    entries = list(trained.path("output/cache/vae").rglob("*.safetensors.zst"))
    originals = {path: path.read_bytes() for path in entries}
    for path in entries[:3]:
        path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    # The same run again: only its cache stays.
    shutil.move(trained.path("output"), trained.path("aside"))
    shutil.copytree(trained.path("aside/cache"), trained.path("output/cache"))

    assert trained.train() == 0

    assert [row["train_loss"] for row in trained.metrics()] == losses
    assert {path: path.read_bytes() for path in entries} == originals
    assert trained.run("cache", "verify") == 0


def test_regularisation_data_keep_the_base_model(workspace: Workspace) -> None:
    """The target is the prediction of the base model, so the loss of an untrained LoRA is 0.

    Other data are trained from step 4 on.
    """
    regularisation = {**DATASETS[0], "id": "regularisation", "is_regularisation_data": True}
    late = {**DATASETS[0], "start_step": 4}
    workspace.write_datasets([regularisation, late, DATASETS[1]])

    assert workspace.train("max_train_steps=8") == 0

    losses = [row["train_loss"] for row in workspace.metrics()]
    assert losses[:3] == [0.0, 0.0, 0.0]
    assert any(losses[3:])


def test_a_loss_that_is_not_finite_stops_before_the_update(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    compute_loss = step.elementwise_loss
    calls = iter(range(100))
    records: list[MetricsFile] = []

    def compute_third_as_nan(prediction: torch.Tensor, noisy: Any, config: Any) -> torch.Tensor:
        loss = compute_loss(prediction, noisy, config)
        return loss * float("nan") if next(calls) == 2 else loss

    def open_record(*arguments: Any) -> MetricsFile:
        records.append(MetricsFile(*arguments))
        return records[-1]

    workspace.write_config(checkpoint_step_interval=1)
    with monkeypatch.context() as patch:
        patch.setattr(step, "elementwise_loss", compute_third_as_nan)
        patch.setattr(metrics, "MetricsFile", open_record)
        assert workspace.train() == 1

    with workspace.inside(), pytest.raises(ValueError, match="closed file"):
        records[0].append(3, {})
    error = capsys.readouterr().err
    assert "pictures/p" in error
    assert "weights were not updated" in error
    assert [row["step"] for row in workspace.metrics()] == [1, 2]
    assert "stopped" in workspace.path("output/training_report.html").read_text()
    assert workspace.train() == 0, "the run continues from the checkpoint of step 2"


@pytest.mark.slow
def test_i2i_trains_and_previews_from_its_sources(tmp_path: Path, i2i_checkpoint: Path) -> None:
    workspace = Workspace.create(tmp_path / "run", i2i_checkpoint, model_flavour="i2i-lite-sft")
    workspace.add_pictures("datasets/sources", 8, seed=5)
    edits = {**DATASETS[0], "conditioning_data": ["sources"]}
    sources = {
        **DATASETS[0],
        "id": "sources",
        "instance_data_dir": "datasets/sources",
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
    }
    workspace.write_datasets([edits, sources, DATASETS[1]])
    own = {"prompt": "a hat", "picture": "datasets/sources/p7.png", "resolution": "160x128"}
    workspace.path("library.json").write_text(json.dumps({"own": own}))
    workspace.write_config(
        validation_disable=False,
        num_eval_images=2,
        caption_dropout_probability=0.5,
        user_prompt_library="library.json",
    )

    assert workspace.train() == 0

    names = [path.name for path in workspace.path("output/validation_images").iterdir()]
    assert any("validation-1_0_128x128" in name for name in names)
    assert any("_own_0_160x128" in name for name in names), "once, from its own picture"
    assert not any("_own-" in name for name in names)
    texts = list(workspace.path("cache/text").rglob("*.safetensors*"))
    # Two captions and the empty one with each of eight sources.
    assert len(texts) >= 8 * 3


@pytest.mark.slow
def test_photographs_with_spaces_and_unicode_in_their_paths_train(tmp_path: Path) -> None:
    """Real pictures of many ratios, grey ones too, all the way to previews and the report."""
    skimage_data = pytest.importorskip("skimage.data")
    checkpoint = make_checkpoint(tmp_path / "model with spaces")
    workspace = Workspace.create(
        tmp_path / "मेरा काम 我的", checkpoint, pictures=0, max_train_steps=3
    )
    folder = workspace.path("datasets/pictures/sub folder")
    folder.mkdir(parents=True)
    for name in ("astronaut", "coffee", "cat", "rocket", "camera", "page"):
        photograph = Image.fromarray(getattr(skimage_data, name)())
        photograph.save(folder / f"{name} तस्वीर.jpg")
        caption = f"a photograph: {name}\n照片 {name}\n"
        (folder / f"{name} तस्वीर.txt").write_text(caption, encoding="utf-8")
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
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        # Set first, so that monkeypatch removes at the end what the run has set.
        monkeypatch.setenv(variable, "to be restored")
        monkeypatch.delenv(variable)
    if value is not None:
        monkeypatch.setenv(name, value)

    with lock_output(workspace.path("output")):
        assert workspace.train() == 2, "the plan is made, and nothing starts in a locked folder"

    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
