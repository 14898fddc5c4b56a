"""Masks that are painted on the page: PNG files in a dataset of masks beside that of the pictures.

Training asks for a mask of every file, so whoever paints one gets a white one for each file that has none, which is
learned whole as before. A mask is replaced only by somebody who has seen it.
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image
from starlette.requests import Request
from starlette.responses import Response

from simpletuner.annexes.captions.editing import ChangedMeanwhileError
from simpletuner.annexes.captions.library import Library, forget_listings, inspected, stamp_of
from simpletuner.annexes.page.files import Configuration, add_dataset, shown, writable
from simpletuner.annexes.page.library import after_change, changed_meanwhile, name_in, opened
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.atomic import write_atomically
from simpletuner.config.values import Size
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.dataset import is_stretched
from simpletuner.data.discovery import pair_key, scan
from simpletuner.data.files import MediaError
from simpletuner.data.media import PICTURE_SUFFIXES, decode
from simpletuner.errors import UserError

DATA_URI = "data:image/png;base64,"
WHITE_SIDE = 128  # pixels of the shorter side of a white mask, which keep the ratio of its file
MOST_FILLED = 5000
# Between the look at a mask and its replacement, no other request may replace it.
_painting = threading.Lock()


def put_mask(request: Request, body: dict[str, Any]) -> Response:
    """Save a mask: `{"config", "dataset", "file", "mask"}`, a PNG file as a data URI, with the stamp of the one before
    in If-Match. The first adds a dataset of masks to the dataset file."""
    library, project = opened(request, body), project_of(request)
    if library.unpaintable:
        raise Refusal(403, library.unpaintable)
    name, seen = name_in(library, body), request.headers.get("if-match", "").strip('"')
    saved = Configuration.saved(project, str(body.get("config") or "config"))
    if library.masks is None:
        writable(project, saved.datasets)  # or it raises, before there is a mask that nobody reads
    entry = library.masks.model_dump() if library.masks else entry_of_masks(project, library)
    try:
        folder = project.inside(entry["instance_data_dir"])
        filled = write_mask(library, folder, name, str(body.get("mask", "")), seen)
    except ChangedMeanwhileError as error:
        return changed_meanwhile(library, name, error)
    forget_listings()
    notes = [f"Of {filled} more a white mask was made: they are learned whole, as before."] if filled else []
    if library.masks is None:
        add_dataset(saved, entry)
        notes.append(f"{shown(project, saved.datasets)} has a new dataset, {entry['id']}.")
    return after_change(request, body, *notes, is_mask=True)


def entry_of_masks(project: Project, library: Library) -> dict[str, Any]:
    """A dataset of masks for one that has none."""
    ids, name = {each.id for each in library.entries}, f"{library.entry.id}-masks"
    while name in ids:
        name += "-2"
    folder = shown(project, project.inside(library.root.with_name(f"{library.root.name}_masks")))
    kind = {"type": "local", "dataset_type": "conditioning", "conditioning_type": "mask"}
    return {"id": name, **kind, "source_dataset_id": library.entry.id, "instance_data_dir": folder}


def write_mask(library: Library, folder: Path, name: str, sent: str, seen: str) -> int:
    """Write the mask of a file, and a white one for each file that has none; returns the number of those.

    Args:
        folder: of the masks.
        sent: a PNG file as a data URI.
        seen: the stamp of the mask that it replaces; empty if there was none.

    Raises:
        ChangedMeanwhileError: the mask is another one by now.
        UserError: it is no mask for this file, or too many files have none.
    """
    own = inspected(library.root, [name])[name]
    if own.problem is not None:
        raise UserError(f"{name} {own.problem}.")
    content = _as_png(_received(sent, own.picture_size))
    with _painting:
        present = scan(folder, PICTURE_SUFFIXES | CLIP_SUFFIXES).files if folder.is_dir() else ()
        masks = {pair_key(each): each for each in reversed(present)}
        before = masks.get(pair_key(name), "")
        path = folder / (before or PurePosixPath(name).with_suffix(".png"))
        if path.suffix.lower() != ".png":
            raise UserError(f"{path} is a mask of another format, which is kept: move it away, or save it as PNG.")
        if (stamp_of(inspected(folder, [before])[before]) if before else "") != seen:
            raise ChangedMeanwhileError(f"{path.name} has changed since it was opened. It is kept as it is.")
        used = {pair_key(each): each for each in library.listing.files if each not in library.excluded}
        bare = {key: each for key, each in used.items() if key not in masks and key != pair_key(name)}
        if len(bare) > MOST_FILLED:
            message = f"{len(bare):,} files have no mask in {folder}, and each needs one. Put them there first"
            raise UserError(f"{message}: for at most {MOST_FILLED:,} a white one is made here.")
        write_atomically(path, content)
        facts = inspected(library.root, list(bare.values()))
        sizes = {each: fact.picture_size for each, fact in facts.items() if fact.problem is None}
        for each, size in sizes.items():
            factor = max(1, min(size) // WHITE_SIDE)
            white = Image.new("L", (size[0] // factor, size[1] // factor), 255)
            write_atomically(folder / PurePosixPath(each).with_suffix(".png"), _as_png(white), durable=False)
        return len(sizes)


def _received(sent: str, size: Size) -> Image.Image:
    """The mask in a data URI, for a file of a size.

    Raises:
        UserError: it is no picture, of another ratio, or black.
    """
    try:
        mask = decode(base64.b64decode(sent.removeprefix(DATA_URI), validate=True), "black").convert("L")
    except binascii.Error:
        raise UserError("The mask is not sent as a data URI of a PNG file.") from None
    except MediaError as error:
        raise UserError(f"The mask {error}.") from None
    if is_stretched(size, mask.size):
        given, own = ("x".join(map(str, each)) for each in (mask.size, size))
        raise UserError(f"The mask is {given} and its file {own}, another ratio.")
    if mask.getbbox() is None:
        raise UserError("The mask is black: nothing would be learned from the file. Leave the file out instead.")
    return mask


def _as_png(mask: Image.Image) -> bytes:
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()
