"""Routes of what is there: models, GPUs and memory, and the folders of datasets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.discovery import CAPTION_SUFFIX
from simpletuner.data.media import PICTURE_SUFFIXES
from simpletuner.models.registry import FAMILIES, canonical_family_name
from simpletuner.models.spec import FamilySpec
from simpletuner.server.project import Refusal, project_of

MOST_NAMES = 5000  # of a folder; the page shows that there are more
GPU_QUERY = ("index", "name", "memory.total", "memory.free", "utilization.gpu", "temperature.gpu")
QUERY_SECONDS = 5
KINDS = {
    **dict.fromkeys(PICTURE_SUFFIXES, "images"),
    **dict.fromkeys(CLIP_SUFFIXES, "videos"),
    CAPTION_SUFFIX: "captions",
}


def routes() -> list[Route]:
    """Routes under /api/models, /api/hardware and /api/datasets/browse."""
    return [
        Route("/api/models", models),
        Route("/api/models/{family}/flavours", flavours),
        Route("/api/hardware/gpus", gpus),
        Route("/api/hardware/memory", memory),
        Route("/api/datasets/browse", browse),
    ]


def models(request: Request) -> Response:
    """The model families."""
    return JSONResponse([family_json(spec) for spec in FAMILIES.values()])


def family_json(spec: FamilySpec) -> dict[str, Any]:
    """A family as the page shows it."""
    names = [flavour.name for flavour in spec.flavours]
    return {"name": spec.name, "title": spec.title, "media": spec.media, "license": spec.license, "flavours": names}


def flavours(request: Request) -> Response:
    """The published checkpoints of a family, the default first."""
    spec = FAMILIES.get(canonical_family_name(request.path_params["family"]))
    if spec is None:
        raise Refusal(404, f"The family is not one of: {', '.join(FAMILIES)}.")
    wanted = ("name", "repository", "task", "needs")
    return JSONResponse([{key: vars(flavour)[key] for key in wanted} for flavour in spec.flavours])


def gpus(request: Request) -> Response:
    """Every NVIDIA GPU with its memory in bytes; an empty list without a driver."""
    return JSONResponse([gpu_json(line) for line in ask_driver()])


def ask_driver() -> list[str]:
    """A line of `GPU_QUERY` for each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []  # a broken driver is reported when a run starts


def gpu_json(line: str) -> dict[str, Any]:
    """A line of nvidia-smi; None where a GPU does not tell."""
    index, name, *rest = (part.strip() for part in line.split(","))
    total, free, used, temperature = (float(part) if part.replace(".", "").isdecimal() else None for part in rest)
    sizes = {key: None if value is None else value * 2**20 for key, value in (("total", total), ("free", free))}
    return {"index": int(index), "name": name, **sizes, "utilisation": used, "temperature": temperature}


def memory(request: Request) -> Response:
    """The machine's memory in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    sizes = {name: int(words.split()[0]) * 1024 for name, _, words in (line.partition(":") for line in lines)}
    return JSONResponse({"total": sizes.get("MemTotal"), "free": sizes.get("MemAvailable")})


def browse(request: Request) -> Response:
    """The folders in a folder, and how many pictures, clips and captions lie in it; `?path=` of an allowed folder."""
    project = project_of(request)
    folder = project.inside(request.query_params.get("path", "."))
    if not folder.is_dir():
        raise Refusal(404, f"{str(folder)!r} is not a folder.")
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry, _ in zip(entries, range(MOST_NAMES + 1), strict=False)]
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
