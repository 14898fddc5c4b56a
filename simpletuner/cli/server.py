"""`simpletuner server`: the web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.errors import UserError

INSTALL = "The web page needs Starlette and uvicorn: pip install 'simpletuner[server]'"


def server(
    host: Annotated[str, typer.Option("--host", "-H", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on.", min=1, max=65535)] = 8001,
) -> None:
    """Serve the web page on http://localhost:8001."""
    try:
        import uvicorn

        from simpletuner.server.app import create_app
        from simpletuner.server.project import Project
    except ModuleNotFoundError:
        raise UserError(INSTALL) from None
    typer.echo(f"http://localhost:{port}")
    uvicorn.run(create_app(Project(Path.cwd().resolve())), host=host, port=port, log_level="warning")
