"""Random numbers of a training step, derived from where a sample is and not from what was drawn before.

A resumed run, a run with previews and a run without thus draw the same noise in the same step; and a sample draws the
same whether it shares its step with others in one batch or in the batches of several processes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def step_seed(seed: int, global_step: int, micro_step: int, slot: int, purpose: str) -> int:
    """A seed in [0, 2^63) for one draw, the same on every machine and in every version of Python.

    Args:
        seed: of the run.
        global_step: optimizer steps done before this one.
        micro_step: position inside the accumulation window.
        slot: position of the sample in the micro-batch of all processes; 0 for what is drawn once for all of them.
        purpose: what is drawn, such as "noise" or "sigmas", so that two draws in a step are independent.
    """
    place = f"{seed}/{global_step}/{micro_step}/{slot}/{purpose}"
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(seed: int, global_step: int, micro_step: int, slot: int, purpose: str) -> torch.Generator:
    """A CPU generator that starts at `step_seed`. Draw on the CPU and move, so that devices agree.

    torch's CPU generator uses the lower 32 bits of a seed. Among 100 000 draws one pair in expectation starts alike;
    it belongs to two steps that have nothing else in common.
    """
    return torch.Generator("cpu").manual_seed(step_seed(seed, global_step, micro_step, slot, purpose))


@dataclass(frozen=True)
class Place:
    """Where in the run a micro-batch is.

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
        """A CPU generator that starts alike in every process."""
        return generator_for(self.seed, self.global_step, self.micro_step, 0, purpose)

    @property
    def forward_seed(self) -> int:
        """For what the forward pass draws on the device.

        Only the dropout of LoRA does: its masks cover a whole batch at once, so there is one seed per process and
        micro-step, and several processes drop other elements than one process with a larger batch.
        """
        return step_seed(self.seed, self.global_step, self.micro_step, self.slots.start, "forward")


def seed_device(device: torch.device, seed: int) -> None:
    """Seed what operations without a generator (dropout) draw from: `torch.manual_seed` for this device alone.

    That one also reaches for every other kind of device, which costs more than drawing the noise of a small batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
