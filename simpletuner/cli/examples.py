"""`simpletuner examples`: packaged configurations to run or to start from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.errors import UserError

app = typer.Typer(help="List the packaged examples, or copy one to start from.", no_args_is_help=True)


@app.command("list")
def list_examples() -> None:
    """The packaged examples, one line each."""
    from simpletuner.config.sources import example_names

    names = example_names()
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:<{width}}  {_about(name)}")
    typer.echo("\nRun one: simpletuner train example=NAME. Make a copy to change: simpletuner examples copy NAME.")


def _about(name: str) -> str:
    """What an example trains, from its config."""
    from simpletuner.config.sources import EXAMPLES_ALIAS, example_file
    from simpletuner.models.registry import FAMILIES
    from simpletuner.models.spec import TASKS

    config = json.loads(example_file(name).read_text(encoding="utf-8"))
    spec = FAMILIES[config["model_family"]]
    flavour = spec.flavour(config.get("model_flavour"))
    kind = "LoRA" if config["model_type"] == "lora" else "full fine-tune"
    about = f"{kind} for {spec.title}, {flavour.name} ({TASKS[flavour.task]})"
    if "num_processes" in config:
        about += f", on {config['num_processes']} GPUs"
    is_tiny = str(config.get("pretrained_model_name_or_path", "")).startswith(EXAMPLES_ALIAS)
    return f"{about}; tiny model, no download, no GPU, minutes" if is_tiny else about


@app.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(help="Name of the example; `examples list` shows them.")],
    dest: Annotated[Path | None, typer.Option("--dest", help="Folder to create; config/NAME by default.")] = None,
) -> None:
    """Copy an example's files, and point the paths inside them at the copy."""
    from simpletuner.atomic import build_folder, write_atomically
    from simpletuner.config.sources import EXAMPLES_ALIAS, example_file

    source = example_file(name).parent
    folder = dest or Path("config") / name
    # How a text begins that names a file of the example. Those of other examples stay in the package.
    packaged, copied = f'"{EXAMPLES_ALIAS}{name}/', json.dumps(f"{folder.as_posix()}/", ensure_ascii=False)[:-1]
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; choose another folder with --dest.")
    try:
        # Whole or not at all: half a copy would be refused as an existing folder at the next try.
        with build_folder(folder) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            for path in unfinished.glob("*.json"):
                write_atomically(path, path.read_text(encoding="utf-8").replace(packaged, copied))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from None
    chosen = name if dest is None else folder
    typer.echo(f"Copied to {folder}. Run it with: simpletuner train env={chosen}")
