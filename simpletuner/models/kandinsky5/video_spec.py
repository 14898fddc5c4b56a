"""Kandinsky 5 Video as plain data: how it differs from Kandinsky 5 Image, and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simpletuner.config.load import RunConfig
from simpletuner.config.values import Size
from simpletuner.errors import Problem
from simpletuner.models.kandinsky5.cost import VIDEO_COST
from simpletuner.models.kandinsky5.geometry import TILE_SIDE, is_sparse, is_sparse_flavour, rope_scale_of_size
from simpletuner.models.kandinsky5.options import KandinskyOptions, write_rope_scale
from simpletuner.models.kandinsky5.spec import IMAGE_SIZES, KANDINSKY5_IMAGE, check_condition, check_parts
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import Flavour, Task

VAE_CLASS = "AutoencoderKLHunyuanVideo"
NABLA_MULTIPLE = KANDINSKY5_IMAGE.size_multiple * TILE_SIDE  # pixels per side of a tile
# With fewer frames the i2v pipeline renormalises more frames than there are, and returns NaN.
SHORTEST_I2V_PREVIEW = 17
# Further sizes that the model was trained at, width x height, besides those of the image model.
SIZES_512 = ((512, 512), (512, 768), (768, 512))
GUIDANCE_RANGE = (2, 6)


def _flavour(name: str) -> Flavour:
    """The flavour of a name: `t2v-pro-sft-5s-hd` is in the repository Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers."""
    kind, *words = name.removesuffix("-hd").split("-")
    title = "-".join(word.capitalize() if word in ("lite", "pro") else word for word in words)
    task: Task = "i2v" if kind == "i2v" else "t2v"
    repository = f"kandinskylab/Kandinsky-5.0-{kind.upper()}-{title}-Diffusers"
    steps = next((count for stage, count in DISTILLED.items() if stage in words), None)
    defaults = {} if steps is None else {"validation_guidance": 1.0, "validation_num_inference_steps": steps}
    return Flavour(name, repository, task, defaults=defaults, distilled=steps is not None)


# Stages that sample without guidance, and in how many steps.
DISTILLED = {"nocfg": 50, "distilled16steps": 16, "distilled": 16}


FLAVOUR_NAMES = (
    *(f"t2v-lite-{stage}-{length}" for stage in ("sft", "pretrain") for length in ("5s", "10s")),
    *(f"t2v-pro-{stage}-{length}-hd" for stage in ("sft", "pretrain") for length in ("5s", "10s")),
    "i2v-lite-5s",
    "i2v-pro-sft-5s",
    *(f"t2v-lite-{stage}-{length}" for stage in ("nocfg", "distilled16steps") for length in ("5s", "10s")),
    "t2v-pro-distilled-5s-hd",
    "i2v-pro-distilled-5s",
)


def check_video(config: RunConfig, flavour: Flavour) -> list[Problem]:
    """Problems and hints for Kandinsky 5 Video."""
    problems = [*_check_guidance(config, flavour), *_check_preview(config, flavour)]
    if config.schedule.train_batch_size > 1:
        message = f"{config.schedule.train_batch_size}: clips need much memory; 1 with gradient accumulation is usual."
        problems.append(Problem("train_batch_size", message, fatal=False))
    return problems


def _check_guidance(config: RunConfig, flavour: Flavour) -> list[Problem]:
    guidance, (low, high) = config.validation.validation_guidance, GUIDANCE_RANGE
    if flavour.distilled:
        if guidance in (None, 1.0):
            return []
        message = f"{guidance:g}: {flavour.name} is distilled to sample without guidance, which is 1."
        return [Problem("validation_guidance", message, fatal=False)]
    if guidance is None or low <= guidance <= high:
        return []
    message = f"{guidance:g}: below {low} or above {high} this model's clips turn black or noisy."
    return [Problem("validation_guidance", message, fatal=False)]


def check_sizes(
    config: RunConfig, flavour: Flavour, used: Sequence[Size], trained: Mapping[str, Sequence[Size]]
) -> list[Problem]:
    """Warnings about sizes that the stock pipeline samples with another RoPE scale than they are trained with."""
    explicit = config.family.of(KandinskyOptions).rope_scale
    scale = explicit or rope_scale_of_size(used[0] if used else None, flavour.name)
    others = [size for size in used if rope_scale_of_size(size, flavour.name) != scale]
    problems = []
    if others:
        message = f"{write_rope_scale(scale)} is trained; the pipeline samples {_sizes(others)} with another scale."
        problems.append(Problem("validation_resolution", message, fatal=False))
    if explicit is not None:
        return problems  # an explicit scale is meant for every bucket
    for name, sizes in trained.items():
        strange = [size for size in sizes if rope_scale_of_size(size, flavour.name) != scale]
        if strange:
            theirs = write_rope_scale(rope_scale_of_size(strange[0], flavour.name))
            at = f", as {_sizes(used[:1])} is sampled" if used else ""
            message = (
                f"{_sizes(strange)} of {name}: the pipeline samples this size with {theirs}, it is trained with "
                f"{write_rope_scale(scale)}{at}. Samples of the bucket's size would differ from training; "
                "ignore this if you will sample at another size."
            )
            problems.append(Problem("rope_scale", message, fatal=False))
    return problems


def _sizes(sizes: Sequence[Size]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes)


def _check_preview(config: RunConfig, flavour: Flavour) -> list[Problem]:
    frames = config.validation.validation_num_video_frames
    if flavour.task != "i2v" or frames is None or frames >= SHORTEST_I2V_PREVIEW:
        return []
    message = f"{frames}: the i2v pipeline returns NaN below {SHORTEST_I2V_PREVIEW} frames."
    return [Problem("validation_num_video_frames", message)]


def pixel_grid(flavour: Flavour, source: ModelSource) -> int:
    """128 px with block-sparse attention, else 16; decided by the flavour if the checkpoint is not here."""
    transformer = source.read_config("transformer")
    sparse = is_sparse_flavour(flavour.name) if transformer is None else is_sparse(transformer)
    return NABLA_MULTIPLE if sparse else KANDINSKY5_IMAGE.size_multiple


def check_video_checkpoint(flavour: Flavour, source: ModelSource) -> list[Problem]:
    """Problems of the parts on this machine: wrong classes, or parts that do not fit together."""
    problems = check_parts(source, VAE_CLASS)
    if flavour.task == "i2v":
        problems += check_condition(flavour, source, wanted=True)
    return problems


KANDINSKY5_VIDEO = replace(
    KANDINSKY5_IMAGE,
    name="kandinsky5-video",
    title="Kandinsky 5 Video",
    media="video",
    flavours=tuple(_flavour(name) for name in FLAVOUR_NAMES),
    adapter="simpletuner.models.kandinsky5.video:Kandinsky5VideoAdapter",
    defaults={
        **KANDINSKY5_IMAGE.defaults,
        "flow_schedule_shift": 5.0,
        "resolution": 512,
        "framerate": 24,
        "validation_resolution": "512x768",
        "validation_num_video_frames": 61,
    },
    native_sizes={512: SIZES_512, 1024: IMAGE_SIZES},
    text_length_cap=256,
    check=check_video,
    check_sizes=check_sizes,
    check_checkpoint=check_video_checkpoint,
    cost=VIDEO_COST,
    grid=pixel_grid,
    frame_rate=24,
    frame_stride=4,
    slices_convolutions=True,
)
