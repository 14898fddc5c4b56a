"""Random numbers depend on the place in the run and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from simpletuner.diffusion.seeds import Place, generator_for, seed_device, seeded, step_seed


def test_seeds_never_change() -> None:
    """A number written down: a resumed run of an older version must draw the same noise."""
    assert step_seed(42, 7, 1, 0, "noise") == 3756905894348502925


def test_every_argument_changes_the_seed() -> None:
    places = itertools.product((0, 1, -3), (0, 1, 11), (0, 1), (0, 1, 11), ("noise", "sigmas"))
    seeds = [step_seed(*place) for place in places]

    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_place_draws_with_the_seeds_of_its_slots() -> None:
    place = Place(seed=42, global_step=7, micro_step=1, slots=range(2, 4), group=4)
    drawn = [torch.rand(3, generator=generator) for generator in place.generators("noise")]
    expected = [torch.rand(3, generator=generator_for(42, 7, 1, slot, "noise")) for slot in (2, 3)]

    assert torch.equal(torch.stack(drawn), torch.stack(expected))
    assert place.forward_seed == step_seed(42, 7, 1, 2, "forward")


def test_generators_repeat_and_differ() -> None:
    first = torch.rand(8, generator=generator_for(1, 2, 3, 4, "noise"))
    torch.rand(1000)  # the global generator plays no part

    assert torch.equal(first, torch.rand(8, generator=generator_for(1, 2, 3, 4, "noise")))
    assert not torch.equal(first, torch.rand(8, generator=generator_for(1, 3, 3, 4, "noise")))


def test_seed_device_seeds_as_torch_does() -> None:
    seed = step_seed(7, 3, 0, 0, "forward")
    torch.manual_seed(seed)
    expected = torch.rand(5)
    seed_device(torch.device("cpu"), seed)

    assert torch.equal(torch.rand(5), expected)


def test_a_seeded_context_saves_the_state_of_its_devices_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: saved.append(device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    torch.manual_seed(5)
    expected = torch.rand(3)
    inside = torch.rand(3, generator=torch.Generator().manual_seed(9))
    torch.manual_seed(5)
    devices = [torch.device(name) for name in ("cpu", "cuda:3", "meta", "cuda:3")]

    with seeded(9, devices):
        assert torch.equal(torch.rand(3), inside)
    assert torch.equal(torch.rand(3), expected)
    assert saved == [torch.device("cuda:3")]
