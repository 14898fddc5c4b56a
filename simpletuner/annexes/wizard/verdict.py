"""The plan's verdict on a draft: whether it fits the GPU, how long it takes, and its problems."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.fitting.ready import weigh_plan
from simpletuner.annexes.remote.collect import collect_cached
from simpletuner.annexes.wizard.session import example_datasets
from simpletuner.atomic import write_json
from simpletuner.budget.budget import Budget
from simpletuner.budget.device import gigabytes
from simpletuner.config.device import AskedDevice
from simpletuner.config.sources import DATASET_FILE, Arguments, configured
from simpletuner.data.clip_writer import write_mp4
from simpletuner.errors import ConfigError, Problem, Problems, counted
from simpletuner.reporting.wording import duration

NO_GPU = "There is no GPU here. For an estimate name device below, or later run simpletuner plan --device 4090."


def judge(draft: Draft, asked: AskedDevice) -> tuple[list[str], list[Problem]]:
    """Sentences about memory and time, and the problems that training would report.

    Without a dataset file, the plan is for a single sample of the family's usual size.

    Args:
        asked: the device to estimate for.
    """
    problems = Problems()
    has_data = Path(draft.dataset_file).expanduser().is_file()
    with TemporaryDirectory() as folder:
        datasets = draft.dataset_file if has_data else str(provisional_dataset(draft, Path(folder)))
        settings: list[tuple[str, object]] = [("data_backend_config", datasets)]
        base = configured(draft.values)
        try:
            budget = weigh_plan(Arguments(settings, {}, collect_cached, problems, base, device=asked))
        except ConfigError:  # its problems are among those of the arguments
            return [], problems
    device = budget.device
    if not device.is_gpu:
        # Memory was compared with this machine's RAM.
        return [NO_GPU], [problem for problem in problems if problem.where != "memory"]
    room = "unknown memory" if device.memory is None else gigabytes(device.memory)
    worst = max(budget.phases, key=lambda phase: phase.device)
    fits = "does not fit" if any(problem.where == "memory" for problem in problems) else "fits"
    memory = f"On {device.name} ({room}) this {fits}: at most {gigabytes(worst.device)}, while {worst.name}."
    return [memory, run_time(budget, has_data=has_data)], problems


def run_time(budget: Budget, *, has_data: bool) -> str:
    """How long a step takes, and the run if its length is known."""
    steps, time = budget.plan.length.total_steps, f"about {duration(budget.step_seconds)} a step"
    # Without files, the steps of an epoch are unknown.
    if has_data or budget.config.schedule.max_train_steps:
        time += f", {duration(budget.step_seconds * steps)} for {counted(steps, 'step')}"
    return f"{time}{'' if has_data else ', for samples of the usual size'}, without previews."


def provisional_dataset(draft: Draft, folder: Path) -> Path:
    """Write a dataset of one grey sample of the family's usual size into `folder`; returns its dataset file."""
    entries, spec, schedule = example_datasets(draft), draft.spec, draft.config.schedule
    edge = spec.defaults["resolution"]
    size = spec.native_sizes[edge][0] if edge in spec.native_sizes else (edge, edge)
    picture = Image.new("RGB", size, "grey")
    for entry in entries:
        if "instance_data_dir" in entry:
            # The dataset must fill at least one step.
            entry["repeats"] = schedule.train_batch_size * schedule.gradient_accumulation_steps
            entry["instance_data_dir"] = str(place := folder / entry["id"])
            place.mkdir()
            (place / "sample.txt").write_text("a sample", encoding="utf-8")
            if spec.media == "image" or entry["dataset_type"] == "conditioning":
                picture.save(place / "sample.png", compress_level=1)
            else:
                write_mp4(place / "sample.mp4", [picture] * entry["video"]["num_frames"], spec.frame_rate or 1)
    write_json(path := folder / DATASET_FILE, entries)
    return path
