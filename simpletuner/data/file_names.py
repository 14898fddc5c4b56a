"""What a file name reveals: captions, formats that are not read, and files of operating systems."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

CAPTION_SUFFIXES = (".txt", ".caption")  # by precedence
# Tables of captions, as the imagefolder of Hugging Face's `datasets` reads them.
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")

UNREAD_PICTURES = frozenset(
    {
        ".jxl",
        ".jp2",
        ".j2k",
        ".jpf",
        ".jpx",
        ".jxr",
        ".psd",
        ".psb",
        ".xcf",
        ".kra",
        ".exr",
        ".hdr",
        ".tga",
        ".dds",
        ".ppm",
        ".pgm",
        ".pnm",
        ".qoi",
        ".bpg",
        ".svg",
        ".ico",
        # Raw files of cameras.
        ".dng",
        ".cr2",
        ".cr3",
        ".crw",
        ".nef",
        ".nrw",
        ".arw",
        ".srf",
        ".orf",
        ".rw2",
        ".raf",
        ".pef",
        ".srw",
        ".raw",
    }
)
UNREAD_CLIPS = frozenset(
    {
        ".mxf",
        ".vob",
        ".m2v",
        ".m1v",
        ".m2t",
        ".mpe",
        ".mod",
        ".tod",
        ".divx",
        ".asf",
        ".f4v",
        ".rm",
        ".rmvb",
        ".3g2",
        ".qt",
        ".dv",
        ".y4m",
        ".braw",
        ".r3d",
        ".insv",
    }
)

# Files that macOS and Windows write into folders of pictures, in lower case.
JUNK_FILES = frozenset({".ds_store", "thumbs.db", "desktop.ini"})
JUNK_PREFIX = "._"  # of files with what other file systems cannot store
# Folders of thumbnails, deleted files and metadata, in lower case. Names that start with a dot are
# hidden anyway.
SYSTEM_FOLDERS = frozenset(
    {
        "@eadir",
        "#recycle",
        "#snapshot",
        "@tmp",  # Synology
        "@recycle",
        "@recently-snapshot",  # QNAP
        "__macosx",  # zips made by macOS
        "$recycle.bin",
        "recycler",
        "system volume information",  # Windows
        "lost+found",  # Linux
    }
)

# Folders of kohya's scripts: repeats and words. Cameras name folders by three digits and five
# characters, such as 100_FUJI.
CONCEPT_FOLDER = re.compile(r"([1-9]\d{0,2})_(\S.*)")
CAMERA_FOLDER = re.compile(r"\d{3}_[0-9A-Z]{4}")

# Why a file is not used: the category, and a text that continues the name.
Reason = tuple[str, str]
UNREAD = "unread format"


def suffix_of(name: str) -> str:
    """The extension in lower case, with its dot; empty for `.hidden` and names without one."""
    stem, dot, suffix = name.rpartition(".")  # a tenth of the time of pathlib
    return (dot + suffix).lower() if stem and "/" not in suffix else ""


def composed(name: str) -> str:
    """A name in NFC, since some systems store accents and vowel signs as separate characters."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def pair_key(name: str) -> str:
    """The path in NFC without its extension: shared by a file, its caption file and its partner."""
    stem, _, suffix = name.rpartition(".")
    return composed(stem if stem and "/" not in suffix else name)


def index_partners(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of possible partners, by their names in NFC with and without extension.

    `partners_of` searches the result.
    """
    ordered = sorted(names)
    index: dict[str, list[str]] = {}
    for name in ordered:
        index.setdefault(pair_key(name), []).append(name)
    # Full names last, since a file may be called like another one without its extension.
    return index | {composed(name): [name] for name in ordered}


def partners_of(source: str, index: Mapping[str, list[str]]) -> Sequence[str]:
    """Names of the files that may be the partner of a file in another dataset.

    For `cat.jpg`, these are `cat.jpg`, else `cat.jpg.png`, else `cat.png` and all others of its
    stem.
    """
    return index.get(composed(source)) or index.get(pair_key(source)) or ()


def printable(name: str) -> str:
    """A name that can be printed and written to JSON: bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def name_problem(name: str) -> Reason | None:
    """Why a file or folder with this name is not used, or None."""
    if name.startswith("."):
        return "hidden", "is hidden: its name starts with a dot"
    if not name.isascii() and printable(name) != name:
        return "unusable name", "has a name that is not UTF-8; rename it"
    if name.lower() in SYSTEM_FOLDERS:
        return "hidden", "belongs to the system: it holds thumbnails, deleted files or metadata"
    return None


def is_junk(name: str) -> bool:
    """Whether a system writes such a file beside pictures, which nobody wants to read about."""
    base = name.rpartition("/")[2].lower()
    return base in JUNK_FILES or base.startswith(JUNK_PREFIX)


def unread_format(name: str) -> str | None:
    """What to do with a picture or clip in a format that is not read; None for any other file.

    The text continues the file's name.
    """
    suffix = suffix_of(name)
    if suffix in UNREAD_PICTURES:
        return f"is a picture in a format that is not read ({suffix}); save it as .png or .jpg"
    if suffix in UNREAD_CLIPS:
        return f"is a clip in a format that is not read ({suffix}); convert it to .mp4"
    return None


def concept_of(folder: str) -> tuple[int, str] | None:
    """Repeats and words of a folder named like `10_zkt woman`, else None."""
    match = CONCEPT_FOLDER.fullmatch(folder)
    if match is None or CAMERA_FOLDER.fullmatch(folder):
        return None
    return int(match[1]), " ".join(match[2].replace("_", " ").split())


def match_captions(
    media: Sequence[str], texts: Iterable[str]
) -> tuple[dict[str, str], dict[str, Reason]]:
    """The caption file of each picture or clip, and why other caption files are not read.

    `cat.jpg.txt` is for `cat.jpg` alone and wins over `cat.txt`, which is for all files with that
    stem.

    Args:
        media: names of pictures or clips.
        texts: names of caption files, sorted.
    """
    by_key: dict[str, list[str]] = {}
    for text in texts:
        by_key.setdefault(pair_key(text), []).append(text)
    captions: dict[str, str] = {}
    # The caption file that is read, by both keys that a caption file of this picture may have.
    used: dict[str, str] = {}
    for name in media:
        exact = composed(name)
        stem = pair_key(name)
        candidates = by_key.get(exact) or by_key.get(stem)
        if candidates:
            caption = min(candidates, key=_precedence)
            captions[name] = caption
            used[exact] = caption
            used[stem] = caption
    return captions, _unread_texts(by_key, {*captions.values()}, used)


def _precedence(text: str) -> int:
    return CAPTION_SUFFIXES.index(suffix_of(text))


def _unread_texts(
    by_key: Mapping[str, Sequence[str]], read: set[str], used: Mapping[str, str]
) -> dict[str, Reason]:
    """Why the caption files that no picture or clip uses are not read."""
    reasons: dict[str, Reason] = {}
    for key, texts in by_key.items():
        for text in texts:
            if text in read:
                continue
            reason = ("caption without a file", "has no picture or clip of the same name")
            if key in used:
                reason = ("unused caption", f"is not read: {used[key]} has precedence")
            reasons[text] = reason
    return reasons
