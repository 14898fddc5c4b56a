"""`simpletuner sample` and `simpletuner sweep`, as a user calls them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from simpletuner.annexes.figures import Columns, still
from simpletuner.annexes.report.contact_sheet import write_sheet
from simpletuner.annexes.report.sheet import Sheet, SheetCell
from tests.tools.cards import pretend_to_have
from tests.tools.runs import LORA
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
PROMPT = ("--prompt", "a red square")
STRENGTHS = ("--strengths", "0.5,1")
# The unconditional prompt would double the cells of a sheet.
ONE_PROMPT = "validation_disable_unconditional=true"
HELD: dict[str, Any] = {
    **DATASETS[0],
    "id": "held",
    "dataset_type": "eval",
    "instance_data_dir": "datasets/held",
}
BASE_PREVIEW = "output/benchmarks/base_model/validation_128x128.png"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Workspace:
    """A finished run with two checkpoints, previews of both, an average and an evaluation loss."""
    workspace = Workspace.create(
        tmp_path_factory.mktemp("trained") / "run",
        t2i_checkpoint,
        validation_disable=False,
        validation_step_interval=2,
        lora_rank=4,
        learning_rate=0.05,
        use_ema=True,
        ema_decay=0.5,
        eval_steps_interval=2,
        eval_timesteps=2,
    )
    workspace.add_pictures("datasets/held", 1)
    workspace.write_datasets([DATASETS[0], HELD, DATASETS[1]])
    assert workspace.train() == 0
    return workspace


def model_settings(checkpoint: Path) -> tuple[str, ...]:
    """What a LoRA that is not of a run here is sampled with, as the previews of the run are."""
    return (
        f"pretrained_model_name_or_path={checkpoint}",
        "resolution=128",
        "steps=2",
        "seed=7",
        "mixed_precision=no",
    )


def preview(workspace: Workspace, step: int, ending: str = "") -> bytes:
    name = f"step_{step}_validation_0_128x128{ending}.png"
    return workspace.path(f"output/validation_images/{name}").read_bytes()


def sample(workspace: Workspace, folder: str, *arguments: str) -> bytes:
    """Render one picture into a new folder; returns its file."""
    assert workspace.run("sample", *arguments, "--output", folder) == 0
    (picture,) = workspace.path(folder).glob("*.png")
    return picture.read_bytes()


def joined_output(capsys: Capture) -> str:
    """What was printed, without the line breaks of a narrow terminal."""
    return " ".join(capsys.readouterr().out.split())


def test_samples_equal_previews_and_do_not_change_the_run(trained: Workspace) -> None:
    """Even while the run is training: its lock names a live process."""
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

    result = sample(trained, "result", "output", *PROMPT)
    step_2 = sample(trained, "step-2", "output", *PROMPT, "--checkpoint", "2")
    average = sample(trained, "average", "output/checkpoint-4", *PROMPT, "--ema")
    offloaded = sample(trained, "offloaded", LORA, *PROMPT, "enable_group_offload=true")

    assert result == preview(trained, 4)
    assert step_2 == preview(trained, 2)
    assert average == preview(trained, 4, "_ema")
    assert offloaded == preview(trained, 4)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (run / "run.lock").unlink()


def test_samples_are_not_overwritten_and_record_their_settings(trained: Workspace) -> None:
    command = (
        *("sample", "output", *PROMPT),
        *("--seed", "5"),
        *("--resolution", "144x128"),
        *("--output", "again"),
        "steps=3",
    )

    assert trained.run(*command) == 0
    assert trained.run(*command, "--strength", "0.5") == 0

    first = trained.path("again/a_red_square_5_144x128.png")
    second = trained.path("again/a_red_square_5_144x128-2.png")
    assert set(trained.path("again").glob("*.png")) == {first, second}
    assert first.read_bytes() != second.read_bytes()
    record = json.loads(first.with_suffix(".json").read_text())
    assert record["seed"] == 5
    assert record["width"] == 144
    assert record["validation_num_inference_steps"] == 3
    assert record["step"] == 4
    assert record["strength"] == 1.0
    assert json.loads(second.with_suffix(".json").read_text())["strength"] == 0.5


def test_the_base_model_and_a_downloaded_lora_can_be_sampled(
    trained: Workspace, t2i_checkpoint: Path
) -> None:
    base = trained.path(BASE_PREVIEW).read_bytes()
    shutil.copy(trained.path(LORA), trained.path("datasets/downloaded.safetensors"))
    command = (
        *("sample", "datasets/downloaded.safetensors", *PROMPT),
        *model_settings(t2i_checkpoint),
        *("--strength", "0, 1"),
        *("--output", "downloaded"),
    )

    assert sample(trained, "base", *PROMPT) == base, "the configuration alone"
    assert trained.run(*command) == 0

    pictures = {
        path.stem.rpartition("_")[2]: path.read_bytes()
        for path in trained.path("downloaded").glob("*.png")
    }
    assert pictures == {"strength-0": base, "strength-1": preview(trained, 4)}


def write_dora(trained: Workspace, path: Path) -> None:
    """The LoRA of the run with a magnitude of 3 for every output of its layers."""
    weights = load_file(trained.path(LORA))
    for name in [name for name in weights if name.endswith("lora_B.weight")]:
        magnitude = torch.full((len(weights[name]),), 3.0)
        weights[name.replace("lora_B.weight", "lora_magnitude_vector")] = magnitude
    save_file(weights, path)


def test_a_dora_at_strength_0_equals_the_base_model(
    trained: Workspace, t2i_checkpoint: Path, capsys: Capture
) -> None:
    """In the stock pipeline it does not. Between 0 and 1 the magnitudes stay, which is reported."""
    base = trained.path(BASE_PREVIEW).read_bytes()
    write_dora(trained, trained.path("datasets/dora.safetensors"))
    source = ("datasets/dora.safetensors", *PROMPT, *model_settings(t2i_checkpoint))

    full_strength = sample(trained, "dora-1", *source)
    first_output = joined_output(capsys)
    no_strength = sample(trained, "dora-0", *source, "--strength", "0")
    second_output = joined_output(capsys)

    assert no_strength == base
    assert full_strength != base
    warning = (
        "strength: scales the update of a DoRA but not its magnitudes, as in the stock pipeline"
    )
    assert "magnitudes" not in first_output
    assert warning in second_output


def test_a_quantised_base_changes_the_sample(trained: Workspace) -> None:
    picture = sample(trained, "int8", "output", *PROMPT, "base_model_precision=int8-quanto")

    assert picture != preview(trained, 4)


def test_a_sweep_marks_the_lowest_loss_and_continues_where_it_stopped(
    trained: Workspace, capsys: Capture
) -> None:
    command = ("sweep", "output", *STRENGTHS, ONE_PROMPT, "--output", "sweep")
    lines = trained.path("output/training_metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    recorded = {row["step"]: row["loss/val/held"] for row in rows if "loss/val/held" in row}
    best = min(recorded, key=recorded.__getitem__)

    assert trained.run(*command) == 0

    output = joined_output(capsys)
    assert "The held-out loss is lowest at " in output
    stored = json.loads(trained.path("sweep/losses.json").read_text())
    assert stored["step"] == best
    losses = stored["losses"]
    assert losses.keys() == {"0.5", "1"}
    assert losses["1"] == pytest.approx(recorded[best], rel=1e-5)
    assert losses["0.5"] != losses["1"]
    by_strength = f"{losses['0.5']:.4g} at strength 0.5, {losses['1']:.4g} at strength 1."
    assert f"Checkpoint {best} has {by_strength}" in output
    # Two checkpoints at two strengths, and the untrained model.
    cells = sorted(trained.path("sweep/cells").glob("*.png"))
    assert len(cells) == 5
    contents = [cell.read_bytes() for cell in cells]
    assert preview(trained, 4) in contents
    assert trained.path(BASE_PREVIEW).read_bytes() in contents
    page = trained.path("sweep/sheet.html").read_text()
    assert page.count("data:image/png;base64,") == 6, "the untrained model begins every line"
    assert page.count(">lowest loss</span>") == 1, "at the strength with the lowest loss"
    assert not trained.path("sweep/owner.json").exists()
    with Image.open(trained.path("sweep/sheet.png")) as sheet:
        assert sheet.width > 2 * 256

    cells[0].unlink()
    trained.path("datasets/held").rename(trained.path("datasets/away"))
    assert trained.run(*command) == 0
    trained.path("datasets/away").rename(trained.path("datasets/held"))
    output = joined_output(capsys)
    assert "4 of 5 cells exist already" in output
    assert sorted(trained.path("sweep/cells").glob("*.png")) == cells
    # Held-out pictures are read and encoded first: a text encoder and the transformer together
    # may not fit.
    warning = "strength is not measured: instance_data_dir: these folders"
    assert output.index(warning) < output.index("Sweeping")


def test_a_sweep_skips_losses_that_would_not_fit_in_memory(
    trained: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.59 GiB are enough to render, but not for a held-out picture of 1024 pixels."""
    large = {**HELD, "resolution": 1024}
    trained.write_datasets([DATASETS[0], large, DATASETS[1]])
    pretend_to_have(monkeypatch, 0.59)

    assert trained.run("sweep", "output", *STRENGTHS, ONE_PROMPT, "--output", "large") == 0

    trained.write_datasets([DATASETS[0], HELD, DATASETS[1]])
    output = joined_output(capsys)
    assert "strength is not measured: memory: " in output
    assert output.index("strength is not measured") < output.index("Sweeping")


def write_unusable_files(trained: Workspace) -> None:
    """LoRAs for other layers, files that are not LoRAs, and a folder without a result."""
    query = "visual_transformer_blocks.0.self_attention.to_query"
    foreign = {
        "blocks.0.lora_A.weight": torch.ones(2, 8),
        "blocks.0.lora_B.weight": torch.ones(8, 2),
    }
    wide = {
        f"{query}.lora_A.weight": torch.ones(2, 3),
        f"{query}.lora_B.weight": torch.ones(8, 2),
    }
    save_file(foreign, trained.path("other.safetensors"))
    save_file(wide, trained.path("wide.safetensors"))
    save_file({"blocks.0.lokr_w1": torch.ones(2, 2)}, trained.path("lokr.safetensors"))
    save_file({}, trained.path("empty.safetensors"))
    checkpoint = trained.path("output/checkpoint-2")
    shutil.copytree(checkpoint, trained.path("bare/checkpoint-2"), dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ["output", "--image", "nowhere.png"],
            ["--prompt: is required", "--image: 'nowhere.png'"],
        ),
        (
            ["nowhere", *PROMPT],
            ["'nowhere' does not exist."],
        ),
        (
            ["outptu", *PROMPT],
            ["'outptu' does not exist. Did you mean 'output'?"],
        ),
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
        (
            ["bare", *PROMPT],
            ["Its checkpoints: checkpoint-2; choose one with --checkpoint"],
        ),
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
        (
            ["wide.safetensors", *PROMPT],
            ["is for other layers"],
        ),
        (
            ["lokr.safetensors", *PROMPT],
            ["is not a plain LoRA: it holds blocks.0.lokr_w1"],
        ),
        (
            ["config/config.json", *PROMPT],
            ["source: 'config/config.json' is not a complete safetensors file"],
        ),
        (
            ["empty.safetensors", *PROMPT],
            ["source: 'empty.safetensors' holds no weights"],
        ),
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
    write_unusable_files(trained)

    assert trained.run("sample", *arguments) == 2

    error = capsys.readouterr().err
    assert [message for message in messages if message not in error] == []


def test_a_full_fine_tune_is_sampled_by_checkpoint_but_not_by_strength(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(
        model_type="full",
        mixed_precision="bf16",
        max_train_steps=2,
        checkpoint_step_interval=1,
        validation_disable=False,
        validation_step_interval=1,
    )
    assert workspace.train() == 0

    assert sample(workspace, "result", "output", *PROMPT) == preview(workspace, 2)
    assert workspace.run("sweep", "output", *PROMPT, "--output", "sweep") == 0
    cells = {path.read_bytes() for path in workspace.path("sweep/cells").glob("*.png")}
    assert cells == {preview(workspace, 1), preview(workspace, 2)}

    assert workspace.run("sweep", "output", "--ema") == 2
    error = capsys.readouterr().err
    assert error.count("the run had no use_ema") == 1, "once, not for every checkpoint"
    assert workspace.run("sweep", "output", "--strengths", "0.5") == 2
    assert "--strengths: is for LoRAs" in capsys.readouterr().err


def test_a_sweep_of_a_folder_without_checkpoints_is_refused(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.run("sweep", "datasets") == 2
    assert "source: 'datasets' contains no complete checkpoints." in capsys.readouterr().err

    assert workspace.run("sweep", "datasets", "--checkpoints", "9") == 2
    expected = "--checkpoints: '9' is not a complete checkpoint. Checkpoints in datasets: none."
    assert expected in capsys.readouterr().err


def test_a_sample_that_does_not_fit_in_memory_is_refused(
    trained: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_have(monkeypatch, 0.05)
    command = ("sample", "output", *PROMPT)

    assert trained.run(*command) == 2
    error = capsys.readouterr().err
    assert trained.run(*command, "num_processes=8", "fsdp_enable=true") == 2
    error_of_processes = capsys.readouterr().err

    assert "memory: " in error
    assert "train_batch_size" not in error
    assert error_of_processes == error, "one process samples what several have trained"
    assert not trained.path("samples").exists()


@pytest.mark.parametrize(
    ("losses", "verdict", "best"),
    [
        (
            {},
            "No held-out loss was measured",
            None,
        ),
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
    """The best checkpoint is the last one up to the lowest loss; losses of averages are ignored."""
    cells = [SheetCell(step, "validation", "a", "a.png", 8, 8) for step in (100, 150, 290)]
    rows = [
        {"step": step, "loss/val/held": loss, "loss/val/held/ema": 0.1}
        for step, loss in losses.items()
    ]

    sheet = Sheet("run", tmp_path, cells, Columns.of(rows))

    assert verdict in sheet.verdict
    assert sheet.best == best


def test_a_long_prompt_makes_the_sheet_taller(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")

    def height(prompt: str) -> int:
        cell = SheetCell(1, "validation", prompt, "a.png", 64, 64)
        write_sheet(Sheet("run", tmp_path, [cell], Columns.of([])))
        return still(tmp_path / "sheet.png").height

    assert height("") == height("a cat")
    assert height("a cat") < height("a cat " * 10) < height("a cat " * 20)
