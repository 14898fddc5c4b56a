"""Random numbers of a training step, derived from where the step is and not from what was drawn before.

A resumed run, a run with previews and a run without thus draw the same noise in the same step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def step_seed(seed: int, global_step: int, micro_step: int, rank: int, purpose: str) -> int:
    """A seed in [0, 2^63) for one draw, the same on every machine and in every version of Python.

    Args:
        seed: of the run.
        global_step: optimizer steps done before this one.
        micro_step: position inside the accumulation window.
        rank: of the process; pass 0 on all where processes shall share their noise.
        purpose: what is drawn, such as "noise" or "sigmas", so that two draws in a step are independent.
    """
    place = f"{seed}/{global_step}/{micro_step}/{rank}/{purpose}"
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(seed: int, global_step: int, micro_step: int, rank: int, purpose: str) -> torch.Generator:
    """A CPU generator that starts at `step_seed`. Draw on the CPU and move, so that devices agree.

    torch's CPU generator uses the lower 32 bits of a seed. Among 100 000 draws one pair in expectation starts alike;
    it belongs to two steps that have nothing else in common.
    """
    return torch.Generator("cpu").manual_seed(step_seed(seed, global_step, micro_step, rank, purpose))


@dataclass(frozen=True)
class Place:
    """A place in the run at which something is drawn: the arguments of `step_seed` without the purpose."""

    seed: int
    global_step: int
    micro_step: int
    rank: int

    def seed_for(self, purpose: str) -> int:
        """`step_seed` here."""
        return step_seed(self.seed, self.global_step, self.micro_step, self.rank, purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """`generator_for` here."""
        return generator_for(self.seed, self.global_step, self.micro_step, self.rank, purpose)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed what operations without a generator (dropout) draw from: `torch.manual_seed` for this device alone.

    That one also reaches for every other kind of device, which costs more than drawing the noise of a small batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
