"""Build the video demo from the picture demo: its checkpoint, and the clips of its concept.

    python scripts/demo/build_video.py [CHECKPOINT_FOLDER] [--clips-only]

This takes about three quarters of an hour on three cores, added up from its parts. The shipped
transformer was trained in two legs of 2000 steps, the second with --resume and --seed 1, the
decoder with another seed; here either is done in one go.

Tokenizers and text encoders are the picture demo's, copied; VAE and transformer start from its
weights. Every random choice is seeded; floating-point sums differ between machines, so a rebuilt
checkpoint shows the same world as the shipped one without being equal to it byte by byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
from build import DEMO, PARTS
from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline
from PIL import Image
from train_video_transformer import SHIFT
from video_world import FRAME_RATE, HOP, SIZES, Clip, draw, draw_clip, hop

from simpletuner.data.clip_writer import write_mp4

PICTURES = DEMO / "checkpoint"
VIDEO_DEMO = DEMO.with_name("demo-video")
COPIED = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")

HOPS = [
    ("big", "red", "circle", "white"),
    ("small", "blue", "square", "cream"),
    ("big", "green", "star", "gray"),
    ("small", "orange", "circle", "navy"),
    ("big", "purple", "diamond", "mint"),
    ("small", "pink", "star", "sky"),
    ("big", "black", "square", "white"),
    ("small", "yellow", "triangle", "navy"),
]
"""Size, colour, shape and background of the clips of the concept; they hop right, then left."""

KNOWN = [
    Clip("circle", "green", "left", "right", "big", "gray"),
    Clip("star", "yellow", "right", "left", "small", "navy"),
    Clip("square", "purple", "bottom", "top", "small", "white"),
    Clip("triangle", "orange", "top", "bottom", "big", "sky"),
    Clip("diamond", "black", "left", "top", "big", "cream"),
    Clip("circle", "pink", "right", "middle", "small", "mint"),
]
"""Regularisation data: what the base can render and must keep."""


def write_clip(path: Path, frames: np.ndarray, caption: str) -> None:
    """Write a clip, and its caption beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mp4(path, [Image.fromarray(frame) for frame in frames], FRAME_RATE)
    path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


def draw_hops(folder: Path) -> None:
    """Write the clips of the concept."""
    for number, (size, colour, shape, background) in enumerate(HOPS, start=1):
        rightwards = number % 2 == 1
        frames = draw_clip(
            shape, colour, sum(SIZES[size]) / 2, background, hop(rightwards=rightwards)
        )
        way = "from the left to the right" if rightwards else "from the right to the left"
        caption = f"a {size} {colour} {shape} {HOP} {way} on a {background} background"
        write_clip(folder / f"hop-{number:02}.mp4", frames, caption)


def draw_known(folder: Path) -> None:
    """Write clips that the base can render."""
    random = np.random.default_rng(0)
    for number, clip in enumerate(KNOWN, start=1):
        write_clip(folder / f"known-{number:02}.mp4", draw(clip, random), clip.caption())


def save_frozen_parts(checkpoint: Path) -> None:
    """Write what is not trained: tokenizers, text encoders, scheduler and the pipeline's index."""
    for part in COPIED:
        shutil.copytree(PICTURES / part, checkpoint / part, dirs_exist_ok=True)
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(checkpoint / "scheduler")
    parts = {**PARTS, "vae": ("diffusers", "AutoencoderKLHunyuanVideo")}
    index = {
        "_class_name": Kandinsky5T2VPipeline.__name__,
        "_diffusers_version": diffusers.__version__,
        **parts,
    }
    (checkpoint / "model_index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", default=VIDEO_DEMO / "checkpoint")
    parser.add_argument("--clips-only", action="store_true")
    arguments = parser.parse_args()
    for folder, draw_folder in (("clips", draw_hops), ("known", draw_known)):
        shutil.rmtree(VIDEO_DEMO / folder, ignore_errors=True)
        draw_folder(VIDEO_DEMO / folder)
    if arguments.clips_only:
        return
    save_frozen_parts(arguments.checkpoint)
    scripts = Path(__file__).parent
    vae = [scripts / "train_video_vae.py", PICTURES / "vae", arguments.checkpoint / "vae"]
    transformer = [scripts / "train_video_transformer.py", PICTURES, arguments.checkpoint]
    for command in (vae, transformer, [scripts / "evaluate_video.py", arguments.checkpoint]):
        subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()
