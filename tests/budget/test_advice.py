"""Which settings are proposed where memory is short."""

from __future__ import annotations

import pytest

from simpletuner.budget.advice import less_for_latents, less_for_steps
from simpletuner.config.schema import CachingConfig, OffloadConfig


@pytest.mark.parametrize("tiles", [False, True])
def test_tiles_are_proposed_where_they_are_off(tiles: bool) -> None:
    advice = less_for_latents(CachingConfig(vae_enable_tiling=tiles))

    assert ("vae_enable_tiling" in advice) != tiles
    assert "group_offload_vae" in advice


@pytest.mark.parametrize("offload", ["manual", "auto"])
def test_offload_auto_is_proposed_where_it_is_not_set(offload: str) -> None:
    advice = less_for_steps(OffloadConfig(offload=offload))

    assert ("set offload auto" in advice) == (offload == "manual")
