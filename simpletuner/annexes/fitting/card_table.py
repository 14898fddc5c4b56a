"""What a card can train: models, sizes, minutes and memory, before there is a file or a config.

Every row is the plan of a packaged example with `offload: auto`, on files of a usual size that
exist only while it is planned. The rows and the sizes are in `card_rows.toml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from simpletuner.annexes.fitting.nominal import nominal_files
from simpletuner.annexes.fitting.ready import weigh
from simpletuner.atomic import write_json
from simpletuner.budget.budget import Budget, remaining_seconds
from simpletuner.budget.device import Device, find_device
from simpletuner.budget.disk import find_writings
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.json_reader import read_json, read_toml
from simpletuner.config.sources import DATASET_FILE, EXAMPLES, Arguments
from simpletuner.errors import Problems
from simpletuner.planning.build import plan_training
from simpletuner.planning.plans import Plan

STEPS = 1000
FILES = 2  # of a dataset; more would only take longer to read


@dataclass(frozen=True)
class TriedSize:
    """A size that is tried: `768x512@61`, or `1024x1024` of a picture.

    Attributes:
        resolution: of a dataset whose files are trained at this size.
    """

    text: str
    resolution: int

    def __str__(self) -> str:
        return f"{self.pixels}, {self.frames} frames" if self.frames > 1 else self.pixels

    @property
    def pixels(self) -> str:
        return self.text.partition("@")[0]

    @property
    def frames(self) -> int:
        return int(self.text.partition("@")[2] or 1)


@dataclass(frozen=True)
class CardRow:
    """A model and how it is trained.

    Attributes:
        group: what it learns from.
        kind: `LoRA` or `full`.
        example: the packaged example that a run begins with.
        usual: the size that most runs have.
        sizes: the resolution of a dataset by size, the largest first.
        settings: in place of those of the example.
        is_tiny: a demo, which is of interest where there is no GPU.
    """

    group: str
    model: str
    kind: str
    example: str
    usual: str
    sizes: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_tiny: bool = False

    @cached_property
    def tried(self) -> list[TriedSize]:
        """The sizes, the largest first."""
        return [TriedSize(text, resolution) for text, resolution in self.sizes.items()]

    @property
    def usual_size(self) -> TriedSize:
        return TriedSize(self.usual, self.sizes[self.usual])

    def settings_at(self, size: TriedSize) -> dict[str, Any]:
        """The keys of config.json that differ from those of the example; None unsets a key."""
        settings: dict[str, Any] = {"offload": "auto", "validation_resolution": size.pixels}
        if size.frames > 1:
            settings["validation_num_video_frames"] = size.frames
        for key, value in self.settings.items():
            settings[key] = None if value == "null" else value  # TOML has no null
        return settings

    def datasets_at(self, size: TriedSize) -> list[dict[str, Any]]:
        """The dataset file of the example, for files of a size."""
        return [
            _resized(entry, size)
            for entry in read_json(EXAMPLES / self.example / DATASET_FILE, Problems(), list) or []
        ]


def _resized(entry: dict[str, Any], size: TriedSize) -> dict[str, Any]:
    """An entry of a dataset file, for files of another size."""
    changed = dict(entry)
    if "resolution" in entry:
        changed["resolution"] = size.resolution
    if "video" in entry:
        length = {"num_frames": size.frames, "min_frames": size.frames}
        changed["video"] = {**entry["video"], **length}
    return changed


ROWS = [
    CardRow(**row) for row in read_toml("simpletuner.annexes.fitting", "card_rows.toml")["rows"]
]


@dataclass(frozen=True)
class CardFit:
    """A run of `STEPS` steps at a size that a device can train.

    Attributes:
        seconds: of the steps and their previews, without filling the caches.
        on_device: peak in bytes of the card's memory; None if it has none of its own.
        on_host: peak of the machine's memory, which without a card's holds everything.
        disk: bytes of checkpoints and caches.
        choices: what `offload: auto` chose, with reasons.
        assumed: what the numbers assume, since nobody has measured it.
    """

    size: TriedSize
    seconds: float
    on_device: float | None
    on_host: float
    disk: float
    choices: tuple[str, ...]
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a device can do with a row.

    Attributes:
        begin: the usual size, or the next smaller one that fits; None if none does.
        largest: the largest size that fits, if that is larger than the usual one.
        lacking: what the usual size lacks, or, if none fits, the smallest one; else empty.
        download: bytes of the model that are not on this machine yet.
    """

    row: CardRow
    begin: CardFit | None
    largest: CardFit | None
    lacking: str
    download: float


@dataclass(frozen=True)
class CardTable:
    """What a device can train."""

    device: Device
    answers: list[Answer]


def card_table(asked: AskedDevice = HERE) -> CardTable:
    """What a device can train; by default that of this machine.

    Raises:
        ConfigError: this machine's settings prevent any plan.
    """
    device = find_device(asked.device_memory, card=asked.device)
    rows = [row for row in ROWS if not row.is_tiny or not device.is_gpu]
    return CardTable(device, [answer(row, asked) for row in rows])


def answer(row: CardRow, asked: AskedDevice = HERE) -> Answer:
    """What a device can do with a row.

    Raises:
        ConfigError: this machine's settings prevent any plan.
    """
    usual = list(row.sizes).index(row.usual)
    budget = weigh_row(row, row.tried[usual], asked)
    download = budget.parts.download_bytes(budget.plan.source)
    if budget.fits:
        begin = _fit(row.tried[usual], budget)
        largest = None
        if budget.device.is_gpu:  # a CPU would take months
            largest, _ = _largest_fit(row, row.tried[:usual], asked)
        return Answer(row, begin, largest, "", download)
    smaller, lacking = _largest_fit(row, row.tried[usual + 1 :], asked)
    if not lacking:  # a smaller size fits, or there is none
        lacking = _lacking(budget)
    return Answer(row, smaller, None, lacking, download)


def _largest_fit(
    row: CardRow, sizes: Sequence[TriedSize], asked: AskedDevice
) -> tuple[CardFit | None, str]:
    """The first of these sizes that fits, else what the last one lacks."""
    lacking = ""
    for size in sizes:
        budget = weigh_row(row, size, asked)
        if budget.fits:
            return _fit(size, budget), ""
        lacking = _lacking(budget)
    return None, lacking


def _lacking(budget: Budget[Plan]) -> str:
    """What a run that does not fit lacks first: `training at 512x512@61 needs ...`."""
    _, shortage = budget.shortages()[0]
    return shortage


def weigh_row(row: CardRow, size: TriedSize, asked: AskedDevice) -> Budget[Plan]:
    """The plan of a row at a size, with what `offload: auto` chooses for the device.

    Raises:
        ConfigError: this machine's settings prevent any plan.
    """
    with planned(row, size, asked) as plan:
        # Of what it reports, memory is in the budget, and a card elsewhere has another disk.
        return weigh(plan, Problems(), asked)


@contextmanager
def planned(row: CardRow, size: TriedSize, asked: AskedDevice = HERE) -> Iterator[Plan]:
    """The plan of a row at a size, whose files exist within the context.

    Raises:
        ConfigError: this machine's settings prevent any plan.
    """
    with TemporaryDirectory(prefix="simpletuner-card-") as name:
        folder = Path(name)
        write_json(folder / DATASET_FILE, row.datasets_at(size))
        settings = {
            **row.settings_at(size),
            "max_train_steps": STEPS,
            "data_backend_config": str(folder / DATASET_FILE),
            # The example's own may hold a run of the project, whose steps are done.
            "output_dir": str(folder / "output"),
        }
        arguments = Arguments(
            settings=list(settings.items()), selectors={"example": row.example}, device=asked
        )
        with nominal_files(arguments, FILES) as (nominal, _):
            yield plan_training(nominal)


def _fit(size: TriedSize, budget: Budget[Plan]) -> CardFit:
    on_device: float | None
    on_device, on_host = budget.peaks
    if not budget.device.has_own_memory:
        on_device = None
        on_host = max(phase.needed(budget.device) for phase in budget.phases)
    return CardFit(
        size=size,
        seconds=sum(remaining_seconds(budget)),
        on_device=on_device,
        on_host=on_host,
        disk=sum(writing.total for writing in find_writings(budget)),
        choices=tuple(budget.decisions),
        assumed=tuple(_assumed(budget)),
    )


def _assumed(budget: Budget[Plan]) -> Iterator[str]:
    """What the numbers of a plan assume."""
    if "assumed" in budget.device.note:
        name = budget.device.name if budget.device.is_gpu else "the CPU"
        yield f"the speed of {name}"
    if budget.parts.transformer.density and not budget.densities:
        yield "the share of attention that a clip needs"
    if budget.guess:
        yield budget.guess
