"""The plan: what it says, what it counts, and what it never does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.budget.phases import PhasePeak
from simpletuner.config.sources import parse_arguments
from simpletuner.planning.build import plan_training
from simpletuner.planning.checkpoint_folder import Checkpoint, Identity, Manifest
from simpletuner.planning.resume import decide_seed
from simpletuner.run.companions import Ledger
from tests.tools.refusals import complaint, warnings
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]


def plan(workspace: Workspace, capsys: Capture, *settings: str) -> str:
    capsys.readouterr()
    assert workspace.run("plan", *settings) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "title"), [([], "output"), (["tracker_run_name=a star"], "a star")]
)
def test_run_without_a_name_is_named_after_its_folder(
    workspace: Workspace, settings: list[str], title: str
) -> None:
    with workspace.inside():
        assert plan_training(parse_arguments(settings)).title == title


def test_plan_shows_model_output_and_steps(workspace: Workspace, capsys: Capture) -> None:
    shown = plan(workspace, capsys, "lora_rank=8", "validation_disable=false")
    for line in (
        "LoRA on Kandinsky 5 Image t2i-lite-sft\n  on 8 pictures (dataset pictures)\n",
        "seed      7\n",
        "4 steps of 2 samples",
        "8 batches an epoch, 1 epoch\n",
        "  pictures: 8 of 8 pictures used",
        "trained sizes: 4 of 64x64, 4 of 80x48",
        "Cache of pictures: 0 of 8 exist, 8 to encode",
        "Previews every 100 steps at 128x128: validation",
    ):
        assert line in shown, line


@pytest.mark.parametrize(
    ("settings", "often", "halving"),
    [
        (["max_train_steps=1000"], "every 120 steps", "10 rounds of previews"),
        (["max_train_steps=1000"], "every 120 steps", "validation_step_interval 240 halves it"),
        (["max_train_steps=300"], "every 100 steps", "4 rounds"),
        (
            ["max_train_steps=1000", "validation_num_inference_steps=50"],
            "every 340 steps",
            "4 rounds",
        ),
        (
            ["max_train_steps=1000", "validation_num_inference_steps=50"],
            "every 340 steps",
            "validation_num_inference_steps 25 halves it",
        ),
        (["max_train_steps=1000", "num_validation_images=99"], "every 1000 steps", "2 rounds"),
        (
            ["max_train_steps=1000", "validation_steps=25"],
            "every 25 steps",
            "validation_step_interval 50 halves it",
        ),
        (
            ["max_train_steps=96", "validation_epoch_interval=2"],
            "every 2 epochs",
            "validation_epoch_interval 4 halves",
        ),
        (["max_train_steps=50"], "every 100 steps", "validation_num_inference_steps 1 halves it"),
        (["max_train_steps=1", "validation_steps=1"], "every step", "for 1 step,"),
        (
            ["max_train_steps=4", "validation_epoch_interval=1"],
            "every epoch",
            "8 of 8 pictures used",
        ),
    ],
)
def test_previews_have_up_to_eight_milestones_unless_an_interval_is_set(
    workspace: Workspace, capsys: Capture, settings: list[str], often: str, halving: str
) -> None:
    workspace.write_config(validation_step_interval=None, validation_disable=False)
    shown = plan(workspace, capsys, *settings)

    assert f"Previews {often} at" in shown
    assert halving in shown


def test_plan_is_available_as_json(workspace: Workspace, capsys: Capture) -> None:
    document = json.loads(
        plan(workspace, capsys, "--json", "validation_disable=false", "lora_rank=8")
    )
    assert document["ok"]
    assert document["model"]["family"] == "kandinsky5-image"
    assert document["settings"]["lora_rank"] == {"value": 8, "origin": "command line"}
    assert document["length"] == {
        "steps": 4,
        "steps_done": 0,
        "epochs": 1,
        "batches_per_epoch": 8,
        "finished": False,
    }
    (dataset,) = document["datasets"]
    assert (dataset["id"], dataset["files"], dataset["used"]) == ("pictures", 8, 8)
    assert sum(dataset["buckets"].values()) == 8
    phases = {phase["phase"] for phase in document["memory"]}
    assert {"encoding captions", "rendering previews", "saving"} <= phases
    assert sum(bucket["share"] for bucket in document["buckets"]) == pytest.approx(1.0)
    seconds = document["seconds"]
    assert seconds["total"] == pytest.approx(4 * seconds["step"] + seconds["previews"])
    assert seconds["previews"] > 0
    written = {writing["what"] for writing in document["disk"]}
    assert written == {"checkpoints", "latents", "text embeddings"}


@pytest.mark.parametrize(
    ("settings", "has_estimate"),
    [
        (["learning_rte=1", "lora_rank=x"], False),
        (["--device-memory=0.001"], True),
    ],
)
def test_json_has_every_problem_and_the_same_exit_code(
    workspace: Workspace, capsys: Capture, settings: list[str], has_estimate: bool
) -> None:
    assert workspace.run("plan", *settings) == 2
    as_text = capsys.readouterr()
    assert workspace.run("plan", "--json", *settings) == 2
    as_json = capsys.readouterr()

    document = json.loads(as_json.out)
    errors = []
    for problem in document["problems"]:
        if problem["fatal"]:
            errors.append(f"error: {problem['key']}: {problem['message']}")
    printed = [line for line in as_text.err.splitlines() if line.startswith("error: ")]
    assert as_json.err == as_text.err
    assert errors == printed
    assert not document["ok"]
    assert ("memory" in document) == has_estimate


def test_finished_run_has_no_remaining_steps(trained: Workspace, capsys: Capture) -> None:
    shown = plan(trained, capsys, "--verbose")
    document = json.loads(plan(trained, capsys, "--json"))
    Ledger(4, 1, ("uploads", "end")).write(trained.path("output"))
    shown_with_tasks = plan(trained, capsys)

    assert "no steps remain: this run is finished" in shown
    assert "has not finished" not in shown
    assert "has not finished: the uploads, the end of the records." in shown_with_tasks
    estimate = shown.partition("micro-step")[2].partition("disk:")[0]
    assert "-" not in estimate.replace("micro-step", ""), "no number is negative"
    assert document["length"]["finished"]
    assert document["seconds"]["training"] == 0
    assert document["seconds"]["previews"] == 0


def test_run_starts_with_a_summary_and_ends_with_its_result(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.train("--validation_disable=false") == 0
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("LoRA on Kandinsky 5 Image t2i-lite-sft")
    assert lines[begin + 1] == "  on 8 pictures (dataset pictures)"
    assert lines[begin + 2].startswith("  4 steps and 2 rounds of previews, about ")
    assert lines[begin + 2].endswith("; saved to output")
    assert lines[begin + 3].startswith("  fits: up to ")
    assert " while " in lines[begin + 3]
    (end,) = [
        number
        for number, line in enumerate(lines)
        if line.startswith("Saved output/pytorch_lora_weights.safetensors")
    ]
    report, sample, further = lines[end + 1 : end + 4]
    assert report == "Report: output/training_report.html"
    assert sample == 'Render with it: simpletuner sample output --prompt "..."'
    assert "max_train_steps" in further


def test_plan_shows_the_origin_of_every_setting(workspace: Workspace, capsys: Capture) -> None:
    shown = plan(workspace, capsys, "--verbose", "--lora_rank", "8")

    assert ["lora_rank", "8"] in settings_from("command line", shown)
    assert ["learning_rate", "0.001"] in settings_from("config/config.json", shown)
    assert ["validation_disable", "true"] in settings_from("config/config.json", shown)
    assert ["validation_guidance", "5.0"] in settings_from("family default", shown)
    assert "lora_alpha" not in shown, "defaults are left out"


def settings_from(origin: str, shown: str) -> list[list[str]]:
    """Names and values of the settings of an origin."""
    group = shown.partition(f"Settings ({origin})\n")[2].partition("\n\n")[0]
    return [line.split() for line in group.splitlines()]


def test_plan_shows_no_secrets(workspace: Workspace, capsys: Capture) -> None:
    hook = {
        "webhook_type": "raw",
        "callback_url": "https://hooks.example/SECRET123",
        "auth_token": "SECRET123",
    }
    shown = plan(workspace, capsys, f"webhook_config={json.dumps(hook)}")
    assert "hooks.example" in shown
    assert "SECRET123" not in shown
    workspace.write_datasets([{**DATASETS[0], "access_token": "SECRET123"}, DATASETS[1]])
    assert workspace.run("plan") == 2, "an unknown key"
    assert "SECRET123" not in "".join(capsys.readouterr())


def test_every_file_is_used_or_listed_with_its_reason(
    workspace: Workspace, capsys: Capture
) -> None:
    folder = workspace.path("datasets/pictures")
    (folder / "p0.txt").unlink()
    (folder / "p1.png").write_bytes(b"no picture")
    (folder / "notes.doc").write_text("x")
    (folder / "lonely.txt").write_text("x")
    (folder / "red\x1b[31m\nrow.doc").write_text("x")
    shown = plan(workspace, capsys, "--verbose")
    for name in ("p0.png", "p1.png", "notes.doc", "lonely.txt", r"red\x1b[31m\nrow.doc"):
        assert f"  {name}: not used, " in shown

    assert (
        "6 of 8 pictures used, 1 without a caption, 1 not usable; 3 other files are not read"
    ) in shown


def test_plan_counts_cached_entries(filled: Workspace, capsys: Capture) -> None:
    shown = plan(filled, capsys)
    assert "Cache of pictures: 8 of 8 exist, 0 to encode" in shown
    assert ", 0 to encode" in shown.partition("Cache of captions")[2].splitlines()[0]


def test_drawn_seed_is_marked_as_drawn(workspace: Workspace, capsys: Capture) -> None:
    for unset in ("seed=", "seed=-1"):
        assert "(drawn for this run; set seed to repeat it)" in plan(workspace, capsys, unset)


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        (("max_train_steps=20",), 20, 3),
        (("max_train_steps=", "num_train_epochs=3"), 24, 3),
        (("max_train_steps=0",), 8, 1),
        (("max_train_steps=", "gradient_accumulation_steps=3"), 3, 1),
        (("max_train_steps=", "num_train_epochs=1000000000"), 8_000_000_000, 1_000_000_000),
    ],
)
def test_length_is_given_in_steps_or_epochs(
    workspace: Workspace, capsys: Capture, settings: tuple[str, ...], steps: int, epochs: int
) -> None:
    shown = plan(workspace, capsys, *settings)
    assert f"  length    {steps} steps of " in shown
    assert f"an epoch, {epochs} epoch" in shown


def test_datasets_with_windows_are_counted(workspace: Workspace, capsys: Capture) -> None:
    second = {**DATASETS[0], "id": "later", "start_epoch": 3, "end_epoch": 4, "repeats": 0}
    workspace.write_datasets([DATASETS[0], second, DATASETS[1]])
    assert "  length    48 steps of" in plan(
        workspace, capsys, "max_train_steps=", "num_train_epochs=5"
    )


def test_run_that_outlasts_its_datasets_is_refused(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_datasets([{**DATASETS[0], "end_epoch": 2}, DATASETS[1]])
    warnings(workspace, capsys, "max_train_steps=16")
    problem = complaint(workspace, capsys, "plan", "max_train_steps=17")

    assert problem == (
        "data_backend_config: no dataset takes part from step 17 on (epoch 3): pictures "
        "(end_epoch 2). Change a window to include it, or end the run before it with "
        "max_train_steps 16."
    )


def test_timestep_offset_needs_logit_normal_sigmas(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_datasets([{**DATASETS[0], "timestep_sampling_offset": 0.5}, DATASETS[1]])
    plan(workspace, capsys)
    for law in ("flow_use_uniform_schedule", "flow_use_beta_schedule"):
        problem = complaint(workspace, capsys, "plan", f"{law}=true")
        assert problem.startswith(
            "pictures.timestep_sampling_offset: is added before the sigmoid"
        ), law
        assert f"{law} has none" in problem


def test_grid_that_crops_much_is_a_warning(workspace: Workspace, capsys: Capture) -> None:
    # Such as the grid of 128 pixels that block-sparse attention needs.
    coarse = ("aspect_bucket_alignment=64", "i_know_what_i_am_doing=true")
    with_usual_grid = warnings(workspace, capsys)
    with_coarse_grid = warnings(workspace, capsys, *coarse)
    workspace.write_datasets([{**DATASETS[0], "crop": True}, DATASETS[1]])
    with_crop = warnings(workspace, capsys, *coarse)

    message = (
        "pictures.resolution: 33% of the width of p0.png is cropped: 64x64 is the nearest size on "
        "the model's grid"
    )
    assert message in with_coarse_grid
    assert "is cropped" not in with_usual_grid
    assert "is cropped" not in with_crop, "it was requested"


def test_dry_run_equals_plan(workspace: Workspace, capsys: Capture) -> None:
    shown = plan(workspace, capsys)
    for flag in ("--dry-run", "--dry_run"):
        assert workspace.run("train", flag) == 0
        assert capsys.readouterr().out == shown


def test_plan_writes_nothing_and_does_not_import_torch(workspace: Workspace) -> None:
    before = sorted(workspace.folder.rglob("*"))
    script = (
        "import sys; from simpletuner.cli.app import main; code = main(['train', "
        "'--dry-run']);print(code, sorted({'torch', 'diffusers', 'transformers', 'accelerate', "
        "'peft'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=workspace.folder,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == "0 []"
    assert done.stderr == ""
    assert sorted(workspace.folder.rglob("*")) == before


def test_warnings_of_the_family_are_shown(workspace: Workspace, capsys: Capture) -> None:
    printed = warnings(
        workspace,
        capsys,
        "validation_guidance=8",
        "flow_schedule_shift=9",
        "tokenizer_max_length=9999",
        "vae_enable_patch_conv=true",
        "pretrained_gemma_model_name_or_path=a/b",
        "lora_rank=64",
        "vae_enable_temporal_roll=true",
        "validation_resolution=130x128",
        "validation_disable=false",
    )
    for key in (
        "validation_guidance",
        "flow_schedule_shift",
        "tokenizer_max_length",
        "vae_enable_patch_conv",
        "vae_enable_temporal_roll",
        "pretrained_gemma_model_name_or_path",
        "lora_rank",
        "validation_resolution",
    ):
        assert f"  {key}: " in printed, key


@pytest.mark.parametrize("spelling", ["Kandinsky5_Image", "KANDINSKY5-IMAGE", "{env:FAMILY}"])
def test_family_name_may_be_spelled_differently(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.setenv("FAMILY", "kandinsky5-image")
    workspace.write_config(model_family=spelling)
    assert plan(workspace, capsys).startswith("LoRA on Kandinsky 5 Image")


def test_dataset_file_beside_the_config_is_used_with_a_warning(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(data_backend_config=None)
    printed = warnings(workspace, capsys)
    assert (
        printed.strip() == "data_backend_config: is not set; config/multidatabackend.json is used."
    )


def test_names_in_any_script_and_with_spaces_are_accepted(
    workspace: Workspace, capsys: Capture
) -> None:
    folder = workspace.path("datasets/मेरी तस्वीरें 图片")
    workspace.path("datasets/pictures").rename(folder)
    (folder / "p0.png").rename(folder / "बिल्ली 猫.png")
    (folder / "p0.txt").rename(folder / "बिल्ली 猫.txt")
    workspace.write_datasets(
        [{**DATASETS[0], "instance_data_dir": "datasets/मेरी तस्वीरें 图片"}, DATASETS[1]]
    )

    assert "  बिल्ली 猫.png: 96x64" in plan(workspace, capsys, "--verbose", "output_dir=मेरा output")


def test_unusual_terminal_does_not_break_the_plan(workspace: Workspace) -> None:
    folder = workspace.path("datasets/pictures")
    (folder / "p0.png").rename(folder / "猫.png")
    (folder / "p0.txt").rename(folder / "猫.txt")
    environment = {
        "PYTHONIOENCODING": "ascii",
        "PATH": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "simpletuner", "plan", "--verbose"],
        cwd=workspace.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "\\u732b.png: 96x64" in done.stdout


def test_closed_pipe_ends_the_plan_quietly(workspace: Workspace) -> None:
    command = f"{json.dumps(sys.executable)} -m simpletuner plan | true"
    done = subprocess.run(
        command, shell=True, cwd=workspace.folder, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


@pytest.mark.parametrize("command", [["plan"], ["train"]])
def test_incomplete_variables_of_a_launcher_are_refused(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = complaint(workspace, capsys, *command)
    assert "WORLD_SIZE is 2" in error
    assert "RANK is not set" in error
    assert not workspace.path("output").exists()

    monkeypatch.setenv("WORLD_SIZE", "1")
    assert plan(workspace, capsys), "one process needs no variables"


@pytest.mark.parametrize("configured", [None, -1, 0])
def test_continued_run_keeps_its_drawn_seed(configured: int | None) -> None:
    identity = Identity("family", "flavour", "lora", 1, 4711, "", {})
    checkpoint = Checkpoint(Path("checkpoint-1"), 1, False, Manifest(1, 1, identity, {}))

    assert decide_seed(configured, checkpoint) == 4711
    assert decide_seed(5, checkpoint) == 5


def test_control_tokens_in_prompts_are_refused(workspace: Workspace, capsys: Capture) -> None:
    assert (
        workspace.run("plan", "validation_prompt=a cat <|image_pad|>", "validation_disable=false")
        == 2
    )
    assert "prompt 'validation': holds <|image_pad|>" in capsys.readouterr().err


def test_trained_preview_pictures_are_a_warning(workspace: Workspace, capsys: Capture) -> None:
    printed = warnings(workspace, capsys, "eval_dataset_id=pictures")
    assert "pictures is also trained; give it dataset_type eval" in printed


def test_json_and_the_printed_plan_name_the_same_host_memory(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What passes through the host on its way to a GPU is too little to be seen for a tiny model.
    monkeypatch.setattr(PhasePeak, "on_host", lambda phase, device: 7e9)

    phases = json.loads(plan(workspace, capsys, "--json"))["memory"]
    printed = plan(workspace, capsys)

    assert {phase["host"] for phase in phases} == {7e9}
    assert re.search("saving +.*7.00? GB", printed)
