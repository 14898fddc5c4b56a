"""The web page on port 8001 as a Starlette application. Free of torch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from simpletuner.server import edit, files, live
from simpletuner.server.project import Project

STATIC = Path(__file__).parent / "static"


def create_app(project: Project) -> Starlette:
    """The application that serves a project."""

    async def page(request: Request) -> Response:
        return HTMLResponse("<!DOCTYPE html><title>simpletuner</title>")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/health", health),
            *edit.routes(project),
            *files.routes(project),
            *live.routes(project),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


async def health(request: Request) -> Response:
    """Says that the server is up."""
    return JSONResponse({"status": "ok", "version": version("simpletuner")})
