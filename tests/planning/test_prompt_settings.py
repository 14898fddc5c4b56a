"""Prompts with settings of their own: what the plan and its estimate say of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from simpletuner.config.sources import parse_arguments
from simpletuner.planning.build import plan_training
from simpletuner.planning.entries import previews_of_a_round, prompt_entries, prompts_with_sources
from simpletuner.planning.plans import Plan
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]


def write_library(workspace: Workspace, content: Any) -> None:
    workspace.path("library.json").write_text(json.dumps(content))
    workspace.write_config(
        user_prompt_library="library.json",
        validation_disable=False,
        validation_prompt=None,
        validation_guidance=1,
    )


def planned(workspace: Workspace) -> Plan:
    with workspace.inside():
        return plan_training(parse_arguments([]))


def warnings_about(workspace: Workspace, words: str) -> list[str]:
    return [str(problem) for problem in planned(workspace).warnings if words in problem.message]


def seconds_of_previews(workspace: Workspace, capsys: Capture, content: Any) -> float:
    write_library(workspace, content)
    capsys.readouterr()
    assert workspace.run("plan", "--json") == 0
    return json.loads(capsys.readouterr().out)["seconds"]["previews"]


def test_the_plan_names_the_sizes_of_prompts(workspace: Workspace, capsys: Capture) -> None:
    write_library(workspace, {"a": "one", "b": {"prompt": "two", "resolution": "256x128"}})

    assert workspace.run("plan") == 0

    assert "at 128x128, 256x128: a, b" in capsys.readouterr().out


def test_a_round_counts_the_sizes_of_every_prompt(workspace: Workspace) -> None:
    write_library(workspace, {"a": "one", "b": {"prompt": "two", "resolution": "256x128"}})
    workspace.write_config(validation_resolution="128,160")

    assert previews_of_a_round(planned(workspace)) == (3, 2)


@pytest.mark.parametrize("settings", [{}, {"seed": 3}, {"resolution": "128"}, {"guidance": 1}])
def test_settings_that_equal_those_of_the_run_take_the_same_time(
    workspace: Workspace, capsys: Capture, settings: dict[str, Any]
) -> None:
    plain = seconds_of_previews(workspace, capsys, {"a": "one", "b": "two"})
    own = {"a": "one", "b": {"prompt": "two", **settings}}

    assert seconds_of_previews(workspace, capsys, own) == pytest.approx(plain)


@pytest.mark.parametrize("settings", [{"resolution": "256"}, {"guidance": 5}])
def test_a_larger_or_guided_prompt_takes_longer(
    workspace: Workspace, capsys: Capture, settings: dict[str, Any]
) -> None:
    plain = seconds_of_previews(workspace, capsys, {"a": "one", "b": "two"})
    one = seconds_of_previews(workspace, capsys, {"a": "one", "b": {"prompt": "two", **settings}})
    both = seconds_of_previews(
        workspace,
        capsys,
        {"a": {"prompt": "one", **settings}, "b": {"prompt": "two", **settings}},
    )

    assert plain < one < both
    assert one == pytest.approx((plain + both) / 2)


def test_memory_is_that_of_the_largest_prompt(workspace: Workspace, capsys: Capture) -> None:
    def bytes_of_previews(content: Any) -> float:
        write_library(workspace, content)
        capsys.readouterr()
        workspace.run("plan", "--json")
        phases = json.loads(capsys.readouterr().out)["memory"]
        (peak,) = [phase for phase in phases if phase["phase"] == "rendering previews"]
        return peak["device"]

    large = {"prompt": "two", "resolution": "512"}

    assert bytes_of_previews({"a": "one", "b": large}) == bytes_of_previews({"b": large})
    assert bytes_of_previews({"a": "one", "b": large}) > bytes_of_previews({"a": "one"})


def test_a_guidance_that_spoils_pictures_is_warned_about_by_prompt(workspace: Workspace) -> None:
    write_library(workspace, {"a": {"prompt": "one", "guidance": 9}, "b": "two"})

    (warning,) = warnings_about(workspace, "'guidance' of")

    assert warning == (
        "user_prompt_library: library.json: 'guidance' of 'a': 9 oversaturates pictures of this "
        "model; about 5 is right."
    )


def test_a_picture_for_a_model_that_starts_from_noise_is_warned_about(
    workspace: Workspace,
) -> None:
    Image.new("RGB", (64, 64)).save(workspace.path("cat.png"))
    write_library(workspace, {"a": {"prompt": "one", "picture": "cat.png"}})

    (warning,) = warnings_about(workspace, "'picture' of")

    assert "'picture' of 'a' has no effect: t2i-lite-sft starts from noise" in warning
    assert [sources for _, sources in prompts_with_sources(planned(workspace))] == [[None]]


@pytest.fixture
def edits(tmp_path: Path, i2i_checkpoint: Path) -> Workspace:
    """Pictures that are edits of other pictures, from which previews start."""
    made = Workspace.create(tmp_path / "run", i2i_checkpoint, model_flavour="i2i-lite-sft")
    made.add_pictures("datasets/sources", 8, seed=5)
    sources = {
        **DATASETS[0],
        "id": "sources",
        "instance_data_dir": "datasets/sources",
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
    }
    made.write_datasets([{**DATASETS[0], "conditioning_data": ["sources"]}, sources, DATASETS[1]])
    made.write_config(num_eval_images=2)
    return made


def test_a_prompt_starts_from_its_own_picture_and_the_others_from_those_of_the_run(
    edits: Workspace,
) -> None:
    Image.new("RGB", (96, 64)).save(edits.path("mine.png"))
    write_library(edits, {"a": "one", "b": {"prompt": "two", "picture": "mine.png"}})

    plan = planned(edits)

    sources = [[source.name for source in pair[1] if source] for pair in prompts_with_sources(plan)]
    assert sources == [["p0.png", "p1.png"], ["mine.png"]]
    assert previews_of_a_round(plan) == (3, 3)


def test_embeddings_are_made_for_every_picture_at_the_sizes_of_its_prompt(
    edits: Workspace,
) -> None:
    Image.new("RGB", (96, 64)).save(edits.path("mine.png"))
    own = {"prompt": "two", "picture": "mine.png", "resolution": "160"}
    write_library(edits, {"a": "one", "b": own})
    plan = planned(edits)
    asked: list[tuple[str, str, tuple[int, int]]] = []
    catalogue: Any = SimpleNamespace(
        prompt_holds_picture=True,
        text=lambda _, text, picture, title, *, negative: asked.append(
            ("negative" if negative else text, picture.name, picture.geometry.size)
        ),
    )

    prompt_entries(plan, catalogue)

    pictures = [("p0.png", (128, 128)), ("p1.png", (128, 128)), ("mine.png", (160, 160))]
    texts = ["one", "one", "two"]
    assert asked == [
        *((text, *picture) for text, picture in zip(texts, pictures, strict=True)),
        *(("negative", *picture) for picture in pictures),
    ]
