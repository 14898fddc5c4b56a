"""`simpletuner publish`: upload a run's result without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.cli.settings import command_settings


def publish(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Argument(help="The output folder of a run.")],
) -> None:
    """Upload the result of a run: the first time, again, or the rest of an upload that failed. Nothing is trained.

    Where to is what the run's settings say; without any it is the hub. Settings of the section Publishing override
    that: publish OUTPUT_DIR --hub_model_id=me/my-lora.
    """
    from simpletuner.annexes.publishing.again import publish_again

    publish_again(output_dir, command_settings(context.args))
