"""The web page on port 8001 as a Starlette application. Free of torch."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from simpletuner.annexes.page import callback, edit, files, live, machine
from simpletuner.annexes.page.control import Runs
from simpletuner.annexes.page.project import Project, Refusal
from simpletuner.errors import ConfigError, DiskFullError, UserError
from simpletuner.reporting.html import FOLDER as REPORTING

STATIC = Path(__file__).parent / "static"
# What the page shares with the HTML report.
SHARED = ("page.css", "curves.js", "viewer.js")
# What is served: the page, the events of runs elsewhere, or both.
Mode = Literal["unified", "trainer", "callback"]


def create_app(project: Project, mode: Mode = "unified") -> Starlette:
    """The application that serves a project, without its guard."""
    page = [
        *edit.routes(),
        *files.routes(),
        *machine.routes(),
        *live.routes(),
        *(Route(f"/static/{name}", partial(shared, name)) for name in SHARED),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/api/metrics/health/live", health),
            *(callback.routes() if mode != "trainer" else []),
            *(page if mode != "callback" else []),
        ],
        exception_handlers={UserError: refused, HTTPException: no_such_route},
    )
    app.state.project, app.state.runs = project, Runs(project)
    return app


def health(request: Request) -> Response:
    """Says that the server is up."""
    return JSONResponse({"status": "ok", "version": version("simpletuner")})


def shared(name: str, request: Request) -> Response:
    """A file of the HTML report."""
    return FileResponse(REPORTING / name)


def refused(request: Request, error: Exception) -> Response:
    """Answers a `Refusal`, and what the command line would end with."""
    if not isinstance(error, Refusal):
        status = 507 if isinstance(error, DiskFullError) else 422
        error = Refusal(status, error.problems if isinstance(error, ConfigError) else str(error))
    return error.answer()


def no_such_route(request: Request, error: Exception) -> Response:
    """Answers wrong addresses and methods as every other mistake."""
    assert isinstance(error, HTTPException)
    return Refusal(error.status_code, error.detail).answer(error.headers)
