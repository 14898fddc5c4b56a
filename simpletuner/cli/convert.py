"""`simpletuner convert`: the chosen weights of a run as a file for a program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from simpletuner.annexes.adapters.convert import convert as write_converted
from simpletuner.config.types import parse_number
from simpletuner.errors import UserError
from simpletuner.reporting.wording import size_text

Form = Literal["comfyui", "diffusers"]
app = typer.Typer()


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder of a run, or a LoRA's file.")
    ],
    to: Annotated[Form, typer.Option("--to", help="The program that the file is for.")],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="A step, or latest; the result by default.")
    ] = None,
    strength: Annotated[
        str, typer.Option("--strength", help="LoRA strength to multiply into the weights.")
    ] = "1.0",
    ema: Annotated[
        bool, typer.Option("--ema", help="Take the moving average of the weights.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="The file to write, or a folder for it.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
) -> None:
    """Write the chosen weights of a run as one file for ComfyUI or diffusers.

    SOURCE is the output folder of a run, one of its checkpoints, or a file; it is not changed.

    The new file is written beside it, and its name says what it holds.

    Example: convert output/cats --checkpoint 600 --strength 0.75 --to comfyui

    LoKr and LoHa are converted in their own form, a full fine-tune to one file for ComfyUI.
    """
    try:
        factor = parse_number(strength)
    except ValueError as error:
        raise UserError(f"--strength: {strength!r} {error} such as 0.5 or 1.0.") from None
    result = write_converted(
        source, to, output, factor, checkpoint=checkpoint, ema=ema, overwrite=overwrite
    )
    typer.echo(f"Saved {result.path} ({size_text(result.path.stat().st_size)}).")
    if factor != 1.0:
        typer.echo(f"The strength {factor:g} is in the file: load it at strength 1.")
    if to == "comfyui":
        typer.echo(f"Put it into ComfyUI's folder {result.place}.")
