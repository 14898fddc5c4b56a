"""Routes of what is there: models, GPUs and memory, and the folders of datasets."""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.annexes.page.project import Refusal, project_of
from simpletuner.budget.device import ask_driver, host_memory
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.discovery import CAPTION_SUFFIX
from simpletuner.data.media import PICTURE_SUFFIXES
from simpletuner.models.registry import FAMILIES, canonical_family_name

MOST_NAMES = 5000  # of a folder; the page shows that there are more
GPU_QUERY = ("--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")
KINDS = {
    **dict.fromkeys(PICTURE_SUFFIXES, "images"),
    **dict.fromkeys(CLIP_SUFFIXES, "videos"),
    CAPTION_SUFFIX: "captions",
}


def routes() -> list[Route]:
    """Routes under /api/models, /api/hardware and /api/datasets/browse."""
    return [
        Route("/api/models", models),
        Route("/api/models/{family}/flavours", family_flavours),
        Route("/api/hardware/gpus", gpus),
        Route("/api/hardware/memory", memory),
        Route("/api/datasets/browse", browse),
    ]


def models(request: Request) -> Response:
    """The model families with the names of their flavours."""
    keys = ("name", "title", "media", "license")
    found = FAMILIES.values()
    return JSONResponse([{key: vars(spec)[key] for key in keys} | {"flavours": spec.flavour_names} for spec in found])


def family_flavours(request: Request) -> Response:
    """The published checkpoints of a family, the default first."""
    spec = FAMILIES.get(canonical_family_name(request.path_params["family"]))
    if spec is None:
        raise Refusal(404, f"The family is not one of: {', '.join(FAMILIES)}.")
    keys = ("name", "repository", "task", "needs")
    return JSONResponse([{key: vars(flavour)[key] for key in keys} for flavour in spec.flavours])


def gpus(request: Request) -> Response:
    """Every NVIDIA GPU with its memory in bytes, None where it does not tell; an empty list without a driver."""
    # A broken driver is reported when a run starts.
    return JSONResponse([gpu_json(*map(str.strip, line.split(","))) for line in ask_driver(*GPU_QUERY)])


def gpu_json(index: str, name: str, *mebibytes: str) -> dict[str, Any]:
    """A line of nvidia-smi."""
    total, free = (int(size) * 2**20 if size.isdecimal() else None for size in mebibytes)
    return {"index": int(index), "name": name, "total": total, "free": free}


def memory(request: Request) -> Response:
    """The machine's memory in bytes; None where the system does not tell."""
    try:
        told = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        told = None
    return JSONResponse({"total": host_memory(), "free": int(told[1]) * 1024 if told else None})


def browse(request: Request) -> Response:
    """The folders in a folder, and how many pictures, clips and captions lie in it; `?path=` of an allowed folder."""
    project = project_of(request)
    folder = project.inside(request.query_params.get("path", "."))
    if not folder.is_dir():
        raise Refusal(404, f"{str(folder)!r} is not a folder.")
    try:
        with os.scandir(folder) as entries:
            found = list(islice(entries, MOST_NAMES + 1))
    except OSError as error:
        raise Refusal(403, f"{str(folder)!r} cannot be read: {error.strerror}.") from None
    shown = [entry for entry in found[:MOST_NAMES] if not entry.name.startswith(".")]
    roots = (project.folder, *project.roots)
    content = {
        "path": str(folder),
        "parent": None if folder in roots else str(folder.parent),
        "roots": [str(root) for root in roots],
        "folders": sorted(entry.name for entry in shown if entry.is_dir()),
        "files": Counter(KINDS.get(Path(entry.name).suffix.lower(), "others") for entry in shown if entry.is_file()),
        "complete": len(found) <= MOST_NAMES,
    }
    return JSONResponse(content)
