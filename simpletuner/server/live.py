"""Routes of runs: state, events, curves and previews, and the buttons."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.server.project import Project


def routes(project: Project) -> list[Route]:
    """Routes under /api/training and /api/events."""

    async def status(request: Request) -> Response:
        return JSONResponse({"status": "idle"})

    return [Route("/api/training/status", status)]
