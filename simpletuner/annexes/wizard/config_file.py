"""Reading an existing config, writing the new one, and the next steps."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.annexes.wizard.talk import Talk
from simpletuner.atomic import write_atomically
from simpletuner.config.load import canonical, read_json_layer
from simpletuner.config.schema import GROUPS, main_name, option_names
from simpletuner.errors import ConfigError, Reading, UserError
from simpletuner.models.spec import FamilySpec, Task
from simpletuner.plan.draft import Draft


def check_target(file: Path) -> None:
    """Check before the first question that the file can be written.

    Raises:
        UserError: it cannot be written.
    """
    if file.suffix in (".toml", ".env"):
        raise UserError(f"{file}: the wizard writes JSON; name a file such as config/config.json.")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file in it, such as {file / 'config.json'}.")
    # The nearest folder that exists; those below it are created on saving.
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{file} cannot be written: no permission in {folder}.")


def load_values(file: Path) -> Reading[dict[str, Any]]:
    """Values as they are written in the file, by the canonical names of their keys.

    Raises:
        ConfigError: the file cannot be read.
    """
    layer = yield from read_json_layer(file)
    if layer is None:
        raise ConfigError([])
    yield from canonical(layer)
    named = [(main_name(written), value) for written, value in layer.values]
    # Nothing stands for the default, but an empty resume_from_checkpoint for not resuming.
    return {key: value for key, value in named if value not in (None, "") or key == "resume_from_checkpoint"}


def unusable_keys(draft: Draft) -> dict[str, str]:
    """Keys of a loaded file that training refuses, with the reason."""
    reasons: dict[str, str] = {}
    for problem in draft.judgement.problems:
        # the key of a place such as "tread_config.routes[0]"
        key = re.split(r"[.\[]", problem.where)[0]
        if problem.fatal and key in draft.loaded:
            reasons.setdefault(key, problem.message)
    return reasons


def render_config(values: Mapping[str, Any]) -> str:
    """JSON in the order of the schema, with an empty line between groups; unknown keys come last."""
    known = [[name for name in group.model_fields if name in values] for group in GROUPS.values()]
    others = [name for name in values if name not in option_names()]
    blocks = [",\n".join(_entry(name, values[name]) for name in names) for names in (*known, others) if names]
    return "{\n" + ",\n\n".join(blocks) + "\n}\n"


def save(file: Path, text: str) -> None:
    """Write the file atomically; the previous one is kept as `.bak`."""
    target = file.resolve()  # a link is kept, and the file it points to is replaced
    if target.is_file():
        # A copy, so that the file itself is in place until the new one replaces it.
        write_atomically(backup_of(target), target.read_bytes())
    write_atomically(target, text)


def backup_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.bak")


def _entry(name: str, value: Any) -> str:
    # Newlines inside texts are escaped, so only lines of JSON are indented.
    text = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    return f"  {json.dumps(name)}: {text}"


def show_next_steps(draft: Draft, talk: Talk) -> None:
    """Three steps to the first training."""
    path = Path(draft.dataset_file)
    talk.tell()
    talk.tell("Next steps", "bold")
    if path.expanduser().is_file():
        talk.tell(f"  1. Check your dataset file {path}; the wizard does not change it.")
    else:
        talk.tell(f"  1. Write the dataset file {path}, which says where your {draft.spec.media_noun} are, such as:")
        talk.tell(show_datasets(draft.spec, draft.judgement.flavour.task, indent=5), "dim")
    talk.tell(f"  2. Check:  {train_command(draft.file)} --dry-run")
    talk.tell(f"  3. Train:  {train_command(draft.file)}")


def example_datasets(spec: FamilySpec, task: Task) -> list[dict[str, Any]]:
    """A dataset file to start from: a folder of pictures or clips, captions in text files of the same name."""
    samples: dict[str, Any] = {
        "id": f"my-{spec.media_noun}",
        "type": "local",
        "dataset_type": spec.media,
        "instance_data_dir": "datasets/my_images" if spec.media == "image" else "datasets/videos",
        "caption_strategy": "textfile",
        "resolution": spec.defaults["resolution"],
        "repeats": 10,
    }
    texts = {"id": "text-embeds", "type": "local", "dataset_type": "text_embeds", "default": True}
    if task != "i2i":
        return [samples, texts]
    sources = {
        "id": "my-sources",
        "type": "local",
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
        "instance_data_dir": "datasets/my_sources",
    }
    return [samples | {"conditioning_data": "my-sources"}, sources, texts]


def show_datasets(spec: FamilySpec, task: Task, indent: int) -> str:
    text = json.dumps(example_datasets(spec, task), indent=2)
    return "\n".join(" " * indent + line for line in text.splitlines())


def train_command(file: Path) -> str:
    """The shortest command that uses this config."""
    if file == Path("config.json") or (file == Path("config/config.json") and not Path("config.json").exists()):
        return "simpletuner train"
    folder = file.parent
    if file.name == "config.json" and folder.parent == Path("config"):
        return f"simpletuner train env={shlex.quote(folder.name)}"
    return f"simpletuner train config_path={shlex.quote(str(file))}"
