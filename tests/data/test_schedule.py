"""Windows of datasets: the lengths of epochs, gaps, and the order of batches after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from simpletuner.data.dataset import Dataset
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.data.schedule import Origin
from tests.data.test_sampler import make_dataset

# Windows of a first and a second dataset. Their epochs have 3 and 2 batches, times repeats + 1.
WINDOWS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "always": ({}, {}),
    "the second starts by epoch": ({}, {"start_epoch": 3}),
    "the second starts by step": ({}, {"start_step": 8}),
    "the first ends by step": ({"end_step": 7}, {}),
    "one follows the other by step": ({"end_step": 10}, {"start_step": 11}),
    "one follows the other by epoch": ({"end_epoch": 2}, {"start_epoch": 3}),
    "they overlap": ({"end_step": 12}, {"start_step": 5}),
    "a short visit": ({}, {"start_step": 5, "end_step": 6}),
    "by epoch and by step": ({"end_epoch": 4}, {"start_epoch": 2, "start_step": 9}),
    "a gap of steps": ({"end_step": 9}, {"start_step": 14}),
    "a gap of epochs": ({"end_epoch": 1}, {"start_epoch": 3}),
    "an early end": ({"end_step": 9}, {"end_epoch": 3}),
}
CASES = [*product(WINDOWS, (0, 2), (1, 2))]


def datasets(windows: str, repeats: int) -> list[Dataset]:
    first, second = WINDOWS[windows]
    return [
        make_dataset({"1.0": 12}, repeats, "a", **first),
        make_dataset({"1.5": 8}, repeats, "b", **second),
    ]


def run_batches(sampler: Sampler, epochs: int) -> Iterator[PlannedBatch]:
    """The batches of a run, until no dataset takes part."""
    for epoch in range(sampler.origin.epoch, epochs + 1):
        if sampler.batches_per_epoch(epoch) == 0:
            return
        yield from sampler.batches(epoch)


@pytest.mark.parametrize(("windows", "repeats", "accumulation"), CASES)
def test_epochs_are_as_long_as_their_batches(windows: str, repeats: int, accumulation: int) -> None:
    sampler = Sampler(datasets(windows, repeats), seed=1, accumulation=accumulation)
    before = 0
    for epoch in range(1, 8):
        planned = sampler._plan(epoch, before)
        assert sampler.batches_per_epoch(epoch) == len(planned)
        assert sampler.schedule.before(epoch) == before
        before += len(planned)
        if not planned:
            return
        assert sampler.schedule.epoch_after(before - 1) == epoch


@pytest.mark.parametrize(("windows", "repeats", "accumulation"), CASES)
def test_a_dataset_is_drawn_only_in_its_window(
    windows: str, repeats: int, accumulation: int
) -> None:
    sampler = Sampler(datasets(windows, repeats), seed=1, accumulation=accumulation)
    configs = {dataset.id: dataset.config for dataset in sampler.datasets}
    for number, batch in enumerate(run_batches(sampler, 7)):
        config = configs[batch.dataset_id]
        step = number // accumulation + 1
        assert config.start_step <= step <= (config.end_step or step)
        assert config.start_epoch <= batch.epoch <= (config.end_epoch or batch.epoch)


@pytest.mark.parametrize(("windows", "repeats", "accumulation"), CASES)
def test_a_run_that_begins_at_any_epoch_draws_the_same(
    windows: str, repeats: int, accumulation: int
) -> None:
    """As a continued run does: it has its epoch and its step, and not the epochs before."""
    settings: dict[str, Any] = {"seed": 1, "accumulation": accumulation}
    sampler = Sampler(datasets(windows, repeats), **settings)
    batches = list(run_batches(sampler, 7))
    for epoch in range(2, 6):
        if sampler.batches_per_epoch(epoch) == 0:
            return
        origin = Origin(epoch, sampler.schedule.before(epoch))
        continued = Sampler(datasets(windows, repeats), **settings, origin=origin)
        expected = [batch for batch in batches if batch.epoch >= epoch]
        assert list(run_batches(continued, 7)) == expected


@pytest.mark.parametrize(
    ("windows", "epoch", "step"),
    [("a gap of steps", 4, 10), ("a gap of epochs", 2, 4), ("an early end", 4, 12)],
)
def test_a_gap_is_found_where_the_run_would_stop(windows: str, epoch: int, step: int) -> None:
    schedule = Sampler(datasets(windows, 0), seed=1).schedule

    gap = schedule.gap(batches=1000)

    assert gap is not None
    assert gap.epochs.start == epoch
    assert schedule.step_at(gap.before) == step
    assert schedule.gap(batches=gap.before) is None, "a run that ends there has none"
    assert schedule.gap(epochs=epoch - 1) is None


def test_windows_that_overlap_have_no_gap() -> None:
    schedule = Sampler(datasets("they overlap", 0), seed=1).schedule

    assert schedule.gap(batches=1000) is None


def test_datasets_that_never_take_part_are_recognised() -> None:
    candidates = [
        make_dataset({"1.0": 12}, id="a"),
        make_dataset({"1.0": 4}, id="step", start_step=31),
        make_dataset({"1.0": 4}, id="epoch", start_epoch=11),
        make_dataset({"1.0": 4}, id="closed", start_epoch=6, end_step=10),
        make_dataset({"1.0": 4}, id="last step", start_step=30),
    ]

    schedule = Sampler(candidates, seed=1).schedule

    active = [dataset.id for dataset in candidates if schedule.takes_part(dataset, 30)]
    assert active == ["a", "last step"]


def test_a_long_run_is_measured_at_the_edges_of_its_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[int] = []
    plan = Sampler._plan

    def counted(sampler: Sampler, epoch: int, before: int) -> Any:
        planned.append(epoch)
        return plan(sampler, epoch, before)

    monkeypatch.setattr(Sampler, "_plan", counted)
    windows = [
        make_dataset({"1.0": 12}, id="a", end_step=200_000),
        make_dataset({"1.0": 8}, id="b", start_step=100_001, end_step=399_000),
        make_dataset({"1.0": 8}, id="c", start_epoch=50_000),
    ]
    schedule = Sampler(windows, seed=1).schedule

    assert schedule.gap(batches=400_000) is None
    assert all(schedule.takes_part(dataset, 400_000) for dataset in windows)
    assert schedule.epoch_after(399_999) > 100_000
    assert len(planned) <= 3, "one for each edge"


def test_windows_count_steps_of_the_run_after_the_data_have_changed() -> None:
    """Epochs of other lengths came before, of which the present datasets have no trace."""
    origin = Origin(epoch=4, batches=20)
    windows = [
        make_dataset({"1.0": 12}, id="a"),
        make_dataset({"1.0": 40}, id="b", start_step=22, end_step=25),
    ]

    batches = run_batches(Sampler(windows, seed=1, origin=origin), 6)

    steps: set[int] = set()
    for step, batch in enumerate(batches, start=origin.batches + 1):
        if batch.dataset_id == "b":
            steps.add(step)

    assert steps
    assert steps <= {22, 23, 24, 25}
