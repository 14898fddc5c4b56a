"""The order of batches: full, mixed, and the same after every restart."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
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
from simpletuner.rounding import ceil_div
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
    samples: list[Sample] = []
    for label, count in buckets.items():
        for number in range(count):
            name = f"{label}/{number}"
            sample = Sample(
                dataset_id=id,
                name=name,
                root=Path(),
                content=name,
                original_size=SIZES[label],
                geometry=rules.place(SIZES[label]),
                captions=(f"{name} a", f"{name} b", f"{name} c"),
            )
            samples.append(sample)
    return Dataset(config, Folder(Path(), {}), {}, rules, samples=tuple(samples), repeats=repeats)


def uses_of(batches: Sequence[PlannedBatch]) -> Counter[str]:
    """How often each sample is used."""
    return Counter(sample.full_name for batch in batches for sample in batch.samples)


@pytest.mark.parametrize("repeats", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_buckets_are_padded_to_whole_batches(count: int, repeats: int) -> None:
    sampler = Sampler([make_dataset({"1.0": count, "1.5": 4}, repeats)], seed=0)
    passes = repeats + 1
    expected = ceil_div(count * passes, 4) + passes

    batches = sampler.batches(1)

    assert len(batches) == expected
    assert sampler.batches_per_epoch(1) == expected
    assert [batch.index for batch in batches] == list(range(expected))
    for batch in batches:
        assert len(batch.samples) == 4
        assert {sample.geometry.size for sample in batch.samples} == {batch.size}
        assert {sample.geometry.bucket for sample in batch.samples} == {batch.bucket}

    uses = uses_of(batches)
    assert len(uses) == count + 4
    assert min(uses.values()) >= passes


@pytest.mark.parametrize("repeats", [0, 3])
@pytest.mark.parametrize("count", [4, 5, 7, 11])
def test_no_batch_holds_a_sample_twice_where_it_can_be_avoided(count: int, repeats: int) -> None:
    for seed in range(20):
        for batch in Sampler([make_dataset({"1.0": count}, repeats)], seed=seed).batches(1):
            assert len({sample.name for sample in batch.samples}) == 4


def test_the_last_batch_is_filled_evenly() -> None:
    uses = uses_of(Sampler([make_dataset({"1.0": 9})], seed=1).batches(1))
    assert max(uses.values()) - min(uses.values()) <= 1


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    datasets = [make_dataset({"1.0": 9, "1.5": 7}, 1, "a"), make_dataset({"0.67": 5}, 0, "b")]

    def batches(seed: int, epochs: Sequence[int]) -> dict[int, list[PlannedBatch]]:
        sampler = Sampler(datasets, seed=seed)
        return {epoch: list(sampler.batches(epoch)) for epoch in epochs}

    expected = batches(3, [1, 2, 3])

    assert batches(3, [3, 1, 2]) == expected
    assert expected[1] != expected[2]
    assert batches(4, [1])[1] != expected[1]


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

    def set_device(device: int) -> None:
        calls.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)

    next(planned_by([make_dataset({"1.0": 9})]))

    assert calls == [("batch-reader_0", 3)]


def test_a_restart_anywhere_continues_with_the_same_batches() -> None:
    datasets = [make_dataset({"1.0": 9, "1.5": 7}, 0, "a"), make_dataset({"0.67": 5}, 2, "b")]
    uninterrupted = planned_by(datasets)
    expected = [next(uninterrupted) for _ in range(40)]
    loader = planned_by(datasets)
    batches: list[Any] = []
    for number in range(40):
        if number % 7 == 3:
            state = json.loads(json.dumps(loader.state_dict()))
            loader.close()
            loader = planned_by(datasets)
            loader.load_state_dict(state)
        batches.append(next(loader))

    assert batches == expected
    assert loader.state_dict() == uninterrupted.state_dict()
    assert {batch.epoch for batch in batches} == {1, 2, 3, 4, 5}

    uninterrupted.close()
    loader.close()


def test_batches_are_numbered_through_epochs_and_restarts() -> None:
    class Numbers:
        def draw_ahead(self, batch: Batch, number: int) -> Any:
            return number

    numbers: list[Any] = []
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
        numbers += [next(loader) for _ in range(start, end)]
        state = loader.state_dict()
        loader.close()

    assert numbers == list(range(30))
    assert state["epoch"] > 2


def test_batches_of_all_buckets_are_mixed() -> None:
    """Otherwise an epoch would train one aspect ratio after the other."""
    batches = Sampler([make_dataset({"1.0": 40, "1.5": 40})], seed=0).batches(1)

    buckets = [batch.bucket for batch in batches]
    changes = sum(before != after for before, after in pairwise(buckets))

    assert changes > 3


def test_captions_are_drawn_per_use() -> None:
    batches = Sampler([make_dataset({"1.0": 8}, 20)], seed=0).batches(1)

    last_letters = Counter(caption[-1] for batch in batches for caption in batch.captions)
    assert set(last_letters) == {"a", "b", "c"}
    assert min(last_letters.values()) > 35  # of 8 x 21 = 168 uses
    for batch in batches:
        for sample, caption in zip(batch.samples, batch.captions, strict=True):
            assert caption in sample.captions


def test_auto_weighting_mixes_datasets_by_size() -> None:
    datasets = [make_dataset({"1.0": 400}, id="large"), make_dataset({"1.0": 100}, id="small")]

    order = [batch.dataset_id for batch in Sampler(datasets, seed=0).batches(1)]

    assert Counter(order) == {"large": 100, "small": 25}

    first_half = order[: len(order) // 2]
    assert 6 <= first_half.count("small") <= 19


def sign(strength: float | None) -> str:
    if not strength:
        return "0"
    return "+" if strength > 0 else "-"


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
    signs = {f"set {number}": sign(strength) for number, strength in enumerate(strengths)}

    batches = Sampler(datasets, seed=1).batches(1)

    turns = "".join(signs[batch.dataset_id] for batch in batches)
    assert turns.startswith(sides * 10), "until a side is used up"
    assert Counter(batch.dataset_id for batch in batches) == dict.fromkeys(signs, 10)


def test_sliders_of_strength_zero_keep_the_order_of_any_run() -> None:
    neutral = [make_dataset({"1.0": 40}, id=name, slider_strength=0) for name in ("a", "b")]
    plain = [make_dataset({"1.0": 40}, id=name) for name in ("a", "b")]

    order = [batch.samples for batch in Sampler(neutral, seed=1).batches(1)]

    assert order == [batch.samples for batch in Sampler(plain, seed=1).batches(1)]


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


def test_datasets_take_part_in_their_window_of_epochs() -> None:
    datasets = [
        make_dataset({"1.0": 4}, id="a", end_epoch=2),
        make_dataset({"1.0": 4}, id="b", start_epoch=2),
    ]
    sampler = Sampler(datasets, seed=0)

    active = [{batch.dataset_id for batch in sampler.batches(epoch)} for epoch in (1, 2, 3)]

    assert active == [{"a"}, {"a", "b"}, {"b"}]


def test_an_epoch_without_a_dataset_is_an_error() -> None:
    sampler = Sampler([make_dataset({"1.0": 4}, end_epoch=2)], seed=0)

    assert sampler.batches_per_epoch(3) == 0
    with pytest.raises(UserError, match="epoch 3"):
        sampler.batches(3)


def test_step_windows_count_optimizer_steps_of_the_run() -> None:
    datasets = [
        make_dataset({"1.0": 40}, id="a"),
        make_dataset({"1.0": 40}, id="b", start_step=8, end_step=12),
    ]
    sampler = Sampler(datasets, seed=0, accumulation=2)
    counter = Sampler(datasets, seed=0, accumulation=2)
    steps: dict[str, set[int]] = {"a": set(), "b": set()}
    micro_batches = 0
    for epoch in range(1, 5):
        assert counter.batches_per_epoch(epoch) == len(sampler.batches(epoch))
        for batch in sampler.batches(epoch):
            steps[batch.dataset_id].add(micro_batches // 2 + 1)
            micro_batches += 1

    assert min(steps["b"]) >= 8
    assert max(steps["b"]) <= 12
    assert min(steps["a"]) == 1


def test_processes_get_batches_of_one_shape_at_the_same_time() -> None:
    datasets = [make_dataset({"1.0": 30, "1.5": 13}, 1, "a"), make_dataset({"0.67": 9}, 0, "b")]
    ranks = [Sampler(datasets, seed=2, world=World(rank, 3)).batches(1) for rank in range(3)]

    for shares in zip(*ranks, strict=True):
        assert len({(batch.dataset_id, batch.size, batch.index) for batch in shares}) == 1
        assert all(len(batch.samples) == 4 for batch in shares)

    uses = uses_of([batch for batches in ranks for batch in batches])
    assert len(uses) == 52  # 30 + 13 + 9
    for name, count in uses.items():
        assert count >= (2 if name.startswith("a/") else 1)


def test_several_processes_draw_together_what_one_draws_alone() -> None:
    """Three processes with batches of 2 train the batches of 6 of a single process."""
    alone = Sampler([make_dataset({"1.0": 24}, train_batch_size=6)], seed=2).batches(1)
    dataset = make_dataset({"1.0": 24}, train_batch_size=2)
    ranks = [Sampler([dataset], seed=2, world=World(rank, 3)).batches(1) for rank in range(3)]

    for batch, *shares in zip(alone, *ranks, strict=True):
        samples = [sample.name for share in shares for sample in share.samples]
        captions = [caption for share in shares for caption in share.captions]
        assert samples == [sample.name for sample in batch.samples]
        assert captions == list(batch.captions)
    assert len({batch.captions for batch in alone}) == len(alone)


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
