"""Routes of configs and dataset files, inside the project's folders only."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.server.project import Project


def routes(project: Project) -> list[Route]:
    """Routes under /api/configs, /api/datasets and /api/models."""

    async def configs(request: Request) -> Response:
        return JSONResponse([])

    return [Route("/api/configs/", configs)]
