"""Output folders of runs, without a training: every kind of run that the page may meet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from PIL import Image

from simpletuner.data.clip_writer import write_mp4
from simpletuner.headers import join_header
from simpletuner.planning.checkpoint_folder import (
    FILE_NAME,
    Identity,
    Manifest,
    describe_files,
    write_manifest,
)
from simpletuner.reporting.events import StateChanged
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, MediaRecord
from simpletuner.weights.lora_names import LORA_FILE, METADATA_KEY, STEP_NOTE
from tests.annexes.page.runs.test_runs import STEPS, own, tell

Saved = Literal["nothing", "checkpoint", "result"]
State = Literal["running", "interrupted", "cancelled", "stopped", "done"]
Media = Literal["pictures", "clips", "nothing"]
IDENTITY = Identity("kandinsky5-image", "t2i-lite-sft", "lora", 1, 0, "", {})


LAST_EVENTS: dict[State, tuple[StateChanged, ...]] = {
    "cancelled": (StateChanged("interrupted", 3, 9, "KeyboardInterrupt"),),
    "stopped": (StateChanged("interrupted", 3, 9, "Stopped at step 3; start again to continue."),),
    "done": (StateChanged("finished", 3, 3, "Trained.\nRender with it: simpletuner sample"),),
}


@dataclass(frozen=True)
class RunFolder:
    """What a run has left in its folder.

    Attributes:
        evaluated: with an evaluation loss in its record.
        saved: a checkpoint, or a checkpoint and the LoRA of the last step.
        swept: with a comparison of its checkpoints, and a sample.
        media: what its previews are; a clip has one frame.
        rounds: the number of rounds of previews: one after step 3, or one a step from step 0 on.
    """

    evaluated: bool
    saved: Saved
    swept: bool
    state: State
    media: Media = "pictures"
    rounds: int = 1

    @property
    def name(self) -> str:
        """A name for its folder, which says all of that."""
        parts = [
            "evaluated" if self.evaluated else "",
            self.saved,
            "swept" if self.swept else "",
            self.state,
            self.media if self.media != "pictures" else "",
            f"{self.rounds} rounds" if self.rounds > 1 else "",
        ]
        return "-".join(filter(None, parts))

    def write(self, root: Path) -> Path:
        """Write the folder below another one."""
        folder = root / self.name
        folder.mkdir(parents=True)
        tell(folder, *STEPS, *LAST_EVENTS.get(self.state, ()))
        if self.state == "running":
            own(folder)
        elif self.state == "interrupted":
            own(folder, started="1")
        (folder / "console.log").write_text("$ simpletuner train\nTraining\n")
        if self.media != "nothing":
            write_previews(folder, self.media, self.rounds)
        if self.evaluated:
            with (folder / METRICS_FILE).open("a") as record:
                for step, loss in ((1, 0.6), (3, 0.5)):
                    record.write(json.dumps({"step": step, "loss/val/held": loss}) + "\n")
        if self.saved != "nothing":
            write_checkpoint(folder / "checkpoint-2", 2)
        if self.state == "stopped" and self.saved != "nothing":
            write_checkpoint(folder / "checkpoint-3-rolling", 3)
        if self.saved == "result":
            write_lora(folder, 3)
        if self.swept:
            write_sweep(folder / "sweep")
            write_sample(folder / "samples")
        return folder


def every_run() -> Iterator[RunFolder]:
    """Every combination, and every state with other previews."""
    for state, media in product(get_args(State), ("clips", "nothing")):
        yield RunFolder(True, "checkpoint", False, state, media)
    for evaluated, saved, swept, state in product(
        (True, False), get_args(Saved), (True, False), get_args(State)
    ):
        yield RunFolder(evaluated, saved, swept, state)


def write_previews(folder: Path, media: Media, rounds: int) -> None:
    """Write rounds of previews with their records; all are links to the same file."""
    suffix = "mp4" if media == "clips" else "png"
    steps = range(rounds) if rounds > 1 else [3]
    first = folder / f"previews/{steps[0]}.{suffix}"
    if media == "clips":
        first.parent.mkdir()
        write_mp4(first, [Image.new("RGB", (8, 8))], 8)
    else:
        write_picture(first)
    lines = []
    for step in steps:
        path = f"previews/{step}.{suffix}"
        if step != steps[0]:
            (folder / path).hardlink_to(first)
        lines.append(json.dumps(asdict(MediaRecord(step, "validation", "a bird", path, 8, 8))))
    (folder / MEDIA_FILE).write_text("\n".join([*lines, ""]))


def write_checkpoint(folder: Path, step: int) -> None:
    """Write a complete checkpoint with a LoRA."""
    folder.mkdir()
    write_lora(folder, step)
    write_manifest(folder, Manifest(step, 0, IDENTITY, describe_files(folder)))
    assert (folder / FILE_NAME).is_file()


def write_lora(folder: Path, step: int) -> None:
    """Write a LoRA file without weights."""
    notes = {STEP_NOTE: str(step), "modelspec.architecture": "kandinsky5-image/lite-t2i"}
    notes |= {METADATA_KEY: json.dumps({"r": 4, "lora_alpha": 4})}
    (folder / LORA_FILE).write_bytes(join_header({"__metadata__": notes}, b""))


def write_sweep(folder: Path) -> None:
    """Write a comparison of one checkpoint at one strength."""
    write_picture(folder / "cells" / "2.png")
    record = MediaRecord(2, "validation", "a bird", "cells/2.png", 8, 8)
    (folder / "sheet.json").write_text(json.dumps([asdict(record)]))
    (folder / "losses.json").write_text(json.dumps({"1": 0.5}))


def write_sample(folder: Path) -> None:
    """Write a sample with its recipe."""
    write_picture(folder / "owl.png")
    recipe = {
        "prompt": "an owl",
        "seed": 7,
        "index": 0,
        "width": 8,
        "height": 8,
        "step": 3,
        "strength": 1.0,
    }
    (folder / "owl.json").write_text(json.dumps({**recipe, "guidance": 4.0}))


def write_picture(path: Path) -> None:
    """Write a small picture into a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
