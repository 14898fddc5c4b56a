"""Routes of the form: what can be set, what is set, and what is wrong with it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.server.project import Project


def routes(project: Project) -> list[Route]:
    """Routes under /api/fields and /tabs."""

    async def tabs(request: Request) -> Response:
        return JSONResponse([])

    return [Route("/api/fields/tabs", tabs)]
