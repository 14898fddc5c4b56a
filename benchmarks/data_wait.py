"""The share of a training step that waits for data, in whole runs on cached latents."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.models import write_checkpoint
from benchmarks.timing import Ratio, arguments, show
from tests.tools.tiny import TOKENIZERS
from tests.tools.workspace import DATASETS, Workspace

BAR = 0.01


def main() -> None:
    parser = arguments(__doc__, ("tiny", "medium"), rounds=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if not TOKENIZERS.is_dir():
        raise SystemExit("the demo's tokenizers are missing")
    torch.set_num_threads(1)
    first: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name) / "checkpoint", options.size)
        runs = {
            form: _prepare(Path(name) / form, checkpoint, form, options.steps)
            for form in ("compressed", "plain")
        }
        for number in range(options.rounds):
            for form, run in runs.items():
                with contextlib.redirect_stdout(io.StringIO()):
                    code = run.train(f"output_dir=output{number}")
                if code:
                    raise RuntimeError(f"the run ended with {code}")
                metrics = run.path(f"output{number}") / "training_metrics.jsonl"
                steps = [json.loads(line) for line in metrics.read_text().splitlines()]
                waits = [step["data_seconds"] for step in steps]
                seconds = [step["seconds"] for step in steps]
                shares.setdefault(form, []).append(sum(waits[1:]) / sum(seconds[1:]))
                first.setdefault(form, []).append(waits[0] / seconds[1])
    ratios = [Ratio(f"waiting / step, {form}", rounds, BAR) for form, rounds in shares.items()]
    ratios += [
        Ratio(f"wait of the first step / a step, {form}", rounds) for form, rounds in first.items()
    ]
    show(
        f"Waiting for data, {options.size} model on {options.device}, {options.steps} steps a run",
        ratios,
        options,
    )


def _prepare(folder: Path, checkpoint: Path, form: str, steps: int) -> Workspace:
    """A folder whose caches are full; they lie outside of the output folder."""
    run = Workspace.create(
        folder,
        checkpoint,
        pictures=24,
        cache_dir_vae="cache/vae",
        compress_disk_cache=form == "compressed",
        max_train_steps=steps,
        gradient_checkpointing=True,
        checkpoint_step_interval=10 * steps,
    )
    run.write_datasets(
        [{**DATASETS[0], "resolution": 192, "cache_dir_vae": "cache/vae"}, *DATASETS[1:]]
    )
    if run.run("cache", "fill"):
        raise RuntimeError("the caches were not filled")
    return run


if __name__ == "__main__":
    main()
