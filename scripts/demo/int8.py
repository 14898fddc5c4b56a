"""Whether products in int8 change what the demos learn: the loss on files held out of training.

    python scripts/demo/int8.py FOLDER [--demo demo|demo-video] [--seed N]

Each demo is trained with its own settings, but an int8 base, on all but two of its files, the last
ones by name; then with int8 products in addition (`quantized_matmul`). FOLDER keeps the runs: those
that are finished are not repeated, and the tables are of all that it holds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "simpletuner" / "examples"
MEDIA = {"demo": "pictures", "demo-video": "clips"}
STEPS = {"demo": 200, "demo-video": 100}
SEEDS = (1, 2, 3)
HELD_OUT = 2
BASE = {"base_model_precision": "int8-quanto"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "int8 base": BASE,
    "int8 base and products": {**BASE, "quantized_matmul": True},
}
LOSS = "loss/val/held-out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--demo", choices=MEDIA, action="append")
    parser.add_argument("--seed", type=int, action="append")
    options = parser.parse_args()
    for demo in options.demo or MEDIA:
        datasets = split(demo, options.folder.resolve() / demo)
        for variant in VARIANTS:
            for seed in options.seed or SEEDS:
                train(demo, variant, seed, datasets)
        print("\n".join(table(demo, datasets.parent)))


def split(demo: str, folder: Path) -> Path:
    """Copy a demo's files into those to train on and those held out; returns the dataset file."""
    source = EXAMPLES / demo / MEDIA[demo]
    names = sorted(path.stem for path in source.glob("*.txt"))
    for name in names:
        part = "held-out" if name in names[-HELD_OUT:] else "trained"
        (folder / part).mkdir(parents=True, exist_ok=True)
        for path in source.glob(f"{name}.*"):
            shutil.copy(path, folder / part)
    datasets = json.loads((EXAMPLES / demo / "multidatabackend.json").read_text(encoding="utf-8"))
    trained = datasets[0]
    held_out = {**trained, "id": "held-out", "dataset_type": "eval"}
    held_out["instance_data_dir"] = str(folder / "held-out")
    held_out["cache_dir_vae"] = "{output_dir}/cache/held-out"
    del held_out["repeats"]
    trained["instance_data_dir"] = str(folder / "trained")
    file = folder / "datasets.json"
    file.write_text(json.dumps([*datasets, held_out], indent=2), encoding="utf-8")
    return file


def train(demo: str, variant: str, seed: int, datasets: Path) -> None:
    """Train a variant with a seed, unless that is done."""
    output = run_folder(datasets.parent, variant, seed)
    if held_out_loss(output) is not None:
        return
    settings = {
        "seed": seed,
        "max_train_steps": STEPS[demo],
        "data_backend_config": datasets,
        "output_dir": output,
        "validation_disable": True,
        "eval_steps_interval": STEPS[demo],
        "num_eval_images": HELD_OUT,
        **VARIANTS[variant],
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "simpletuner", "train", f"example={demo}", *words]
    subprocess.run(command, check=True)


def run_folder(folder: Path, variant: str, seed: int) -> Path:
    return folder / f"{variant.replace(' ', '-')}-{seed}"


def held_out_loss(output: Path) -> float | None:
    """The loss on held-out files after the last step; None without one."""
    metrics = output / "training_metrics.jsonl"
    if not metrics.exists():
        return None
    for line in reversed(metrics.read_text(encoding="utf-8").splitlines()):
        loss = json.loads(line).get(LOSS)
        if loss is not None:
            return float(loss)
    return None


def table(demo: str, folder: Path) -> Iterable[str]:
    """The results of a demo, in Markdown."""
    yield f"\n{demo}, {STEPS[demo]} steps, {len(SEEDS)} seeds\n"
    yield "| | held-out loss | more than with the int8 base alone |"
    yield "|---|---|---|"
    plain: list[float] = []
    for variant in VARIANTS:
        losses = [held_out_loss(run_folder(folder, variant, seed)) for seed in SEEDS]
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(SEEDS):
            continue
        plain = plain or known
        differences = [loss - other for loss, other in zip(known, plain, strict=True)]
        yield f"| {variant} | {spread(known, '.4f')} | {spread(differences, '+.4f')} |"


def spread(values: list[float], form: str) -> str:
    """The mean, with the smallest and the largest in brackets."""
    texts = [f"{value:{form}}" for value in (statistics.mean(values), min(values), max(values))]
    return "{} ({} to {})".format(*texts)


if __name__ == "__main__":
    main()
