from __future__ import annotations

import json
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import CachingConfig
from simpletuner.config.types import Size
from simpletuner.data.buckets import BucketRules, PixelGrid
from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import Folder
from simpletuner.data.sample import Sample
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.training.loader import BatchLoader

SIZES = {"1.0": Size(100, 100), "1.5": Size(150, 100), "0.67": Size(100, 150)}


def make_dataset(
    buckets: dict[str, int], repeats: int = 0, id: str = "set", **keys: Any
) -> Dataset:
    """A dataset with so many samples per bucket label; each sample has three captions."""
    config = DatasetConfig(
        id=id, **{"train_batch_size": 4, "vae_cache_clear_each_epoch": False, **keys}
    )
    rules = BucketRules(PixelGrid(64, "pixel_area", 16), 2048, config)
    names = [
        (f"{label}/{number}", SIZES[label])
        for label, count in buckets.items()
        for number in range(count)
    ]
    samples = tuple(
        Sample(
            id, name, Path(), name, size, rules.place(size), (f"{name} a", f"{name} b", f"{name} c")
        )
        for name, size in names
    )
    return Dataset(config, Folder(Path(), {}), {}, rules, samples=samples, repeats=repeats)


def used(batches: list[PlannedBatch]) -> Counter[str]:
    return Counter(sample.full_name for batch in batches for sample in batch.samples)


@pytest.mark.parametrize("repeats", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_a_bucket_gives_its_batches(count: int, repeats: int) -> None:
    sampler = Sampler([make_dataset({"1.0": count, "1.5": 4}, repeats)], seed=0)
    batches = sampler.batches(1)
    expected = -(-count * (repeats + 1) // 4) + -(-4 * (repeats + 1) // 4)
    assert len(batches) == expected == sampler.batches_per_epoch(1)
    assert [batch.index for batch in batches] == list(range(expected))
    for batch in batches:
        assert len(batch.samples) == 4
        assert {sample.geometry.size for sample in batch.samples} == {batch.size}
        assert {sample.geometry.bucket for sample in batch.samples} == {batch.bucket}
    uses = used(batches)
    assert all(uses[name] >= repeats + 1 for name in uses)
    assert len(uses) == count + 4
    assert sum(uses.values()) - (count + 4) * (repeats + 1) == expected * 4 - (count + 4) * (
        repeats + 1
    )


@pytest.mark.parametrize("repeats", [0, 3])
@pytest.mark.parametrize("count", [4, 5, 7, 11])
def test_no_batch_holds_a_sample_twice_where_it_can_be_avoided(count: int, repeats: int) -> None:
    for seed in range(20):
        for batch in Sampler([make_dataset({"1.0": count}, repeats)], seed=seed).batches(1):
            assert len({sample.name for sample in batch.samples}) == 4


def test_the_last_batch_is_filled_evenly() -> None:
    uses = used(Sampler([make_dataset({"1.0": 9})], seed=1).batches(1))
    assert max(uses.values()) - min(uses.values()) <= 1


def test_order_is_a_function_of_seed_and_epoch() -> None:
    datasets = [make_dataset({"1.0": 9, "1.5": 7}, 1, "a"), make_dataset({"0.67": 5}, 0, "b")]
    first = Sampler(datasets, seed=3)
    expected = [list(first.batches(epoch)) for epoch in (1, 2, 3)]
    assert [list(Sampler(datasets, seed=3).batches(epoch)) for epoch in (3, 1, 2)] == [
        expected[2],
        *expected[:2],
    ]
    assert expected[0] != expected[1]
    assert list(Sampler(datasets, seed=4).batches(1)) != expected[0]


def planned_by(datasets: list[Dataset]) -> BatchLoader:
    """A loader that hands out the planned batches themselves."""
    sampler = Sampler(datasets, seed=3)
    return BatchLoader(sampler, as_planned, CachingConfig(), lambda epoch: None, pin=False)


def as_planned(planned: PlannedBatch) -> Any:
    """The planned batch in place of its tensors."""
    return planned


def test_batches_are_made_on_the_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread would lock pages by way of the first GPU, and take memory there."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: calls.append((threading.current_thread().name, device)),
    )
    next(planned_by([make_dataset({"1.0": 9})]))
    assert calls == [("batch-reader_0", 3)]


def test_a_restart_anywhere_goes_on_exactly() -> None:
    datasets = [make_dataset({"1.0": 9, "1.5": 7}, 0, "a"), make_dataset({"0.67": 5}, 2, "b")]
    whole = planned_by(datasets)
    expected = [next(whole) for _ in range(40)]
    loader = planned_by(datasets)
    seen: list[Any] = []
    for number in range(40):
        if number % 7 == 3:
            state = json.loads(json.dumps(loader.state_dict()))
            loader.close()
            loader = planned_by(datasets)
            loader.load_state_dict(state)
        seen.append(next(loader))
    assert seen == expected
    assert loader.state_dict() == whole.state_dict()
    assert {batch.epoch for batch in seen} == {1, 2, 3, 4, 5}
    whole.close()
    loader.close()


def test_batches_are_numbered_through_epochs_and_restarts() -> None:
    class Numbers:
        def draw_ahead(self, batch: Batch, number: int) -> Any:
            return number

    seen: list[Any] = []
    state: dict[str, Any] = {"epoch": 1, "position": 0}
    for start, end in ((0, 17), (17, 30)):
        sampler = Sampler([make_dataset({"1.0": 9, "1.5": 7})], seed=3)
        loader = BatchLoader(
            sampler,
            as_planned,
            CachingConfig(),
            lambda epoch: None,
            False,
            cast(Any, Numbers()),
            start,
        )
        loader.load_state_dict(state)
        seen += [next(loader) for _ in range(start, end)]
        state = loader.state_dict()
        loader.close()
    assert seen == list(range(30))
    assert state["epoch"] > 2


def test_batches_of_all_buckets_are_mixed() -> None:
    """Otherwise an epoch would train one aspect ratio after the other."""
    drawn = [
        batch.bucket for batch in Sampler([make_dataset({"1.0": 40, "1.5": 40})], seed=0).batches(1)
    ]
    assert sum(before != after for before, after in pairwise(drawn)) > 3


def test_captions_are_drawn_per_use() -> None:
    batches = Sampler([make_dataset({"1.0": 8}, 20)], seed=0).batches(1)
    drawn = Counter(caption[-1] for batch in batches for caption in batch.captions)
    assert set(drawn) == {"a", "b", "c"}
    assert min(drawn.values()) > 35
    for batch in batches:
        for sample, caption in zip(batch.samples, batch.captions, strict=True):
            assert caption in sample.captions


def test_auto_weighting_mixes_datasets_by_size() -> None:
    datasets = [make_dataset({"1.0": 400}, id="large"), make_dataset({"1.0": 100}, id="small")]
    order = [batch.dataset_id for batch in Sampler(datasets, seed=0).batches(1)]
    assert Counter(order) == {"large": 100, "small": 25}
    first_half = order[: len(order) // 2].count("small")
    assert 6 <= first_half <= 19


@pytest.mark.parametrize(
    ("strengths", "sides"),
    [((1, -1, None), "+-0"), ((2.5, None), "+0"), ((-1, -0.5, 3), "+-"), ((0, None), "0")],
    ids=["all sides", "no negative side", "no neutral side", "no slider"],
)
def test_the_sides_of_a_slider_take_turns(strengths: tuple[float | None, ...], sides: str) -> None:
    datasets = [
        make_dataset({"1.0": 40}, id=f"set {number}", slider_strength=strength)
        for number, strength in enumerate(strengths)
    ]
    batches = Sampler(datasets, seed=1).batches(1)
    signs = {
        f"set {number}": "+" if (strength or 0) > 0 else "-" if strength else "0"
        for number, strength in enumerate(strengths)
    }
    turns = "".join(signs[batch.dataset_id] for batch in batches)
    assert turns.startswith(sides * 10), "until a side is used up"
    assert Counter(batch.dataset_id for batch in batches) == dict.fromkeys(signs, 10)
    if sides == "0":
        plain = [make_dataset({"1.0": 40}, id=dataset.id) for dataset in datasets]
        assert list(Sampler(plain, seed=1).batches(1)) == list(batches), "the order of any run"


def test_uniform_draws_by_probability_alone() -> None:
    datasets = [
        make_dataset({"1.0": 800}, id="large"),
        make_dataset({"1.0": 100}, id="small", probability=3.0),
    ]
    order = [batch.dataset_id for batch in Sampler(datasets, seed=0, sampling="uniform").batches(1)]
    assert Counter(order) == {"large": 200, "small": 25}
    assert order[:30].count("small") > 15


def test_a_dataset_of_probability_zero_is_not_used() -> None:
    datasets = [make_dataset({"1.0": 4}, id="a"), make_dataset({"1.0": 4}, id="b", probability=0)]
    assert {batch.dataset_id for batch in Sampler(datasets, seed=0).batches(1)} == {"a"}


def test_datasets_have_their_own_batch_size() -> None:
    datasets = [
        make_dataset({"1.0": 6}, id="a"),
        make_dataset({"1.0": 6}, id="b", train_batch_size=3),
    ]
    sizes = {batch.dataset_id: len(batch.samples) for batch in Sampler(datasets, seed=0).batches(1)}
    assert sizes == {"a": 4, "b": 3}


def test_epoch_windows() -> None:
    datasets = [
        make_dataset({"1.0": 4}, id="a", end_epoch=2),
        make_dataset({"1.0": 4}, id="b", start_epoch=2),
    ]
    sampler = Sampler(datasets, seed=0)
    taking_part = [{batch.dataset_id for batch in sampler.batches(epoch)} for epoch in (1, 2, 3)]
    assert taking_part == [{"a"}, {"a", "b"}, {"b"}]
    alone = Sampler(datasets[:1], seed=0)
    assert alone.batches_per_epoch(3) == 0
    with pytest.raises(UserError, match="epoch 3"):
        alone.batches(3)


def test_step_windows_count_optimizer_steps_of_the_run() -> None:
    datasets = [
        make_dataset({"1.0": 40}, id="a"),
        make_dataset({"1.0": 40}, id="b", start_step=8, end_step=12),
    ]
    sampler = Sampler(datasets, seed=0, accumulation=2)
    steps: dict[str, set[int]] = {"a": set(), "b": set()}
    micro = 0
    for epoch in range(1, 5):
        assert Sampler(datasets, seed=0, accumulation=2).batches_per_epoch(epoch) == len(
            sampler.batches(epoch)
        )
        for batch in sampler.batches(epoch):
            steps[batch.dataset_id].add(micro // 2 + 1)
            micro += 1
    assert steps["b"]
    assert min(steps["b"]) >= 8
    assert max(steps["b"]) <= 12
    assert min(steps["a"]) == 1


def test_processes_get_batches_of_one_shape_at_the_same_time() -> None:
    datasets = [make_dataset({"1.0": 30, "1.5": 13}, 1, "a"), make_dataset({"0.67": 9}, 0, "b")]
    ranks = [Sampler(datasets, seed=2, world=World(rank, 3)).batches(1) for rank in range(3)]
    for together in zip(*ranks, strict=True):
        assert len({(batch.dataset_id, batch.size, batch.index) for batch in together}) == 1
        assert all(len(batch.samples) == 4 for batch in together)
    uses = used([batch for batches in ranks for batch in batches])
    assert all(count >= (2 if name.startswith("a/") else 1) for name, count in uses.items())
    assert len(uses) == 52


def test_several_processes_draw_together_what_one_draws_alone() -> None:
    """Samples and captions of a batch, cut among the ranks, are those of one process with the
    larger batch.
    """
    alone = Sampler([make_dataset({"1.0": 24}, train_batch_size=6)], seed=2).batches(1)
    ranks = [
        Sampler([make_dataset({"1.0": 24}, train_batch_size=2)], seed=2, world=World(rank, 3))
        for rank in range(3)
    ]
    for batch, *parts in zip(alone, *(rank.batches(1) for rank in ranks), strict=True):
        assert [sample.name for part in parts for sample in part.samples] == [
            sample.name for sample in batch.samples
        ]
        assert [caption for part in parts for caption in part.captions] == list(batch.captions)
    assert len({batch.captions for batch in alone}) == len(alone), (
        "captions differ from place to place"
    )


def test_moving_crops_are_those_of_the_epoch() -> None:
    dataset = make_dataset(
        {"1.5": 8}, crop=True, vae_cache_clear_each_epoch=True, train_batch_size=2
    )
    sampler = Sampler([dataset], seed=0)
    for epoch in (2, 3):
        geometries = {sample.name: sample.geometry for sample in dataset.at_epoch(epoch).samples}
        for batch in sampler.batches(epoch):
            assert all(sample.geometry == geometries[sample.name] for sample in batch.samples)


def test_counting_the_batches_of_a_long_run_is_quick() -> None:
    sampler = Sampler([make_dataset({"1.0": 5000, "1.5": 5000})], seed=0)
    assert sum(sampler.batches_per_epoch(epoch) for epoch in range(1, 101)) == 250_000


def test_an_epoch_begins_with_its_own_first_batch() -> None:
    loader = planned_by([make_dataset({"1.0": 12})])
    count = loader.sampler.batches_per_epoch(1)
    drawn: list[Any] = [next(loader) for _ in range(2 * count)]
    loader.close()
    assert [batch.epoch for batch in drawn] == [1] * count + [2] * count
    assert drawn == [*loader.sampler.batches(1), *loader.sampler.batches(2)]
