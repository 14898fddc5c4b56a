"""`simpletuner convert`: a result for another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from simpletuner.config.types import parse_number
from simpletuner.errors import UserError
from simpletuner.reporting.wording import size_text

Form = Literal["comfyui", "diffusers"]
app = typer.Typer()


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A LoRA's file, or a folder of a run.")
    ],
    to: Annotated[Form, typer.Option("--to", help="The program that the file is for.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="The file to write, or a folder for it.")
    ] = None,
    strength: Annotated[
        str, typer.Option("--strength", help="LoRA strength to multiply into the weights.")
    ] = "1.0",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
) -> None:
    """Write a LoRA under the names of another program, or a full fine-tune as one file for ComfyUI.

    SOURCE is a file, the output folder of a run, or one of its checkpoints; it is not changed.

    Example: convert output/my-lora --to comfyui

    LoKr and LoHa are converted in their own form.
    """
    try:
        factor = parse_number(strength)
    except ValueError as error:
        raise UserError(f"--strength: {strength!r} {error} such as 0.5 or 1.0.") from None
    # At the wall: it imports torch, so the command line is checked before.
    from simpletuner.annexes.adapters.convert import convert as write_converted

    result = write_converted(source, to, output, factor, overwrite=overwrite)
    typer.echo(f"Saved {result.path} ({size_text(result.path.stat().st_size)}).")
    if to == "comfyui":
        typer.echo(f"Put it into ComfyUI's folder {result.place}.")
