"""Kandinsky 5 as plain data: the family of pictures, which the family of clips builds on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

from simpletuner.config.load import RunConfig
from simpletuner.config.schema import FamilyOptions
from simpletuner.config.values import Size
from simpletuner.errors import Problem
from simpletuner.models.kandinsky5.cost import IMAGE_COST, TRANSFORMER_CLASS
from simpletuner.models.kandinsky5.options import KandinskyOptions, write_rope_scale
from simpletuner.models.kandinsky5.templates import OFFICIAL, TemplateName, clean_caption
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import Component, FamilySpec, Flavour, Task

# A regular expression, because the bare name out_layer would also match the transformer's final layer.
ALL_LINEAR = (
    r"(text|visual)_transformer_blocks\.\d+\."
    r"((self|cross)_attention\.(to_query|to_key|to_value|out_layer)|feed_forward\.(in_layer|out_layer))"
)
# Only the visual blocks, and only attention among their own tokens.
SLIDER = r"visual_transformer_blocks\.\d+\.self_attention\.(to_query|to_key|to_value|out_layer)"

ATTENTION, FEED_FORWARD = r".+\.(self|cross)_attention", r".+\.feed_forward"
ADAPTER_CLASSES = {
    "Attention": ATTENTION,
    "FeedForward": FEED_FORWARD,
    "Kandinsky5Attention": ATTENTION,
    "Kandinsky5FeedForward": FEED_FORWARD,
    "Kandinsky5TransformerEncoderBlock": r"text_transformer_blocks\.\d+",
    "Kandinsky5TransformerDecoderBlock": r"visual_transformer_blocks\.\d+",
}

IMAGE_VAE_CLASS = "AutoencoderKL"

COMPONENTS = {
    "transformer": Component("transformer", "pretrained_transformer_model_name_or_path"),
    "vae": Component("vae", "pretrained_vae_model_name_or_path"),
    "text_encoder": Component("text_encoder", "qwen_text_encoder_model_name_or_path", ("qwen2_5_vl",)),
    "tokenizer": Component("tokenizer", "qwen_text_encoder_model_name_or_path"),
    "text_encoder_2": Component("text_encoder_2", kinds=("clip_text_model",)),
    "tokenizer_2": Component("tokenizer_2"),
    "scheduler": Component("scheduler", kinds=("FlowMatchEulerDiscreteScheduler",)),
}
TEMPLATES: dict[Task, TemplateName] = {"t2i": "image", "i2i": "image_edit", "t2v": "video", "i2v": "video"}

# Sizes that the image model was trained at, width x height: about one megapixel each.
IMAGE_SIZES = ((1024, 1024), (640, 1408), (1408, 640), (768, 1280), (1280, 768), (896, 1152), (1152, 896))


def _image_flavour(task: Task, stage: str) -> Flavour:
    repository = f"kandinskylab/Kandinsky-5.0-{task.upper()}-Lite-{stage}-Diffusers"
    needs = "a conditioning dataset with the source pictures" if task == "i2i" else ""
    return Flavour(f"{task}-lite-{stage}", repository, task, needs)


def check_image(config: RunConfig, flavour: Flavour) -> list[Problem]:
    """Problems and hints for Kandinsky 5 Image."""
    problems = []
    shift = config.flow.flow_schedule_shift
    if shift is not None and not 1 / 3 <= shift <= 5:
        message = f"{shift:g} is far from 1; this model trains unstably with extreme shifts."
        problems.append(Problem("flow_schedule_shift", message, fatal=False))
    guidance = config.validation.validation_guidance
    if guidance is not None and guidance >= 7:
        message = f"{guidance:g} oversaturates pictures of this model; about 5 is right."
        problems.append(Problem("validation_guidance", message, fatal=False))
    scale = config.family.of(KandinskyOptions).rope_scale
    if scale is not None:
        message = f"{write_rope_scale(scale)!r}: pictures are always sampled with 1,1,1; leave it at auto."
        problems.append(Problem("rope_scale", message))
    return problems


def check_image_sizes(
    config: RunConfig, flavour: Flavour, used: Sequence[Size], trained: Mapping[str, Sequence[Size]]
) -> list[Problem]:
    """Warnings about preview sizes that the stock pipeline does not render by default."""
    others = [f"{width}x{height}" for width, height in used if (width, height) not in IMAGE_SIZES]
    if not others or config.validation.validation_disable:
        return []
    native = ", ".join(f"{width}x{height}" for width, height in IMAGE_SIZES)
    message = (
        f"{', '.join(others)}: previews have this size, but the stock pipeline renders {native} only and would take "
        "the nearest of them; set its `resolutions` to [(width, height)] to reproduce a preview."
    )
    return [Problem("validation_resolution", message, fatal=False)]


def check_image_checkpoint(flavour: Flavour, source: ModelSource) -> list[Problem]:
    """Problems of the parts on this machine: wrong classes, or parts that do not fit together."""
    return check_parts(source, IMAGE_VAE_CLASS) + check_condition(flavour, source, wanted=flavour.task == "i2i")


def check_condition(flavour: Flavour, source: ModelSource, *, wanted: bool) -> list[Problem]:
    """Whether the transformer takes a source picture exactly if the flavour has one."""
    transformer = source.read_config("transformer")
    has = bool(transformer and transformer.get("visual_cond"))
    if transformer is None or wanted == has:
        return []
    kind = "takes" if has else "does not take"
    where = f"the transformer in {source['transformer'].location!r}"
    message = f"{flavour.name} does not fit: {where} {kind} a source picture (visual_cond is {str(has).lower()})."
    return [Problem("model_flavour", message)]


def check_parts(source: ModelSource, vae_class: str) -> list[Problem]:
    """Whether transformer and VAE have the right classes and the same channels; absent parts are not checked."""
    problems = []
    transformer, vae = source.read_config("transformer"), source.read_config("vae")
    if transformer is not None:
        where = f"the transformer in {source['transformer'].location!r}"
        if transformer.get("_class_name") != TRANSFORMER_CLASS:
            problems.append(Problem("pretrained_model_name_or_path", f"{where} is not a {TRANSFORMER_CLASS}."))
    if vae is not None and vae.get("_class_name") != vae_class:
        message = f"the VAE in {source['vae'].location!r} is a {vae.get('_class_name')}, not an {vae_class}."
        problems.append(Problem("pretrained_vae_model_name_or_path", message))
    if vae is not None and transformer is not None and vae.get("latent_channels") != transformer.get("in_visual_dim"):
        message = (
            f"the VAE has {vae.get('latent_channels')} channels, the transformer {transformer.get('in_visual_dim')}."
        )
        problems.append(Problem("pretrained_vae_model_name_or_path", message))
    return problems


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
    flavours=(
        _image_flavour("t2i", "sft"),
        _image_flavour("t2i", "pretrain"),
        _image_flavour("i2i", "sft"),
        _image_flavour("i2i", "pretrain"),
    ),
    adapter="simpletuner.models.kandinsky5.image:Kandinsky5ImageAdapter",
    options=KandinskyOptions,
    defaults={
        "flow_schedule_shift": 1.0,
        "resolution": 1024,
        "aspect_bucket_alignment": "16",
        "tokenizer_max_length": 256,
        "validation_guidance": 5.0,
        "validation_num_inference_steps": 30,
        "validation_resolution": "1024x1024",
        "validation_negative_prompt": "blurry, cropped, ugly",
        "crepa_block_index": 8,
    },
    components=COMPONENTS,
    size_multiple=16,
    vae_stride=8,
    patch_size=2,
    largest_side=2048,
    native_sizes={1024: IMAGE_SIZES},
    text_length_cap=512,
    text_reserve=1,
    captioner="simpletuner.annexes.captions.captioner:QwenCaptioner",
    lora_targets=("to_query", "to_key", "to_value"),
    lora_presets={"all-linear": ALL_LINEAR, "slider": SLIDER},
    adapter_classes=ADAPTER_CLASSES,
    quantised_layers=ALL_LINEAR,
    license="mit",
    check=check_image,
    check_sizes=check_image_sizes,
    check_checkpoint=check_image_checkpoint,
    clean_caption=clean_caption,
    text_fingerprint=text_fingerprint,
    fast_blocks=True,
    cost=IMAGE_COST,
    prompt_holds_picture=frozenset({"i2i"}),
    in_comfyui=True,
    token_blocks="num_visual_blocks",
    block_counts={"text_transformer_blocks": "num_text_blocks", "visual_transformer_blocks": "num_visual_blocks"},
)
