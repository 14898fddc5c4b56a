"""Kandinsky 5 as plain data: the family of pictures, and that of clips, which differs in fields.

`family.toml` has their defaults.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simpletuner.config.json_reader import read_toml
from simpletuner.config.schema import FamilyOptions, RunConfig
from simpletuner.config.types import Size
from simpletuner.errors import Problems
from simpletuner.models.kandinsky5.cost import (
    FAMILY,
    IMAGE_COST,
    PACKAGE,
    TRANSFORMER_CLASS,
    VIDEO_COST,
    attention_heads,
    published,
)
from simpletuner.models.kandinsky5.options import (
    NABLA_SETTINGS,
    TILE_SIDE,
    KandinskyOptions,
    is_dense_at_size,
    is_sparse,
    is_sparse_flavour,
    rope_scale_of_size,
    transformer_overrides,
    write_rope_scale,
)
from simpletuner.models.kandinsky5.templates import OFFICIAL, TemplateName, clean_caption
from simpletuner.models.source import ModelSource, check_channels
from simpletuner.models.spec import (
    CaptionFormat,
    Component,
    FamilyChecks,
    FamilySpec,
    Flavour,
    OriginalWeights,
    Task,
)

# A regular expression, because the bare name out_layer would also match the transformer's final
# layer.
ALL_LINEAR = (
    r"(text|visual)_transformer_blocks\.\d+\."
    r"((self|cross)_attention\.(to_query|to_key|to_value|out_layer)|feed_forward\.(in_layer|out_layer))"
)
# Only the visual blocks, and only attention among their own tokens.
SLIDER = r"visual_transformer_blocks\.\d+\.self_attention\.(to_query|to_key|to_value|out_layer)"

COMPONENTS = {
    "transformer": Component(
        "transformer", "pretrained_transformer_model_name_or_path", (TRANSFORMER_CLASS,)
    ),
    "vae": Component("vae", "pretrained_vae_model_name_or_path", ("AutoencoderKL",)),
    "text_encoder": Component(
        "text_encoder", "qwen_text_encoder_model_name_or_path", ("qwen2_5_vl",)
    ),
    "tokenizer": Component("tokenizer", "qwen_text_encoder_model_name_or_path"),
    # transformers loads the text part of a whole CLIP.
    "text_encoder_2": Component("text_encoder_2", kinds=("clip_text_model", "clip")),
    "tokenizer_2": Component("tokenizer_2"),
    "scheduler": Component("scheduler", kinds=("FlowMatchEulerDiscreteScheduler",)),
}
TEMPLATES: dict[Task, TemplateName] = {
    "t2i": "image",
    "i2i": "image_edit",
    "t2v": "video",
    "i2v": "video",
}

# Sizes that the image model was trained at, width x height: about one megapixel each.
IMAGE_SIZES = (
    Size(1024, 1024),
    Size(640, 1408),
    Size(1408, 640),
    Size(768, 1280),
    Size(1280, 768),
    Size(896, 1152),
    Size(1152, 896),
)


# Further sizes that the model of clips was trained at.
SIZES_512 = (Size(512, 512), Size(512, 768), Size(768, 512))
GUIDANCE_RANGE = (2, 6)  # of clips
# With fewer frames the i2v pipeline renormalises more frames than there are, and returns NaN.
SHORTEST_I2V_PREVIEW = 17
SIZE_MULTIPLE = 16


def read_flavours(*tasks: Task) -> tuple[Flavour, ...]:
    """The published checkpoints for these tasks, in the order of `flavours.toml`."""
    table = read_toml(PACKAGE, "flavours.toml")
    return tuple(_flavour(name, row) for name, row in table.items() if row["task"] in tasks)


def _flavour(name: str, row: Mapping[str, Any]) -> Flavour:
    """One entry of `flavours.toml`."""
    task: Task = row["task"]
    steps = row.get("distilled_steps")
    defaults: dict[str, object] = {}
    if task == "i2v":
        # A prompt is rendered from several pictures, and comparing weights would double the clips.
        defaults["ema_validation"] = "ema_only"
    if steps is not None:
        defaults["validation_guidance"] = 1.0
        defaults["validation_num_inference_steps"] = steps
    return Flavour(
        name=name,
        repository=row["repository"],
        task=task,
        needs="a conditioning dataset with the source pictures" if task == "i2i" else "",
        defaults=defaults,
        distilled=steps is not None,
        # ComfyUI has no node that gives its model of pictures a source picture.
        changes={"in_comfyui": False} if task == "i2i" else {},
        original=OriginalWeights(**row["original"]) if "original" in row else None,
    )


def check_image(config: RunConfig, flavour: Flavour, report: Problems) -> None:
    """Problems and hints for Kandinsky 5 Image."""
    shift = config.flow.flow_schedule_shift
    guidance = config.validation.validation_guidance
    if shift is not None and not 1 / 3 <= shift <= 5:
        message = f"{shift:g} is far from 1; this model trains unstably with extreme shifts."
        report.warn("flow_schedule_shift", message)
    if guidance is not None and guidance >= 7:
        message = f"{guidance:g} oversaturates pictures of this model; about 5 is right."
        report.warn("validation_guidance", message)
    scale = config.family.of(KandinskyOptions).rope_scale
    if scale is not None:
        message = (
            f"{write_rope_scale(scale)!r}: pictures are always sampled with 1,1,1; leave it "
            "at auto."
        )
        report.error("rope_scale", message)


def check_image_sizes(
    config: RunConfig,
    flavour: Flavour,
    used: Sequence[Size],
    trained: Mapping[str, Sequence[Size]],
    report: Problems,
) -> None:
    """Warnings about preview sizes that the stock pipeline does not render by default."""
    unusual = [size for size in used if size not in IMAGE_SIZES]
    base = config.model.pretrained_model_name_or_path
    # A checkpoint with another name may support other sizes.
    is_published = base is None or Path(base).name == Path(flavour.repository).name
    if unusual and is_published and not config.validation.validation_disable:
        message = (
            f"the stock pipeline cannot repeat previews of {_sizes(unusual)}: it takes the nearest "
            f"of {_sizes(IMAGE_SIZES)}. Choose one of these, or set the pipeline's resolutions to "
            "[(width, height)]."
        )
        report.warn("validation_resolution", message)


def check_video(config: RunConfig, flavour: Flavour, report: Problems) -> None:
    """Problems and hints for Kandinsky 5 Video."""
    guidance = config.validation.validation_guidance
    frames = config.validation.validation_num_video_frames
    low, high = GUIDANCE_RANGE
    batch_size = config.schedule.train_batch_size
    if flavour.distilled and guidance not in (None, 1.0):
        message = (
            f"{guidance:g}: {flavour.name} is distilled to sample without guidance, which is 1."
        )
        report.warn("validation_guidance", message)
    elif not flavour.distilled and guidance is not None and not low <= guidance <= high:
        message = (
            f"{guidance:g}: below {low} or above {high} this model's clips turn black or noisy."
        )
        report.warn("validation_guidance", message)
    if flavour.task == "i2v" and frames is not None and frames < SHORTEST_I2V_PREVIEW:
        message = f"{frames}: the i2v pipeline returns NaN below {SHORTEST_I2V_PREVIEW} frames."
        remedy = {"validation_num_video_frames": SHORTEST_I2V_PREVIEW}
        report.error("validation_num_video_frames", message, remedy=remedy)
    if batch_size > 1:
        message = f"{batch_size}: clips need much memory; 1 with gradient accumulation is usual."
        report.warn("train_batch_size", message)


def check_video_sizes(
    config: RunConfig,
    flavour: Flavour,
    used: Sequence[Size],
    trained: Mapping[str, Sequence[Size]],
    report: Problems,
) -> None:
    """Warnings about sizes that are sampled with another RoPE scale than they are trained with."""
    explicit = config.family.of(KandinskyOptions).rope_scale
    trained_scale = explicit or rope_scale_of_size(used[0] if used else None, flavour.name)

    def at_another_scale(sizes: Sequence[Size]) -> list[Size]:
        return [size for size in sizes if rope_scale_of_size(size, flavour.name) != trained_scale]

    sampled_otherwise = at_another_scale(used)
    if sampled_otherwise:
        message = (
            f"{write_rope_scale(trained_scale)} is trained; the pipeline samples "
            f"{_sizes(sampled_otherwise)} with another scale."
        )
        report.warn("validation_resolution", message)
    if explicit is not None:
        return  # an explicit scale is meant for every bucket
    for dataset, sizes in trained.items():
        trained_otherwise = at_another_scale(sizes)
        if not trained_otherwise:
            continue
        size = trained_otherwise[0]
        sampled_scale = rope_scale_of_size(size, flavour.name)
        where = f"at {_sizes(used[:1])}, as previews are," if used else "at the model's own sizes,"
        message = (
            f"clips of {dataset} are trained at {_sizes(trained_otherwise)}. If you will sample "
            f"{where} ignore this; else set crop_aspect closest: {size} is sampled "
            f"with RoPE scale {write_rope_scale(sampled_scale)}, and trained with "
            f"{write_rope_scale(trained_scale)}."
        )
        report.warn("rope_scale", message)


def _sizes(sizes: Sequence[Size]) -> str:
    """Sizes as in messages, separated by commas."""
    return ", ".join(map(str, sizes))


def check_checkpoint(flavour: Flavour, source: ModelSource, report: Problems) -> None:
    """Problems of parts on this machine that do not fit together."""
    check_channels(source, "in_visual_dim", "latent_channels", report)
    _check_nabla(flavour, source, report)
    transformer = source["transformer"].read_config()
    if transformer is None or flavour.task == "t2v":  # t2v samples with either kind
        return
    needs_picture = flavour.task in ("i2i", "i2v")
    takes_picture = bool(transformer.get("visual_cond"))
    if needs_picture == takes_picture:
        return
    takes = "takes" if takes_picture else "does not take"
    message = (
        f"{flavour.name} does not fit: the transformer in {source['transformer'].location!r} "
        f"{takes} a source picture (visual_cond is {str(takes_picture).lower()})."
    )
    report.error("model_flavour", message)


def _check_nabla(flavour: Flavour, source: ModelSource, report: Problems) -> None:
    """Report `attention_type` nabla for a checkpoint that has no settings of NABLA."""
    part = source["transformer"]
    if not is_sparse(part.overrides):
        return
    settings = part.read_config()
    if settings is None:
        has_settings = is_sparse_flavour(flavour.name)
    else:
        has_settings = all(settings.get(name) is not None for name in NABLA_SETTINGS)
    if not has_settings:
        message = (
            f"'nabla': {flavour.name} was not trained with block-sparse attention, and its "
            f"config.json has no settings of it ({', '.join(NABLA_SETTINGS)}); use auto or dense."
        )
        report.error("attention_type", message)


def pixel_grid(flavour: Flavour, source: ModelSource) -> int:
    """128 px, a tile, with block-sparse attention; else 16.

    The flavour decides if the checkpoint is not on this machine.
    """
    if is_sparse(_transformer_settings(flavour, source)):
        return SIZE_MULTIPLE * TILE_SIDE
    return SIZE_MULTIPLE


def _transformer_settings(flavour: Flavour, source: ModelSource) -> Mapping[str, object]:
    """The config.json of the transformer as the run uses it, or as it is published."""
    part = source["transformer"]
    settings = part.read_config()
    if settings is not None:
        return settings
    return {**published(flavour.name), **part.overrides}


def describe_attention(flavour: Flavour, source: ModelSource, sizes: Sequence[Size]) -> str | None:
    """Which attention is trained and sampled, for the plan; None where only one is possible."""
    sparse = is_sparse(_transformer_settings(flavour, source))
    kind = "block-sparse (NABLA)" if sparse else "dense"
    if source["transformer"].overrides:
        return f"{kind}, by attention_type, also in previews, samples and the program of the result"
    if not sparse:
        return None
    kind += ", as the diffusers pipeline samples"
    if sizes and is_dense_at_size(flavour.name, sizes[0]):
        return (
            f"{kind}; the publisher's own program samples five seconds at {sizes[0]} densely, "
            "which is attention_type dense"
        )
    return kind


def text_fingerprint(options: FamilyOptions, flavour: Flavour) -> str:
    """The template's text, or the release of diffusers that defines it."""
    name = TEMPLATES[flavour.task]
    if options.of(KandinskyOptions).text_template == "official":
        return OFFICIAL[name].text
    return f"diffusers {importlib.metadata.version('diffusers')} {name}"


KANDINSKY5_IMAGE = FamilySpec(
    name="kandinsky5-image",
    title="Kandinsky 5 Image",
    media="image",
    flavours=read_flavours("t2i", "i2i"),
    adapter="simpletuner.models.kandinsky5.image:Kandinsky5ImageAdapter",
    options=KandinskyOptions,
    defaults=FAMILY["defaults"]["image"],
    components=COMPONENTS,
    transformer_overrides=transformer_overrides,
    size_multiple=SIZE_MULTIPLE,
    vae_stride=8,
    patch_size=2,
    largest_side=128 * 16,  # the table of positions has 128 per side, of 16 pixels each
    native_sizes={1024: IMAGE_SIZES},
    lora_targets=("to_query", "to_key", "to_value"),
    lora_presets={"all-linear": ALL_LINEAR, "slider": SLIDER},
    adapter_classes=FAMILY["adapter_classes"],
    quantised_layers=ALL_LINEAR,
    license="mit",
    checks=FamilyChecks(check_image, check_checkpoint, check_image_sizes),
    captions=CaptionFormat(
        longest=512,
        reserved=1,  # <|im_end|>, the end of the template
        clean=clean_caption,
        fingerprint=text_fingerprint,
        picture_tasks=frozenset({"i2i"}),
        captioner="simpletuner.annexes.captions.captioner:QwenCaptioner",
    ),
    fast_blocks=True,
    heads=attention_heads,
    cost=IMAGE_COST,
    in_comfyui=True,
    lora_settings_file="config_lora.json",
    token_blocks="num_visual_blocks",
    block_counts={
        "text_transformer_blocks": "num_text_blocks",
        "visual_transformer_blocks": "num_visual_blocks",
    },
)

KANDINSKY5_VIDEO = replace(
    KANDINSKY5_IMAGE,
    name="kandinsky5-video",
    title="Kandinsky 5 Video",
    media="video",
    flavours=read_flavours("t2v", "i2v"),
    adapter="simpletuner.models.kandinsky5.video:Kandinsky5VideoAdapter",
    defaults={**KANDINSKY5_IMAGE.defaults, **FAMILY["defaults"]["video"]},
    components={
        **COMPONENTS,
        "vae": replace(COMPONENTS["vae"], kinds=("AutoencoderKLHunyuanVideo",)),
    },
    native_sizes={512: SIZES_512, 1024: IMAGE_SIZES},
    checks=FamilyChecks(check_video, check_checkpoint, check_video_sizes),
    captions=replace(KANDINSKY5_IMAGE.captions, longest=256),
    cost=VIDEO_COST,
    grid=pixel_grid,
    attention=describe_attention,
    frame_rate=24,
    frame_stride=4,  # 61 frames -> 16 latent frames
    slices_convolutions=True,
)
