"""The planned peak of a whole step against the metered one, for every flavour and memory switch.

With all weights, gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from simpletuner.models.cost import BatchShape
from tests.tools.fake_runs import FakeRun

LOADS = {
    "t2i-lite-sft": BatchShape(1, 1, 64, 64, 256),
    "i2i-lite-sft": BatchShape(1, 1, 64, 64, 512),
    "t2v-lite-sft-5s": BatchShape(1, 16, 32, 48, 256),
    "t2v-lite-sft-10s": BatchShape(1, 31, 32, 48, 256),
    "i2v-lite-5s": BatchShape(1, 16, 32, 48, 512),
    "t2v-pro-sft-5s-hd": BatchShape(1, 31, 32, 48, 256),
    "i2v-pro-sft-5s": BatchShape(1, 31, 32, 48, 512),
    "2b-480p": BatchShape(1, 21, 30, 52, 300),
    "2b-480p, first frame given": BatchShape(1, 21, 30, 52, 300, timed_tokens=True),
    "2b-720p": BatchShape(1, 11, 22, 40, 300),
}
THOROUGH = pytest.mark.thorough
FULL = {"model_type": "full", "speed": "auto"}
LORA = {"model_type": "lora", "speed": "auto"}
RELEASED = {
    "optimizer_release_gradients": True,
    "max_grad_norm": 1.0,
    "grad_clip_method": "value",
}


def cases(names: Collection[str], usual: Collection[str]) -> list[Any]:
    """All names as parameters; those that are not usual are for thorough runs."""
    return [pytest.param(name, marks=() if name in usual else THOROUGH) for name in names]


def run_of(name: str, blocks: int, settings: dict[str, Any]) -> FakeRun:
    return FakeRun(name.partition(",")[0], LOADS[name], blocks, settings)


@pytest.mark.parametrize(
    "name", cases(LOADS, ["t2i-lite-sft", "t2v-lite-sft-5s", "t2v-pro-sft-5s-hd", "2b-480p"])
)
def test_the_planned_peak_of_a_lora_is_the_metered_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.97 <= run_of(name, 4, LORA).ratio(monkeypatch) <= 1.05


@pytest.mark.slow(3)
@pytest.mark.parametrize("name", cases(LOADS, ["2b-480p"]))
def test_the_planned_peak_of_a_full_fine_tune_is_the_metered_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of the blocks: a single one is taken to be diffusers', which saves more."""
    blocks = 4 if name.startswith("2b") else 16
    assert 0.97 <= run_of(name, blocks, FULL).ratio(monkeypatch) <= 1.05


@THOROUGH
@pytest.mark.slow(4)
def test_a_full_fine_tune_of_lite_is_planned_to_fit_32_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("t2v-lite-sft-5s", 0, FULL)

    assert 1.0 <= run.ratio(monkeypatch) <= 1.03
    assert run.planned.total < 0.95 * 32 * 2**30


SWITCHES: dict[str, dict[str, Any]] = {
    "diffusers' blocks": {"speed": "reference"},
    "no checkpoints": {"gradient_checkpointing": False},
    "every second block": {"gradient_checkpointing_interval": 2},
    "kept blocks": {"gradient_checkpointing_kept_blocks": 3},
    "float32": {"mixed_precision": "no"},
    "released gradients": RELEASED,
    "accumulated gradients": {"gradient_accumulation_steps": 2},
    "moving average": {"use_ema": True},
}
FULL_SWITCHES = {
    **SWITCHES,
    "attention recomputed": {"speed_keep_attention": False},
    "float32 weights": {"optimizer": "adamw"},
    "temporaries of an update": {"optimizer": "torch-rmsprop"},
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("switch", cases(SWITCHES, ["kept blocks"]))
def test_the_planned_peak_of_a_lora_follows_every_switch(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**LORA, **SWITCHES[switch]}

    assert 0.97 <= run_of("t2i-lite-sft", 8, settings).ratio(monkeypatch) <= 1.05


@pytest.mark.slow(2)
@pytest.mark.parametrize("switch", cases(FULL_SWITCHES, ["no checkpoints", "released gradients"]))
def test_the_planned_peak_of_a_full_fine_tune_follows_every_switch(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**FULL, **FULL_SWITCHES[switch]}

    assert 0.97 <= run_of("t2i-lite-sft", 8, settings).ratio(monkeypatch) <= 1.05
