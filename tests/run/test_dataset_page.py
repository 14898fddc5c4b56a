"""`simpletuner dataset`: the page shows what will be trained, and what deserves a look."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFilter

from simpletuner.annexes.captions.dataset_page import (
    caption_reader,
    colour_grid,
    motion,
    near_duplicates,
)
from simpletuner.config.sources import parse_arguments
from simpletuner.models.adapter import load_adapter
from simpletuner.planning.build import survey_datasets
from tests.tools.clips import Clip
from tests.tools.families import adapter_settings
from tests.tools.pictures import photograph
from tests.tools.workspace import DATASETS, Workspace

PICTURES = "datasets/pictures"
ENTRY = {
    **DATASETS[0],
    "crop": True,
    "crop_style": "center",
    "crop_aspect": "square",
    "minimum_image_size": 40,
}
LONG = (
    "a rocket on its pad before the start, seen from far away on a hazy morning, with smoke "
    "beside the tower"
)


def cards_of(page: str) -> dict[str, str]:
    """The part of the page for each file that it shows, by the file's name."""
    parts = page.split('<figure class="file-card"')[1:]
    return {unescape(re.findall(r'alt="([^"]*)"', part)[0]): part for part in parts}


@pytest.fixture
def awkward(tmp_path: Path, t2i_checkpoint: Path) -> Workspace:
    """Photographs, and files of every kind that is not one."""
    workspace = Workspace.create(
        tmp_path / "run", t2i_checkpoint, pictures=0, tokenizer_max_length=40
    )
    workspace.write_datasets([ENTRY, DATASETS[1]])
    folder = workspace.path(PICTURES)
    for index in range(6):
        photograph(folder / f"p{index}.png", (96, 64) if index else (64, 128), seed=index)
        (folder / f"p{index}.txt").write_text(
            f"{LONG}, {LONG}" if index == 5 else f'picture <b>{index}</b> & "more"'
        )
    whole = Image.open(folder / "p1.png")
    whole.resize((150, 100)).save(folder / "copy.jpg", quality=80)
    whole.filter(ImageFilter.GaussianBlur(6)).save(folder / "soft.png")
    whole.resize((45, 45)).save(folder / "small.png")
    whole.resize((12, 8)).save(folder / "tiny.png")
    for name in ("copy", "soft", "small", "tiny"):
        (folder / f"{name}.txt").write_text("one")
    photograph(folder / "silent.png", (96, 64), seed=9)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "notes.md").write_text("")
    return workspace


def test_the_page_shows_every_file_once_as_it_will_be_trained(awkward: Workspace) -> None:
    files = {path: path.stat().st_mtime_ns for path in awkward.folder.rglob("*") if path.is_file()}
    assert awkward.run("dataset", "--out", "page.html") == 0
    page = awkward.path("page.html").read_text()
    cards = cards_of(page)
    assert len(cards) == 11
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert "left:0.00%;top:25.00%;width:100.00%;height:50.00%" in cards["p0.png"]
    assert "left:16.67%;top:0.00%;width:66.67%;height:100.00%" in cards["p1.png"]
    assert "picture &lt;b&gt;1&lt;/b&gt; &amp; &#34;more&#34;" in cards["p1.png"]
    assert "<b>1</b>" not in page
    assert "enlarged 1.4" not in cards["small.png"]
    assert 'class="box"' in cards["small.png"]
    for name, reason in (
        ("tiny.png", "smaller than minimum_image_size"),
        ("silent.png", "has no caption file"),
    ):
        assert reason in cards[name]
        assert ('class="box"' in cards[name]) == (name == "silent.png"), (
            "as it will be trained once it has a caption"
        )
    for name, reason in (
        ("broken.png", "is truncated"),
        ("notes.md", "does not have the extension"),
    ):
        assert name not in cards
        assert re.search(rf"{name.partition('.')[0]}.*{reason}", page)
    assert "blurred" in cards["soft.png"]
    assert "blurred" not in cards["p1.png"]
    twins = {name for name, card in cards.items() if "near-duplicate" in card}
    assert {"p1.png", "copy.jpg"} <= twins
    assert not {"p0.png", "p2.png", "p3.png"} & twins
    assert "<mark>" in cards["p5.png"]
    assert page.count("<mark>") == 1
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "@import" not in page


def test_the_page_is_made_without_torch_and_without_captions(awkward: Workspace) -> None:
    for path in awkward.path(PICTURES).glob("*.txt"):
        path.unlink()
    code = (
        "import sys; from simpletuner.cli.app import main; sys.exit(main(['dataset']) or 'torch' "
        "in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=awkward.folder, check=True)
    page = awkward.path("dataset.html").read_text()
    assert "0 of" in page
    assert len(cards_of(page)) == 11
    assert awkward.run("dataset", "pretrained_model_name_or_path=some/where") == 0
    assert "tokens are not counted" in awkward.path("dataset.html").read_text()


@pytest.mark.parametrize("family", ["kandinsky5-image", "sanavideo"])
def test_captions_are_cut_where_the_encoder_cuts_them(
    family: str, tmp_path: Path, t2i_checkpoint: Path, sana_checkpoint: Path
) -> None:
    checkpoint = t2i_checkpoint if family == "kandinsky5-image" else sana_checkpoint
    settings = {"model_family": family, "model_flavour": None, "tokenizer_max_length": 16}
    workspace = Workspace.create(tmp_path / "run", checkpoint, pictures=1, **settings)
    kind = "image" if family == "kandinsky5-image" else "video"
    if kind == "video":
        Clip(seconds=6).write(workspace.path(f"{PICTURES}/p0.mp4"))
    workspace.write_datasets([{**DATASETS[0], "dataset_type": kind}, DATASETS[1]])
    with workspace.inside():
        found = survey_datasets(parse_arguments([]))
        adapter = load_adapter(found.spec)(
            adapter_settings(found.config), found.flavour, found.source
        )
        encoder = adapter.load_text_encoder(torch.device("cpu"), torch.float32)
        read = caption_reader(found)
        for count in range(1, len(LONG.split()) + 1):
            caption = " ".join(LONG.split()[:count])
            words = read(found.datasets[0], caption)
            lost = (encoder.truncated(caption) or "").strip()
            # Gemma may merge the end of the instruction with the beginning of a caption into one
            # token.
            assert lost == words.cut.strip() or (
                family == "sanavideo" and words.cut.strip()[1:].endswith(lost)
            )
            assert words.kept + words.cut == caption
        assert words.cut


def test_versions_of_a_picture_are_near_duplicates_and_other_pictures_are_not(
    tmp_path: Path,
) -> None:
    photograph(tmp_path / "one.png", (320, 240), seed=0)
    photograph(tmp_path / "two.png", (320, 240), seed=1)
    one = Image.open(tmp_path / "one.png")
    two = Image.open(tmp_path / "two.png")
    brighter = one.point(lambda value: min(255, value + 12))
    disc, square = (Image.new("RGB", (96, 96), "white") for _ in range(2))
    disc.paste((200, 30, 30), (30, 30, 60, 60))
    square.paste((20, 20, 20), (30, 30, 60, 60))
    pictures = [
        one,
        two,
        one.resize((100, 75)),
        brighter,
        disc,
        square,
        one.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    ]
    assert near_duplicates([colour_grid(picture) for picture in pictures]) == [[0, 2, 3]]
    assert near_duplicates([]) == []


def test_motion_is_a_share_of_the_range() -> None:
    black = Image.new("RGB", (64, 64))
    white = Image.new("RGB", (64, 64), "white")
    assert motion([black, black]) == 0
    assert motion([black, white, white]) == 0.5
