"""What is found in a folder: pictures, clips, captions, and why the rest is not used."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.discovery import classify, scan
from simpletuner.data.file_names import SYSTEM_FOLDERS, UNREAD, UNREAD_CLIPS, UNREAD_PICTURES
from simpletuner.data.pictures import PICTURE_SUFFIXES

HINDI = "सुनहरी चाय"
CHINESE = "红色 的房子"


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_pictures_are_listed_in_order_from_all_folders_in_any_letter_case(tmp_path: Path) -> None:
    names = [
        "a b/h i.png",
        "a.jpeg",
        "b.JPG",
        "d.webp",
        "e.bmp",
        "f.tif",
        "g.TIFF",
        "sub/deep/c.PnG",
    ]
    touch(tmp_path, *reversed(names))

    assert list(scan(tmp_path).files) == names


def test_captions_belong_to_pictures_of_their_stem(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "a.txt", "a.jpg", "sub/a.png", "b.TXT", "b.png", "c.txt")

    listing = scan(tmp_path)

    assert listing.captions == {"a.jpg": "a.txt", "a.png": "a.txt", "b.png": "b.TXT"}

    reason = ("caption without a file", "has no picture or clip of the same name")
    assert listing.ignored["c.txt"] == reason


@pytest.mark.parametrize(
    "stem", [HINDI, CHINESE, "café au lait", "dots.in.name", "trailing space "]
)
def test_names_in_any_writing_are_paired_in_either_unicode_form(stem: str, tmp_path: Path) -> None:
    picture = unicodedata.normalize("NFD", f"{stem}.png")
    caption = unicodedata.normalize("NFC", f"{stem}.txt")
    touch(tmp_path, picture, caption)

    listing = scan(tmp_path)

    assert list(listing.captions) == [listing.files[0]]
    assert not listing.ignored


@pytest.mark.parametrize(
    ("texts", "read"),
    [
        (["a.jpg.txt", "a.txt"], {"a.jpg": "a.jpg.txt", "a.png": "a.txt"}),  # the exact name wins
        (["a.jpg.caption", "a.txt"], {"a.jpg": "a.jpg.caption", "a.png": "a.txt"}),
        (["a.caption", "a.txt"], {"a.jpg": "a.txt", "a.png": "a.txt"}),
        (["a.CAPTION"], {"a.jpg": "a.CAPTION", "a.png": "a.CAPTION"}),
        (["a.jpg.txt"], {"a.jpg": "a.jpg.txt"}),
        (["a.JPG.txt"], {}),
    ],
)
def test_a_caption_file_is_for_one_file_or_for_all_of_its_stem(
    texts: list[str], read: dict[str, str], tmp_path: Path
) -> None:
    touch(tmp_path, "a.jpg", "a.png", *texts)

    listing = scan(tmp_path)

    assert listing.captions == read
    assert {*listing.captions.values(), *listing.ignored} == {*texts}


def test_a_caption_file_that_is_not_read_names_the_one_that_is(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "a.txt", "a.caption")

    reason = ("unused caption", "is not read: a.txt has precedence")
    assert scan(tmp_path).ignored == {"a.caption": reason}


@pytest.mark.parametrize("suffix", sorted(UNREAD_PICTURES | UNREAD_CLIPS))
@pytest.mark.parametrize("wanted", [PICTURE_SUFFIXES, CLIP_SUFFIXES], ids=["pictures", "clips"])
def test_a_format_that_is_not_read_is_named_unless_the_file_has_a_twin(
    suffix: str, wanted: frozenset[str]
) -> None:
    alone = f"a{suffix.upper()}"
    beside_twin = f"b{suffix}"
    twin = "b.jpg" if wanted is PICTURE_SUFFIXES else "b.mp4"

    listing = classify([(name, None) for name in (alone, beside_twin, twin)], wanted)

    assert listing.files == (twin,)
    assert listing.ignored[alone][0] == UNREAD
    assert listing.ignored[beside_twin][0].startswith("not a")
    for _, detail in listing.ignored.values():
        assert f"in a format that is not read ({suffix})" in detail


@pytest.mark.parametrize("folder", sorted(SYSTEM_FOLDERS))
def test_folders_of_operating_systems_are_hidden(folder: str, tmp_path: Path) -> None:
    hidden = folder.upper()
    touch(
        tmp_path,
        "a.png",
        f"{hidden}/a.png/thumbnail.jpg",
        f"sub/{folder}/b.png",
        f"sub/{folder}/b.txt",
    )

    listing = scan(tmp_path)

    assert listing.files == ("a.png",)

    reasons = {name: reason for name, (reason, _) in listing.ignored.items()}
    assert reasons == {hidden: "hidden", f"sub/{folder}": "hidden"}


def test_other_files_are_listed_with_their_reasons(tmp_path: Path) -> None:
    reasons = {
        "movie.mp4": "clip among pictures",
        "notes.md": "not a picture",
        "no_ending": "not a picture",
        ".hidden.png": "hidden",
        "._a.png": "hidden",
        ".git": "hidden",
    }
    touch(tmp_path, "a.png", ".git/config", *(name for name in reasons if name != ".git"))

    ignored = scan(tmp_path).ignored

    assert {name: reason for name, (reason, _) in ignored.items()} == reasons


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_not_utf8_are_listed(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.png"
    with open(name, "wb"):  # noqa: PTH123 - a name that no str can spell
        pass

    listing = scan(tmp_path)

    assert listing.files == ()
    assert [reason for reason, _ in listing.ignored.values()] == ["unusable name"]

    "".join(listing.ignored).encode()  # the listed name can be written as UTF-8


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "here/a.png", "elsewhere/b.png")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "here" / "loop").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "c.png").symlink_to(tmp_path / "elsewhere" / "b.png")
    (tmp_path / "here" / "itself").symlink_to("itself")

    listing = scan(tmp_path / "here")

    assert list(listing.files) == ["a.png", "c.png", "link/b.png"]
    assert listing.ignored["loop/"][0] == "unreadable"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_folders_of_the_kernel_are_not_walked(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    (tmp_path / "process").symlink_to("/proc/self")

    listing = scan(tmp_path)

    assert listing.files == ("a.png",)
    assert listing.ignored == {"process/": ("unreadable", "belongs to the kernel (/proc, /sys)")}


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        scan(tmp_path / "nowhere")


def test_a_folder_that_is_removed_while_it_is_listed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").touch()
    (tmp_path / "b.png").touch()
    walk = os.walk

    def walk_and_remove(top: str, **settings: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, subfolders, names in walk(top, **settings):
            if folder != top:
                shutil.rmtree(folder)
            yield folder, subfolders, names

    monkeypatch.setattr(os, "walk", walk_and_remove)

    listing = scan(tmp_path)

    assert listing.files == ("b.png",)

    reason = ("unreadable", "cannot be listed: No such file or directory")
    assert listing.ignored == {"sub/": reason}
