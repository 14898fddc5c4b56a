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


def test_pictures_are_sorted_and_found_in_sub_folders_in_any_letter_case(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "b.JPG",
        "a.jpeg",
        "sub/deep/c.PnG",
        "d.webp",
        "e.bmp",
        "f.tif",
        "g.TIFF",
        "a b/h i.png",
    )
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
    assert list(scan(tmp_path).files) == names


def test_captions_belong_to_pictures_of_their_stem(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "a.txt", "a.jpg", "sub/a.png", "b.TXT", "b.png", "c.txt")
    found = scan(tmp_path)
    assert found.captions == {"a.jpg": "a.txt", "a.png": "a.txt", "b.png": "b.TXT"}
    assert found.ignored["c.txt"] == (
        "caption without a file",
        "has no picture or clip of the same name",
    )


@pytest.mark.parametrize(
    "stem", [HINDI, CHINESE, "café au lait", "dots.in.name", "trailing space "]
)
def test_names_in_any_writing_are_paired_in_either_unicode_form(stem: str, tmp_path: Path) -> None:
    touch(
        tmp_path,
        unicodedata.normalize("NFD", stem) + ".png",
        unicodedata.normalize("NFC", stem) + ".txt",
    )
    found = scan(tmp_path)
    assert list(found.captions) == [found.files[0]]
    assert not found.ignored


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

    found = scan(tmp_path)

    assert found.captions == read
    assert {*found.captions.values(), *found.ignored} == {*texts}


def test_a_caption_file_that_is_not_read_names_the_one_that_is(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "a.txt", "a.caption")
    assert scan(tmp_path).ignored == {
        "a.caption": ("unused caption", "is not read: a.txt has precedence")
    }


@pytest.mark.parametrize("suffix", sorted(UNREAD_PICTURES | UNREAD_CLIPS))
@pytest.mark.parametrize("wanted", [PICTURE_SUFFIXES, CLIP_SUFFIXES], ids=["pictures", "clips"])
def test_a_format_that_is_not_read_is_named_unless_the_file_has_a_twin(
    suffix: str, wanted: frozenset[str]
) -> None:
    twin = "b.jpg" if wanted is PICTURE_SUFFIXES else "b.mp4"

    found = classify([(name, None) for name in (f"a{suffix.upper()}", f"b{suffix}", twin)], wanted)

    assert found.files == (twin,)
    assert found.ignored[f"a{suffix.upper()}"][0] == UNREAD
    assert found.ignored[f"b{suffix}"][0].startswith("not a")
    for _, detail in found.ignored.values():
        assert f"in a format that is not read ({suffix})" in detail


@pytest.mark.parametrize("folder", sorted(SYSTEM_FOLDERS))
def test_what_a_system_leaves_in_a_folder_is_never_trained(folder: str, tmp_path: Path) -> None:
    touch(
        tmp_path,
        "a.png",
        f"{folder.upper()}/a.png/thumbnail.jpg",
        f"sub/{folder}/b.png",
        f"sub/{folder}/b.txt",
    )

    found = scan(tmp_path)

    assert found.files == ("a.png",)
    assert {name: reason for name, (reason, _) in found.ignored.items()} == {
        folder.upper(): "hidden",
        f"sub/{folder}": "hidden",
    }


def test_everything_else_is_listed_with_its_reason(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "a.png",
        "movie.mp4",
        "notes.md",
        ".hidden.png",
        ".git/config",
        "no_ending",
        "._a.png",
    )
    reasons = {name: reason for name, (reason, _) in scan(tmp_path).ignored.items()}
    assert reasons == {
        "movie.mp4": "clip among pictures",
        "notes.md": "not a picture",
        "no_ending": "not a picture",
        ".hidden.png": "hidden",
        "._a.png": "hidden",
        ".git": "hidden",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_not_utf8_are_listed(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.png", "wb"):  # noqa: PTH123 - a name that no str can spell
        pass
    found = scan(tmp_path)
    assert found.files == ()
    assert [reason for reason, _ in found.ignored.values()] == ["unusable name"]
    "".join(found.ignored).encode()


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "here/a.png", "elsewhere/b.png")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "here" / "loop").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "c.png").symlink_to(tmp_path / "elsewhere" / "b.png")
    (tmp_path / "here" / "itself").symlink_to("itself")
    found = scan(tmp_path / "here")
    assert list(found.files) == ["a.png", "c.png", "link/b.png"]
    assert found.ignored["loop/"][0] == "unreadable"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_what_the_kernel_tells_is_not_walked(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    (tmp_path / "process").symlink_to("/proc/self")
    found = scan(tmp_path)
    assert found.files == ("a.png",)
    assert found.ignored == {"process/": ("unreadable", "belongs to the kernel (/proc, /sys)")}


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
    files = scan(tmp_path)

    assert files.files == ("b.png",)
    assert files.ignored == {"sub/": ("unreadable", "cannot be listed: No such file or directory")}
