"""`simpletuner examples` lists and copies examples."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.annexes.guide import examples_by_group
from simpletuner.atomic import build_folder, write_atomically
from simpletuner.config.sources import EXAMPLES_ALIAS, example_file
from simpletuner.errors import Problems, UserError
from simpletuner.reporting.screen import layout_of

examples = typer.Typer(help="List the packaged examples, or copy one to start from.")
app = typer.Typer()
app.add_typer(examples, name="examples")


@examples.callback(invoke_without_command=True)
def list_without_command(context: typer.Context) -> None:
    """List the packaged examples, or copy one to start from."""
    if context.invoked_subcommand is None:
        list_examples()


@examples.command("list")
def list_examples() -> None:
    """List the packaged examples, with the card that each needs and the time it takes there."""
    layout = layout_of(sys.stdout)
    for group, listed in examples_by_group().items():
        typer.echo(group)
        for example in listed:
            mark = " (the usual choice)" if example.is_usual else ""
            typer.echo(f"  {example.name}{mark}")
            for line in layout.wrap(f"{example.about} ({example.needs})", indent=6, hanging=0):
                typer.echo(line)
        typer.echo("")
    notes = (
        "Memory and time are calculated for the settings as they are. Add offload=auto for a "
        "smaller card: `simpletuner plan --device 3060` shows what it can train.",
        "Run one: `simpletuner train example=NAME`. Make a copy to change: `simpletuner examples "
        "copy NAME`.",
    )
    for note in notes:
        for line in layout.wrap(note, hanging=0):
            typer.echo(line)


@examples.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(help="Name of the example; `examples list` shows them.")],
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to create; config/NAME by default.")
    ] = None,
    dest: Annotated[Path | None, typer.Option("--dest", help="The same, as an option.")] = None,
) -> None:
    """Copy an example's files, point their paths at the copy, and set a separate output folder."""
    if folder is not None and dest is not None and folder != dest:
        raise UserError(f"{folder} and --dest {dest} are two folders; give one.")
    source = example_file(name, Problems()).parent
    chosen = folder or dest
    folder = chosen or Path("config") / name
    if folder.exists() or folder.is_symlink():
        raise UserError(
            f"{folder} exists already; choose another folder: simpletuner examples copy "
            f"{name} FOLDER."
        )
    # The example's output folder may hold a run of it, which a copy could not resume.
    output = f"output/{folder.name}" if folder.name != name else f"output/my-{name}"
    # Replaced in JSON, hence the quotation marks. Paths to files of other examples still point into
    # the package.
    replacements = {
        f'"{EXAMPLES_ALIAS}{name}/': json.dumps(f"{folder.as_posix()}/", ensure_ascii=False)[:-1],
        f'"output_dir": "output/{name}"': f'"output_dir": {json.dumps(output, ensure_ascii=False)}',
    }
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        # All or nothing: the folder of a partial copy would make the next attempt fail.
        with build_folder(folder) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=ignored)
            for path in unfinished.glob("*.json"):
                text = path.read_text(encoding="utf-8")
                for old, new in replacements.items():
                    text = text.replace(old, new)
                write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from None
    env = shlex.quote(str(name if chosen is None else folder))
    typer.echo(
        f"Copied to {folder}; its runs write to {output}. Run it with: simpletuner train env={env}"
    )
