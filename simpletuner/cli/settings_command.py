"""Commands that take settings beside their options: `key=value`, `--key value` or `--flag`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from simpletuner.cli.help import sections_help
from simpletuner.config.schema import option_names
from simpletuner.config.sources import SELECTORS
from simpletuner.config.types import plain_key
from simpletuner.errors import UserError, nearest

# click passes unknown options through; the option schema parses them as settings.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
MISSPELLED = 0.75  # minimum difflib ratio at which a word counts as a misspelt option
# Short names of the settings most often changed for samples.
SHORT = {
    "resolution": "validation_resolution",
    "frames": "validation_num_video_frames",
    "seed": "validation_seed",
    "steps": "validation_num_inference_steps",
    "guidance": "validation_guidance",
    "negative_prompt": "validation_negative_prompt",
}


class SettingsCommand(TyperCommand):
    """A command that takes settings; its `--help` also lists their sections."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Typer keeps the line breaks of all paragraphs but the first.
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
        super().format_help(ctx, formatter)
        typer.echo("\n".join(sections_help()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Pass unknown options through as settings, except misspelt options of the command.

        Raises:
            UserError: an option is misspelt (the nearest is named), or lacks its value.
        """
        options: dict[str, TyperOption] = {}
        for param in self.params:
            if isinstance(param, TyperOption):
                options |= dict.fromkeys(param.opts, param)
        for name, following in pairwise(args):
            # Otherwise the next option would be taken for the value.
            if name in options and following in options and not options[name].is_flag:
                raise UserError(f"{name} needs a value, and {following} is an option.")
        rest = super().parse_args(ctx, args)
        for token in rest:
            if token.startswith("--") or "=" in token:
                _check_spelling(token.partition("=")[0], options)
        return rest


def _check_spelling(word: str, options: Mapping[str, TyperOption]) -> None:
    """Check that the name of a setting is not a misspelt option of the command.

    Args:
        options: the options of the command, by their flags.

    Raises:
        UserError: it is one.
    """
    key = plain_key(word)
    flags = {plain_key(name): name for name in options}
    flags |= {name: f"--{name}" for name in SELECTORS}
    settings = {*option_names(), *SHORT, *SELECTORS}
    if key in settings or (word.startswith("--") and key in flags):
        return
    guess = nearest(key, {*settings, *flags}, cutoff=MISSPELLED)
    if guess in flags:
        raise UserError(
            f"{word} is neither an option nor a setting. Did you mean '{flags[guess]}'?"
        )
