"""The packaged configurations load as they are, and with files the plan has no warnings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from simpletuner.cli.app import main
from simpletuner.config.schema import all_options
from simpletuner.config.sources import EXAMPLES, example_names
from simpletuner.models.registry import FAMILIES
from tests.tools.clips import write_clip
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
# The demos bring their own models, pictures and clips.
NAMES = [name for name in example_names() if not name.startswith("demo")]
MISSING = "error: instance_data_dir: these folders do not exist"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip that is long and large enough for every example."""
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_clip(
        path, seconds=6.0, size=(768, 512), codec_options={"preset": "ultrafast", "crf": "30"}
    )
    return path


def read(name: str, file: str = "config.json") -> dict:
    return json.loads((EXAMPLES / name / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_example_without_files_lacks_only_the_users_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["plan", f"example={name}"]) == 2
    problem, summary = capsys.readouterr().err.splitlines()
    assert problem.startswith(MISSING)
    assert summary.startswith("1 problem")


@pytest.mark.parametrize("name", NAMES)
def test_example_with_files_is_planned_without_warnings(
    name: str, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))
    workspace = Workspace(tmp_path)
    for entry in read(name, "multidatabackend.json"):
        if entry["dataset_type"] == "video":
            target = workspace.path(entry["instance_data_dir"]) / "clip.mp4"
            target.parent.mkdir(parents=True)
            shutil.copy(clip, target)
            target.with_suffix(".txt").write_text("a clip")
        elif "instance_data_dir" in entry:
            workspace.add_pictures(entry["instance_data_dir"], 2, scale=16)

    assert main(["plan", f"example={name}"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "warning" not in captured.out.lower()


@pytest.mark.parametrize("name", NAMES)
def test_files_are_in_the_order_of_the_schema_and_named_after_the_example(name: str) -> None:
    config = read(name)

    assert list(config) == [key for key in all_options() if key in config]
    assert config["output_dir"] == f"output/{name}"
    assert config["data_backend_config"] == f"config/examples/{name}/multidatabackend.json"


def test_every_kind_of_flavour_has_an_example() -> None:
    """The kind is family, task, size of the model, and for Lite the length of its clips.

    Long clips of Lite have another attention.
    """

    def kind(family: str, flavour: str) -> tuple[str, str, bool, bool]:
        is_pro = "-pro-" in flavour
        return (
            family,
            FAMILIES[family].flavour(flavour).task,
            is_pro,
            "-10s" in flavour and not is_pro,
        )

    kinds_of_examples = {
        kind(config["model_family"], config["model_flavour"]) for config in map(read, NAMES)
    }

    kinds_of_flavours = {
        kind(family, name) for family, spec in FAMILIES.items() for name in spec.flavour_names
    }

    assert kinds_of_flavours == kinds_of_examples


def test_a_copy_is_ready_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["examples", "list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert set(NAMES) < listed

    assert main(["examples", "copy", "sanavideo-lora"]) == 0

    assert main(["plan", "env=sanavideo-lora"]) == 2
    assert capsys.readouterr().err.startswith(MISSING)
