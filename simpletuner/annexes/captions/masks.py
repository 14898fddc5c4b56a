"""Masks that are painted on the page.

Masks are PNG files in a dataset of masks beside the pictures. Training needs a mask for every file,
so the first painted mask adds white masks for all other files, which are still learned whole. Only
a client that has read the current mask can replace it.
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from PIL import Image

from simpletuner.annexes.captions.editing import ChangedMeanwhileError
from simpletuner.annexes.captions.library import LINKED, Library, inspected, stamp_of
from simpletuner.atomic import write_atomically
from simpletuner.config.types import Size
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.dataset import is_stretched
from simpletuner.data.discovery import scan
from simpletuner.data.file_names import composed, index_partners, pair_key, partners_of
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import PICTURE_SUFFIXES, decode
from simpletuner.errors import UserError

DATA_URI = "data:image/png;base64,"
# Pixels of the shorter side of a white mask, enough to keep the aspect ratio of its file.
WHITE_SIDE = 128
MOST_FILLED = 5000  # white masks that the page creates
# Held between the comparison of a mask with If-Match and its replacement.
_painting = threading.Lock()


def write_mask(library: Library, folder: Path, name: str, sent: str, seen: str) -> int:
    """Write the mask of a file, and white masks for all files without a mask.

    Args:
        folder: the folder of the masks.
        sent: a PNG file as a data URI.
        seen: the stamp of the replaced mask; empty if there was none.

    Returns:
        The number of white masks.

    Raises:
        ChangedMeanwhileError: the mask has changed since.
        UserError: the mask does not match the file, or too many files have no mask.
    """
    facts = inspected(library.root, [name])[name]
    if facts.problem is not None:
        raise UserError(f"{name} {facts.problem}.")
    content = _as_png(_decode_sent(sent, facts.picture_size))
    with _painting:
        masks = masks_in(folder)
        before = mask_of(name, masks)
        path = mask_path(library, folder, name, before)
        if path.suffix.lower() != ".png":
            raise UserError(
                f"{path} is a mask in another format: move it away, or convert it to PNG."
            )
        stamp = stamp_of(inspected(folder, [before])[before]) if before else ""
        if stamp != seen:
            raise ChangedMeanwhileError(
                f"{path.name} has changed since it was opened. It was not overwritten."
            )
        # Checked before anything is written; the painted file has a mask from now on.
        new_name = path.relative_to(folder).as_posix()
        unmasked = files_without_mask(library, folder, [*masks, new_name])
        write_atomically(path, content)
        return fill_white(library, folder, unmasked)


def fill_missing(library: Library, folder: Path) -> int:
    """Write white masks for all files without one; returns their number.

    Raises:
        UserError: as `write_mask`.
    """
    with _painting:
        unmasked = files_without_mask(library, folder, masks_in(folder))
        return fill_white(library, folder, unmasked)


def masks_in(folder: Path) -> Sequence[str]:
    """The names of the masks in a folder."""
    if not folder.is_dir():
        return ()
    return scan(folder, PICTURE_SUFFIXES | CLIP_SUFFIXES).files


def mask_of(name: str, masks: Iterable[str]) -> str:
    """The mask of a file, by the rule of training; empty if it has none."""
    partners = partners_of(name, index_partners(masks))
    return partners[0] if partners else ""


def mask_name(library: Library, name: str, before: str = "") -> str:
    """The name of a file's mask: `cat.png`, or `cat.jpg.png` if another file has the same stem.

    Args:
        before: the present mask, which is replaced unless it is also that of another file.
    """
    is_shared = library.files_by_pair_key[pair_key(name)] > 1
    if before:
        is_named_after_file = composed(name) in (composed(before), pair_key(before))
        if not is_shared or is_named_after_file:
            return before
    return f"{name}.png" if is_shared else str(PurePosixPath(name).with_suffix(".png"))


def mask_path(library: Library, folder: Path, name: str, before: str = "") -> Path:
    """The path of a file's mask; see `mask_name`.

    Raises:
        UserError: it is behind a link out of the project.
    """
    path = folder / mask_name(library, name, before)
    if not library.may_show(path):
        raise UserError(f"{path} {LINKED}.")
    return path


def files_without_mask(library: Library, folder: Path, masks: Sequence[str]) -> list[str]:
    """The used files that have no mask.

    Raises:
        UserError: too many files have none, or one would be written behind a link out of the
            project.
    """
    index = index_partners(masks)
    used = (file for file in library.listing.files if file not in library.excluded)
    unmasked = [file for file in used if not partners_of(file, index)]
    if len(unmasked) > MOST_FILLED:
        raise UserError(
            f"{len(unmasked):,} files have no mask in {folder}, and every file needs one. Add "
            f"masks first: the page creates at most {MOST_FILLED:,} white masks."
        )
    for file in unmasked:
        mask_path(library, folder, file)  # raises for a link out of the project
    return unmasked


def fill_white(library: Library, folder: Path, files: Sequence[str]) -> int:
    """Write white masks, with which files are learned whole; returns their number."""
    facts = inspected(library.root, files)
    sizes = {file: fact.picture_size for file, fact in facts.items() if fact.problem is None}
    for file, (width, height) in sizes.items():
        factor = max(1, min(width, height) // WHITE_SIDE)
        white = Image.new("L", (width // factor, height // factor), 255)
        write_atomically(folder / mask_name(library, file), _as_png(white), durable=False)
    return len(sizes)


def _decode_sent(sent: str, size: Size) -> Image.Image:
    """Decode the mask in a data URI, for a file of a size.

    Raises:
        UserError: the mask is not a picture, has another aspect ratio, or is black.
    """
    try:
        content = base64.b64decode(sent.removeprefix(DATA_URI), validate=True)
        mask = decode(content, "black").convert("L")
    except binascii.Error:
        raise UserError("The mask is not sent as a data URI of a PNG file.") from None
    except MediaError as error:
        raise UserError(f"The mask {error}.") from None
    if is_stretched(size, mask.size):
        painted = f"{mask.width}x{mask.height}"
        raise UserError(f"The mask is {painted} and its file {size}: the aspect ratios differ.")
    if mask.getbbox() is None:
        raise UserError(
            "The mask is black: nothing would be learned from the file. Exclude the file instead."
        )
    return mask


def _as_png(mask: Image.Image) -> bytes:
    """The content of a PNG file with a mask."""
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()
