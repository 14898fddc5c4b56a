"""The last lines of `simpletuner start`: the result, the best checkpoint, and its file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpletuner.annexes.adapters.choice import PROGRAMS, Choice, command_for, find_choice
from simpletuner.annexes.adapters.convert import why_not, why_not_one_file
from simpletuner.annexes.report.contact_sheet import PAGE
from simpletuner.annexes.report.sheet import Sheet
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER
from simpletuner.weights.lora_names import LoraForm


def ending_of(output: Path, held_out: int) -> Iterator[str]:
    """What is printed once the checkpoints are compared.

    Args:
        output: the output folder of the run.
        held_out: number of files that were held out of training; 0 if no loss was measured on any.
    """
    try:
        result = find_choice(output)
        sheet = Sheet.of_run(output)
    except UserError as error:  # moved or damaged meanwhile: the run itself is done
        yield f"The result cannot be shown: {error}"
        return
    noun = "fine-tuned transformer" if result.is_full else "LoRA"
    yield f"The {noun}: {result.path}"
    best = sheet.best if held_out else None
    strength = sheet.best_strength if best is not None else 1.0
    if best is not None:
        files = f"the {held_out} files that were held out, and so could not be memorised"
        checkpoint = output / f"checkpoint-{best}"
        place = checkpoint if checkpoint.is_dir() else f"the result, of step {best:,},"
        yield f"Lowest loss on {files}: {place} at strength {strength:g}."
    yield from _commands(output, best, strength)
    yield (
        f"Compare the pictures before you decide, in {output / SWEEP_FOLDER / PAGE} or with "
        "`simpletuner server`; docs/CHOOSING.md explains what to look for."
    )


def _commands(output: Path, step: int | None, strength: float) -> Iterator[str]:
    """How to get the file of a step at a strength; without a step, of the result."""
    checkpoint = step
    try:
        choice = find_choice(output, None if step is None else str(step))
    except UserError:  # the best is the result, which no checkpoint holds
        choice = find_choice(output)
        checkpoint = None
    for form, program in PROGRAMS.items():
        if not _obstacle(choice, form, strength):
            command = command_for(str(output), form, checkpoint=checkpoint, strength=strength)
            yield f"To get it as a file for {program}: {command}"
            break
    if step is None:
        yield "For another checkpoint or strength, add --checkpoint STEP and --strength NUMBER."
    else:
        yield "For another checkpoint or strength, change the numbers."


def _obstacle(choice: Choice, form: LoraForm, strength: float) -> str:
    """Why the weights cannot be written in a form; empty if they can."""
    if not choice.is_full:
        return why_not(choice.path, form, strength)
    if form == "diffusers":
        return "It has this form already."
    return why_not_one_file(choice.path)
