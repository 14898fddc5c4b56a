"""Two processes with batches of one train like one process with batches of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from simpletuner.caching.catalogue import Catalogue
from simpletuner.config.techniques.tread import Route
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch
from simpletuner.distributed.world import World
from simpletuner.encoding.read import BatchReader
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.techniques.tread import Tread
from simpletuner.training.state import Assembly
from tests.data.test_sampler import make_dataset
from tests.tools.assembly import make_assembly, make_batch, no_forward
from tests.tools.catalogues import make_catalogue

ONE = [World()]
TWO = [World(0, 2), World(1, 2)]
EPOCHS = range(1, 9)
# What a batch of one drew at seed 3, step 4, micro-step 1 before samples had slots.
EARLIER_NOISE = [0.1982555240392685, -0.03409070521593094, -1.1095114946365356]
EARLIER_SIGMAS = [0.8097069263458252]


class CaptionReader(BatchReader):
    """Yields captions instead of their embeddings, so that no cache is needed."""

    def read(self, entry: Any) -> Any:
        return entry.caption


def planned(world: World) -> list[PlannedBatch]:
    datasets = [
        make_dataset({"1.0": 9, "1.5": 6}, 1, "a", train_batch_size=2 // world.size),
        make_dataset({"0.67": 12}, 0, "b", train_batch_size=4 // world.size),
    ]
    sampler = Sampler(datasets, seed=2, world=world)
    return [batch for epoch in EPOCHS for batch in sampler.batches(epoch)]


def _never(entry: Any) -> Any:
    raise AssertionError("no entry is restored or encoded")


def captions_trained(catalogue: Catalogue, planned: PlannedBatch) -> list[Any]:
    reader = CaptionReader(catalogue, 0.4, 3, _never, _never)
    return [reader._embeds(planned, index) for index in range(len(planned.samples))]


def test_samples_captions_and_dropout_equal_those_of_one_process(catalogue: Catalogue) -> None:
    dropped = 0
    total = 0
    for whole, *parts in zip(planned(ONE[0]), *map(planned, TWO), strict=True):
        assert whole.samples == tuple(sample for part in parts for sample in part.samples)
        assert whole.captions == tuple(caption for part in parts for caption in part.captions)
        assert list(whole.slots) == [slot for part in parts for slot in part.slots]
        trained = captions_trained(catalogue, whole)
        assert trained == [
            caption for part in parts for caption in captions_trained(catalogue, part)
        ]
        dropped = dropped + trained.count("")
        total = total + len(trained)

    assert dropped / total == pytest.approx(0.4, abs=0.1)


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return make_catalogue(tmp_path, "a", "b")


def drawn(assembly: Assembly, batch: Batch, tread: Tread, world: World) -> dict[str, Tensor]:
    """All random draws for the samples of one process at one position of the run."""
    noisy = replace(assembly, world=world).noise.add(batch, 4, 1)
    tread.before_forward(noisy, no_forward)
    kept = tread.kept_tokens(1)
    assert kept is not None
    return {
        "noise": noisy.noise,
        "sigmas": noisy.sigmas,
        "input": noisy.noisy_latents,
        "kept": kept,
    }


def part(batch: Batch, which: slice) -> Batch:
    return Batch(batch.latents[which], batch.embeds[which], batch.names[which])


@pytest.mark.parametrize("settings", [{}, {"disable_segmented_timestep_sampling": True}])
def test_noise_of_several_processes_equals_that_of_one(
    t2i_checkpoint: Path, settings: dict[str, Any]
) -> None:
    tread = Tread(TreadSpec([Route(0.5, 1, 1)]))
    assembly = make_assembly(
        t2i_checkpoint, tread, noise_offset=0.1, input_perturbation=0.1, **settings
    )
    batch = make_batch(t2i_checkpoint, ["a", "b", "c", "d"], side=8)
    whole = drawn(assembly, batch, tread, ONE[0])
    parts = [
        drawn(assembly, part(batch, slice(2 * world.rank, 2 * world.rank + 2)), tread, world)
        for world in TWO
    ]

    for name, together in whole.items():
        assert torch.equal(together, torch.cat([part[name] for part in parts])), name
        assert len(together.unique(dim=0)) == 4, f"{name}: every sample draws its own"


def test_shared_noise_is_equal_in_all_processes(t2i_checkpoint: Path) -> None:
    assembly = make_assembly(t2i_checkpoint, seed_for_each_device=False)
    batch = make_batch(t2i_checkpoint, ["a", "b"])
    first, second = (replace(assembly, world=world).noise.add(batch, 4, 1) for world in TWO)

    assert torch.equal(first.noise, second.noise)
    assert torch.equal(first.sigmas, second.sigmas)


def test_a_batch_of_one_draws_the_numbers_of_earlier_versions(t2i_checkpoint: Path) -> None:
    """Numbers written down: a run with batches of one must give the same result as it did in
    earlier versions.
    """
    noisy = make_assembly(t2i_checkpoint).noise.add(make_batch(t2i_checkpoint, ["a"]), 4, 1)
    assert noisy.noise.flatten()[:3].tolist() == pytest.approx(EARLIER_NOISE, rel=1e-6)
    assert noisy.sigmas.tolist() == pytest.approx(EARLIER_SIGMAS, rel=1e-6)
