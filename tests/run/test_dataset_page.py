"""`simpletuner dataset`: the page shows what will be trained, and which files need a look."""

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
CENTER_CROPS = {
    **DATASETS[0],
    "crop": True,
    "crop_style": "center",
    "crop_aspect": "square",
    "minimum_image_size": 40,
}
LONG_CAPTION = (
    "a rocket on its pad before the start, seen from far away on a hazy morning, with smoke "
    "beside the tower"
)


def split_cards(page: str) -> dict[str, str]:
    """The part of the page for each file that it shows, by the file's name."""
    parts = page.split('<figure class="file-card"')[1:]
    return {unescape(re.findall(r'alt="([^"]*)"', part)[0]): part for part in parts}


def read_cards(workspace: Workspace) -> dict[str, str]:
    assert workspace.run("dataset", "--out", "page.html") == 0
    return split_cards(workspace.path("page.html").read_text())


def modification_times(workspace: Workspace) -> dict[Path, int]:
    paths = [path for path in workspace.folder.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.fixture
def varied(tmp_path: Path, t2i_checkpoint: Path) -> Workspace:
    """Photographs, versions of one of them, and files that cannot be trained."""
    workspace = Workspace.create(
        tmp_path / "run", t2i_checkpoint, pictures=0, tokenizer_max_length=40
    )
    workspace.write_datasets([CENTER_CROPS, DATASETS[1]])
    folder = workspace.path(PICTURES)
    photograph(folder / "p0.png", (64, 128), seed=0)
    for index in range(1, 6):
        photograph(folder / f"p{index}.png", (96, 64), seed=index)
    for index in range(5):
        (folder / f"p{index}.txt").write_text(f'picture <b>{index}</b> & "more"')
    (folder / "p5.txt").write_text(f"{LONG_CAPTION}, {LONG_CAPTION}")
    original = Image.open(folder / "p1.png")
    original.resize((150, 100)).save(folder / "copy.jpg", quality=80)
    original.filter(ImageFilter.GaussianBlur(6)).save(folder / "soft.png")
    original.resize((45, 45)).save(folder / "small.png")
    original.resize((12, 8)).save(folder / "tiny.png")
    for name in ("copy", "soft", "small", "tiny"):
        (folder / f"{name}.txt").write_text("a version of picture 1")
    photograph(folder / "silent.png", (96, 64), seed=9)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "notes.md").write_text("")
    return workspace


def test_the_page_shows_every_file_once_as_it_will_be_trained(varied: Workspace) -> None:
    before = modification_times(varied)

    cards = read_cards(varied)

    # Six photographs, four versions and the one without a caption.
    assert len(cards) == 11
    after = modification_times(varied)
    assert {path: after[path] for path in before} == before
    # Squares in the middle: 64 x 64 of 64 x 128, and of 96 x 64.
    assert "left:0.00%;top:25.00%;width:100.00%;height:50.00%" in cards["p0.png"]
    assert "left:16.67%;top:0.00%;width:66.67%;height:100.00%" in cards["p1.png"]
    assert "picture &lt;b&gt;1&lt;/b&gt; &amp; &#34;more&#34;" in cards["p1.png"]
    assert 'class="box"' in cards["small.png"]
    assert "enlarged 1.4" not in cards["small.png"]


def test_the_page_names_files_that_are_not_trained(varied: Workspace) -> None:
    cards = read_cards(varied)

    assert "smaller than minimum_image_size" in cards["tiny.png"]
    assert 'class="box"' not in cards["tiny.png"]
    assert "has no caption file" in cards["silent.png"]
    assert 'class="box"' in cards["silent.png"], "as it will be trained once it has a caption"
    assert "broken.png" not in cards
    assert "notes.md" not in cards
    page = varied.path("page.html").read_text()
    assert re.search(r"broken.*is truncated", page)
    assert re.search(r"notes.*does not have the extension", page)


def test_held_out_files_count_once_and_foreign_files_do_not_count(varied: Workspace) -> None:
    varied.write_datasets([{**CENTER_CROPS, "hold_out": 2}, DATASETS[1]])
    suffixes = {".png", ".jpg"}
    pictures = [path for path in varied.path(PICTURES).iterdir() if path.suffix in suffixes]

    read_cards(varied)

    page = varied.path("page.html").read_text()
    assert f"{len(pictures) - 3} of {len(pictures)} files used." in page  # tiny, silent, broken
    assert f">all {len(pictures)}</button>" in page
    assert ">not used 3</button>" in page
    assert re.search(r"notes.*does not have the extension", page)


def test_the_page_marks_files_that_need_a_look(varied: Workspace) -> None:
    cards = read_cards(varied)

    assert "blurred" in cards["soft.png"]
    assert ">blurred<" not in cards["p1.png"]
    duplicates = {name for name, card in cards.items() if "near-duplicate" in card}
    assert {"p1.png", "copy.jpg"} <= duplicates
    assert not {"p0.png", "p2.png", "p3.png"} & duplicates
    cut_captions = {name for name, card in cards.items() if "<mark>" in card}
    assert cut_captions == {"p5.png"}


def test_sharpness_is_a_share_of_the_median_of_its_dataset(varied: Workspace) -> None:
    cards = read_cards(varied)

    shares = re.findall(r"sharpness (\d+) %", "".join(cards.values()))

    assert len(shares) > 2
    below = [share for share in shares if int(share) < 100]
    above = [share for share in shares if int(share) > 100]
    assert abs(len(below) - len(above)) <= 1


def test_the_page_is_one_file_without_scripts_from_captions(varied: Workspace) -> None:
    read_cards(varied)

    page = varied.path("page.html").read_text()
    assert "<b>1</b>" not in page
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "@import" not in page


def test_the_page_is_made_without_torch_and_without_captions(varied: Workspace) -> None:
    for path in varied.path(PICTURES).glob("*.txt"):
        path.unlink()
    code = (
        "import sys; from simpletuner.cli.app import main; sys.exit(main(['dataset']) or 'torch' "
        "in sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], cwd=varied.folder, check=True)

    page = varied.path("dataset.html").read_text()
    assert "0 of" in page
    assert len(split_cards(page)) == 11


def test_tokens_are_not_counted_without_the_model(varied: Workspace) -> None:
    assert varied.run("dataset", "pretrained_model_name_or_path=some/where") == 0

    assert "tokens are not counted" in varied.path("dataset.html").read_text()


def make_captioned_workspace(folder: Path, family: str, checkpoint: Path) -> Workspace:
    """One picture or clip; captions are cut after 16 tokens."""
    settings = {"model_family": family, "model_flavour": None, "tokenizer_max_length": 16}
    workspace = Workspace.create(folder, checkpoint, pictures=1, **settings)
    if family == "sanavideo":
        Clip(seconds=6).write(workspace.path(f"{PICTURES}/p0.mp4"))
        workspace.write_datasets([{**DATASETS[0], "dataset_type": "video"}, DATASETS[1]])
    return workspace


@pytest.mark.parametrize(
    ("family", "fixture"),
    [
        ("kandinsky5-image", "t2i_checkpoint"),
        ("sanavideo", "sana_checkpoint"),
    ],
)
def test_captions_are_cut_where_the_encoder_cuts_them(
    tmp_path: Path, family: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(fixture)
    workspace = make_captioned_workspace(tmp_path / "run", family, checkpoint)
    words = LONG_CAPTION.split()

    with workspace.inside():
        survey = survey_datasets(parse_arguments([]))
        settings = adapter_settings(survey.config)
        adapter = load_adapter(survey.spec)(settings, survey.flavour, survey.source)
        encoder = adapter.load_text_encoder(torch.device("cpu"), torch.float32)
        read = caption_reader(survey)
        for count in range(1, len(words) + 1):
            caption = " ".join(words[:count])
            shown = read(survey.datasets[0], caption)
            cut_by_encoder = (encoder.truncated(caption) or "").strip()
            cut = shown.cut.strip()
            assert shown.kept + shown.cut == caption
            if family == "sanavideo" and cut != cut_by_encoder:
                # Gemma may merge the end of the instruction with the beginning of a caption into
                # one token.
                assert cut[1:].endswith(cut_by_encoder)
            else:
                assert cut == cut_by_encoder
    assert shown.cut, "the longest caption is cut"


def test_versions_of_a_picture_are_near_duplicates_and_other_pictures_are_not(
    tmp_path: Path,
) -> None:
    photograph(tmp_path / "first.png", (320, 240), seed=0)
    photograph(tmp_path / "second.png", (320, 240), seed=1)
    first = Image.open(tmp_path / "first.png")
    second = Image.open(tmp_path / "second.png")
    smaller = first.resize((100, 75))
    brighter = first.point(lambda value: min(255, value + 12))
    mirrored = first.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # The same shape on white in two colours.
    red_square = Image.new("RGB", (96, 96), "white")
    red_square.paste((200, 30, 30), (30, 30, 60, 60))
    black_square = Image.new("RGB", (96, 96), "white")
    black_square.paste((20, 20, 20), (30, 30, 60, 60))
    pictures = [first, second, smaller, brighter, red_square, black_square, mirrored]

    groups = near_duplicates([colour_grid(picture) for picture in pictures])

    assert groups == [[0, 2, 3]], "the first picture, smaller and brighter"
    assert near_duplicates([]) == []


def test_motion_is_a_share_of_the_range() -> None:
    black = Image.new("RGB", (64, 64))
    white = Image.new("RGB", (64, 64), "white")

    assert motion([black, black]) == 0
    assert motion([black, white, white]) == 0.5
