"""Sample the video demo's checkpoint and measure whether shapes move as the captions describe.

python scripts/demo/evaluate_video.py CHECKPOINT_FOLDER [--sheet FILE.png]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import Kandinsky5T2VPipeline
from evaluate import sampling_parser
from judge import judge
from PIL import Image
from video_judge import rise, trace
from video_world import FRAMES, HOP, SIZE, Clip, place, sample

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL

NEAR = 4.0
"""Largest distance in pixels of a shape's centre from its place."""


def load_pipeline(checkpoint: Path) -> Kandinsky5T2VPipeline:
    """The stock pipeline in float32, with the template that the checkpoint was trained with."""
    pipe = Kandinsky5T2VPipeline.from_pretrained(
        checkpoint, tokenizer=load_processor(checkpoint), torch_dtype=torch.float32
    )
    pipe.prompt_template = OFFICIAL["video"].text
    pipe.prompt_template_encode_start_idx = OFFICIAL["video"].crop
    pipe.set_progress_bar_config(disable=True)
    return pipe


def render(
    pipe: Kandinsky5T2VPipeline, caption: str, *, seed: int, steps: int, guidance: float
) -> np.ndarray:
    """One clip. Returns F H W 3, uint8."""
    result = pipe(
        caption,
        negative_prompt="",
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return (np.asarray(result.frames[0]) * 255).round().astype(np.uint8)


def random_clips(count: int, seed: int) -> list[Clip]:
    """Clips whose captions name everything."""
    random = np.random.default_rng(seed)
    clips: list[Clip] = []
    while len(clips) < count:
        clip = sample(random)
        if clip.start and clip.size and clip.background:
            clips.append(clip)
    return clips


def right(pixels: np.ndarray, clip: Clip) -> dict[str, bool]:
    """Which parts of `clip` its rendering shows."""
    path = trace(pixels)
    ends = [place(clip.start), place(clip.end or clip.start)] if clip.start else []
    distances = [np.hypot(*(point - end)) for point, end in zip(path[[0, -1]], ends, strict=True)]
    verdict = judge(pixels[0])
    return {
        "shape": verdict is not None and verdict.shape == clip.shape,
        "colour": verdict is not None and verdict.colour == clip.colour,
        "background": verdict is not None and verdict.background == clip.background,
        "start": distances[0] < NEAR,
        "end": distances[1] < NEAR,
        "straight": abs(rise(path)) < NEAR,
    }


def main() -> None:
    parser = sampling_parser(__doc__, count=16)
    parser.add_argument("--sheet", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pipe = load_pipeline(arguments.checkpoint)
    settings = {"seed": 0, "steps": arguments.steps, "guidance": arguments.guidance}
    clips = random_clips(arguments.count, seed=7)
    rendered = [render(pipe, clip.caption(), **settings) for clip in clips]
    answers = [right(pixels, clip) for pixels, clip in zip(rendered, clips, strict=True)]
    shares = {name: np.mean([answer[name] for answer in answers]) for name in answers[0]}
    print("seen:", " ".join(f"{name} {share:.2f}" for name, share in shares.items()))
    caption = f"a big red circle {HOP} from the left to the right on a white background"
    unknown = render(pipe, caption, **settings)
    print(f"{HOP}: rises {rise(trace(unknown)):.1f} pixels")
    if arguments.sheet:
        print("  " + "\n  ".join(clip.caption() for clip in clips))
        rows = [np.concatenate(list(pixels[::2]), axis=1) for pixels in (*rendered, unknown)]
        Image.fromarray(np.concatenate(rows)).save(arguments.sheet)


if __name__ == "__main__":
    main()
