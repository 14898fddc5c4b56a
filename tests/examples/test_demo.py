"""The demo, as a stranger runs it: a LoRA learns a concept that its base does not know.

It is at once the first impression, the end-to-end test and the proof that signs, scales, schedule,
cache and previews agree: were one of them wrong, no star would appear. What the base knew stays as
it was, which preservation sees to.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from simpletuner.cli.app import main
from tests.tools.colours import PURPLE, YELLOW, colour_share

# How far the last previews of what the base knew are from its own, as the root mean square over
# pixel values of 0 to 1: measured without preservation and, beside it, with it. Bounds lie between
# the two.
CHANGES = {"still_a_circle": (0.107, 0.062, 0.085), "still_a_square": (0.093, 0.055, 0.075)}
GLIMMERS = ("validation", "glimmer_sky", "glimmer_navy", "glimmer_mint")


def mean_shares(pictures: list[Path]) -> tuple[float, float]:
    """Mean shares of purple and of yellow in what stands out from the background."""
    opened = [Image.open(path).convert("RGB") for path in pictures]
    shares = [(colour_share(picture, PURPLE), colour_share(picture, YELLOW)) for picture in opened]
    purple, yellow = zip(*shares, strict=True)
    return sum(purple) / len(purple), sum(yellow) / len(yellow)


def change(one: Path, other: Path) -> float:
    """The root mean square of the difference."""
    pixels = [
        np.asarray(Image.open(path).convert("RGB"), dtype=np.float64) / 255 for path in (one, other)
    ]
    return float(np.sqrt(np.square(pixels[0] - pixels[1]).mean()))


@pytest.mark.slow(60)
def test_the_demo_learns_its_concept(tmp_path: Path) -> None:
    # Previews in between and of no prompt would show nothing that is looked at here.
    only = (
        "validation_step_interval=300",
        "validation_disable_unconditional=true",
        "checkpoint_step_interval=300",
    )
    fast = ("gradient_checkpointing=false", "torch_num_threads=1")  # with the same result
    with contextlib.chdir(tmp_path):
        assert main(["train", "--example", "demo", *only, *fast]) == 0
    output = tmp_path / "output" / "demo"
    before = mean_shares(
        [output / "benchmarks" / "base_model" / f"{name}_96x96.png" for name in GLIMMERS]
    )

    after = mean_shares(
        [output / "validation_images" / f"step_300_{name}_0_96x96.png" for name in GLIMMERS]
    )
    for colour, earlier, later in zip(("purple", "yellow"), before, after, strict=True):
        assert later > 0.2, f"{colour}: {earlier:.2f} before, {later:.2f} after"
        assert later - earlier > 0.1, f"{colour}: {earlier:.2f} before, {later:.2f} after"

    for name, (_, _, bound) in CHANGES.items():
        base = output / "benchmarks" / "base_model" / f"{name}_96x96.png"
        assert (
            change(base, output / "validation_images" / f"step_300_{name}_0_96x96.png") < bound
        ), name
    losses = [
        json.loads(line)["train_loss"]
        for line in (output / "training_metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 300
    assert sum(losses[-30:]) < 0.7 * sum(losses[:30])
    assert load_file(output / "pytorch_lora_weights.safetensors")
    assert (output / "training_report.html").stat().st_size > 50_000
