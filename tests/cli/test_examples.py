"""`simpletuner examples`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.guide import examples_by_group
from simpletuner.cli.app import main
from simpletuner.config.sources import EXAMPLES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [["examples"], ["examples", "list"]])
def test_examples_are_listed_by_what_they_learn_from(words: list[str], capsys: Capture) -> None:
    assert main(words) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in ("Pictures", "Clips", "Try it")] == [
        "Pictures",
        "Clips",
        "Try it",
    ]
    names = {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}
    assert names == {path.parent.name for path in EXAMPLES.glob("*/config.json")}
    assert lines[lines.index("Pictures") + 1] == "  kandinsky5-image-lora (the usual choice)"


def test_examples_differ_in_words_and_name_what_they_need() -> None:
    listed = [example for group in examples_by_group().values() for example in group]

    described = [(example.about, example.needs) for example in listed]
    assert len(set(described)) == len(described)
    needs = {example.name: example.needs for example in listed}
    assert re.fullmatch(r"from 16 GB; \d+ min on a 4090", needs["kandinsky5-image-lora"])
    assert needs["kandinsky5-video-lite-full-8gpu"].startswith("8 GPUs from ")
    assert needs["demo"] == "minutes on any computer"


def test_paths_of_a_copied_example_point_to_the_copy(capsys: Capture) -> None:
    assert main(["examples", "copy", "demo"]) == 0
    assert "simpletuner train env=demo" in capsys.readouterr().out

    config = json.loads(Path("config/demo/config.json").read_text())
    datasets = json.loads(Path("config/demo/multidatabackend.json").read_text())
    assert config["data_backend_config"] == "config/demo/multidatabackend.json"
    assert Path(config["user_prompt_library"]).is_file()
    assert Path(config["pretrained_model_name_or_path"]).is_dir()
    assert Path(datasets[0]["instance_data_dir"]).is_dir()
    assert "config/examples/" not in json.dumps([config, datasets])


def test_an_example_is_copied_to_any_folder(capsys: Capture, here: Path) -> None:
    assert main(["examples", "copy", "demo", "--dest", "mine/first one"]) == 0
    assert "env='mine/first one'" in capsys.readouterr().out

    config = json.loads((here / "mine/first one/config.json").read_text())
    assert config["data_backend_config"] == "mine/first one/multidatabackend.json"


@pytest.mark.parametrize("name", [path.parent.name for path in EXAMPLES.glob("*/config.json")])
def test_a_copied_example_has_a_separate_output_folder(name: str) -> None:
    assert main(["examples", "copy", name]) == 0
    assert main(["examples", "copy", name, "--dest", 'config/one\'s "own"']) == 0

    written = [
        json.loads(path.read_text())["output_dir"]
        for path in sorted(Path("config").glob("*/config.json"))
    ]
    assert sorted(written) == [f"output/my-{name}", 'output/one\'s "own"']


def test_copying_an_example_refuses_an_existing_folder(capsys: Capture, here: Path) -> None:
    (here / "config" / "demo").mkdir(parents=True)

    assert main(["examples", "copy", "demo"]) == 2
    assert (
        capsys.readouterr().err
        == "error: config/demo exists already; choose another folder: simpletuner examples copy "
        "demo FOLDER.\n"
    )
    assert list((here / "config" / "demo").iterdir()) == []


def test_copying_an_unknown_example_is_an_error(capsys: Capture) -> None:
    assert main(["examples", "copy", "dmo"]) == 2
    assert "Did you mean 'demo'?" in capsys.readouterr().err


def test_an_interrupted_copy_leaves_nothing(
    capsys: Capture, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "copytree", fail)

    assert main(["examples", "copy", "demo"]) == 2
    assert capsys.readouterr().err == "error: config/demo cannot be written: Permission denied.\n"
    assert list(here.rglob("*demo*")) == []


@pytest.mark.parametrize("name", [path.parent.name for path in EXAMPLES.glob("*/config.json")])
def test_packaged_configs_have_known_keys_only(capsys: Capture, name: str) -> None:
    code = main(["plan", f"example={name}"])
    printed = capsys.readouterr().err

    assert (
        code == 0
        or "the model folder" in printed
        or "instance_data_dir: these folders do not exist" in printed
    ), printed
    assert "is not a known key" not in printed
