"""`simpletuner configure`: config.json by answering questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_FILE = Path("config/config.json")


def configure(
    file: Annotated[Path, typer.Argument(help="The file to write, or to edit if it exists.")] = DEFAULT_FILE,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Ask nothing: write the file with every default.")
    ] = False,
) -> None:
    """Write config.json by answering questions; ? explains each. The dataset file is never touched."""
    from simpletuner.cli.wizard.session import run_session
    from simpletuner.cli.wizard.talk import Talk

    run_session(file, Talk(defaults=defaults))
