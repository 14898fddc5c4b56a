"""Sample the demo's checkpoint with the stock pipeline and count what it draws right.

python scripts/demo/evaluate.py CHECKPOINT_FOLDER [--grid FILE.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from diffusers import Kandinsky5T2IPipeline
from judge import Verdict, judge
from PIL import Image
from world import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIZE, SIZES, Picture

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL

PARTS = ("shape", "colour", "rim", "background")


def load_pipeline(checkpoint: Path) -> Kandinsky5T2IPipeline:
    """The stock pipeline in float32, with the size and template of its training."""
    pipe = Kandinsky5T2IPipeline.from_pretrained(
        checkpoint, tokenizer=load_processor(checkpoint), torch_dtype=torch.float32
    )
    pipe.resolutions = [(SIZE, SIZE)]
    pipe.prompt_template = OFFICIAL["image"].text
    pipe.prompt_template_encode_start_idx = OFFICIAL["image"].crop
    pipe.set_progress_bar_config(disable=True)
    return pipe


def render(
    pipe: Kandinsky5T2IPipeline,
    captions: list[str],
    *,
    seed: int = 0,
    steps: int = 25,
    guidance: float = 4.0,
) -> np.ndarray:
    """One picture per caption; captions must be equally long in tokens. Returns B H W 3, uint8."""
    result = pipe(
        captions,
        height=SIZE,
        width=SIZE,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return (result.image * 255).round().astype(np.uint8)


def random_pictures(count: int, seed: int, *, rim: bool, held_out: bool) -> list[Picture]:
    """Pictures whose captions name everything, so that they are equally long."""
    random = np.random.default_rng(seed)
    pictures: list[Picture] = []
    while len(pictures) < count:
        shape, colour = (str(random.choice(names)) for names in (SHAPES, list(COLOURS)))
        picture = Picture(
            shape="star" if held_out else shape,
            colour="purple" if held_out else colour,
            rim=str(random.choice(list(COLOURS))) if rim else None,
            size=str(random.choice(list(SIZES))),
            place=str(random.choice(list(PLACES))),
            background=str(random.choice(list(BACKGROUNDS))),
        )
        distinct = (
            picture.colour not in (picture.rim, picture.background)
            and picture.rim != picture.background
        )
        if distinct and picture.held_out == held_out:
            pictures.append(picture)
    return pictures


def right(verdict: Verdict | None, picture: Picture) -> dict[str, bool]:
    """Which parts of `picture` its rendering shows."""
    if verdict is None:
        return dict.fromkeys((*PARTS, "colour and shape"), False)
    answer = {name: getattr(verdict, name) == getattr(picture, name) for name in PARTS}
    return {**answer, "colour and shape": answer["shape"] and answer["colour"]}


def sampling_parser(description: str | None, count: int) -> argparse.ArgumentParser:
    """The arguments of a judgement: the checkpoint, how many prompts and how they are sampled."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=3)
    return parser


def main() -> None:
    parser = sampling_parser(__doc__, count=48)
    parser.add_argument("--grid", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pipe = load_pipeline(arguments.checkpoint)
    rows = []
    for held_out in (False, True):
        for rim in (False, True):
            pictures = random_pictures(arguments.count, seed=7, rim=rim, held_out=held_out)
            images = render(
                pipe,
                [picture.caption() for picture in pictures],
                steps=arguments.steps,
                guidance=arguments.guidance,
            )
            answers = [
                right(judge(image), picture)
                for image, picture in zip(images, pictures, strict=True)
            ]
            shares = {
                name: sum(answer[name] for answer in answers) / len(answers) for name in answers[0]
            }
            kind = f"{'purple stars' if held_out else 'seen'}, {'with' if rim else 'no'} rim"
            figures = [f"{name} {share:.2f}" for name, share in shares.items()]
            print(kind, " ".join(figures), flush=True)
            rows.append(np.concatenate(list(images[:12]), axis=1))
            if arguments.grid:
                print("  " + "\n  ".join(picture.caption() for picture in pictures[:12]))
    if arguments.grid:
        Image.fromarray(np.concatenate(rows)).save(arguments.grid)


if __name__ == "__main__":
    main()
