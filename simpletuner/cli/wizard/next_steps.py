"""What to do after the wizard: the dataset file first, which it never touches."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from simpletuner.cli.wizard.draft import Draft
from simpletuner.cli.wizard.talk import Talk
from simpletuner.models.spec import FamilySpec, Task


def show_next_steps(draft: Draft, talk: Talk) -> None:
    """Three steps to the first training."""
    path = Path(draft.dataset_file)
    talk.tell()
    talk.tell("Next steps", "bold")
    if path.expanduser().is_file():
        talk.tell(f"  1. Look over your dataset file {path}: it is there, and the wizard leaves it as it is.")
    else:
        talk.tell(f"  1. Tell where your {draft.spec.samples} are: write the dataset file {path}, for instance")
        talk.tell(show_datasets(draft.spec, draft.judgement.flavour.task, indent=5), "dim")
    talk.tell(f"  2. Check it all:  {train_command(draft.file)} --dry-run")
    talk.tell(f"  3. Train:         {train_command(draft.file)}")


def example_datasets(spec: FamilySpec, task: Task) -> list[dict[str, Any]]:
    """A dataset file to start from: a folder of pictures or clips, captions in text files of the same name."""
    samples: dict[str, Any] = {
        "id": f"my-{spec.samples}",
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
    """What to type so that this config is used."""
    if file == Path("config.json") or (file == Path("config/config.json") and not Path("config.json").exists()):
        return "simpletuner train"
    folder = file.parent
    if file.name == "config.json" and folder.parent == Path("config"):
        return f"simpletuner train env={shlex.quote(folder.name)}"
    return f"simpletuner train config_path={shlex.quote(str(file))}"
