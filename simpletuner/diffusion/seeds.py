"""Stateless random numbers of a step: seeded by a sample's position in the run, not earlier draws.

A resumed run, and runs with and without previews, therefore draw the same noise in the same step. A
sample draws the same numbers however the global batch is divided among processes.
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
        seed: seed of the run.
        global_step: number of earlier optimizer steps.
        micro_step: position in the accumulation window.
        slot: position of the sample in the global micro-batch; 0 for draws shared by all processes.
        purpose: name of the draw, such as "noise" or "sigmas", which makes the draws of a step
            independent.
    """
    place = f"{seed}/{global_step}/{micro_step}/{slot}/{purpose}"
    # Not `hash`, which for strings differs between processes.
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


def generator_for(
    seed: int, global_step: int, micro_step: int, slot: int, purpose: str
) -> torch.Generator:
    """A CPU generator seeded with `step_seed`.

    Draw on the CPU, then move the numbers, so that they are the same on all devices.

    torch's CPU generator uses only the lower 32 bits of a seed, so about one pair among 100 000
    draws shares a seed. This is harmless, since everything else in the two steps differs.
    """
    generator = torch.Generator("cpu")
    return generator.manual_seed(step_seed(seed, global_step, micro_step, slot, purpose))


@dataclass(frozen=True)
class Place:
    """The position of a micro-batch in the run.

    Attributes:
        slots: positions of this process's samples in the global micro-batch.
        group: number of samples in the global micro-batch.
    """

    seed: int
    global_step: int
    micro_step: int
    slots: range
    group: int

    def generators(self, purpose: str) -> list[torch.Generator]:
        """One CPU generator per sample of this process."""
        return [
            generator_for(self.seed, self.global_step, self.micro_step, slot, purpose)
            for slot in self.slots
        ]

    def shared_generator(self, purpose: str) -> torch.Generator:
        """A CPU generator with the same seed on every process."""
        return generator_for(self.seed, self.global_step, self.micro_step, 0, purpose)

    @property
    def forward_seed(self) -> int:
        """Seed of random numbers drawn on the device in the forward pass.

        Only LoRA dropout draws on the device. Its masks cover a whole batch, so the seed is per
        process and micro-step, and several processes drop different elements than one process with
        a larger batch.
        """
        return step_seed(self.seed, self.global_step, self.micro_step, self.slots.start, "forward")


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the default generator of one device, which dropout uses.

    `torch.manual_seed` seeds all device types, which takes longer than drawing the noise of a small
    batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """Start the default generators from a seed; afterwards, restore those of CPU and devices."""
    used = set(devices)
    # With a list of devices. Without one, `fork_rng` would save the state of every visible GPU,
    # which takes memory on each.
    numbered = {device for device in used if device.type in ("cuda", "xpu")}
    kind = next((device.type for device in numbered), "cuda")
    # There is at most one Apple GPU; it has no number, and `fork_rng` skips it.
    apple_state = None
    if any(device.type == "mps" for device in used):
        apple_state = torch.mps.get_rng_state()
    try:
        with torch.random.fork_rng(numbered, device_type=kind):
            torch.manual_seed(seed)
            yield
    finally:
        if apple_state is not None:
            torch.mps.set_rng_state(apple_state)
