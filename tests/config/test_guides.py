"""The configs and datasets in users' guides load: their keys and values, with our texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.errors import Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.prompt_library import read_library
from tests.tools.refusals import complaints, warnings
from tests.tools.workspace import DATASETS, Workspace

GUIDES = Path(__file__).parents[1] / "data" / "guides"
IMAGE = "kandinsky5-image"
VIDEO = "kandinsky5-video"
SANA = "sanavideo"


def block(family: str, name: str) -> str:
    """A block of a guide; lines that the guide shows without braces get them, as by its reader."""
    path = GUIDES / family / name
    text = path.read_text(encoding="utf-8")
    return f"{{{text}}}" if path.suffix == ".fragment" else text


def install(workspace: Workspace, family: str, name: str) -> None:
    """Put a block of settings into config.json, as text, after what every config needs."""
    path = workspace.path("config/config.json")
    base = {**json.loads(path.read_text(encoding="utf-8")), "model_family": family}
    keys = json.loads(block(family, name).replace(",\n}", "}"))
    base = {key: value for key, value in base.items() if key not in keys and f"--{key}" not in keys}
    path.write_text(json.dumps(base)[:-1] + "," + block(family, name).strip()[1:], encoding="utf-8")
    library = GUIDES / family / "user_prompt_library.json"
    if library.exists():
        workspace.path("config/user_prompt_library.json").write_text(
            library.read_text(encoding="utf-8")
        )


def test_the_families_of_the_guides_are_known() -> None:
    assert {*FAMILIES} == {path.name for path in GUIDES.iterdir()}


def test_the_quantised_base_of_the_image_guide(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    install(workspace, IMAGE, "quantised.fragment")
    assert warnings(workspace, capsys) == ""


def test_tread_of_the_image_guide(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    install(workspace, IMAGE, "tread.json")
    (problem,) = complaints(workspace, capsys)
    assert problem.startswith("tread_config: the model has 2 blocks")

    workspace.write_config(pretrained_model_name_or_path=None)
    assert warnings(workspace, capsys) == ""


def test_the_prompt_library_of_the_image_guide(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    install(workspace, IMAGE, "prompt_library.json")
    capsys.readouterr()

    assert workspace.run("plan", "validation_disable=false") == 0
    assert ": portrait, landscape, validation" in capsys.readouterr().out


def test_the_datasets_of_the_image_guide(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.path("config/multidatabackend.json").write_text(
        block(IMAGE, "datasets.json"), encoding="utf-8"
    )
    (problem,) = complaints(workspace, capsys)
    assert problem.startswith("instance_data_dir: these folders do not exist")
    assert problem.endswith("my-image-dataset: 'datasets/my_images'.")

    workspace.add_pictures("datasets/my_images", 2, scale=16)
    assert warnings(workspace, capsys) == ""
    assert workspace.run("plan") == 0
    assert "my-image-dataset: 2 of 2 pictures used" in capsys.readouterr().out


def other_family(workspace: Workspace, family: str) -> None:
    """A config of another family, whose model on the hub is not needed for a plan."""
    workspace.write_config(
        model_family=family, model_flavour=None, pretrained_model_name_or_path=None
    )
    workspace.write_config(validation_resolution=None)


def test_tread_of_the_video_guide(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    other_family(workspace, VIDEO)
    install(workspace, VIDEO, "tread.json")

    assert "tread" not in warnings(workspace, capsys)


@pytest.mark.parametrize("family", [VIDEO, SANA])
def test_crepa_of_the_guides(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    other_family(workspace, family)
    install(workspace, family, "crepa.json")

    assert "crepa" not in warnings(workspace, capsys)


@pytest.mark.parametrize("family", [IMAGE, VIDEO])
def test_group_offload_of_the_guides(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    other_family(workspace, family)
    install(workspace, family, "group_offload.json")

    assert "offload" not in warnings(workspace, capsys)


def test_previews_from_a_dataset_as_the_video_guide_has_them(workspace: Workspace) -> None:
    other_family(workspace, VIDEO)
    workspace.write_datasets([{**DATASETS[0], "id": "my-image-dataset"}, DATASETS[1]])

    install(workspace, VIDEO, "first_frames.json")

    assert workspace.run("plan") == 0


def test_the_whole_config_of_the_sana_guide(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.path("config/sanavideo/multidatabackend.json")
    path.parent.mkdir()
    path.write_text(block(SANA, "datasets.json"), encoding="utf-8")
    (workspace.path("config/config.json")).write_text(block(SANA, "config.json"), encoding="utf-8")

    (problem,) = complaints(workspace, capsys)

    assert problem.startswith("instance_data_dir: these folders do not exist"), (
        "all keys of the guide are taken"
    )


@pytest.mark.parametrize("family", [VIDEO, SANA])
def test_datasets_of_the_other_guides(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    other_family(workspace, family)
    workspace.path("config/multidatabackend.json").write_text(
        block(family, "datasets.json"), encoding="utf-8"
    )

    (problem,) = complaints(workspace, capsys, "plan")

    assert problem.startswith("instance_data_dir: these folders do not exist")


def test_a_trailing_comma_in_a_guide_is_accepted(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    install(workspace, SANA, "prompt_library.fragment")
    capsys.readouterr()

    workspace.run("plan")

    assert (
        "has a comma before a closing bracket (line 1); it was ignored." in capsys.readouterr().err
    )


def test_nicknames_of_the_sana_guide() -> None:
    problems = Problems()
    library = read_library(GUIDES / SANA / "user_prompt_library.json", problems)

    assert problems == []
    assert len(library) == 15
    assert library[0].nickname == "anime_<token>"
