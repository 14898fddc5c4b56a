"""`simpletuner publish`: uploads the result of a run after training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.annexes.publishing.again import publish_again
from simpletuner.cli.settings import command_settings
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand

app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def publish(
    context: typer.Context, output_dir: Annotated[Path, typer.Argument(help="A run's folder.")]
) -> None:
    """Upload the result of a run for the first time or again, or finish a failed upload. Nothing is
    trained.

    Settings of the section Publishing override those of the run: publish OUTPUT_DIR
    --hub_model_id=me/my-lora.
    """
    publish_again(output_dir, command_settings(context.args))
