"""The weights that a user chooses: of a step of a run or in a file, and the name of their copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletuner.config.json_reader import read_json
from simpletuner.config.paths import missing_path
from simpletuner.errors import Problems, UserError, nearest
from simpletuner.headers import METADATA, read_header
from simpletuner.planning.checkpoint_folder import (
    AVERAGE_FOLDER,
    FOLDER_NAME,
    PIPELINE_FOLDER,
    Checkpoint,
    average_is_stale,
    find_checkpoints,
    result_step,
)
from simpletuner.weights.lora_names import LORA_FILE, STEP_NOTE, LoraForm
from simpletuner.weights.published_lora import lora_file

TRANSFORMER = "transformer"  # of a pipeline or of a checkpoint of a full fine-tune
AVERAGED_TRANSFORMER = "transformer_ema"
LATEST = "latest"
# Programs by the form of their files; the first suits most users.
PROGRAMS: dict[LoraForm, str] = {"comfyui": "ComfyUI", "diffusers": "diffusers"}


@dataclass(frozen=True)
class Choice:
    """Weights that a user has chosen.

    Attributes:
        path: the file of a LoRA, LoKr or LoHa, or the folder of a fully trained transformer.
        is_full: whether it is such a folder.
        name: of the run, or of the file.
        folder: where a converted copy is written unless the user names another place: never a
            checkpoint, which is deleted once there are too many.
        step: step of the weights; None if unknown.
        ema: whether they are the moving average.
    """

    path: Path
    is_full: bool
    name: str
    folder: Path
    step: int | None = None
    ema: bool = False

    def file_name(self, form: LoraForm | str, strength: float = 1.0) -> str:
        """The name of a copy, which says what it holds: `cats-step600-strength0.75-comfyui`."""
        parts = [re.sub(r"[^\w.-]+", "-", self.name) or "lora"]
        if self.step is not None:
            parts.append(f"step{self.step}")
        if self.ema:
            parts.append("ema")
        if strength != 1.0:
            sign = "minus" if strength < 0 else ""
            parts.append(f"strength{sign}{abs(strength):g}")
        if form:
            parts.append(form)
        return f"{'-'.join(parts)}.safetensors"


def command_for(
    output: str, form: LoraForm, *, checkpoint: int | None, strength: float, ema: bool = False
) -> str:
    """The command that writes the copy of a step of a run; without a step, of its result."""
    words = ["simpletuner", "convert", output]
    if checkpoint is not None:
        words += ["--checkpoint", str(checkpoint)]
    if ema:
        words.append("--ema")
    if strength != 1.0:
        words += ["--strength", f"{strength:g}"]
    return shlex.join([*words, "--to", form])


def find_choice(source: Path, checkpoint: str | None = None, *, ema: bool = False) -> Choice:
    """The weights at a path.

    Args:
        source: a file, an output folder of a run, a checkpoint, or a pipeline's folder.
        checkpoint: of a run: a step, the name of a folder, or `latest`; None means the result.
        ema: the moving average.

    Raises:
        UserError: there are no such weights.
    """
    if not source.exists():
        raise UserError(missing_path(source))
    if source.is_file():
        if checkpoint is not None or ema:
            raise UserError(
                f"--checkpoint and --ema choose among the weights of a run; {str(source)!r} is a "
                "file. Name the run's folder."
            )
        return _in_file(source)
    is_checkpoint = FOLDER_NAME.fullmatch(source.resolve().name) is not None
    if checkpoint is not None:
        return _in_checkpoint(_named(source, checkpoint).path, ema=ema)
    if is_checkpoint:
        return _in_checkpoint(source, ema=ema)
    return _result(source, ema=ema)


def _in_file(path: Path) -> Choice:
    """A file, which may lie in the folder of a run, of a checkpoint, or of an average."""
    folder = path.resolve().parent
    ema = folder.name == AVERAGE_FOLDER
    if ema:
        folder = folder.parent
    if FOLDER_NAME.fullmatch(folder.name):
        folder = folder.parent
    is_of_run = folder != path.resolve().parent or path.name == LORA_FILE
    name = folder.name if is_of_run else path.stem
    shown = folder if is_of_run and folder != path.resolve().parent else path.parent
    return Choice(path, False, name, shown, _step_in(path) if is_of_run else None, ema)


def _in_checkpoint(folder: Path, *, ema: bool) -> Choice:
    """The weights in the folder of a checkpoint."""
    run = folder.resolve().parent
    match = FOLDER_NAME.fullmatch(folder.resolve().name)
    step = int(match[1]) if match else None
    transformer = folder / (AVERAGED_TRANSFORMER if ema else TRANSFORMER)
    if is_transformer(transformer):
        return Choice(transformer, True, run.name, folder.parent, step, ema)
    return Choice(_adapter_in(folder, ema=ema), False, run.name, folder.parent, step, ema)


def _result(folder: Path, *, ema: bool) -> Choice:
    """The result in the output folder of a run, or the weights in another folder."""
    name = folder.resolve().name
    transformer = transformer_folder(folder)
    if transformer is not None:
        step = result_step(folder, "full")
        return Choice(transformer, True, name, folder, step)
    if not lora_file(folder).is_file():
        saves, _ = find_checkpoints(folder)
        if saves:
            raise UserError(
                f"{str(folder)!r} contains no result. Its checkpoints: {_names(saves)}; choose one "
                "with --checkpoint."
            )
    if ema and average_is_stale(folder):
        raise UserError(
            f"{str(folder / AVERAGE_FOLDER)!r} is not of the result beside it: a later session "
            "trained without use_ema. Choose a checkpoint of the earlier one with --checkpoint."
        )
    path = _adapter_in(folder, ema=ema)
    return Choice(path, False, name, folder, _step_in(path), ema)


def _adapter_in(folder: Path, *, ema: bool) -> Path:
    """The file of an adapter in a folder.

    Raises:
        UserError: there is none.
    """
    path = lora_file(folder / AVERAGE_FOLDER if ema else folder)
    if path.is_file():
        return path
    if ema:
        raise UserError(f"{str(path)!r} does not exist: the run had no use_ema.")
    raise UserError(f"{str(folder)!r} contains no LoRA and no fine-tuned transformer.")


def _named(folder: Path, name: str) -> Checkpoint:
    """The checkpoint of a run that a user names.

    Raises:
        UserError: there is no such complete checkpoint.
    """
    saves, _ = find_checkpoints(folder)
    named: dict[str, Checkpoint] = {}
    for save in saves:  # by step: of two of a step, the last is the regular one
        named |= {LATEST: save, str(save.step): save, save.path.name: save}
    chosen = named.get(name.strip())
    if chosen is None:
        near = nearest(name, [*named])
        hint = f" Did you mean {near}?" if near and near != LATEST else ""
        raise UserError(
            f"--checkpoint: {name!r} is not a complete checkpoint. Checkpoints in {folder}: "
            f"{_names(saves)}.{hint}"
        )
    return chosen


def _names(saves: Sequence[Checkpoint]) -> str:
    return ", ".join(save.path.name for save in saves) or "none"


def _step_in(path: Path) -> int | None:
    """The step in the header of a file of this program; None if it does not state one."""
    try:
        step = str(read_header(path)[METADATA].get(STEP_NOTE, ""))
    except (OSError, ValueError, AttributeError):
        return None
    return int(step) if step.isdecimal() else None


def transformer_folder(source: Path) -> Path | None:
    """The folder with a fully fine-tuned transformer: the source, or a folder in it; else None."""
    if source.is_file():
        return None
    for folder in (source / PIPELINE_FOLDER / TRANSFORMER, source / TRANSFORMER, source):
        if is_transformer(folder):
            return folder
    return None


def is_transformer(folder: Path) -> bool:
    """Whether a folder holds a transformer in diffusers' form."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json", Problems(), dict) or {}
    return "Transformer" in str(config.get("_class_name"))
