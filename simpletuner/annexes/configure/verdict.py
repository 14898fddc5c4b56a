"""The plan's verdict on a config: whether it fits the GPU, how long it takes, and its problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from simpletuner.annexes.configure.answers import ConfigAnswers, example_datasets
from simpletuner.annexes.draft import Draft
from simpletuner.annexes.fitting.ready import weigh_plan
from simpletuner.annexes.fitting.show import MISSING_GPU
from simpletuner.annexes.remote.collect import collect_cached
from simpletuner.atomic import write_json
from simpletuner.budget.budget import Budget
from simpletuner.budget.device import gigabytes
from simpletuner.config.sources import DATASET_FILE, Arguments, config_from_values
from simpletuner.data.clip_writer import write_mp4
from simpletuner.errors import ConfigError, Problem, Problems, counted
from simpletuner.reporting.wording import duration_text

NO_GPU = (
    "There is no GPU here. For an estimate name device below, or later run simpletuner plan "
    "--device 4090."
)


def judge(answers: ConfigAnswers) -> tuple[list[str], list[Problem]]:
    """Sentences about memory and time, and the problems that training would report.

    Without a dataset file and a folder, the plan is for a single sample of the family's usual size,
    and says nothing of this machine's CPU.
    """
    report = Problems()
    _check_folder(answers, report)
    has_files = answers.dataset_path.is_file() or answers.new_run() is not None
    with TemporaryDirectory() as folder:
        dataset_file = _dataset_file(answers, Path(folder))
        arguments = Arguments(
            [("data_backend_config", dataset_file)],
            {},
            collect_cached,
            report,
            config_from_values(answers.draft.values),
            device=answers.device,
        )
        try:
            budget = weigh_plan(arguments)
        except ConfigError:  # its problems are among those of the arguments
            return [], _without_captions(report, answers)
    problems = _without_captions(report, answers)
    shortage = [problem for problem in problems if problem.where == "memory"]
    if not budget.device.is_gpu:
        # Memory was compared with this machine's RAM.
        uncounted = [*shortage]
        if not has_files:
            uncounted += [problem for problem in problems if problem.where == MISSING_GPU]
        return [NO_GPU], [problem for problem in problems if problem not in uncounted]
    memory = memory_needed(budget, fits=not shortage)
    return [memory, run_time(budget, has_files=has_files)], problems


def memory_needed(budget: Budget, *, fits: bool) -> str:
    """A sentence about the memory of the device, and the phase of the run that needs most."""
    device = budget.device
    capacity = "unknown memory" if device.memory is None else gigabytes(device.memory)
    largest = max(budget.phases, key=lambda phase: phase.device)
    verdict = "fits" if fits else "does not fit"
    return (
        f"On {device.name} ({capacity}) this {verdict}: at most {gigabytes(largest.device)}, while "
        f"{largest.name}."
    )


def _check_folder(answers: ConfigAnswers, report: Problems) -> None:
    """Report settings that do not go with the folder of the files."""
    if answers.run is None or answers.folder is None or answers.dataset_path.is_file():
        return
    if answers.new_run() is None:
        spec = answers.draft.spec
        kind = f"{spec.media_noun}, and {answers.folder} holds {answers.run.media.noun}"
        report.error("model_family", f"{spec.name} learns from {kind}.")
    output = answers.draft.config.run.output_dir
    if Path(output).resolve().is_relative_to(answers.folder.resolve()):
        report.error(
            "output_dir", f"{output} is inside {answers.folder}, so previews would be trained."
        )


def _without_captions(problems: Problems, answers: ConfigAnswers) -> list[Problem]:
    """The problems, without those of captions that are still to be written."""
    if answers.new_run() is None:
        return problems
    return [problem for problem in problems if problem.kind != "captions"]


def _dataset_file(answers: ConfigAnswers, folder: Path) -> str:
    """The dataset file to plan with: the existing one, or one that is written into `folder`."""
    if answers.dataset_path.is_file():
        return answers.draft.dataset_file
    run = answers.new_run()
    if run is None:
        return str(provisional_dataset(answers.draft, folder))
    # Captions that are missing will be written.
    planned = replace(run, captions=not run.media.uncaptioned)
    path = folder / DATASET_FILE
    write_json(path, planned.datasets())
    return str(path)


def run_time(budget: Budget, *, has_files: bool) -> str:
    """How long a step takes, and the run if its length is known."""
    steps = budget.plan.length.total_steps
    time = f"about {duration_text(budget.step_seconds)} a step"
    # Without files, the steps of an epoch are unknown.
    if has_files or budget.config.schedule.max_train_steps:
        time += f", {duration_text(budget.step_seconds * steps)} for {counted(steps, 'step')}"
    if not has_files:
        time += ", for samples of the usual size"
    return f"{time}, without previews."


def provisional_dataset(draft: Draft, folder: Path) -> Path:
    """Write a dataset of a grey sample of the family's usual size into `folder`.

    Returns:
        The path of the dataset file.
    """
    entries = example_datasets(draft)
    spec = draft.spec
    schedule = draft.config.schedule
    edge = spec.defaults["resolution"]
    size = (edge, edge)
    if edge in spec.native_sizes:
        size = spec.native_sizes[edge][0]
    picture = Image.new("RGB", size, "grey")
    for entry in entries:
        if "instance_data_dir" not in entry:
            continue
        # The dataset must fill at least one step.
        entry["repeats"] = schedule.train_batch_size * schedule.gradient_accumulation_steps
        files = folder / entry["id"]
        files.mkdir()
        entry["instance_data_dir"] = str(files)
        (files / "sample.txt").write_text("a sample", encoding="utf-8")
        if spec.media == "image" or entry["dataset_type"] == "conditioning":
            picture.save(files / "sample.png", compress_level=1)
        else:
            frames = [picture] * entry["video"]["num_frames"]
            write_mp4(files / "sample.mp4", frames, spec.frame_rate or 1)
    path = folder / DATASET_FILE
    write_json(path, entries)
    return path
