"""Random numbers of a training step, derived from the position of a sample, not from earlier draws.

A resumed run and runs with and without previews thus draw the same noise in the same step, and a sample draws the same
numbers whether it shares a step with others in one batch or in the batches of several processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def step_seed(seed: int, global_step: int, micro_step: int, slot: int, purpose: str) -> int:
    """A seed in [0, 2^63) for one draw, the same on every machine and in every version of Python.

    Args:
        seed: of the run.
        global_step: optimizer steps done before this one.
        micro_step: position inside the accumulation window.
        slot: position of the sample in the micro-batch of all processes; 0 for draws shared by all of them.
        purpose: what is drawn, such as "noise" or "sigmas", so that the draws of a step are independent.
    """
    place = f"{seed}/{global_step}/{micro_step}/{slot}/{purpose}"
    # Python's `hash` of a string differs from process to process.
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


def generator_for(seed: int, global_step: int, micro_step: int, slot: int, purpose: str) -> torch.Generator:
    """A CPU generator seeded with `step_seed`. Draw on the CPU and move, so that all devices get the same numbers.

    torch's CPU generator uses only the lower 32 bits of a seed: among 100 000 draws, about one pair has the same seed.
    This is harmless, since the two steps differ in everything else.
    """
    return torch.Generator("cpu").manual_seed(step_seed(seed, global_step, micro_step, slot, purpose))


@dataclass(frozen=True)
class Place:
    """The position of a micro-batch in the run.

    Attributes:
        slots: positions of this process's samples in the micro-batch of all processes.
        group: samples of that micro-batch, over all processes.
    """

    seed: int
    global_step: int
    micro_step: int
    slots: range
    group: int

    def generators(self, purpose: str) -> list[torch.Generator]:
        """One CPU generator per sample of this process."""
        return [generator_for(self.seed, self.global_step, self.micro_step, slot, purpose) for slot in self.slots]

    def shared_generator(self, purpose: str) -> torch.Generator:
        """A CPU generator with the same seed on every process."""
        return generator_for(self.seed, self.global_step, self.micro_step, 0, purpose)

    @property
    def forward_seed(self) -> int:
        """Seed of what the forward pass draws on the device.

        Only LoRA dropout draws there. Its masks cover a whole batch, so the seed is per process and micro-step, and
        several processes drop other elements than one process with a larger batch.
        """
        return step_seed(self.seed, self.global_step, self.micro_step, self.slots.start, "forward")


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the default generator of one device, which dropout draws from.

    `torch.manual_seed` seeds all device types, which takes longer than drawing the noise of a small batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which the default generators start from a seed; restores the CPU's and the devices' generators.

    By default torch would save the state of every visible GPU, which takes memory on all of them.
    """
    with torch.random.fork_rng({each for each in devices if each.type == "cuda"}):
        torch.manual_seed(seed)
        yield
