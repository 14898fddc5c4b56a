"""What each technique changes: both demos trained plain and with one technique at a time, over several seeds.

Every cell of the table is one run in its own process, and is kept: what is finished is not run again. The caches, the
data and the base model's previews are shared. Two samples of each demo are held out for the evaluation loss.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.timing import arguments, write_json
from tests.colours import PURPLE, YELLOW, colour_share
from tests.motion import path_of, read_clip, rise

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "simpletuner" / "examples"
PLAIN = "plain"
HELD_OUT = 2  # samples of a demo
PREVIEW_STEPS, EVAL_TIMESTEPS = 25, 28
TIMED, UNTIMED = 10, 2  # steps of a run for its time alone: those that count, after those that do not
MARKS = re.compile(r"(?<=<!-- ablation -->\n).*(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Demo:
    """One packaged demo.

    Attributes:
        trained: its folder of samples.
        regularised: its folder of regularisation data, if it has one.
        learned, kept: names of the previews of the concept, and of what the base knew.
        score: of a preview's file: how well the concept is learned.
        change: of two previews of the same prompt and noise: how far apart they are.
        units: of score and change.
        class_word: the word for the concept in its captions, and a word that the base knows in its place.
        steps: of a run, at the demo's own settings; clips hop after half of the steps of their demo.
    """

    example: str
    trained: str
    learned: Sequence[str]
    kept: Sequence[str]
    suffix: str
    score: Callable[[Path], float]
    change: Callable[[Path, Path], float]
    units: tuple[str, str]
    steps: int
    class_word: tuple[str, str]
    regularised: str | None = None


def star_score(path: Path) -> float:
    """The smaller of the shares of purple and yellow in what stands out from the background: a star has both."""
    with Image.open(path) as picture:
        return min(colour_share(picture, PURPLE), colour_share(picture, YELLOW))


def pixel_change(path: Path, base: Path) -> float:
    """Mean absolute difference of two pictures, 0 to 255."""
    pair = [np.asarray(Image.open(each).convert("RGB"), dtype=np.float32) for each in (path, base)]
    return float(np.abs(pair[0] - pair[1]).mean())


def hop_score(path: Path) -> float:
    """Height of the hop in pixels; the clips that are trained have 14."""
    return rise(path_of(read_clip(path)))


def path_change(path: Path, base: Path) -> float:
    """Mean distance in pixels between where the shape is in two clips."""
    return float(np.linalg.norm(path_of(read_clip(path)) - path_of(read_clip(base)), axis=-1).mean())


DEMOS = {
    "video": Demo(
        "demo-video", "clips", ("validation", "hop_diamond", "hop_star"), ("still_straight", "still_up"),
        "64x64@17", hop_score, path_change, ("height of the hop, px (14)", "px"), 150, ("hops", "moves"), "known",
    ),
    "image": Demo(
        "demo", "pictures", ("validation", "glimmer_sky", "glimmer_navy", "glimmer_mint"),
        ("still_a_circle", "still_a_square"), "96x96", star_score, pixel_change,
        ("share of the star's colours", "of 255"), 300, ("glimmer", "circle"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One way to train: settings on top of the demo's, with or without its regularisation data and its class word."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    demos: Sequence[str] = ("video", "image")
    regularised: bool = False
    class_word: bool = False


# Both demos have six visual blocks.
STUDENT, TEACHER = 1, 4
ROWS = {
    PLAIN: Row(),
    "regularisation": Row(demos=("video",), regularised=True),
    "preservation": Row({"preservation_weight": 1.0}, class_word=True),
    "preservation-blank": Row({"preservation_weight": 1.0}),
    "crepa": Row({
        "crepa_enabled": True, "crepa_feature_source": "backbone", "crepa_block_index": STUDENT,
        "crepa_teacher_block_index": TEACHER,
    }, demos=("video",)),
    "layersync": Row({
        "layersync_enabled": True, "layersync_student_block": STUDENT, "layersync_teacher_block": TEACHER
    }),
    "mixflow": Row({"mixflow_enabled": True}),
    "rollout": Row({
        "scheduled_sampling_max_step_offset": 2, "scheduled_sampling_probability": 0.5,
        "scheduled_sampling_sampler": "euler",
    }),
    "rollout-undirected": Row({
        "scheduled_sampling_max_step_offset": 2, "scheduled_sampling_probability": 0.5,
        "scheduled_sampling_sampler": "euler", "scheduled_sampling_reflexflow_beta1": 0.0,
    }),
    "tread": Row({"tread_config": {"routes": [
        {"selection_ratio": 0.5, "start_layer_idx": STUDENT, "end_layer_idx": TEACHER}
    ]}}),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run."""

    demo: str
    row: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.demo}-{self.row}-{self.seed}-{self.steps}"


@dataclass(frozen=True)
class Lab:
    """The folder where all runs are."""

    folder: Path

    def file(self, cell: Cell) -> Path:
        """Written when the cell is finished."""
        return self.folder / cell.name / "cell.json"

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What a finished cell measured."""
        path = self.file(cell)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def times(self, demo: str) -> Path:
        """Where the times of a demo's rows are."""
        return self.folder / f"times-{demo}.json"

    def read_times(self, demo: str, row: str) -> list[float]:
        """The time of a step in every round, in units of the plain one; empty if it is not measured yet."""
        path = self.times(demo)
        return json.loads(path.read_text(encoding="utf-8")).get(row, []) if path.is_file() else []

    def preview(self, cell: Cell, name: str) -> Path:
        """The last preview of a prompt."""
        suffix = DEMOS[cell.demo].suffix
        file = f"step_{cell.steps}_{name}_0_{suffix}"
        return next((self.folder / cell.name / "validation_images").glob(f"{file}.*"))

    def base(self, cell: Cell, name: str) -> Path:
        """The base model's preview, which the plain runs render; it is the same for all."""
        runs = self.folder.glob(f"{cell.demo}-{PLAIN}-*/benchmarks/base_model/{name}_{DEMOS[cell.demo].suffix}*")
        return min(runs)

    def split(self, demo: str) -> tuple[Path, Path]:
        """Folders of the trained and of the held-out samples."""
        shipped = EXAMPLES / DEMOS[demo].example / DEMOS[demo].trained
        parts = self.folder / "data" / demo / "trained", self.folder / "data" / demo / "held-out"
        stems = sorted({path.stem for path in shipped.iterdir()})
        for part, chosen in zip(parts, (stems[:-HELD_OUT], stems[-HELD_OUT:]), strict=True):
            part.mkdir(parents=True, exist_ok=True)
            for path in shipped.iterdir():
                if path.stem in chosen and not (part / path.name).exists():
                    shutil.copy(path, part)
        return parts

    def write_config(self, cell: Cell) -> Path:
        """The configuration of a cell; returns its config.json."""
        demo, row, folder = DEMOS[cell.demo], ROWS[cell.row], self.folder / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        shipped, trained_on = (
            json.loads((EXAMPLES / demo.example / name).read_text(encoding="utf-8"))
            for name in ("config.json", "multidatabackend.json")
        )
        config = {
            **shipped,
            **neutral(shipped),
            "torch_num_threads": 1,
            "seed": cell.seed,
            "max_train_steps": cell.steps,
        }
        config |= {"output_dir": str(folder), "data_backend_config": str(folder / "datasets.json")}
        config |= {"checkpoint_step_interval": cell.steps, "checkpoints_total_limit": 1}
        config |= {"validation_step_interval": cell.steps, "validation_num_inference_steps": PREVIEW_STEPS}
        config |= {"eval_steps_interval": cell.steps, "eval_timesteps": EVAL_TIMESTEPS, "num_eval_images": HELD_OUT}
        config |= {"disable_benchmark": cell.row != PLAIN, "validation_disable_unconditional": True, **row.settings}
        if row.class_word:
            config |= dict(zip(("preservation_trigger", "preservation_prompt"), demo.class_word, strict=True))
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        datasets = list(self.datasets(cell.demo, trained_on, regularised=row.regularised))
        (folder / "datasets.json").write_text(json.dumps(datasets, indent=2), encoding="utf-8")
        return folder / "config.json"

    def datasets(self, demo: str, shipped: Sequence[dict[str, Any]], *, regularised: bool) -> Iterator[dict[str, Any]]:
        """The dataset file of a demo with the held-out samples apart, and one cache for all runs."""
        cache, (trained, held_out) = self.folder / "cache" / demo, self.split(demo)
        for entry in shipped:
            if entry["dataset_type"] == "text_embeds":
                yield {**entry, "cache_dir": str(cache / "text")}
            elif not entry.get("is_regularisation_data"):
                own = {**entry, "instance_data_dir": str(trained), "cache_dir_vae": str(cache / entry["id"])}
                yield own
                apart = {"id": "held-out", "dataset_type": "eval", "instance_data_dir": str(held_out), "repeats": 0}
                yield {**own, **apart, "cache_dir_vae": str(cache / "held-out")}
            elif regularised:
                yield {**entry, "cache_dir_vae": str(cache / entry["id"])}


def neutral(shipped: Mapping[str, Any]) -> dict[str, Any]:
    """What a demo itself uses of the techniques, switched off."""
    keys = {key for row in ROWS.values() for key in row.settings}
    return {key: None for key in shipped if key in keys or key.startswith("preservation_")}


def run_cell(lab: Lab, cell: Cell) -> None:
    """Train one cell in this process and write what it measured; an interrupted one continues."""
    from simpletuner.cli.app import main as simpletuner

    config = lab.write_config(cell)
    code = simpletuner(["train", "--config", str(config)])
    if code:
        raise SystemExit(code)
    lines = (config.parent / "training_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    loss = [record["loss/val/held-out"] for record in map(json.loads, lines) if "loss/val/held-out" in record][-1]
    lab.file(cell).write_text(json.dumps({"loss": loss}), encoding="utf-8")


def measure_times(lab: Lab, name: str, rounds: int) -> None:
    """Write the time of a step of every row, in units of the plain one of the same round.

    Short runs without previews take turns, since the long ones are hours apart, on a machine that others use, too.
    """
    rows = [row for row in ROWS if name in ROWS[row].demos]
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            seconds[row].append(step_seconds(lab, Cell(name, row, 0, UNTIMED + TIMED)))
    times = {row: [mine / plain for mine, plain in zip(seconds[row], seconds[PLAIN], strict=True)] for row in rows}
    lab.times(name).write_text(json.dumps(times), encoding="utf-8")


def step_seconds(lab: Lab, cell: Cell) -> float:
    """Mean CPU time of a step; one thread does the work, and neighbours disturb CPU time least."""
    from simpletuner.cli.app import main as simpletuner
    from simpletuner.training import loop

    seconds: list[float] = []
    step = loop.optimizer_step

    def timed(*inputs: Any) -> Any:
        started = time.process_time()
        report = step(*inputs)
        seconds.append(time.process_time() - started)
        return report

    alone = Lab(lab.folder / "timed")
    config = alone.write_config(cell)
    loop.optimizer_step = timed  # type: ignore[assignment]
    try:
        words = ["resume_from_checkpoint=none", "validation_disable=true", "eval_loss_disable=true"]
        code = simpletuner(["train", "--config", str(config), *words])
    finally:
        loop.optimizer_step = step
        shutil.rmtree(config.parent)
    if code:
        raise SystemExit(code)
    return statistics.fmean(seconds[UNTIMED:])


def in_its_own_process(lab: Lab, name: str, words: Sequence[str]) -> None:
    """Start this script with further words; the output goes to a folder of that name."""
    (lab.folder / name).mkdir(parents=True, exist_ok=True)
    with (lab.folder / name / "output.txt").open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "benchmarks.ablation", "--folder", str(lab.folder), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=lab.folder / name, check=True, stdout=output, stderr=output, env=environment)


@dataclass(frozen=True)
class Line:
    """One row of the table; a number per seed in each column, and the times of all rounds.

    `worse` is the loss less that of the plain run.
    """

    demo: str
    row: str
    loss: Sequence[float]
    worse: Sequence[float]
    score: Sequence[float]
    change: Sequence[float]
    time: Sequence[float]


def lines_of(lab: Lab, cells: Sequence[Cell]) -> list[Line]:
    """The rows of the finished cells."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if lab.read(cell) and lab.read(plain_of(cell)):
            found.setdefault((cell.demo, cell.row), []).append(cell)
    return [line_of(lab, *key, group) for key, group in found.items()]


def plain_of(cell: Cell) -> Cell:
    """The plain run of the same seed."""
    return Cell(cell.demo, PLAIN, cell.seed, cell.steps)


def line_of(lab: Lab, name: str, row: str, cells: Sequence[Cell]) -> Line:
    """The scores of one row's finished cells."""
    demo = DEMOS[name]
    own, plain = ([lab.read(cell) or {} for cell in group] for group in (cells, map(plain_of, cells)))
    scores = [statistics.fmean(demo.score(lab.preview(cell, each)) for each in demo.learned) for cell in cells]
    changes = [
        statistics.fmean(demo.change(lab.preview(cell, each), lab.base(cell, each)) for each in demo.kept)
        for cell in cells
    ]
    pairs = list(zip(own, plain, strict=True))
    worse = [mine["loss"] - other["loss"] for mine, other in pairs]
    return Line(name, row, [each["loss"] for each in own], worse, scores, changes, lab.read_times(name, row))


def table(lines: Sequence[Line], steps: int | None) -> str:
    """The rows as Markdown: the mean over the seeds, with the smallest and the largest; then their settings."""
    parts = []
    for name, demo in DEMOS.items():
        rows = [line for line in lines if line.demo == name]
        if not rows:
            continue
        seeds = max(len(row.loss) for row in rows)
        parts.append(f"{demo.example}, {steps or demo.steps} steps, {seeds} seeds\n")
        heads = ("", "held-out loss", "less plain", demo.units[0], f"change, {demo.units[1]}", "time of a step")
        parts += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for row in rows:
            less = "" if row.row == PLAIN else spread(row.worse, 3, "+")
            columns = (spread(row.loss, 3), less, spread(row.score, 2), spread(row.change, 2), spread(row.time, 2))
            title = row.row if len(row.loss) == seeds else f"{row.row} ({len(row.loss)} of {seeds} seeds)"
            parts.append(f"| {title} | {' | '.join(columns)} |")
        parts.append("")
    parts += [f"- {name}: `{json.dumps(ROWS[name].settings)}`" for name in dict.fromkeys(line.row for line in lines)
              if ROWS[name].settings]  # fmt: skip
    return "\n".join(parts) + "\n"


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean (smallest to largest)."""
    if not values:
        return ""
    mean, *ends = (f"{each:{sign}.{digits}f}" for each in (statistics.fmean(values), min(values), max(values)))
    return mean if len(values) < 2 else f"{mean} ({' to '.join(ends)})"


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "ablation", help="where the runs are kept")
    parser.add_argument("--demos", nargs="+", choices=DEMOS, default=list(DEMOS))
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows to run besides the plain one")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of a run, instead of the demo's own number")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="also put the table between the marks of this page")
    parser.add_argument("--cell", nargs=4, metavar=("DEMO", "ROW", "SEED", "STEPS"), help="run one cell here")
    parser.add_argument("--time", choices=DEMOS, help="measure the times of a demo's rows here")
    options = parser.parse_args()
    lab = Lab(options.folder.resolve())
    if options.cell:
        demo, row, seed, steps = options.cell
        return run_cell(lab, Cell(demo, row, int(seed), int(steps)))
    if options.time:
        return measure_times(lab, options.time, options.rounds)
    chosen = [
        Cell(demo, row, seed, options.steps or DEMOS[demo].steps)
        for seed in options.seeds  # seed by seed, so that an unfinished table has every row
        for demo in options.demos
        for row in dict.fromkeys((PLAIN, *options.only))
        if demo in ROWS[row].demos
    ]
    failed = run_all(lab, chosen, options.rounds)
    every = [
        Cell(name, row, seed, options.steps or demo.steps)
        for name, demo in DEMOS.items()
        for row in ROWS
        for seed in seeds_of(lab)
    ]
    lines = lines_of(lab, every)
    text = table(lines, options.steps)
    print(text)
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        options.docs.write_text(MARKS.sub(lambda _: text, page), encoding="utf-8")
    if options.json:
        ratios = [{"name": f"{line.demo} {line.row}", "rounds": list(line.time)} for line in lines]
        content = {"rows": [vars(line) for line in lines], "ratios": ratios}
        write_json(options.json, content, "cpu")
    if failed:
        raise SystemExit(f"failed, see output.txt there: {', '.join(failed)}")


def seeds_of(lab: Lab) -> list[int]:
    """The seeds of all finished cells."""
    return sorted({int(path.parent.name.split("-")[-2]) for path in lab.folder.glob("*/cell.json")})


def run_all(lab: Lab, cells: Sequence[Cell], rounds: int) -> list[str]:
    """Run the cells that are not finished and measure missing times; returns the names of what failed."""
    waiting = {cell.name: ["--cell", cell.demo, cell.row, str(cell.seed), str(cell.steps)]
               for cell in cells if lab.read(cell) is None}  # fmt: skip
    for cell in cells:
        if not lab.read_times(cell.demo, cell.row):
            waiting[f"times-{cell.demo}"] = ["--time", cell.demo, "--rounds", str(rounds)]
    failed = []
    for number, (name, words) in enumerate(waiting.items(), 1):
        print(f"{number}/{len(waiting)} {name}", flush=True)
        try:
            in_its_own_process(lab, name, words)
        except subprocess.CalledProcessError:
            failed.append(name)
    return failed


if __name__ == "__main__":
    main()
