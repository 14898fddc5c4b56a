"""The video demo, as a stranger runs it: a LoRA learns a motion that its base cannot render.

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


def preview_paths(output: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """The path of the shape in the last preview of each prompt, 17 2: x, y in pixels per frame."""
    folder = output / "validation_images"
    return [path_of(read_clip(folder / f"step_150_{name}_0_64x64@17.mp4")) for name in names]


def moved_right(path: np.ndarray) -> float:
    """Pixels from the first to the last frame."""
    return float(path[-1, 0] - path[0, 0])


def moved_up(path: np.ndarray) -> float:
    """Pixels from the first to the last frame; y grows downwards."""
    return float(path[0, 1] - path[-1, 1])


@pytest.mark.thorough
@pytest.mark.slow(50)
def test_the_demo_learns_its_motion(tmp_path: Path) -> None:
    arguments = [
        # Half of the example's steps: by then the shape hops, and it hops no higher at the end.
        "max_train_steps=150",
        "checkpoint_step_interval=150",
        # Four samples a step, as in the example, but in one pass and without recomputation.
        "train_batch_size=4",
        "gradient_accumulation_steps=1",
        "gradient_checkpointing=false",
        "torch_num_threads=1",
        # test_demo_video_checkpoint shows that the base does not hop, so it renders nothing here.
        "disable_benchmark=true",
        "validation_disable_unconditional=true",
    ]

    with contextlib.chdir(tmp_path):
        assert main(["train", "--example", "demo-video", *arguments]) == 0

    output = tmp_path / "output" / "demo-video"
    rightwards = preview_paths(output, RIGHTWARDS)
    leftwards = preview_paths(output, LEFTWARDS)
    rises = [rise(path) for path in rightwards + leftwards]
    assert min(rises) > 7, rises
    assert min(moved_right(path) for path in rightwards) > 18
    assert max(moved_right(path) for path in leftwards) < -18

    # Motions that the base knew: no hop appears where the prompt asks for none.
    straight, up = preview_paths(output, ("still_straight", "still_up"))
    assert abs(rise(straight)) < 7
    assert moved_right(straight) > 18
    assert moved_up(up) > 18

    assert load_file(output / "pytorch_lora_weights.safetensors")
    assert (output / "training_report.html").stat().st_size > 50_000
