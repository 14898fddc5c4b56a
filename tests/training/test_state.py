"""Random states of machines with more generators, and weights of other layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from simpletuner.errors import UserError
from simpletuner.training.state import random_states, restore_random_states
from simpletuner.training.trained import load_parameters


def test_random_states_of_more_gpus_than_present_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    restored: list[int] = []

    def set_all(states: Any) -> None:
        for index, state in enumerate(states):
            generators[index].copy_(state)
            restored.append(index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_rng_state_all", lambda: [generator.clone() for generator in generators]
    )
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_all)
    saved = random_states()
    del generators[1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    restore_random_states(saved)

    assert restored == [0]


@pytest.mark.parametrize("layers", [["a"], ["a", "b", "c"]])
def test_weights_of_other_layers_are_refused(tmp_path: Path, layers: list[str]) -> None:
    save_file({name: torch.ones(2) for name in layers}, tmp_path / "weights.safetensors")
    own = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}

    with pytest.raises(UserError, match="was made with other trained layers; check lora_rank"):
        load_parameters(own, [tmp_path / "weights.safetensors"], tmp_path, "lora_rank")
    assert not own["a"].any(), "nothing is loaded"
