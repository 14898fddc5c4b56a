"""Runs the model between steps without gradients and without effect on training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly, random_states, restore_random_states


def weights_to_use(ema: Ema | None, ema_validation: str) -> list[bool]:
    """The weights to validate with; True means the moving average."""
    if ema is None:
        return [False]
    return {"none": [False], "ema_only": [True], "comparison": [False, True]}[ema_validation]


@contextmanager
def quiet(assembly: Assembly) -> Iterator[None]:
    """Evaluation mode without gradients; global random states are restored afterwards."""
    # Library code may draw from the global generators.
    states = random_states()
    assembly.transformer.eval()
    try:
        with torch.no_grad(), assembly.sampling_weights():
            yield
    finally:
        assembly.transformer.train()
        restore_random_states(states)
