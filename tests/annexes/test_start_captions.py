"""`start` uses captions in the layouts of other programs, or prints what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpletuner.annexes.start.media_folder import read_media_folder
from simpletuner.budget import device
from simpletuner.budget.device import Gpu
from simpletuner.cli.app import main
from simpletuner.errors import UserError

Capture = pytest.CaptureFixture[str]
NAMES = ("a.jpg", "b.jpg")


def rows(*names: str, column: str = "file_name", text: str = "text", folder: str = "") -> str:
    return "".join(
        json.dumps({column: f"{folder}{name}", text: f"a photo of {name[0]}"}) + "\n"
        for name in names
    )


PARAGRAPHS = (
    f"{'A grey cat sleeps on a wooden chair. ' * 3}\n\n{'The light is soft and warm. ' * 4}"
)
TEXTFILE: dict[str, Any] = {"caption_strategy": "textfile"}
METADATA = {"caption_strategy": "metadata"}
TRIGGER_ALONE = {"caption_strategy": "instanceprompt", "instance_prompt": "zkt woman"}
# Files beside the pictures; the keys that read them; and what is said.
LAYOUTS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "text files": (
        {"a.txt": "a cat", "b.txt": "a dog"},
        TEXTFILE,
        "2 pictures, 1024x1024, all captioned",
    ),
    "kohya": (
        {"a.caption": "a cat", "b.caption": "a dog"},
        TEXTFILE,
        "2 pictures, 1024x1024, all captioned",
    ),
    "whole names": (
        {"a.jpg.txt": "a cat", "b.jpg.txt": "a dog"},
        TEXTFILE,
        "2 pictures, 1024x1024, all captioned",
    ),
    "tags and captions": (
        {"a.txt": "cat", "a.caption": "a cat", "b.txt": "dog", "b.caption": "a dog"},
        TEXTFILE,
        "Not used: 2 caption files; a.caption is not read: a.txt has precedence.",
    ),
    "imagefolder": (
        {"metadata.jsonl": rows(*NAMES)},
        METADATA,
        "Captions are read from metadata.jsonl",
    ),
    "imagefolder csv": (
        {"metadata.csv": "file_name,prompt\na.jpg,a\nb.jpg,b\n"},
        METADATA,
        "read from metadata.csv",
    ),
    "musubi": (
        {"metadata.jsonl": rows(*NAMES, column="image_path", text="caption", folder="/data/set/")},
        METADATA,
        "2 pictures, 1024x1024, all captioned",
    ),
    "musubi unnamed": (
        {"set.jsonl": rows(*NAMES, column="image_path", text="caption", folder="/data/set/")},
        TRIGGER_ALONE,
        "Not used: set.jsonl lists captions: rename it to metadata.jsonl",
    ),
    "json files": (
        {"a.json": '{"caption": "a cat"}', "b.json": '{"caption": "a dog"}'},
        TRIGGER_ALONE,
        "Not used: 2 .json files beside pictures or clips (a.json) hold captions",
    ),
    "labels": (
        {"metadata.jsonl": '{"file_name": "a.jpg", "label": 1}'},
        TRIGGER_ALONE,
        "needs one of the columns text, caption, prompt; it has: file_name, label.",
    ),
    "table and texts": (
        {"metadata.jsonl": rows("a.jpg"), "a.txt": "a cat", "b.txt": "a dog"},
        TEXTFILE,
        "Not used: the captions in metadata.jsonl",
    ),
    "texts and table": (
        {"metadata.jsonl": rows(*NAMES), "a.txt": "a cat"},
        METADATA,
        "Not used: 1 caption file, since the table captions more files.",
    ),
    "paragraphs": (
        {"a.txt": PARAGRAPHS, "b.txt": "a dog"},
        TEXTFILE | {"disable_multiline_split": True},
        "hold one text each and are not split into lines",
    ),
    "json in text files": (
        {
            "a.txt": json.dumps({"subject": "a cat"}, indent=1),
            "b.txt": json.dumps({"subject": "a dog"}, indent=1),
        },
        TEXTFILE | {"disable_multiline_split": True},
        "hold one text each and are not split into lines",
    ),
    "alternatives": (
        {"a.txt": "a cat\nan animal", "b.txt": "a dog\na pet"},
        TEXTFILE,
        "2 pictures, 1024x1024, all captioned",
    ),
    "none": ({}, TRIGGER_ALONE, "2 pictures, 1024x1024, none captioned"),
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "query_gpu", lambda: Gpu("NVIDIA H100 PCIe", 80e9))
    monkeypatch.setattr("simpletuner.cli.start._run", lambda commands: None)


def put(folder: str, files: dict[str, str], names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1024, 1024), "grey").save(path)
    for name, content in files.items():
        Path(folder, name).write_text(content)


def start(folder: str, *arguments: str) -> dict[str, Any]:
    """The entry that a dry run writes for a folder."""
    assert main(["start", folder, "--yes", "--dry-run", "--trigger", "zkt woman", *arguments]) == 0
    entries: list[dict[str, Any]] = json.loads(
        Path("config", folder, "multidatabackend.json").read_text()
    )
    return entries[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_captions_are_used_or_the_remedy_is_printed(layout: str, capsys: Capture) -> None:
    files, keys, message = LAYOUTS[layout]
    put("cat", files)

    entry = start("cat")

    assert message in capsys.readouterr().out
    read = ("caption_strategy", "disable_multiline_split")
    assert {key: entry[key] for key in read if key in entry} == {
        key: keys[key] for key in read if key in keys
    }
    prompt = "zkt woman" if keys is TRIGGER_ALONE else "zkt woman,"
    assert entry["instance_prompt"] == prompt
    assert main(["plan", "env=cat", "--device-memory=80"]) == 0
    assert "trained sizes: 2 of " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("caption", "is_prepended"),
    [
        ("zkt woman on a chair\na woman\nsomeone\na person", True),  # one line of four
        ("zkt woman on a chair\na zkt woman\nsomeone", False),
        ("zkt womanly\nzkt women", True),
    ],
)
def test_trigger_is_prepended_unless_most_lines_contain_it(
    caption: str, is_prepended: bool, capsys: Capture
) -> None:
    put("cat", {"a.txt": caption, "b.txt": caption})

    entry = start("cat")

    assert entry.get("prepend_instance_prompt", False) == is_prepended
    unnamed = (
        "Without 'zkt woman', which most captions contain: 2 of 6 captions, such as 'someone'."
    )
    assert (unnamed in capsys.readouterr().out) != is_prepended


def test_unreadable_formats_are_reported(capsys: Capture) -> None:
    put("cat", {"c.jxl": "", "d.CR3": "", "e.mxf": ""})

    start("cat")

    output = capsys.readouterr().out
    assert (
        "Not read: 3 files in other formats (c.jxl, d.CR3, e.mxf). Save such pictures as "
        ".png or .jpg" in output
    )


def test_folder_of_unreadable_formats_is_refused_with_a_remedy() -> None:
    put("cat", {"c.jxl": ""}, ("x/y.jpg",))
    Path("cat/x/y.jpg").unlink()

    with pytest.raises(
        UserError,
        match=r"contains no pictures and no clips. Not read: 1 file in other formats \(c.jxl\)",
    ):
        read_media_folder(Path("cat"))


def test_caption_option_is_refused_beside_a_metadata_table(
    capsys: Capture,
) -> None:
    put("cat", {"metadata.jsonl": rows("a.jpg")})

    assert main(["start", "cat", "--yes", "--dry-run", "--caption"]) == 2
    assert (
        "--caption writes .txt files, and captions are read from a metadata table"
        in capsys.readouterr().err
    )


def concepts(folder: str, *arguments: str) -> list[dict[str, Any]]:
    """The entries of pictures that a dry run writes for a folder; no trigger by default."""
    assert main(["start", folder, "--yes", "--dry-run", *arguments]) == 0
    entries = json.loads(Path("config", folder, "multidatabackend.json").read_text())
    return [entry for entry in entries if entry["dataset_type"] == "image"]


def prompt_of(folder: str) -> str:
    config: dict[str, Any] = json.loads(Path("config", folder, "config.json").read_text())
    return str(config["validation_prompt"])


@pytest.mark.parametrize("place", ["kohya/10_zkt woman", "kohya/img/10_zkt woman"])
def test_kohya_folder_name_sets_repeats_and_trigger(place: str, capsys: Capture) -> None:
    put(place, {})
    put("kohya/reg/1_woman", {})

    (entry,) = concepts("kohya")

    assert (entry["instance_data_dir"], entry["repeats"]) == (place, 9)
    assert (entry["caption_strategy"], entry["instance_prompt"]) == ("instanceprompt", "zkt woman")
    assert prompt_of("kohya") == "a photo of zkt woman on a beach at sunset"
    output = capsys.readouterr().out
    assert (
        "'10_zkt woman': 2 files, seen 10 times in an epoch (repeats 9); the words 'zkt woman'."
        in output
    )
    assert (
        "Not trained: 2 files outside of such folders or in regularisation folders "
        "(reg/1_woman/a.jpg" in output
    )
    assert main(["plan", "env=kohya", "--device-memory=80"]) == 0
    assert "2 of 2 pictures used" in capsys.readouterr().out


def test_every_kohya_folder_becomes_a_dataset(capsys: Capture) -> None:
    put("kohya/10_zkt woman", {"c.caption": "on a chair"}, ("c.jpg",))
    put("kohya/4_qxz_dog", {}, ("a.jpg", "b.jpg", "c.jpg"))

    dog, woman = concepts("kohya")

    assert (dog["instance_data_dir"], dog["repeats"], dog["instance_prompt"]) == (
        "kohya/4_qxz_dog",
        3,
        "qxz dog",
    )
    assert (woman["instance_data_dir"], woman["repeats"]) == ("kohya/10_zkt woman", 9)
    assert (woman["caption_strategy"], woman["instance_prompt"]) == ("textfile", "zkt woman,")
    assert main(["plan", "env=kohya", "--device-memory=80"]) == 0
    assert "3 of 3 pictures used" in capsys.readouterr().out


def test_trigger_option_overrides_the_kohya_folder_name() -> None:
    put("kohya/10_zkt woman", {})

    (entry,) = concepts("kohya", "--trigger", "qxz, a woman")

    assert (entry["repeats"], entry["instance_prompt"]) == (9, "qxz, a woman")


def test_single_kohya_folder_can_be_started() -> None:
    put("10_zkt woman", {})

    assert main(["start", "10_zkt woman", "--yes", "--dry-run", "--name", "zkt"]) == 0
    entry = json.loads(Path("config/zkt/multidatabackend.json").read_text())[0]
    assert (entry["instance_data_dir"], entry["repeats"]) == ("10_zkt woman", 9)
    assert entry["instance_prompt"] == "zkt woman"


def test_date_and_camera_folders_are_not_kohya_concepts() -> None:
    for folder in ("set/2024_summer", "set/100_FUJI", "set/001_cats"):
        put(folder, {})

    (entry,) = concepts("set")

    assert (entry["instance_data_dir"], entry["instance_prompt"]) == ("set", "zkt")
