"""`simpletuner examples`: packaged configurations to run or to start from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner.atomic import write_json
from simpletuner.config.locate import EXAMPLES_ALIAS, example_file, example_names
from simpletuner.errors import UserError

app = typer.Typer(help="List the packaged examples, or copy one to start from.", no_args_is_help=True)


@app.command("list")
def list_examples() -> None:
    """Names of the packaged examples."""
    for name in example_names():
        typer.echo(name)


@app.command("copy")
def copy_example(
    name: str,
    dest: Annotated[Path | None, typer.Option("--dest", help="Folder to create; config/NAME by default.")] = None,
) -> None:
    """Copy an example's files, with the paths inside them led to the copy."""
    source = example_file(name).parent
    folder = dest or Path("config") / name
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder with --dest.")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, _redirect(content, name, folder))
    typer.echo(f"Copied to {folder}. Run it with: simpletuner train env={folder}")


def _redirect(value: Any, name: str, folder: Path) -> Any:
    """Paths below config/examples/NAME point into the copy; those of other examples stay in the package."""
    if isinstance(value, dict):
        return {key: _redirect(inner, name, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redirect(inner, name, folder) for inner in value]
    own = f"{EXAMPLES_ALIAS}{name}/"
    return (
        f"{folder.as_posix()}/{value.removeprefix(own)}" if isinstance(value, str) and value.startswith(own) else value
    )
