"""Mistakes of users: exit code 2, all problems in one message, no traceback, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simpletuner import atomic
from simpletuner.__main__ import run
from tests.tools import pictures
from tests.tools.processes import PATIENCE
from tests.tools.refusals import complaint, complaints, warnings
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]
DATASET_FILE = "config/multidatabackend.json"


def change_dataset(workspace: Workspace, **keys: Any) -> None:
    """The usual dataset with some keys replaced."""
    workspace.write_datasets([{**DATASETS[0], **keys}, DATASETS[1]])


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_mistakes_of_every_kind_are_reported_together(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(
        learning_rte=1, lora_rank=0, optimizer="adamx", num_train_epochs=2, maximum_image_size=512
    )
    change_dataset(workspace, instance_data_dir="nowhere", crop_aspct=1, text_embeds="txt")

    printed = "\n".join(complaints(workspace, capsys, "plan", "foo"))

    for part in (
        "foo: is not a setting",
        "learning_rte: is not a known key. Did you mean 'learning_rate'?",
        "lora_rank: 0",
        "optimizer: 'adamx'",
        "num_train_epochs: is 2 and max_train_steps is 4",
        "'nowhere'",
        "crop_aspct",
        "pictures.text_embeds: 'txt'",
        "maximum_image_size",
    ):
        assert part in printed, part


def test_nothing_is_written_after_an_error(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(learning_rte=1)
    before = files_below(workspace.folder)
    complaint(workspace, capsys, "train")

    complaint(workspace, capsys, "plan")

    assert files_below(workspace.folder) == before


def test_an_invalid_config_is_reported_with_its_line(workspace: Workspace, capsys: Capture) -> None:
    workspace.path("config/config.json").write_text('{\n "seed": 1\n "x": 2}')
    assert complaint(workspace, capsys) == (
        "config/config.json: is not valid JSON: a comma or a closing bracket is missing (line "
        "3, column 2)."
    )


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("mixed_precision", "fp32", "no"),
        ("mixed_precision", "float32", "no"),
        ("mixed_precision", "float16", "fp16"),
        ("mixed_precision", "torch.bfloat16", "bf16"),
        ("vae_dtype", "float32", "fp32"),
        ("vae_dtype", "half", "fp16"),
    ],
)
def test_pytorch_names_of_dtypes_are_understood(
    key: str, value: str, meant: str, workspace: Workspace, capsys: Capture
) -> None:
    problem = complaint(workspace, capsys, "plan", f"{key}={value}")
    assert problem.endswith(f"Did you mean '{meant}'? (command line)")


def test_misplaced_values_are_reported(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(
        model_type="lokr", model_flavour="t2v-lite-sft-5s", caption_strategy="txt"
    )
    kind, caption, flavour = complaints(workspace, capsys)

    assert kind.startswith(
        "model_type: 'lokr' is a kind of LoRA: set model_type lora, and the kind as lora_type."
    )
    assert "Did you mean 'textfile'?" in caption
    assert (
        "'t2v-lite-sft-5s' belongs to kandinsky5-video; kandinsky5-image has: t2i-lite-sft"
        in flavour
    )


def test_a_list_in_place_of_a_word_is_reported(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(model_type=["lora"])
    assert complaint(workspace, capsys).startswith(
        "model_type: ['lora'] is not one of: lora, full."
    )


def test_an_invalid_dataset_file_is_reported_with_its_line(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.path(DATASET_FILE).write_text("[{,1]")
    problem = complaint(workspace, capsys)

    assert problem.startswith(f"{DATASET_FILE}: is not valid JSON: ")
    assert "(line 1, column 3)" in problem


def test_a_key_twice_in_a_file_is_an_error(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(**{"--seed": 8})
    assert (
        complaint(workspace, capsys)
        == "seed: is given twice: seed=7 and --seed=8 (config/config.json)."
    )


def test_a_wrong_choice_is_reported_with_the_allowed_ones(
    workspace: Workspace, capsys: Capture
) -> None:
    problem = complaint(workspace, capsys, "plan", "--lr_scheduler", "cosin")

    assert problem.startswith("lr_scheduler: 'cosin' is not one of: constant, ")
    assert problem.endswith("Did you mean 'cosine'? (command line)")


def test_missing_dataset_folders_are_one_problem(workspace: Workspace, capsys: Capture) -> None:
    change_dataset(workspace, instance_data_dir="datasets/gone")
    problem = complaint(workspace, capsys)
    assert "pictures: 'datasets/gone'" in problem

    change_dataset(workspace, instance_data_dir="datasets/picturse", hold_out=2)
    assert workspace.train("eval_steps_interval=5") == 2

    printed = capsys.readouterr().err
    assert "pictures: 'datasets/picturse'. Did you mean 'datasets/pictures'?" in printed
    assert "hold_out" not in printed, "a consequence"
    assert "eval_steps_interval" not in printed, "a consequence"

    change_dataset(workspace, instance_data_dir="datasets/pictures", caption_strategy="text")
    assert workspace.train("eval_steps_interval=5") == 2
    assert "hold_out" not in capsys.readouterr().err, "a consequence"


def test_a_file_in_place_of_a_dataset_folder_is_named(
    workspace: Workspace, capsys: Capture
) -> None:
    path = next(workspace.path("datasets/pictures").glob("*.png"))
    change_dataset(workspace, instance_data_dir=f"datasets/pictures/{path.name}")

    assert f"pictures: 'datasets/pictures/{path.name}' is a file." in complaint(workspace, capsys)


def test_missing_captions_are_reported(workspace: Workspace, capsys: Capture) -> None:
    workspace.path("datasets/pictures/p3.txt").unlink()
    message = warnings(workspace, capsys)
    assert "p3.png" in message
    assert "caption" in message

    for path in workspace.path("datasets/pictures").glob("*.txt"):
        path.unlink()
    assert "no samples detected in dataset pictures" in complaint(workspace, capsys)


def test_a_caption_filter_of_exponential_time_is_refused(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletuner.data.captions.FILTER_SECONDS", 0.05)
    workspace.write_datasets([DATASETS[0], {**DATASETS[1], "caption_filter_list": ["(a+)+$"]}])
    workspace.path("datasets/pictures/p3.txt").write_text("a" * 5000 + "b")

    message = complaint(workspace, capsys)

    assert message.startswith("'datasets/pictures/p3.png': '(a+)+$' of caption_filter_list on 'aaa")
    assert message.endswith("a' takes more than 0.05 s.")
    assert len(message) < 400


@pytest.mark.parametrize("command", ["plan", "train"])
def test_missing_partner_pictures_are_reported(
    i2i_checkpoint: Path, tmp_path: Path, capsys: Capture, command: str
) -> None:
    workspace = Workspace.create(tmp_path / "run", i2i_checkpoint, model_flavour="i2i-lite-sft")
    sources = {
        "id": "sources",
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
        "instance_data_dir": "datasets/sources",
    }
    workspace.write_datasets(
        [{**DATASETS[0], "conditioning_data": "sources"}, sources, DATASETS[1]]
    )
    workspace.add_pictures("datasets/sources", 6)

    problem = complaint(workspace, capsys, command)

    assert problem.startswith("pictures: no partner of the same path and name in sources (")
    assert "p6.png" in problem
    assert "p7.png" in problem


def test_a_flavour_for_edits_needs_source_pictures(
    i2i_checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    workspace = Workspace.create(tmp_path / "run", i2i_checkpoint, model_flavour="i2i-lite-sft")
    assert complaint(workspace, capsys).startswith(
        "pictures.conditioning_data: is required: this flavour edits"
    )


@pytest.mark.parametrize("name", sorted(pictures.BROKEN))
def test_damaged_pictures_are_kept_and_reported(
    workspace: Workspace, capsys: Capture, name: str
) -> None:
    path = workspace.path("datasets/pictures") / name
    pictures.BROKEN[name](path)
    path.with_suffix(".txt").write_text("a caption")
    content = path.read_bytes()

    message = warnings(workspace, capsys, "delete_problematic_images=true")

    assert name in message
    assert path.read_bytes() == content, "a plan moves nothing"


def test_a_dataset_smaller_than_a_step_names_the_needed_repeats(
    workspace: Workspace, capsys: Capture
) -> None:
    problem = complaint(
        workspace, capsys, "plan", "train_batch_size=5", "gradient_accumulation_steps=5"
    )
    assert "no samples detected in dataset pictures" in problem
    assert "repeats 3 would work" in problem

    change_dataset(workspace, repeats=3)
    warnings(workspace, capsys, "train_batch_size=5", "gradient_accumulation_steps=5")
    change_dataset(workspace, repeats=None)
    settings = (
        "train_batch_size=5",
        "gradient_accumulation_steps=5",
        "allow_dataset_oversubscription=true",
    )
    assert "repeats is raised to 3" in warnings(workspace, capsys, *settings)


def test_wrong_ids_defaults_and_references_are_reported(
    workspace: Workspace, capsys: Capture
) -> None:
    first = {**DATASETS[0], "text_embeds": "nowhere"}
    workspace.write_datasets(
        [first, {**first, "text_embeds": None}, DATASETS[1], {**DATASETS[1], "id": "text2"}]
    )

    printed = "\n".join(complaints(workspace, capsys, "plan", "eval_dataset_id=picture"))

    assert "pictures: is the id of 2 datasets" in printed
    assert "two text_embeds entries are the default: text, text2" in printed
    assert "pictures.text_embeds: 'nowhere' is not the id" in printed
    assert "eval_dataset_id: 'picture' is not a dataset id; choose from" in printed


@pytest.mark.parametrize("output", ["config/config.json", "config/config.json/below"])
def test_an_output_folder_that_is_a_file_is_reported(
    workspace: Workspace, capsys: Capture, output: str
) -> None:
    problems = complaints(workspace, capsys, "plan", f"output_dir={output}")
    assert f"output_dir: '{output}' cannot be a folder: 'config/config.json' is a file." in problems


def test_an_unwritable_output_folder_is_reported(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **more: not mode & os.W_OK and may(path, mode, **more)
    )

    problem = complaint(workspace, capsys, "plan", "output_dir=locked")

    assert problem == "output_dir: 'locked' cannot be written to (no permission in '.')."


def test_an_unwritable_cache_folder_is_reported(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only missing entries are written, and the plan knows them before torch is loaded."""
    may = os.access
    locked = workspace.path("locked")
    locked.mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, mode, **more: Path(path) != locked and may(path, mode, **more)
    )
    workspace.write_datasets(
        [{**DATASETS[0], "cache_dir_vae": str(locked / "latents")}, DATASETS[1]]
    )

    problem = complaint(workspace, capsys, "plan")

    assert (
        problem
        == f"latents: '{locked}/latents' cannot be written to (no permission in '{locked}')."
    )


def test_an_output_folder_that_cannot_be_created_is_reported(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some file systems, only the attempt shows that a folder cannot be created."""
    create = Path.mkdir

    def refuse(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == "locked":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        create(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", refuse)

    problem = complaint(workspace, capsys, "train", "output_dir=locked")

    assert problem == "output_dir: 'locked' cannot be created: Read-only file system."


def test_steps_and_epochs_must_agree(workspace: Workspace, capsys: Capture) -> None:
    assert complaint(workspace, capsys, "plan", "num_train_epochs=2").startswith(
        "num_train_epochs: is 2 and"
    )

    problem = complaint(workspace, capsys, "plan", "num_train_epochs=0", "max_train_steps=0")
    assert "is 0, as max_train_steps is" in problem

    warnings(workspace, capsys, "num_train_epochs=2", "max_train_steps=0")
    warnings(workspace, capsys, "num_train_epochs=0")


def test_maximum_image_size_needs_target_downsample_size(
    workspace: Workspace, capsys: Capture
) -> None:
    change_dataset(workspace, maximum_image_size=1024, crop=True)
    problem = complaint(workspace, capsys)

    assert "maximum_image_size" in problem
    assert "target_downsample_size" in problem


@pytest.mark.parametrize(
    "part", ["transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
)
def test_a_missing_part_of_a_model_is_reported(
    workspace: Workspace, capsys: Capture, tmp_path: Path, part: str
) -> None:
    model = json.loads(workspace.path("config/config.json").read_text())[
        "pretrained_model_name_or_path"
    ]
    copy = tmp_path / "model"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns(part))

    problem = complaint(workspace, capsys, "plan", f"pretrained_model_name_or_path={copy}")

    assert f"lacks a usable {part} (it is not there)." in problem


def test_a_model_that_is_not_downloaded_is_reported_offline(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert workspace.run("plan", "pretrained_model_name_or_path=me/model") == 0, (
        "a plan needs no weights"
    )

    problem = complaint(
        workspace, capsys, "train", "pretrained_model_name_or_path=me/model", "--yes"
    )
    assert problem.startswith(
        "pretrained_model_name_or_path: 'me/model' is not on this machine, and the hub is offline"
    )


def test_a_checkpoint_of_another_task_is_refused(workspace: Workspace, capsys: Capture) -> None:
    problems = complaints(workspace, capsys, "plan", "model_flavour=i2i-lite-sft")
    assert any(
        problem.startswith("model_flavour: i2i-lite-sft does not fit") for problem in problems
    )


def test_an_unknown_flavour_is_reported(workspace: Workspace, capsys: Capture) -> None:
    problem = complaint(workspace, capsys, "plan", "model_flavour=t2i-lite-stf")

    assert "t2i-lite-sft, t2i-lite-pretrain, i2i-lite-sft, i2i-lite-pretrain" in problem
    assert "Did you mean 't2i-lite-sft'?" in problem
    assert "set pretrained_model_name_or_path" in problem


def test_lora_targets_that_match_nothing_are_reported(
    workspace: Workspace, capsys: Capture
) -> None:
    problem = complaint(workspace, capsys, "plan", "peft_lora_target_modules=to_qury,to_key")
    assert problem == (
        "peft_lora_target_modules: 'to_qury' matches no module of the transformer. Did you "
        "mean 'to_query'?"
    )


@pytest.mark.parametrize(
    ("setting", "complaint_"),
    [
        ("init_lora=nothing.safetensors", "init_lora: 'nothing.safetensors' does not exist."),
        (
            "init_lora=~nouser/x",
            "init_lora: '~nouser/x' starts with the home folder of an unknown user.",
        ),
        ("webhook_config=~nouser/x", "webhook_config: '~nouser/x' does not exist"),
        (
            f"webhook_config={'x' * 300}",
            "does not exist; give a file, an object or a list of objects",
        ),
        (
            "webhook_config=datasets",
            "'datasets' is a folder, not a file; give a file, an object or a list of objects",
        ),
        (
            "user_prompt_library=datasets",
            "user_prompt_library: 'datasets' is a folder, not a file.",
        ),
        ("data_backend_config=datasets", "the dataset file 'datasets' is a folder, not a file."),
        ("config=config", "tried config (a folder). Did you mean 'config/config.json'?"),
        ("config=config/confg.json", "tried config/confg.json. Did you mean 'config/config.json'?"),
        ("user_prompt_library=nothing.json", "user_prompt_library: 'nothing.json' does not exist."),
        (
            "resume_from_checkpoint=checkpoint-9",
            "is not a complete checkpoint. In output there are: none.",
        ),
        ("lr_end=1", "lr_end: 1 is not below learning_rate 0.001"),
        ("adam_beta1=1", "adam_beta1: '1'"),
        ("optimizer_beta1=0.9", "optimizer_beta1: must be given together with optimizer_beta2."),
        ("validation_resolution=1.0", "sizes are pixels, not megapixels"),
        (
            "num_machines=2",
            "num_processes: 1 processes cannot be shared equally by num_machines 2; it counts "
            "those of",
        ),
        (
            "post_upload_script=no-such-program {global_step}",
            "'no-such-program' is not a program that",
        ),
        ('post_checkpoint_script="echo', "cannot be split into words: No closing quotation."),
        ("webhook_config=hooks.json", "webhook_config: 'hooks.json' does not exist"),
        ("model_type=fulll", "Did you mean 'full'?"),
    ],
)
def test_wrong_settings_are_reported_in_one_line(
    workspace: Workspace, capsys: Capture, setting: str, complaint_: str
) -> None:
    if "learning_rate" in complaint_:
        setting_list = [setting, "lr_scheduler=cosine"]
    else:
        setting_list = [setting]
    assert complaint_ in complaint(
        workspace, capsys, "plan", "validation_disable=false", *setting_list
    )


@pytest.mark.parametrize(
    ("name", "value", "complaint_"),
    [
        ("SIMPLETUNER_LOG_LEVEL", "lod", "SIMPLETUNER_LOG_LEVEL: 'lod' is not one of: DEBUG, INFO"),
        (
            "SIMPLETUNER_ALLOW_MODIFYING_BSZ",
            "perhaps",
            "SIMPLETUNER_ALLOW_MODIFYING_BSZ: 'perhaps' is not 0 or 1.",
        ),
        ("TRAINING_NUM_PROCESSES", "x", "num_processes: 'x' is not a whole number. (environment)"),
        (
            "ACCELERATE_USE_FSDP",
            "true",
            "ACCELERATE_USE_FSDP: is set, by an accelerate config or by hand; unset it.",
        ),
        (
            "ACCELERATE_USE_DEEPSPEED",
            "1",
            "ACCELERATE_USE_DEEPSPEED: is set, by an accelerate config or by hand;",
        ),
        (
            "TRAINER_EXTRA_ARGS",
            "--seed=1 --sede=2",
            "--sede: is not a known key. Did you mean 'seed'?",
        ),
        ("SIMPLETUNER_ENV", "nowhere", "the environment 'nowhere' was not found"),
        ("CONFIG_PATH", "nowhere.json", "no configuration was found; tried nowhere.json"),
        ("CONFIG_BACKEND", "yaml", "CONFIG_BACKEND: 'yaml' is not one of: json, toml, env."),
    ],
)
def test_unset_variables_are_reported(
    workspace: Workspace,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    complaint_: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert complaint_ in complaint(workspace, capsys)


@pytest.mark.parametrize("command", ["sample", "sweep", "start", "publish"])
def test_a_folder_with_an_impossible_name_is_reported(
    workspace: Workspace, capsys: Capture, command: str
) -> None:
    assert "File name too long" in complaint(workspace, capsys, command, "x" * 300)


@pytest.mark.parametrize("command", ["sample", "sweep", "start", "publish"])
def test_a_loop_of_links_is_reported(workspace: Workspace, capsys: Capture, command: str) -> None:
    workspace.path("loop").symlink_to("loop")

    assert workspace.run(command, str(workspace.path("loop"))) == 2
    assert "run/loop" in capsys.readouterr().err


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, is_full_for: Callable[[Path], bool]) -> None:
    """Let the disk be full when a file of some places is renamed to its final name."""
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if is_full_for(Path(target)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)


def test_a_full_disk_while_caching_is_one_line(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def third_latent(target: Path) -> bool:
        if "/vae/" in target.as_posix() and target.name != "index.json":
            written.append(target)
        return len(written) > 2

    with monkeypatch.context() as patch:
        fill_the_disk(patch, third_latent)
        assert "no space left on the disk" in complaint(workspace, capsys, "cache", "fill")
    assert list(workspace.folder.rglob(".*.tmp")) == []
    assert workspace.run("cache", "verify") == 0, "what was complete is whole"

    kept = [workspace.path(str(path)).stat().st_mtime_ns for path in written[:2]]
    assert workspace.run("cache", "fill") == 0
    assert [workspace.path(str(path)).stat().st_mtime_ns for path in written[:2]] == kept, (
        "and is not made again"
    )


@pytest.mark.slow(1)
def test_a_full_disk_while_saving_is_one_line(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        flush = atomic._flush_tree

        def refuse(folder: Path) -> None:
            if folder.name.startswith("checkpoint-4"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush(folder)

        patch.setattr(atomic, "_flush_tree", refuse)
        assert "no space left on the disk" in complaint(workspace, capsys, "train")
    checkpoints = [path.name for path in workspace.path("output").glob("checkpoint-*")]

    assert checkpoints == ["checkpoint-2"], "the one before is kept, and no torn one is left"
    assert workspace.train() == 0
    assert workspace.path("output/pytorch_lora_weights.safetensors").is_file()


REFUSED = [
    "plan learning_rte=1",
    "train model_flavour=x",
    "train env=nowhere",
    "nonsense",
    "train foo",
]


def test_refusals_import_no_torch(workspace: Workspace) -> None:
    script = (
        "import sys; from simpletuner.cli.app import main\nfor command in sys.argv[1:]:\n    "
        "code, heavy = main(command.split()), {'torch', 'diffusers', 'transformers', "
        "'numpy.testing'}\n    print(command, code, sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, *REFUSED]

    done = subprocess.run(
        command, cwd=workspace.folder, capture_output=True, text=True, check=False
    )

    assert [line for line in done.stdout.splitlines() if line.endswith("]")] == [
        f"{arguments} 2 []" for arguments in REFUSED
    ]
    assert done.stderr.count("error: ") >= len(REFUSED)
    assert "Traceback" not in done.stderr


def test_ctrl_c_during_the_import_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *places: object) -> None:
            if name == "simpletuner.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "simpletuner.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])

    with pytest.raises(SystemExit) as ended:
        run()
    assert (ended.value.code, capsys.readouterr().err) == (130, "Interrupted.\n")


def test_the_exit_code_reaches_the_shell(workspace: Workspace) -> None:
    with workspace.spawn("train", "lora_rank=0", stderr=subprocess.PIPE) as process:
        _, printed = process.communicate(timeout=PATIENCE)

    assert process.returncode == 2
    assert printed.splitlines()[-1] == "1 problem to fix; nothing was started."
