"""`simpletuner examples`: packaged configurations to run or to start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner.errors import UserError

app = typer.Typer(help="List the packaged examples, or copy one to start from.", no_args_is_help=True)

TASKS = {"t2i": "text to image", "i2i": "image editing", "t2v": "text to video", "i2v": "image to video"}


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
    import json

    from simpletuner.config.sources import EXAMPLES_ALIAS, example_file
    from simpletuner.models.registry import FAMILIES

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
    import json

    from simpletuner.atomic import build_folder, write_json
    from simpletuner.config.sources import example_file

    source = example_file(name).parent
    folder = dest or Path("config") / name
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; choose another folder with --dest.")
    try:
        with build_folder(folder) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            for path in unfinished.glob("*.json"):
                write_json(path, _redirect(json.loads(path.read_text(encoding="utf-8")), name, folder))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from None
    chosen = name if dest is None else folder
    typer.echo(f"Copied to {folder}. Run it with: simpletuner train env={chosen}")


def _redirect(value: Any, name: str, folder: Path) -> Any:
    """Paths below config/examples/NAME point into the copy; those of other examples stay in the package."""
    from simpletuner.config.sources import EXAMPLES_ALIAS

    if isinstance(value, dict):
        return {key: _redirect(inner, name, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redirect(inner, name, folder) for inner in value]
    own = f"{EXAMPLES_ALIAS}{name}/"
    if isinstance(value, str) and value.startswith(own):
        return f"{folder.as_posix()}/{value.removeprefix(own)}"
    return value
