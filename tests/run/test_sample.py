"""`simpletuner sample` and `simpletuner sweep`, as a user calls them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from simpletuner.annexes.figures import Columns, still
from simpletuner.annexes.report.sheet import Sheet
from simpletuner.reporting.metrics import MediaRecord
from tests.tools.cards import pretend_to_have
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
LORA = "output/pytorch_lora_weights.safetensors"
PROMPT = ("--prompt", "a red square")
HELD = {**DATASETS[0], "id": "held", "dataset_type": "eval", "instance_data_dir": "datasets/held"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Workspace:
    """A finished run with two checkpoints, previews of both, an average and an evaluation loss."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    workspace = Workspace.create(
        folder, t2i_checkpoint, validation_disable=False, validation_step_interval=2
    )
    workspace.add_pictures("datasets/held", 1)
    workspace.write_datasets([DATASETS[0], HELD, DATASETS[1]])
    workspace.write_config(
        lora_rank=4,
        learning_rate=0.05,
        use_ema=True,
        ema_decay=0.5,
        eval_steps_interval=2,
        eval_timesteps=2,
    )
    assert workspace.train() == 0
    return workspace


def preview(workspace: Workspace, step: int, ending: str = "") -> bytes:
    return workspace.path(
        f"output/validation_images/step_{step}_validation_0_128x128{ending}.png"
    ).read_bytes()


def sampled(workspace: Workspace, folder: str, *arguments: str) -> bytes:
    """What one call rendered."""
    assert workspace.run("sample", *arguments, "--output", folder) == 0
    (picture,) = workspace.path(folder).glob("*.png")
    return picture.read_bytes()


def test_samples_equal_previews_and_do_not_change_the_run(trained: Workspace) -> None:
    run = trained.path("output")
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": "",
        "started": "",
        "command": "",
        "since": 0,
    }
    (run / "run.lock").write_text(json.dumps(owner))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert sampled(trained, "one", "output", *PROMPT) == preview(trained, 4)
    assert sampled(trained, "two", "output", *PROMPT, "--checkpoint", "2") == preview(trained, 2)
    assert sampled(trained, "three", "output/checkpoint-4", *PROMPT, "--ema") == preview(
        trained, 4, "_ema"
    )
    assert sampled(trained, "four", LORA, *PROMPT, "enable_group_offload=true") == preview(
        trained, 4
    )
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (run / "run.lock").unlink()


def test_samples_are_not_overwritten_and_record_their_settings(trained: Workspace) -> None:
    command = (
        "sample",
        "output",
        *PROMPT,
        "--seed",
        "5",
        "--resolution",
        "144x128",
        "steps=3",
        "--output",
        "again",
    )
    assert trained.run(*command) == 0
    assert trained.run(*command, "--strength", "0.5") == 0
    names = ["a_red_square_5_144x128-2.png", "a_red_square_5_144x128.png"]
    assert sorted(path.name for path in trained.path("again").glob("*.png")) == names
    first, second = (
        json.loads(trained.path(f"again/{name}").with_suffix(".json").read_text())
        for name in names[::-1]
    )
    assert (
        first["seed"],
        first["width"],
        first["validation_num_inference_steps"],
        first["step"],
    ) == (5, 144, 3, 4)
    assert (first["strength"], second["strength"]) == (1.0, 0.5)
    assert len({trained.path(f"again/{name}").read_bytes() for name in names}) == 2


def test_the_base_model_and_a_downloaded_lora_can_be_sampled(
    trained: Workspace, t2i_checkpoint: Path
) -> None:
    base = trained.path("output/benchmarks/base_model/validation_128x128.png").read_bytes()
    assert sampled(trained, "base", *PROMPT) == base, "the configuration alone"
    shutil.copy(trained.path(LORA), trained.path("datasets/theirs.safetensors"))
    model = (
        f"pretrained_model_name_or_path={t2i_checkpoint}",
        "resolution=128",
        "steps=2",
        "seed=7",
        "mixed_precision=no",
    )
    command = (
        "sample",
        "datasets/theirs.safetensors",
        *PROMPT,
        *model,
        "--strength",
        "0, 1",
        "--output",
        "theirs",
    )
    assert trained.run(*command) == 0
    made = {
        path.stem.rpartition("_")[2]: path.read_bytes()
        for path in trained.path("theirs").glob("*.png")
    }
    assert made == {"strength-0": base, "strength-1": preview(trained, 4)}


def test_a_dora_at_strength_0_equals_the_base_model(
    trained: Workspace, t2i_checkpoint: Path, capsys: Capture
) -> None:
    """Which it is not in the stock pipeline, and a strength never changes its magnitudes: so it is
    said.
    """
    base = trained.path("output/benchmarks/base_model/validation_128x128.png").read_bytes()
    weights = load_file(trained.path(LORA))
    for name in [name for name in weights if name.endswith("lora_B.weight")]:
        weights[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.full(
            (len(weights[name]),), 3.0
        )
    save_file(weights, trained.path("datasets/dora.safetensors"))
    source = (
        "datasets/dora.safetensors",
        *PROMPT,
        f"pretrained_model_name_or_path={t2i_checkpoint}",
        "resolution=128",
        "steps=2",
        "seed=7",
        "mixed_precision=no",
    )
    whole = sampled(trained, "dora-1", *source)
    assert "magnitudes" not in capsys.readouterr().out
    assert sampled(trained, "dora-0", *source, "--strength", "0") == base != whole
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "strength: scales the update of a DoRA but not its magnitudes, as in the stock pipeline"
        in said
    )


def test_a_quantised_base_changes_the_sample(trained: Workspace) -> None:
    picture = sampled(trained, "int8", "output", *PROMPT, "base_model_precision=int8-quanto")
    assert picture != preview(trained, 4)


def test_a_sweep_marks_the_lowest_loss_and_continues_where_it_stopped(
    trained: Workspace, capsys: Capture
) -> None:
    command = (
        "sweep",
        "output",
        "--strengths",
        "0.5,1",
        "validation_disable_unconditional=true",
        "--output",
        "sweep",
    )
    assert trained.run(*command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "The evaluation loss is lowest at " in told
    rows = [
        json.loads(line)
        for line in trained.path("output/training_metrics.jsonl").read_text().splitlines()
    ]
    recorded = {row["step"]: row["loss/val/held"] for row in rows if "loss/val/held" in row}
    best = min(recorded, key=recorded.__getitem__)
    losses = json.loads(trained.path("sweep/losses.json").read_text())
    assert losses == {
        "0.5": pytest.approx(losses["0.5"]),
        "1": pytest.approx(recorded[best], rel=1e-5),
    }
    assert losses["0.5"] != losses["1"]
    assert (
        f"Checkpoint {best} has {losses['0.5']:.4g} at strength 0.5, {losses['1']:.4g} at "
        "strength 1." in told
    )
    cells = sorted(trained.path("sweep/cells").glob("*.png"))
    assert len(cells) == 4
    assert preview(trained, 4) in [cell.read_bytes() for cell in cells]
    page = trained.path("sweep/sheet.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert page.count("lowest evaluation loss</span>") == 2, "once a strength"
    with Image.open(trained.path("sweep/sheet.png")) as sheet:
        assert sheet.width > 2 * 256
    cells[0].unlink()
    trained.path("datasets/held").rename(trained.path("datasets/away"))
    assert trained.run(*command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "3 of 4 cells exist already" in told
    assert sorted(trained.path("sweep/cells").glob("*.png")) == cells
    # Read and encoded first: a text encoder and the transformer together may not fit.
    assert told.index("strength is not measured: instance_data_dir: these folders") < told.index(
        "Sweeping"
    )
    trained.path("datasets/away").rename(trained.path("datasets/held"))


def test_a_sweep_skips_losses_that_would_not_fit_in_memory(
    trained: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has room to render, but not for a held-out picture of this size."""
    trained.write_datasets([DATASETS[0], {**HELD, "resolution": 1024}, DATASETS[1]])
    command = (
        "sweep",
        "output",
        "--strengths",
        "0.5,1",
        "validation_disable_unconditional=true",
        "--output",
        "large",
    )
    pretend_to_have(monkeypatch, 0.59)
    assert trained.run(*command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "strength is not measured: memory: " in told
    assert told.index("strength is not measured") < told.index("Sweeping")
    trained.write_datasets([DATASETS[0], HELD, DATASETS[1]])


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["output", "--image", "nowhere.png"], ["--prompt: is required", "--image: 'nowhere.png'"]),
        (["nowhere", *PROMPT], ["'nowhere' does not exist."]),
        (["outptu", *PROMPT], ["'outptu' does not exist. Did you mean 'output'?"]),
        (
            ["~nouser/x", *PROMPT, "--image", "~nouser/y.png"],
            ["'~nouser/x' does not exist", "'~nouser/y.png' cannot"],
        ),
        (
            ["output", *PROMPT, "--output", "~nouser/x"],
            ["--output: '~nouser/x' starts with the home folder"],
        ),
        (
            ["output/cache", *PROMPT],
            ["contains no result (pytorch_lora_weights.safetensors). It has no checkpoints"],
        ),
        (
            [*PROMPT, "--strength", "0.5", "--ema", "--checkpoint", "2"],
            [
                "--strength: is for LoRAs",
                "--ema: needs the output",
                "--checkpoint: needs",
                "simpletuner sample output",
            ],
        ),
        (["bare", *PROMPT], ["Its checkpoints: checkpoint-2; choose one with --checkpoint"]),
        (
            ["output", *PROMPT, "--checkpoint", "3"],
            ["'3' is not a complete checkpoint", "checkpoint-2, checkpoint-4"],
        ),
        (
            ["output", *PROMPT, "--image", "datasets/held/p0.png", "gudance=3"],
            ["starts from noise", "mean 'guidance'?"],
        ),
        (
            ["output", *PROMPT, "model_family=sanavideo"],
            ["was trained on kandinsky5-image, not on sanavideo"],
        ),
        (
            ["other.safetensors", *PROMPT],
            ["1 of 1 layers in 'other.safetensors' are not in this model (blocks.0)"],
        ),
        (["wide.safetensors", *PROMPT], ["is for other layers"]),
        (["lokr.safetensors", *PROMPT], ["is not a plain LoRA: it holds blocks.0.lokr_w1"]),
        (
            ["config/config.json", *PROMPT],
            ["source: 'config/config.json' is not a complete safetensors file"],
        ),
        (["empty.safetensors", *PROMPT], ["source: 'empty.safetensors' holds no weights"]),
        (
            ["output", *PROMPT, "--strength", "nan", "--checkpoint", "3"],
            ["--strength: 'nan'", "'3' is not a complete"],
        ),
        (
            ["output", *PROMPT, "--strength", "0,x, y"],
            ["--strength: 'x' is not a number", "--strength: 'y' is not"],
        ),
        (
            [LORA, *PROMPT, "--checkpoint", "2", "--ema"],
            ["--checkpoint: has no effect", "--ema: has no effect"],
        ),
    ],
)
def test_all_mistakes_of_a_sample_command_are_reported_at_once(
    trained: Workspace, capsys: Capture, arguments: list[str], messages: list[str]
) -> None:
    shutil.copytree(
        trained.path("output/checkpoint-2"), trained.path("bare/checkpoint-2"), dirs_exist_ok=True
    )
    layer = "visual_transformer_blocks.0.self_attention.to_query"
    for name, module, inner in (("other", "blocks.0", 8), ("wide", layer, 3)):
        weights = {
            f"{module}.lora_A.weight": torch.ones(2, inner),
            f"{module}.lora_B.weight": torch.ones(8, 2),
        }
        save_file(weights, trained.path(f"{name}.safetensors"))
    save_file({}, trained.path("empty.safetensors"))
    save_file({"blocks.0.lokr_w1": torch.ones(2, 2)}, trained.path("lokr.safetensors"))
    assert trained.run("sample", *arguments) == 2
    error = capsys.readouterr().err
    assert [message for message in messages if message not in error] == []


def test_a_full_fine_tune_is_sampled_by_checkpoint_but_not_by_strength(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(
        model_type="full", max_train_steps=2, checkpoint_step_interval=1, validation_disable=False
    )
    workspace.write_config(validation_step_interval=1, mixed_precision="bf16")
    assert workspace.train() == 0
    assert sampled(workspace, "one", "output", *PROMPT) == preview(workspace, 2)
    assert workspace.run("sweep", "output", *PROMPT, "--output", "sweep") == 0
    cells = {path.read_bytes() for path in workspace.path("sweep/cells").glob("*.png")}
    assert cells == {preview(workspace, 1), preview(workspace, 2)}
    assert workspace.run("sweep", "output", "--ema") == 2
    assert capsys.readouterr().err.count("the run had no use_ema") == 1, (
        "once, not for every checkpoint"
    )
    assert workspace.run("sweep", "output", "--strengths", "0.5") == 2
    assert "--strengths: is for LoRAs" in capsys.readouterr().err
    assert workspace.run("sweep", "datasets", "--checkpoints", "9") == 2
    assert (
        "--checkpoints: '9' is not a complete checkpoint. Checkpoints in datasets: none."
        in capsys.readouterr().err
    )
    assert workspace.run("sweep", "datasets") == 2
    assert "source: 'datasets' contains no complete checkpoints." in capsys.readouterr().err


def test_a_sample_that_does_not_fit_in_memory_is_refused(
    trained: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_have(monkeypatch, 0.05)
    command = ("sample", "output", *PROMPT)
    assert trained.run(*command, "num_processes=8", "fsdp_enable=true") == 2
    error = capsys.readouterr().err
    assert trained.run(*command) == 2
    assert error == capsys.readouterr().err, "one process samples what several have trained"
    assert "memory: " in error
    assert "train_batch_size" not in error
    assert not trained.path("samples").exists()


@pytest.mark.parametrize(
    ("losses", "verdict", "best"),
    [
        ({}, "No evaluation loss was measured", None),
        (
            {100: 0.5, 200: 0.4, 300: 0.55},
            "lowest at step 200 (0.4) and then rises to 0.55 at step 300",
            150,
        ),
        (
            {100: 0.5, 200: 0.4, 300: 0.35},
            "lowest at the last measured step (0.35 at step 300)",
            290,
        ),
    ],
)
def test_a_sheet_interprets_the_evaluation_loss(
    tmp_path: Path, losses: dict[int, float], verdict: str, best: int | None
) -> None:
    records = [MediaRecord(step, "validation", "a", "a.png", 8, 8) for step in (100, 150, 290)]
    rows = [
        {"step": step, "loss/val/held": loss, "loss/val/held/ema": 0.1}
        for step, loss in losses.items()
    ]
    sheet = Sheet("run", tmp_path, records, Columns.of(rows))
    assert verdict in sheet.verdict
    assert sheet.best == best


def test_a_long_prompt_makes_the_sheet_taller(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")

    def height(prompt: str) -> int:
        sheet = Sheet(
            "run", tmp_path, [MediaRecord(1, "validation", prompt, "a.png", 64, 64)], Columns.of([])
        )
        sheet.write()
        return still(tmp_path / "sheet.png").height

    assert height("") == height("a cat") < height("a cat " * 10) < height("a cat " * 20)
