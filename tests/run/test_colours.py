"""Earlier versions ignored colour profiles: their caches are encoded again, and runs warn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.tools import colour_profiles
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
P3 = colour_profiles.rgb_profile(colour_profiles.DISPLAY_P3, 2.2)


def add_picture_with_profile(workspace: Workspace) -> None:
    path = workspace.path("datasets/pictures/p3.png")
    Image.open(path).convert("RGB").save(path, icc_profile=P3)


def cached_latents(workspace: Workspace) -> set[Path]:
    return set(workspace.path("output/cache/vae").rglob("*.zst"))


def make_older(workspace: Workspace) -> None:
    """Make caches and checkpoints those of a version that ignored profiles."""
    for index in workspace.path("output/cache").rglob("index.json"):
        index.write_bytes(index.read_bytes().replace(b'{"version":5,', b'{"version":4,'))
    for manifest in workspace.path("output").rglob("manifest.json"):
        content = json.loads(manifest.read_text())
        del content["identity"]["settings"]["colour_profiles"]
        manifest.write_text(json.dumps(content))


def plan_output(workspace: Workspace, capsys: Capture, *settings: str) -> str:
    """All that a plan prints."""
    capsys.readouterr()
    assert workspace.run("plan", *settings) == 0
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.slow
def test_only_pictures_with_a_colour_profile_are_encoded_again(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_profile = cached_latents(workspace)
    add_picture_with_profile(workspace)
    with monkeypatch.context() as patch:
        # Earlier versions did not convert colours.
        patch.setattr("simpletuner.data.pictures._conversion", lambda *arguments: None)
        assert workspace.run("cache", "fill") == 0
    before = cached_latents(workspace)
    make_older(workspace)

    output = plan_output(workspace, capsys)
    assert "1 picture (p3.png)" in output
    assert "simpletuner cache gc --remove" in output

    assert workspace.run("cache", "fill") == 0
    assert len(cached_latents(workspace) - before) == 1
    assert workspace.run("cache", "gc", "--remove") == 0
    assert cached_latents(workspace).isdisjoint(before - without_profile)
    assert "cache gc" not in plan_output(workspace, capsys), "nothing is left to remove"


@pytest.mark.slow
def test_continuing_a_run_that_ignored_colour_profiles_warns(
    workspace: Workspace, capsys: Capture
) -> None:
    add_picture_with_profile(workspace)
    assert workspace.train("max_train_steps=1") == 0

    new_run = plan_output(workspace, capsys, "max_train_steps=2")
    make_older(workspace)
    older_run = plan_output(workspace, capsys, "max_train_steps=2")

    assert "without the colour profile" not in new_run
    assert "was trained without the colour profile" in older_run
    assert "p3.png" in older_run
