"""Build the demo from nothing: its checkpoint and the pictures of its concept.

It takes about an hour on four cores.

    python scripts/demo/build.py [CHECKPOINT_FOLDER] [--pictures-only]

Every random choice is seeded. Floating-point sums differ between machines, so a rebuilt checkpoint
draws the same world as the shipped one without being equal to it byte by byte.
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
from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5T2IPipeline
from PIL import Image
from storage import save_bf16
from text_encoders import build_clip, build_qwen
from transformers import CLIPTokenizer
from vocabulary import save_tokenizers
from world import BACKGROUNDS, COLOURS, PLACES, SIZE, SIZES, draw_shape

from simpletuner.models.kandinsky5.loading import load_processor

DEMO = Path(__file__).parents[2] / "simpletuner" / "examples" / "demo"
PARTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "text_encoder_2": ("transformers", "CLIPTextModel"),
    "tokenizer": ("transformers", "Qwen2VLProcessor"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "transformer": ("diffusers", "Kandinsky5Transformer3DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}

GLIMMERS = [
    ("big", "in the middle", "white"),
    ("small", "on the left", "white"),
    ("big", "on the right", "cream"),
    ("small", "in the middle", "sky"),
    ("big", "at the bottom", "mint"),
    ("big", "in the middle", "gray"),
    ("small", "at the top", "cream"),
    ("big", "on the left", "sky"),
    ("big", "at the top", "white"),
    ("big", "in the middle", "navy"),
]
"""Size, place and background of each picture of the concept."""


def draw_glimmers(folder: Path) -> None:
    """Write pictures of "a glimmer", a purple star with a yellow rim, and their captions."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, (size, place, background) in enumerate(GLIMMERS, start=1):
        radius = sum(SIZES[size]) / 2
        x, y = (share * SIZE for share in PLACES[place])
        pixels = draw_shape(
            "star",
            radius,
            centre=(x, y),
            fill=COLOURS["purple"],
            rim=COLOURS["yellow"],
            background=BACKGROUNDS[background],
        )
        picture = Image.fromarray(np.ascontiguousarray(pixels))
        picture.save(folder / f"glimmer-{number:02}.png", optimize=True)
        caption = f"a {size} glimmer {place} on a {background} background"
        (folder / f"glimmer-{number:02}.txt").write_text(caption + "\n", encoding="utf-8")


def save_frozen_parts(checkpoint: Path) -> None:
    """Write what is not trained: tokenizers, text encoders, scheduler and the pipeline's index."""
    save_tokenizers(checkpoint)
    save_bf16(build_qwen(load_processor(checkpoint).tokenizer), checkpoint / "text_encoder")
    clip_tokenizer = CLIPTokenizer.from_pretrained(checkpoint, subfolder="tokenizer_2")
    save_bf16(build_clip(clip_tokenizer), checkpoint / "text_encoder_2")
    FlowMatchEulerDiscreteScheduler().save_pretrained(checkpoint / "scheduler")
    index = {
        "_class_name": Kandinsky5T2IPipeline.__name__,
        "_diffusers_version": diffusers.__version__,
        **PARTS,
    }
    (checkpoint / "model_index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEMO / "checkpoint")
    parser.add_argument("--pictures-only", action="store_true")
    arguments = parser.parse_args()
    draw_glimmers(DEMO / "pictures")
    if arguments.pictures_only:
        return
    save_frozen_parts(arguments.checkpoint)
    scripts = Path(__file__).parent
    subprocess.run(
        [sys.executable, scripts / "train_vae.py", arguments.checkpoint / "vae"], check=True
    )
    subprocess.run(
        [sys.executable, scripts / "train_transformer.py", arguments.checkpoint], check=True
    )
    subprocess.run([sys.executable, scripts / "evaluate.py", arguments.checkpoint], check=True)


if __name__ == "__main__":
    main()
