"""`simpletuner configure`: writes config.json by asking questions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.annexes.configure.session import run_session
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.errors import UserError

app = typer.Typer()


@app.command()
def configure(
    file: Annotated[Path, typer.Argument(help="The file to write or edit.")] = Path(
        "config/config.json"
    ),
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Ask nothing: take every default.")
    ] = False,
) -> None:
    """Write config.json by answering questions; ? explains a question. An existing dataset file is
    not changed.
    """
    name = str(file).removeprefix("env=")
    named = Path("config", name, "config.json")  # as the other commands find it
    if name != str(file) or (named.is_file() and not file.exists()):
        raise UserError(
            f"{str(file)!r} is not a file: write simpletuner configure {shlex.quote(str(named))}"
        )
    run_session(file, Dialogue(asks=not defaults, unasked="--defaults"))
