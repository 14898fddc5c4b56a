"""`simpletuner cache`: fill, verify, gc, explain."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.data import file_index
from simpletuner.encoding.caches import CacheFiller
from tests.tools.refusals import complaint
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
LATENTS = "output/cache/vae/kandinsky5-image/pictures"


@pytest.fixture
def filled(workspace: Workspace) -> Workspace:
    """A folder whose caches are complete."""
    assert workspace.run("cache", "fill") == 0
    return workspace


def output_of(workspace: Workspace, capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert workspace.run("cache", *arguments) == 0
    return capsys.readouterr().out


def entries(workspace: Workspace, folder: str = LATENTS) -> list[Path]:
    return sorted(workspace.path(folder).glob("*/*.safetensors*"))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_fill_stops_before_training(filled: Workspace) -> None:
    assert len(entries(filled)) == 8
    assert list(filled.folder.rglob("checkpoint-*")) == []


def test_verify_reports_that_there_are_no_caches(workspace: Workspace, capsys: Capture) -> None:
    assert output_of(workspace, capsys, "verify") == "There are no caches yet.\n"


def test_verify_reads_every_entry(filled: Workspace, capsys: Capture) -> None:
    assert (
        output_of(filled, capsys, "verify") == f"Every entry in cache/text, {LATENTS} is intact.\n"
    )
    assert not list(filled.folder.rglob("verifying.json"))

    broken = entries(filled)[3]
    damage(broken)
    assert (
        complaint(filled, capsys, "cache", "verify")
        == "1 damaged entry; the next run encodes it again."
    )
    assert filled.run("cache", "fill") == 0


def test_a_damaged_entry_is_named(filled: Workspace, capsys: Capture) -> None:
    broken = entries(filled)[3]
    damage(broken)

    capsys.readouterr()

    assert filled.run("cache", "verify") == 2
    assert broken.name.partition(".")[0] in capsys.readouterr().out


def test_gc_removes_only_with_remove(filled: Workspace, capsys: Capture) -> None:
    assert output_of(filled, capsys, "gc").splitlines()[-1].startswith("Nothing to remove")

    filled.path("datasets/pictures/p5.png").unlink()
    filled.path("datasets/pictures/p5.txt").unlink()
    before = entries(filled)
    listed = output_of(filled, capsys, "gc")
    assert "pictures/p5.png" in listed
    assert "--remove deletes them" in listed
    assert entries(filled) == before
    assert "removed." in output_of(filled, capsys, "gc", "--remove")
    assert len(entries(filled)) == 7
    assert (
        output_of(filled, capsys, "gc")
        == "Nothing to remove: this configuration refers to every entry.\n"
    )


def test_gc_reports_damaged_entries(filled: Workspace, capsys: Capture) -> None:
    filled.path("datasets/pictures/p5.png").unlink()
    for path in entries(filled):
        path.write_bytes(b"nothing")

    assert "damaged" in output_of(filled, capsys, "gc", "--remove")


@pytest.mark.parametrize(
    "name", ["p2.png", "pictures/p2.png", "datasets/pictures/p2.png", "./datasets/pictures/p2.png"]
)
def test_explain_lists_the_entries_of_a_picture(
    filled: Workspace, capsys: Capture, name: str
) -> None:
    printed = output_of(filled, capsys, "explain", name)

    assert f"latents of pictures/p2.png: cached in {LATENTS}" in printed
    assert "caption of 'picture 2', pictures/p2.png: cached in cache/text" in printed


def test_explain_shows_why_an_entry_is_not_reused(filled: Workspace, capsys: Capture) -> None:
    filled.write_datasets(
        [{"id": "pictures", "instance_data_dir": "datasets/pictures", "resolution": 128}]
    )
    printed = output_of(filled, capsys, "explain", "p2.png", "cache_dir_text=elsewhere")

    assert "latents of pictures/p2.png: not cached" in printed
    assert "is not reused, size: cached [" in printed


def test_explain_reports_a_damaged_entry(filled: Workspace, capsys: Capture) -> None:
    for path in entries(filled):
        path.write_bytes(b"nothing")
    assert "it is damaged; the next run encodes it again" in output_of(
        filled, capsys, "explain", "p2.png"
    )


def test_explain_reports_a_file_that_is_not_used(workspace: Workspace, capsys: Capture) -> None:
    assert complaint(workspace, capsys, "cache", "explain", "other.png").startswith(
        "'other.png' is not used by"
    )

    workspace.path("datasets/pictures/broken.png").write_bytes(b"")
    for name in ("broken.png", "pictures/broken.png", "datasets/pictures/broken.png"):
        assert (
            complaint(workspace, capsys, "cache", "explain", name)
            == f"{name!r} is not used: it is empty."
        )
    assert "the file comes first" in complaint(workspace, capsys, "cache", "explain", "seed=1")


@pytest.mark.parametrize("command", ["fill", "verify", "gc"])
def test_wrong_settings_of_cache_are_reported_as_in_train(
    workspace: Workspace, capsys: Capture, command: str
) -> None:
    assert complaint(workspace, capsys, "cache", command, "lora_rank=0").startswith(
        "lora_rank: 0 is out of range"
    )


def test_an_interrupted_verification_resumes(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(filler: CacheFiller) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CacheFiller, "fill", interrupt)
        assert workspace.run("cache", "fill") == 130

    monkeypatch.setattr(file_index, "_inspect", lambda path: pytest.fail(f"{path} was read"))

    assert workspace.run("cache", "fill") == 0
