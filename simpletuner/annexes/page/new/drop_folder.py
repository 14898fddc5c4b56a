"""The folder of a drop: what was dropped into it, and its final name.

Until a run uses the folder, a hidden file in it lists the dropped files, so that what the page
copied there can be told from what the user put there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from simpletuner.annexes.start.media_folder import EXCLUDED
from simpletuner.atomic import unused_path
from simpletuner.data.file_names import CAPTION_SUFFIXES, pair_key, suffix_of

FOLDER = Path("datasets")  # of uploads
LEDGER = ".dropped"
UNNAMED = "my-files"
_NUMBERED = re.compile(rf"{UNNAMED}(-\d+)?")


def is_new(folder: Path) -> bool:
    """Whether a folder holds dropped files that no run uses yet."""
    return folder.parent.name == FOLDER.name and (folder / LEDGER).is_file()


def begin_ledger(folder: Path) -> None:
    """Begin the list of dropped files."""
    (folder / LEDGER).touch()


def note_dropped(folder: Path, names: Iterable[str]) -> None:
    """Add dropped files to the list, if the folder has one."""
    if not is_new(folder):
        return
    # In one call, since several uploads append at once.
    with (folder / LEDGER).open("a", encoding="utf-8") as ledger:
        ledger.write("".join(f"{name}\n" for name in names))


def end_ledger(folder: Path) -> None:
    """Forget that the folder was just dropped: a run uses it from now on."""
    (folder / LEDGER).unlink(missing_ok=True)


def strangers_in(folder: Path) -> list[str]:
    """The files that were neither dropped nor written by the page."""
    dropped = {*(folder / LEDGER).read_text(encoding="utf-8").splitlines()}
    stems = {pair_key(name) for name in dropped}
    strangers = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_own = name in dropped or path.name in (LEDGER, EXCLUDED)
        is_caption = suffix_of(name) in CAPTION_SUFFIXES and pair_key(name) in stems
        if not path.is_dir() and not is_own and not is_caption:
            strangers.append(name)
    return sorted(strangers)


def is_unnamed(folder: Path) -> bool:
    """Whether the page has named a folder of dropped files, for lack of a better name."""
    return is_new(folder) and bool(_NUMBERED.fullmatch(folder.name))


def settle(folder: Path, name: str) -> Path:
    """The folder of a drop under the name of its run; folders that have a name keep it."""
    if not is_unnamed(folder) or not name:
        return folder
    final = unused_path(folder.with_name(name))
    with suppress(OSError):  # it keeps its name
        folder.rename(final)
        return final
    return folder
