"""Routes of the form: what can be set, what is set, and what is wrong with it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from simpletuner.reporting.html import render
from simpletuner.server.project import Project


def routes(project: Project) -> list[Route]:
    """The page itself, and routes under /api/fields and /tabs."""

    async def page(request: Request) -> Response:
        return HTMLResponse(render("server/page.html.jinja"))

    async def tabs(request: Request) -> Response:
        return JSONResponse([])

    return [Route("/", page), Route("/api/fields/tabs", tabs)]
