"""What earlier versions cached or trained without colour profiles is encoded again, and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.tools import colour_profiles
from tests.tools.workspace import Workspace

P3 = colour_profiles.rgb_profile(colour_profiles.DISPLAY_P3, 2.2)


def give_profile(workspace: Workspace, name: str = "p3.png") -> None:
    path = workspace.path(f"datasets/pictures/{name}")
    Image.open(path).convert("RGB").save(path, icc_profile=P3)


def entries(workspace: Workspace) -> set[Path]:
    return set(workspace.path("output/cache/vae").rglob("*.zst"))


def make_older(workspace: Workspace) -> None:
    """Make caches and checkpoints those of a version that ignored profiles."""
    for index in workspace.path("output/cache").rglob("index.json"):
        index.write_bytes(index.read_bytes().replace(b'{"version":5,', b'{"version":4,'))
    for manifest in workspace.path("output").rglob("manifest.json"):
        content = json.loads(manifest.read_text())
        del content["identity"]["settings"]["colour_profiles"]
        manifest.write_text(json.dumps(content))


@pytest.mark.slow
def test_only_pictures_with_a_colour_profile_are_encoded_again(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = entries(workspace)
    give_profile(workspace)
    with monkeypatch.context() as patch:
        patch.setattr(
            "simpletuner.data.pictures._conversion", lambda *arguments: None
        )  # as earlier versions did
        assert workspace.run("cache", "fill") == 0
    before = entries(workspace)
    make_older(workspace)
    capsys.readouterr()
    assert workspace.run("plan") == 0
    output = capsys.readouterr()
    assert "1 picture (p3.png)" in output.out + output.err
    assert "simpletuner cache gc --remove" in output.out + output.err
    assert workspace.run("cache", "fill") == 0
    assert len(entries(workspace) - before) == 1
    assert workspace.run("cache", "gc", "--remove") == 0
    assert entries(workspace).isdisjoint(before - others)
    capsys.readouterr()
    assert workspace.run("plan") == 0
    output = capsys.readouterr()
    assert "cache gc" not in output.out + output.err, "what is done is not said again"


@pytest.mark.slow
def test_continuing_a_run_that_ignored_colour_profiles_warns(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    give_profile(workspace)
    assert workspace.train("max_train_steps=1") == 0
    capsys.readouterr()
    assert workspace.run("plan", "max_train_steps=2") == 0
    said = capsys.readouterr()
    assert "without the colour profile" not in said.out + said.err
    make_older(workspace)
    assert workspace.run("plan", "max_train_steps=2") == 0
    said = capsys.readouterr()
    assert "was trained without the colour profile" in said.out + said.err
    assert "p3.png" in said.out + said.err
