"""The video demo, as a stranger runs it: a LoRA learns a motion that its base does not know.

It does for clips what the picture demo does for pictures: were the frame order, the latents' scale,
the channels of the first frame or the template wrong, no shape would hop.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from simpletuner.cli.app import main
from tests.tools.motion import path_of, read_clip, rise

RIGHTWARDS = ("validation", "hop_diamond")
LEFTWARDS = ("hop_star",)


def paths(folder: Path, pattern: str, names: tuple[str, ...]) -> list[np.ndarray]:
    """The way of the shape in each preview, 17 2."""
    return [path_of(read_clip(folder / pattern.format(name))) for name in names]


@pytest.mark.slow(50)
def test_the_demo_learns_its_motion(tmp_path: Path) -> None:
    # Half of the example's steps: by then it hops, and hops no higher at the end. A step trains on
    # four samples, as the example's own, but in one pass, and computes nothing again. That the base
    # does not hop is for test_demo_video_checkpoint, so that only what is looked at here is
    # rendered.
    only = (
        "disable_benchmark=true",
        "validation_disable_unconditional=true",
        "checkpoint_step_interval=150",
    )
    fast = ("train_batch_size=4", "gradient_accumulation_steps=1", "gradient_checkpointing=false")
    with contextlib.chdir(tmp_path):
        assert (
            main(
                [
                    "train",
                    "--example",
                    "demo-video",
                    "max_train_steps=150",
                    "torch_num_threads=1",
                    *only,
                    *fast,
                ]
            )
            == 0
        )
    output = tmp_path / "output" / "demo-video"
    last = output / "validation_images", "step_150_{}_0_64x64@17.mp4"

    after = [rise(path) for path in paths(*last, RIGHTWARDS + LEFTWARDS)]
    assert min(after) > 7, after
    for sign, names in ((1, RIGHTWARDS), (-1, LEFTWARDS)):
        assert all(sign * (path[-1, 0] - path[0, 0]) > 18 for path in paths(*last, names))

    straight, up = paths(*last, ("still_straight", "still_up"))
    assert abs(rise(straight)) < 7
    assert straight[-1, 0] - straight[0, 0] > 18
    assert up[0, 1] - up[-1, 1] > 18
    assert load_file(output / "pytorch_lora_weights.safetensors")
    assert (output / "training_report.html").stat().st_size > 50_000
