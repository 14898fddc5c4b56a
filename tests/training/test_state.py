"""The states of random generators, and machines that have more of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simpletuner.training.state import random_states, restore_random_states


def test_a_machine_with_fewer_gpus_takes_what_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    restored: list[int] = []

    def set_all(states: Any) -> None:
        for index, state in enumerate(states):
            generators[index].copy_(state)
            restored.append(index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [each.clone() for each in generators])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_all)
    saved = random_states()
    del generators[1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    restore_random_states(saved)
    assert restored == [0]
