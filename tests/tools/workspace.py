"""A folder as a user has it: config/, datasets/, and `simpletuner train` run inside it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from simpletuner.cli.app import main
from tests.tools.forks import fork

CONFIG: dict[str, Any] = {
    "model_type": "lora",
    "model_family": "kandinsky5-image",
    "model_flavour": "t2i-lite-sft",
    "data_backend_config": "config/multidatabackend.json",
    "output_dir": "output",
    "seed": 7,
    "max_train_steps": 4,
    "train_batch_size": 2,
    "mixed_precision": "no",
    "learning_rate": 1e-3,
    "checkpoint_step_interval": 2,
    "validation_prompt": "a red square",
    "validation_resolution": "128x128",
    "validation_num_inference_steps": 2,
    "validation_step_interval": 100,
    "validation_disable": True,
    "torch_num_threads": 1,
}
DATASETS: list[dict[str, Any]] = [
    {
        "id": "pictures",
        "type": "local",
        "dataset_type": "image",
        "instance_data_dir": "datasets/pictures",
        "caption_strategy": "textfile",
        "resolution": 64,
        "repeats": 1,
    },
    {
        "id": "text",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": "cache/text",
    },
]
# A dataset of pictures that are evaluated and not trained on.
EVAL: dict[str, Any] = {
    "id": "held-out",
    "type": "local",
    "dataset_type": "eval",
    "instance_data_dir": "datasets/held out",
    "caption_strategy": "textfile",
    "resolution": 64,
}


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log, without an incomplete last line."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


@cache
def noise_pictures(count: int, seed: int, scale: int) -> list[bytes]:
    """PNG files of noise; cached, since hundreds of tests need the same ones."""
    random = np.random.default_rng(seed)
    files = []
    for index in range(count):
        shape = (64, 64, 3) if index % 2 else (64, 96, 3)
        picture = Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8))
        enlarged = picture.resize((picture.width * scale, picture.height * scale))
        file = io.BytesIO()
        enlarged.save(file, "PNG")
        files.append(file.getvalue())
    return files


@dataclass
class Workspace:
    """One working directory."""

    folder: Path

    @classmethod
    def create(
        cls, folder: Path, checkpoint: Path, *, pictures: int = 8, **settings: Any
    ) -> Workspace:
        """Write everything a run needs; `settings` replace or add keys of config.json."""
        workspace = cls(folder)
        (folder / "config").mkdir(parents=True)
        workspace.write_config(pretrained_model_name_or_path=str(checkpoint), **settings)
        workspace.write_datasets(DATASETS)
        workspace.add_pictures("datasets/pictures", pictures)
        return workspace

    def write_config(self, **settings: Any) -> None:
        """Change keys of config.json, or of the usual settings if there is none; None removes a
        key.
        """
        path = self.folder / "config" / "config.json"
        content = json.loads(path.read_text()) if path.exists() else dict(CONFIG)
        content.update(settings)
        content = {key: value for key, value in content.items() if value is not None}
        path.write_text(json.dumps(content))

    def write_datasets(self, entries: list[dict[str, Any]]) -> None:
        (self.folder / "config" / "multidatabackend.json").write_text(json.dumps(entries))

    def add_pictures(self, folder: str, count: int, *, seed: int = 0, scale: int = 1) -> None:
        """Noise pictures in two aspect ratios, each with two captions of unequal length."""
        target = self.folder / folder
        target.mkdir(parents=True, exist_ok=True)
        for index, content in enumerate(noise_pictures(count, seed, scale)):
            caption = "noise of many colours " * (index % 3 + 1)
            (target / f"p{index}.png").write_bytes(content)
            (target / f"p{index}.txt").write_text(f"picture {index}\n{caption}")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Work in this folder."""
        with contextlib.chdir(self.folder):
            yield

    def run(self, *arguments: str) -> int:
        """Run `simpletuner <arguments>` in this process; returns the exit code."""
        with self.inside():
            return main(list(arguments))

    def train(self, *settings: str) -> int:
        """Run `simpletuner train <settings>` in this process; returns the exit code."""
        return self.run("train", *settings)

    def spawn(self, *arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
        """Start `simpletuner <arguments>` in a new process."""
        command = [sys.executable, "-m", "simpletuner", *arguments]
        return subprocess.Popen(command, cwd=self.folder, text=True, **kwargs)

    def fork(self, work: Callable[..., object], *arguments: object) -> BaseProcess:
        """Start `work(*arguments)` inside this folder, in a fresh process."""
        return fork(_work_inside, self, work, arguments)

    def metrics(self, output: str = "output") -> list[dict[str, Any]]:
        """The rows of a run's metrics, without what depends on the clock or the machine."""
        lines = (self.folder / output / "training_metrics.jsonl").read_text().splitlines()
        measured = re.compile("time|mfu|(.*_)?seconds|.*_share|(peak|reserved)_memory_gb")
        rows = []
        for line in lines:
            row = json.loads(line)
            rows.append({key: row[key] for key in row if not measured.fullmatch(key)})
        return rows

    def copy(self, folder: Path, **settings: Any) -> Workspace:
        """A copy of this workspace with changed settings."""
        copy = Workspace(Path(shutil.copytree(self.folder, folder)))
        copy.write_config(**settings)
        return copy

    def stopped(self, folder: Path, step: int) -> Workspace:
        """A copy of a run as if it had ended after a step that has a checkpoint."""
        copy = self.copy(folder)
        output = copy.path("output")
        for checkpoint in output.glob("checkpoint-*"):
            if int(checkpoint.name.split("-")[1]) > step:
                shutil.rmtree(checkpoint)
        for result in output.glob("*.safetensors"):
            result.unlink()
        shutil.rmtree(output / "pipeline", ignore_errors=True)
        return copy

    def path(self, relative: str) -> Path:
        return self.folder / relative


def _work_inside(
    workspace: Workspace, work: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    with workspace.inside():
        work(*arguments)
