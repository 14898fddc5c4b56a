"""`simpletuner start`: its questions, the files that it writes, and the commands that it runs."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import pytest
from PIL import Image

from simpletuner.annexes.page.new.receive import receive
from simpletuner.annexes.start import answers
from simpletuner.annexes.start.intervals import checkpoint_interval, preview_interval
from simpletuner.annexes.start.media_folder import MediaFolder, OpenedFiles
from simpletuner.annexes.start.recipe import RECIPES, find_models
from simpletuner.annexes.start.verdict import Verdict
from simpletuner.budget import device
from simpletuner.budget.drivers import Gpu
from simpletuner.cli import start
from simpletuner.cli.app import main
from simpletuner.cli.start import _check_training
from simpletuner.config.sources import CONFIG_NAME
from simpletuner.data.clips import ClipFacts
from simpletuner.data.discovery import Scan
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.registry import FAMILIES
from simpletuner.weights.lora_names import LORA_FILE
from tests.tools.clips import write_clip
from tests.tools.processes import PATIENCE

Capture = pytest.CaptureFixture[str]
CALL = start.run_command


def put_pictures(
    folder: Path, count: int, *, captions: int | None = None, size: tuple[int, int] = (1024, 1024)
) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number}.png")
        if captions is None or number < captions:
            (folder / f"{number}.txt").write_text("it stands there")
    return folder


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that `start` would run on a machine with a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "query_gpu", lambda: Gpu("NVIDIA H100 PCIe", 80e9))
    called: list[list[str]] = []

    def call(command: Sequence[str]) -> int:
        assert command[:3] == [sys.executable, "-m", "simpletuner"]
        called.append(list(command[3:]))
        if command[3] == "train":  # its result, which the last lines name
            output = Path(written(command[4].removeprefix("env="))["output_dir"])
            output.mkdir(parents=True, exist_ok=True)
            (output / LORA_FILE).touch()
        return 0

    monkeypatch.setattr(start, "run_command", call)
    return called


def written(name: str, file: str = "config.json") -> Any:
    return json.loads((Path("config") / name / file).read_text())


def test_a_folder_of_pictures_is_trained_and_compared(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("my cat"), 12)

    trigger = ["--trigger", "zkt, a grey cat"]
    assert main(["start", "my cat", "--yes", *trigger, "learning_rate=2e-4"]) == 0

    config = written("my-cat")
    trained, texts = written("my-cat", "multidatabackend.json")
    assert commands == [
        ["train", "env=my-cat"],
        ["sweep", "output/my-cat", "--strengths", "0.75,1.0"],
    ]
    assert config["model_flavour"] == "t2i-lite-sft"
    assert config["max_train_steps"] == 1000
    assert config["learning_rate"] == 2e-4
    assert config["offload"] == "auto"
    assert config["preservation_trigger"] == "zkt, a grey cat"
    assert config["model_card_trigger"] == ["zkt, a grey cat"]
    assert config["preservation_prompt"] == "a grey cat"
    assert config["validation_prompt"] == "a photo of zkt, a grey cat, on a beach at sunset"
    assert trained["instance_data_dir"] == "my cat"
    assert trained["instance_prompt"] == "zkt, a grey cat,"
    assert trained["prepend_instance_prompt"]
    assert texts["dataset_type"] == "text_embeds"
    assert "output/my-cat" in capsys.readouterr().out


def test_some_of_many_files_are_held_out_to_compare_checkpoints(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 17, captions=0)

    assert main(["start", "cat", "--yes"]) == 0
    output = capsys.readouterr().out
    assert "Held out: 2 of 17 files, to compare checkpoints on them (hold_out in" in output

    config = written("cat")
    trained, _ = written("cat", "multidatabackend.json")
    assert trained["hold_out"] == 2
    assert config["max_train_steps"] == 1200  # 75 a file for 15 files, rounded
    assert config["eval_steps_interval"] == 150
    assert config["checkpoint_step_interval"] == 150
    assert config["validation_step_interval"] == 300  # every second checkpoint has a preview

    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    output = capsys.readouterr().out
    assert "15 of 17 pictures used" in output
    assert "2 of 2 pictures used" in output


def test_written_config_can_be_planned(commands: list[list[str]], capsys: Capture) -> None:
    put_pictures(Path("cat"), 3, captions=0)

    assert main(["start", "cat", "--yes", "--purpose", "style", "--dry-run"]) == 0
    assert commands == [["plan", "env=cat"]]

    capsys.readouterr()
    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    assert "3 of 3 pictures used" in capsys.readouterr().out

    (trained, _) = written("cat", "multidatabackend.json")
    assert trained["instance_prompt"] == "in the style of zkt"


def test_start_asks_at_most_three_questions(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "clips").mkdir()
    write_clip(tmp_path / "clips" / "a.mp4", seconds=2.0, size=(64, 48))
    inputs = ["?", "subject", "?", "qxz, a dog", "2"]  # a question mark asks for an explanation
    monkeypatch.setattr("builtins.input", lambda prompt: inputs.pop(0))

    assert main(["start", "clips"]) == 0
    assert inputs == []

    config = written("clips")
    trained, _ = written("clips", "multidatabackend.json")
    assert config["model_family"] == "sanavideo"
    # 2 s at 16 frames a second are 32, rounded down to 4k + 1.
    assert trained["video"]["num_frames"] == 29
    assert config["validation_num_video_frames"] == 29


def test_small_pictures_are_trained_at_a_smaller_size(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 3, captions=0, size=(700, 900))
    # A broken link: it has no caption either, as none of the pictures has.
    Path("cat/link.png").symlink_to("nowhere.png")

    assert main(["start", "cat", "--yes", "--dry-run"]) == 0
    assert "cat: 3 pictures, 700x900, none captioned\n" in capsys.readouterr().out
    assert written("cat", "multidatabackend.json")[0]["resolution"] == 640

    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    output = capsys.readouterr().out
    assert "trained sizes: 3 of 640x640" in output
    assert "enlarged" not in output


def test_stray_animation_among_pictures_is_reported_and_left_out(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 3)
    frames = [Image.new("RGB", (64, 64), (red, 0, 0)) for red in (0, 255)]
    frames[0].save("cat/loop.gif", save_all=True, append_images=frames[1:])

    assert main(["start", "cat", "--yes"]) == 0
    output = capsys.readouterr().out
    assert "cat: 3 pictures, 1024x1024, all captioned" in output
    assert (
        "Not trained, clips: loop.gif. A run learns from pictures or from clips: to train "
        "clips, put them" in output
    )
    assert written("cat")["model_family"] == "kandinsky5-image"

    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    assert "loop.gif: not used, is a clip; clips need a separate dataset" in capsys.readouterr().out


def test_few_pictures_among_clips_are_reported_and_left_out(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("clips"), 1, captions=0)
    for name in ("a", "b"):
        write_clip(Path(f"clips/{name}.mp4"), seconds=2.0, size=(64, 48))

    assert main(["start", "clips", "--yes"]) == 0
    output = capsys.readouterr().out
    assert "clips: 2 clips, 64x48, 2.0 s, none captioned" in output
    assert "Not trained, pictures: 0.png." in output


LARGE = [(1024, 1024)]


def opened(
    sizes: dict[str, tuple[int, int]], clips: dict[str, ClipFacts] | None = None
) -> MediaFolder:
    """A folder whose files have been opened already, and have these sizes."""
    media = MediaFolder(Path(), Scan(), "clips" if clips else "pictures")
    media.__dict__["opened"] = OpenedFiles(sizes, clips or {})
    return media


SQUARE: dict[str, Any] = {"resolution": 1024, "crop_aspect": "square"}
IMAGE = FAMILIES["kandinsky5-image"]
SMALL_SIZES = [(640, 480), (451, 300), (900, 600)]


def mixed_folder(small: int, size: tuple[int, int]) -> MediaFolder:
    """25 pictures, of which so many have a small size; the others are large."""
    sizes = {f"{number:02}": size for number in range(small)}
    for number in range(100 + small, 125):
        sizes[str(number)] = (3024, 4032)
    return opened(sizes)


def resolution_for(size: tuple[int, int]) -> int:
    """The largest multiple of 64 that enlarges no picture of this size, at least 256."""
    return max(256, min(size) // 64 * 64)


@pytest.mark.parametrize("small", [1, 2, 3, 6])
@pytest.mark.parametrize("size", SMALL_SIZES)
def test_few_small_files_are_left_out_instead_of_shrinking_the_rest(
    small: int, size: tuple[int, int]
) -> None:
    fit = mixed_folder(small, size).fit(SQUARE, IMAGE, 1)

    assert fit.resolution == 1024
    assert len(fit.small) == small
    notes = " ".join(fit.notes())
    assert f"Left out: {small} of 25 pictures (00" in notes
    assert "Trained at " not in notes
    assert notes.endswith(f"add resolution={resolution_for(size)}.")


@pytest.mark.parametrize("small", [7, 13, 25])
@pytest.mark.parametrize("size", SMALL_SIZES)
def test_many_small_files_lower_the_resolution(small: int, size: tuple[int, int]) -> None:
    fit = mixed_folder(small, size).fit(SQUARE, IMAGE, 1)

    assert fit.resolution == resolution_for(size)
    assert fit.small == []
    notes = " ".join(fit.notes())
    assert "Left out: " not in notes
    assert "Trained at " in notes


def test_large_files_are_trained_at_the_usual_resolution_without_a_note() -> None:
    fit = mixed_folder(0, (640, 480)).fit(SQUARE, IMAGE, 1)

    assert fit.resolution == 1024
    assert fit.small == []
    assert "Left out: " not in " ".join(fit.notes())
    assert "Trained at " not in " ".join(fit.notes())


@pytest.mark.parametrize(
    ("sizes", "square", "trained", "left_out"),
    [
        ([(2000, 1500)], True, 1024, 0),
        (LARGE * 19 + [(300, 300)], True, 1024, 1),
        ([(960, 960)], True, 1024, 0),  # enlarged by so little that it cannot be seen
        ([(512, 288)], False, 384, 0),
        ([(90, 90)], True, 256, 0),
        ([], True, 1024, 0),
    ],
)
def test_resolution_leaves_few_files_enlarged(
    sizes: list[tuple[int, int]], square: bool, trained: int, left_out: int
) -> None:
    folder = opened({str(number): size for number, size in enumerate(sizes)})
    entry = {"resolution": 1024, "crop_aspect": "square" if square else "preserve"}

    fit = folder.fit(entry, IMAGE, 1)

    assert fit.resolution == trained
    assert len(fit.small) == left_out


@pytest.mark.parametrize(
    ("resolution", "usual_size"), [(96, 600), (256, 600), (512, 256), (512, 300), (512, 600)]
)
def test_resolution_suggested_for_small_files_is_never_larger(
    resolution: int, usual_size: int
) -> None:
    sizes = {str(number): (usual_size, usual_size) for number in range(9)}
    folder = opened({**sizes, "tiny": (60, 60)})

    fit = folder.fit({**SQUARE, "resolution": resolution}, IMAGE, 1)

    assert fit.small == ["tiny"]
    (note,) = [note for note in fit.notes() if note.startswith("Left out: ")]
    remedy = "at a smaller size for all, add resolution=256."
    if fit.resolution <= 256:  # no smaller resolution is possible
        remedy = f"enlarged, add resolution={fit.resolution}."
    assert note.endswith(f"To train them too, {remedy}")


def test_small_files_are_left_out_and_reported(commands: list[list[str]], capsys: Capture) -> None:
    put_pictures(Path("cat"), 22, captions=0, size=(1100, 1200))
    put_pictures(Path("small"), 3, captions=0, size=(640, 480))
    for path in Path("small").iterdir():
        path.rename(f"cat/small-{path.name}")

    assert main(["start", "cat", "--yes", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert (
        "Left out: 3 of 25 pictures (small-0.png, small-1.png, small-2.png) are smaller than "
        "1024x1024" in output
    )

    config = written("cat")
    trained, _ = written("cat", "multidatabackend.json")
    assert (trained["resolution"], trained["minimum_image_size"]) == (1024, 930)
    assert (trained["hold_out"], config["validation_resolution"]) == (2, "1024x1024")

    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    output = capsys.readouterr().out
    assert "20 of 25 pictures used" in output
    assert "2 of 2 pictures used" in output
    assert "enlarged" not in output

    # The remedy of the note.
    assert main(["start", "cat", "--yes", "--dry-run", "--name", "all", "resolution=448"]) == 0
    assert "Left out" not in capsys.readouterr().out
    assert "minimum_image_size" not in written("all", "multidatabackend.json")[0]


def test_unusable_files_are_neither_held_out_nor_counted(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 16)
    Path("cat/7.txt").write_text(" ")
    Path("cat/broken.png").write_bytes(b"broken")
    Path("cat/broken.txt").write_text("it stands there")

    assert main(["start", "cat", "--yes"]) == 0
    output = capsys.readouterr().out
    assert "cat: 15 pictures, 1024x1024, all captioned\n" in output
    assert "Not usable: 7.png has an empty caption file." in output
    assert "Not usable: broken.png is " in output
    assert "Held out" not in output

    config = written("cat")
    trained, _ = written("cat", "multidatabackend.json")
    # Sixteen files would be enough to hold out two.
    assert "hold_out" not in trained
    assert config["max_train_steps"] == 1200  # 75 steps for each of the 15


def test_settings_reach_the_datasets_in_any_spelling(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 1)

    assert main(["start", "cat", "--yes", "--max-train-steps", "500", "--resolution=512"]) == 0
    config = written("cat")
    trained, _ = written("cat", "multidatabackend.json")
    assert (config["max_train_steps"], config["resolution"]) == (500, 512)
    assert "resolution" not in trained, "which would override it"

    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    assert "trained sizes: 1 of 512x512" in capsys.readouterr().out


def test_an_empty_trigger_is_the_default(commands: list[list[str]]) -> None:
    put_pictures(Path("cat"), 1)

    assert main(["start", "cat", "--yes", "--trigger", " "]) == 0
    assert written("cat")["validation_prompt"] == "a photo of zkt on a beach at sunset"


def test_a_name_keeps_the_letters_of_every_script(commands: list[list[str]]) -> None:
    put_pictures(Path("मेरी बिल्ली (2)"), 1)

    assert main(["start", "मेरी बिल्ली (2)", "--yes"]) == 0
    assert commands[0] == ["train", "env=मेरी-बिल्ली-2"]
    assert CONFIG_NAME.fullmatch("मेरी-बिल्ली-2"), "so that the page opens it"


def test_before_and_after_folders_train_edits_without_questions(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pictures(Path("pairs/Before"), 2, captions=0)
    put_pictures(Path("pairs/after"), 2)
    monkeypatch.delattr("builtins.input")

    assert main(["start", "pairs"]) == 0
    trained, sources, _ = written("pairs", "multidatabackend.json")
    assert written("pairs")["model_flavour"] == "i2i-lite-sft"
    assert Path(trained["instance_data_dir"]) == Path("pairs/after")
    assert Path(sources["instance_data_dir"]) == Path("pairs/Before")
    assert "instance_prompt" not in trained


def test_start_writes_captions_before_training(commands: list[list[str]]) -> None:
    put_pictures(Path("cat"), 3, captions=1)

    assert main(["start", "cat", "--yes", "--caption", "--trigger", "qxz"]) == 0
    trained = written("cat", "multidatabackend.json")[0]
    assert commands[0] == ["caption", "env=cat"], "the dataset puts the trigger before all captions"
    assert (trained["caption_strategy"], trained["instance_prompt"]) == ("textfile", "qxz,")


def test_a_dry_run_writes_no_captions_and_shows_the_plan(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 3, captions=1)

    assert main(["start", "cat", "--yes", "--dry-run", "--caption"]) == 0

    output = capsys.readouterr().out
    assert "Write 2 captions before training: simpletuner caption env=cat\n" in output
    assert "trained sizes: 3 of 1024x1024" in output
    assert "data_backend_config" not in output, "a temporary file"
    assert not commands
    assert written("cat", "multidatabackend.json")[0]["caption_strategy"] == "textfile"


def answering(monkeypatch: pytest.MonkeyPatch, **answers: str) -> list[str]:
    """Answer prompts that contain a word (spaces as underscores), and Enter all others; returns
    the prompts.
    """
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        for words, text in answers.items():
            if words.replace("_", " ") in prompt:
                return text
        return ""

    monkeypatch.setattr("builtins.input", answer)
    return prompts


@pytest.mark.parametrize(
    ("answer", "first"), [("", "caption"), ("caption", "caption"), ("start", "train")]
)
def test_start_asks_before_it_leaves_many_files_out(
    answer: str, first: str, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pictures(Path("cat"), 8, captions=2)
    prompts = answering(monkeypatch, left_out=answer)

    assert main(["start", "cat", "--trigger", "zkt, a cat"]) == 0

    asked = "6 of 8 pictures would be left out: 6 without a caption. What shall be done?"
    assert any(asked in prompt for prompt in prompts)
    assert commands[0][0] == first
    assert written("cat", "multidatabackend.json")[0]["caption_strategy"] == "textfile"


def test_start_stops_if_the_user_does_not_want_to_leave_files_out(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    put_pictures(Path("cat"), 8, captions=2)
    answering(monkeypatch, left_out="stop")

    assert main(["start", "cat", "--trigger", "zkt, a cat"]) == 2

    assert "6 without a caption. Nothing was written." in capsys.readouterr().err
    assert not Path("config").exists()


def test_few_files_without_a_caption_are_left_out_and_counted(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 10, captions=8)

    assert main(["start", "cat", "--yes"]) == 0

    output = capsys.readouterr().out
    assert "cat: 10 pictures, 1024x1024, 8 captioned\n" in output
    assert "Left out: 2 files that have no caption." in output
    assert written("cat")["max_train_steps"] == 600  # 75 for each of the 8


def test_a_subject_is_asked_until_the_words_say_what_it_is(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    put_pictures(Path("cat"), 1)
    inputs = ["subject", "", "zkt", "zkt, a grey cat"]
    monkeypatch.setattr("builtins.input", lambda prompt: inputs.pop(0))

    assert main(["start", "cat"]) == 0

    output = capsys.readouterr().out
    assert "Name it: a made-up word, then what it is, as in: zkt, a grey cat" in output
    assert "Say what zkt is, too, after a comma, as in: zkt, a grey cat." in output
    assert written("cat")["preservation_prompt"] == "a grey cat"


def test_files_that_the_user_leaves_out_are_not_counted(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 17)
    Path("cat/exclude.json").write_text('["3.png", "4.png"]')

    assert main(["start", "cat", "--yes"]) == 0

    assert "cat: 15 pictures, 1024x1024, all captioned\n" in capsys.readouterr().out
    trained = written("cat", "multidatabackend.json")[0]
    assert trained["exclude_files"] == "exclude.json"
    assert "hold_out" not in trained, "fewer than 16 are left"


def test_captions_that_name_the_subject_stay_as_they_are(commands: list[list[str]]) -> None:
    put_pictures(Path("cat"), 3, captions=2)
    for number, name in enumerate(("Zkt", "zkt, a grey cat,")):
        Path(f"cat/{number}.txt").write_text(f"a photo of {name} on a chair")

    assert main(["start", "cat", "--yes", "--caption", "--trigger", "zkt, a grey cat"]) == 0
    config = written("cat")
    trained = written("cat", "multidatabackend.json")[0]
    assert commands[0] == ["caption", "env=cat", "--trigger", "zkt, a grey cat"]
    assert (trained["caption_strategy"], trained.get("instance_prompt")) == ("textfile", None)
    assert (config["preservation_trigger"], config["preservation_prompt"]) == ("zkt", "a grey cat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder."),
        (["."], "output/test_start_refuses_what"),
        (["."], "is inside ., so previews would be trained. Start outside of it: cd "),
        (["cat", "output_dir=cat/out"], "cat/out is inside cat, so previews would be trained."),
        (["cat/0.png"], "cat/0.png is a file; name the folder that it is in: cat"),
        (["hlaf"], "hlaf is not a folder. Did you mean 'half'?"),
        (["empty"], "empty contains no pictures and no clips."),
        (["run"], "It has a config: simpletuner train --config run/config.json."),
        (["mixed", "--purpose", "motion"], "--purpose 'motion' is not one of: subject, style."),
        (["half"], "no caption for 1 of 2 files (1.png is the first). --caption writes them"),
        (
            ["cat", "--purpose", "styel"],
            "--purpose 'styel' is not one of: subject, style. Did you mean 'style'?",
        ),
        (["cat", "--model", "flux"], "--model 'flux' is not one of: kandinsky5-image."),
        # Captions or not.
        (["half", "--model", "flux"], "--model 'flux' is not one of: kandinsky5-image."),
        (["pairs"], "pairs/after contains no pictures."),
        (
            ["cat", "max_train_step=9"],
            "max_train_step: is not a known key. Did you mean 'max_train_steps'?",
        ),
        (["cat", "learning_rate=fast", "lora_rank=0"], "learning_rate: 'fast'"),
        (["cat", "learning_rate=fast", "lora_rank=0"], "lora_rank: 0"),
        # A dry run is refused before anything is written, too.
        (["cat", "learning_rate=fast", "--dry-run"], "learning_rate: 'fast'"),
        (
            ["cat", "learning_rat=1"],
            "learning_rat: is not a known key. Did you mean 'learning_rate'?",
        ),
        (["cat", "env=other"], "env: has no effect: start writes a config of its own."),
        (["cat", "--name", "a/b"], "--name 'a/b' is not the name of a folder."),
        (
            ["cat", "--name", "old"],
            "config/old exists already: continue with `simpletuner train env=old`, or set",
        ),
        (
            ["cat", "--name", "my cat!!"],
            "--name 'my cat!!': a name has letters, digits, -, _ and . only, as in my-cat.",
        ),
        (["cat", "--trigger", "--dry-run"], "--trigger needs a value, and --dry-run is an option."),
    ],
)
def test_start_refuses_what_it_cannot_train(
    arguments: list[str], message: str, commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 1)
    put_pictures(Path("half"), 2, captions=1)
    Path("half/0-link.png").symlink_to("nowhere.png")  # the plan lists it; it needs no caption
    Path("half/0-broken.png").write_bytes(b"broken")
    put_pictures(Path("mixed"), 1)
    write_clip(Path("mixed/a.mp4"), seconds=0.5, size=(64, 48))
    for folder in ("empty", "run", "config/old", "config/ol d", "pairs/before", "pairs/after"):
        Path(folder).mkdir(parents=True)
    Path("run/config.json").write_text("{}")

    assert main(["start", *arguments, "--yes"]) == 2
    assert message in capsys.readouterr().err
    assert not commands
    assert {path.name for path in Path("config").iterdir()} == {"old", "ol d"}


def test_caption_option_chooses_a_model_that_can_write_captions(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    Path("clips").mkdir()
    write_clip(Path("clips/a.mp4"), seconds=2.0, size=(64, 48))
    monkeypatch.setattr(
        answers, "judge_new_run", lambda run: Verdict(run.example == "sanavideo-lora", "judged")
    )

    assert main(["start", "clips", "--yes", "--caption", "--model", "sanavideo"]) == 2
    assert (
        "--caption: the text encoder of sanavideo cannot write captions" in capsys.readouterr().err
    )
    assert not Path("config").exists()

    assert main(["start", "clips", "--yes", "--caption"]) == 0
    assert written("clips")["model_family"] == "kandinsky5-video"


def test_settings_are_written_and_intervals_follow_them(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pictures(Path("cat"), 3)
    monkeypatch.setenv("HUB", "me/cat")
    settings = [
        "--max-train-steps=40",
        "--output-dir",
        "mine",
        "lr_warmup_steps=null",
        "hub_model_id={env:HUB}",
    ]

    assert main(["start", "cat", "--yes", *settings]) == 0
    config = written("cat")
    assert (config["max_train_steps"], config["checkpoint_step_interval"]) == (40, 5)

    assert commands[1][:2] == ["sweep", "mine"]
    assert config["lr_warmup_steps"] is None
    assert config["hub_model_id"] == "{env:HUB}"


def test_last_checkpoint_is_not_right_after_the_one_before_it() -> None:
    """It is the one of the last interval, or at least a tenth of an interval later."""
    for steps in range(1, 3000):
        interval = checkpoint_interval(steps)
        since_last = steps % interval or interval
        assert since_last > interval / 10


@pytest.mark.parametrize("steps", [8, 300, 800, 1000, 1100, 1300, 1500, 1700, 1900, 4000])
@pytest.mark.parametrize("rounds", [0.5, 3, 5, 7, 9.5])
def test_intervals_divide_the_run(steps: int, rounds: float) -> None:
    saving = checkpoint_interval(steps)
    assert steps % saving == 0
    assert 4 <= steps / saving <= 8

    previews = preview_interval(steps, saving, rounds)
    assert steps % previews == 0
    assert previews % saving == 0, "each has its checkpoint"
    assert 1 + steps / previews <= max(rounds, 2)


def test_start_never_replaces_a_config(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    put_pictures(Path("cat"), 1)
    (Path("config/cat-tmp")).mkdir(parents=True)
    Path("config/cat-tmp/config.json").write_text("mine")

    def answer(prompt: str) -> str:
        Path("config/cat").mkdir(exist_ok=True)  # meanwhile, on the page
        Path("config/cat/config.json").write_text("theirs")
        return "zkt, a cat" if "made-up word" in prompt else ""

    monkeypatch.setattr("builtins.input", answer)

    assert main(["start", "cat"]) == 2
    assert (
        "config/cat exists already, and differs from these answers in config.json, "
        in capsys.readouterr().err
    )
    assert sorted(path.as_posix() for path in Path("config").rglob("*.json")) == [
        "config/cat-tmp/config.json",
        "config/cat/config.json",
    ]
    assert Path("config/cat/config.json").read_text() == "theirs"


def test_next_upload_removes_leftovers_of_a_killed_server(tmp_path: Path) -> None:
    for name, age in (("old", 7200), ("new", 0)):
        (folder := tmp_path / f".upload-{name}").mkdir()
        (folder / "0.zip").write_bytes(b"half")
        for path in (folder / "0.zip", folder):
            os.utime(path, (time.time() - age,) * 2)

    assert receive(tmp_path, "a.txt", [b"a cat"]) == (["a.txt"], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".upload-new", "a.txt"]


def test_failed_command_stops_start_and_prints_how_to_continue(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    put_pictures(Path("cat"), 1)
    rest = "simpletuner train env={0} && simpletuner sweep output/{0} --strengths 0.75,1.0\n"
    for name, code, advice in (("a", 130, "To go on"), ("b", 2, "Once that is fixed, go on with")):
        monkeypatch.setattr(start, "run_command", lambda command, code=code: code)

        assert main(["start", "cat", "--yes", "--name", name]) == code
        assert f"Stopped. {advice}: {rest.format(name)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("material", "settings", "size", "interval"),
    [
        ("pictures", [], "256x256", 300),
        ("pictures", ["max_train_steps=3000"], "256x256", 375),
        ("pictures", ["resolution=512"], "512x512", 300),
        ("pictures", ["--trigger", "zkt, a cat", "max_train_steps=100"], "256x256", 100),
        # A preview of clips has four times the pixels of the trained clip.
        ("clips", [], "768x512", 800),
    ],
)
def test_previews_have_the_training_size_and_take_a_fifth_of_the_run(
    material: str,
    settings: list[str],
    size: str,
    interval: int,
    commands: list[list[str]],
    capsys: Capture,
) -> None:
    put_pictures(Path("pictures"), 3, captions=0, size=(64, 64))
    Path("clips").mkdir()
    write_clip(Path("clips/a.mp4"), seconds=2.0, size=(320, 240))
    model = {"pictures": "kandinsky5-image", "clips": "kandinsky5-video-lite"}[material]

    assert main(["start", material, "--yes", "--dry-run", "--model", model, *settings]) == 0
    config = written(material)
    assert (config["validation_resolution"], config["validation_step_interval"]) == (size, interval)
    assert (
        interval % config["checkpoint_step_interval"] == 0 or interval == config["max_train_steps"]
    )

    if not settings and material == "pictures":
        assert main(["plan", "env=pictures", "--device=rtx-4090"]) == 0
        (share,) = re.findall(r"rounds? of previews, (\d+)% of that time", capsys.readouterr().out)
        assert int(share) <= 20


def test_ctrl_c_waits_for_the_checkpoint(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A terminal sends it to both processes; training must not be killed while it saves."""
    monkeypatch.setattr(start, "run_command", CALL)
    put_pictures(Path("cat"), 1)
    stub = tmp_path / "python"
    # Longer than the quarter of a second that subprocess waits after a KeyboardInterrupt.
    stub.write_text("#!/bin/sh\nkill -INT $PPID; sleep 0.5; echo > saved; exit 130\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))

    assert main(["start", "cat", "--yes"]) == 130
    assert Path("saved").exists()
    assert "To go on: simpletuner train env=cat && " in capsys.readouterr().err


def test_sigterm_reaches_the_training(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job scheduler ends only `start`; the training must not continue without it."""
    monkeypatch.setattr(start, "run_command", CALL)
    put_pictures(Path("cat"), 1)
    stub = tmp_path / "python"
    stub.write_text(
        "#!/bin/sh\ntrap 'echo > saved; exit 130' TERM\nkill -TERM $PPID; sleep 20 & wait\n"
    )
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))

    assert main(["start", "cat", "--yes"]) == 130
    assert Path("saved").exists()


def test_a_run_is_longer_with_more_files_within_bounds() -> None:
    recipe = RECIPES["subject"]
    assert [recipe.steps(files) for files in (1, 20, 1000)] == [600, 1600, 3000]


@pytest.mark.parametrize(
    ("frames", "trained", "left_out"),
    [
        ([30, 30, 81], 29, 0),
        ([30] * 4 + [81] * 36, 81, 4),
        ([1, 30, 81], 29, 1),
        ([1], 1, 0),
        ([30] + [81] * 19, 81, 1),
        ([200], 81, 0),
    ],
)
def test_few_short_clips_are_left_out_instead_of_shortening_the_rest(
    frames: list[int], trained: int, left_out: int
) -> None:
    # At their own rate, so that the seconds are the frames.
    clips = {
        str(number): ClipFacts(64, 48, count / 16, 16.0) for number, count in enumerate(frames)
    }
    folder = opened(dict.fromkeys(clips, (64, 48)), clips)
    entry = {"resolution": 64, "video": {}}
    family: Any = SimpleNamespace(frame_rate=16, frame_stride=4)

    fit = folder.fit(entry, family, 81)

    assert fit.frames == trained
    assert len(fit.short) == left_out
    notes = " ".join(fit.notes())
    assert ("Trained on " in notes) == (trained < 81)
    assert (f"Left out: {left_out} of {len(frames)} clips" in notes) == (left_out > 0)


def test_model_that_fits_is_chosen_first(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], capsys: Capture
) -> None:
    Path("clips").mkdir()
    write_clip(Path("clips/a.mp4"), seconds=2.0, size=(64, 48))
    monkeypatch.setattr(
        answers, "judge_new_run", lambda run: Verdict(run.example == "sanavideo-lora", "judged")
    )

    assert main(["start", "clips", "--yes"]) == 0
    assert written("clips")["model_family"] == "sanavideo"


@pytest.mark.parametrize("kind", ["pictures", "clips"])
def test_start_without_a_gpu_offers_a_tiny_model(
    kind: str, commands: list[list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "query_gpu", lambda: None)
    put_pictures(Path("pictures"), 6, captions=0)
    Path("clips").mkdir()
    write_clip(Path("clips/a.mp4"), seconds=2.0, size=(96, 80))

    model = {"pictures": "demo", "clips": "demo-video"}[kind]
    assert [*find_models(kind)][-1] == model

    started = ["start", kind, "--purpose", "subject", "--trigger", "zkt, a cat"]
    # The tiny model is not a default, and a run of days is refused before anything is written.
    assert main([*started, "--yes"]) == 2
    errors = capsys.readouterr().err
    assert "device: no GPU was found. On the CPU this takes about " in errors
    assert (
        f" Add --model {model} (a tiny model that draws simple shapes, in minutes), --dry-run ("
        in errors
    )
    assert not commands
    assert not Path("config").exists()

    # In a terminal it is the first choice, so Enter chooses what works here.
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    assert main(started) == 0
    assert commands[0] == ["train", f"env={kind}"]
    assert "kandinsky5-" in (errors := capsys.readouterr().out)
    assert "no GPU here: about " in errors

    config = written(kind)
    entries = written(kind, "multidatabackend.json")
    assert (config["max_train_steps"], config["preservation_prompt"]) == (300, "a cat")
    assert "tracker_run_name" not in config
    assert [entry["id"] for entry in entries if entry["dataset_type"] != "text_embeds"] == [
        entries[0]["id"]
    ]

    capsys.readouterr()
    assert main(["plan", f"env={kind}"]) == 0

    files = {"pictures": 6, "clips": 1}[kind]
    assert f"{files} of {files} {kind.removesuffix('s')}" in capsys.readouterr().out

    assert main(["start", kind, "--yes", "--name", "b", "--caption", "--model", model]) == 2
    assert (
        f"--caption: the text encoder of {model} cannot write captions" in capsys.readouterr().err
    )

    monkeypatch.setattr(
        "simpletuner.annexes.start.recipe.find_device", lambda: SimpleNamespace(is_gpu=True)
    )
    assert model not in find_models(kind)


@pytest.mark.parametrize(
    ("where", "demo", "is_advised"), [("", "", False), ("memory", "", False), ("memory", "a", True)]
)
def test_only_a_run_that_is_too_large_gets_advice(
    monkeypatch: pytest.MonkeyPatch, where: str, demo: str, is_advised: bool
) -> None:
    def refuse(run: object) -> None:
        raise ConfigError([Problem(where, "is wrong.")])

    monkeypatch.setattr("simpletuner.cli.start.plan_new_run", refuse)
    monkeypatch.setattr("simpletuner.cli.start.find_demo", lambda kind: demo)
    run: Any = SimpleNamespace(media=SimpleNamespace(kind="pictures"))

    with pytest.raises(ConfigError) as caught:
        _check_training(run)
    assert ("--dry-run" in caught.value.problems[0].message) == is_advised


@pytest.mark.slow(2)
def test_terminal_questions_can_be_corrected_and_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pictures(tmp_path / "cat", 1)
    monkeypatch.setenv("TERM", "xterm-256color")
    command = ["-m", "simpletuner", "start", "cat", "--dry-run"]
    child = pexpect.spawn(
        sys.executable, command, cwd=str(tmp_path), encoding="utf-8", timeout=PATIENCE
    )
    child.expect(r"What should be learned\? \[subject\]: ")
    child.sendline("styel")
    child.expect("Did you mean 'style'")
    child.expect(r"What should be learned\? \[style\]: ")
    child.sendline("")
    child.expect(r"made-up word \(zkt\) \[zkt\]: ")
    child.sendline("back")
    child.expect(r"What should be learned\? \[style\]: ")
    child.sendcontrol("d")
    child.expect(
        "The input ended before the last question. Nothing was written. --yes takes every default."
    )
    child.expect(pexpect.EOF)

    child.close()

    assert child.exitstatus == 2
    assert not (tmp_path / "config").exists()


def test_start_goes_on_from_its_dry_run(
    commands: list[list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "ending_of", lambda output, held_out: ())  # nothing is trained
    put_pictures(Path("cat"), 3)
    answers = ["start", "cat", "--yes", "--trigger", "zkt, a cat"]
    assert main([*answers, "--dry-run"]) == 0
    before = Path("config/cat/config.json").read_bytes()
    assert commands.pop() == ["plan", "env=cat"]

    assert main(answers) == 0

    assert "config/cat is as these answers would write it" in capsys.readouterr().out
    assert commands[0] == ["train", "env=cat"]
    assert Path("config/cat/config.json").read_bytes() == before


def test_start_names_what_differs_in_a_config_that_exists(
    commands: list[list[str]], capsys: Capture
) -> None:
    put_pictures(Path("cat"), 3)
    answers = ["start", "cat", "--yes", "--trigger", "zkt, a cat"]
    assert main([*answers, "--dry-run"]) == 0
    commands.clear()

    assert main([*answers, "max_train_steps=900"]) == 2

    errors = capsys.readouterr().err
    assert "config/cat exists already, and differs from these answers in max_train_steps" in errors
    assert "Train it as it is with `simpletuner train env=cat`" in errors
    assert commands == []
