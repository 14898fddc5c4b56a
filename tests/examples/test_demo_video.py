"""The video demo, as a stranger runs it: a LoRA learns a motion that its base does not know.

It does for clips what the picture demo does for pictures: were the frame order, the latents' scale, the channels of
the first frame or the template wrong, no shape would go round.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from simpletuner.cli.app import main
from tests.motion import path_of, read_clip, ringness

RINGS = ("validation", "ring_star", "ring_diamond")


def ringnesses(folder: Path, pattern: str) -> list[float]:
    """How much of a ring the shape of each preview goes."""
    return [ringness(path_of(read_clip(folder / pattern.format(name)))) for name in RINGS]


@pytest.mark.slow
def test_the_demo_learns_its_motion(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert main(["train", "--example", "demo-video"]) == 0
    output = tmp_path / "output" / "demo-video"
    before = ringnesses(output / "benchmarks" / "base_model", "{}_64x64@17_0.mp4")
    after = ringnesses(output / "validation_images", "step_300_{}_0_64x64@17.mp4")
    assert max(map(abs, before)) < 0.3, before
    assert min(after) > 0.6, (before, after)
    straight = path_of(read_clip(output / "validation_images" / "step_300_still_straight_0_64x64@17.mp4"))
    assert abs(ringness(straight)) < 0.3
    assert straight[-1, 0] - straight[0, 0] > 15
    assert np.ptp(straight[:, 1]) < 8
    assert load_file(output / "pytorch_lora_weights.safetensors")
    assert (output / "training_report.html").stat().st_size > 50_000
