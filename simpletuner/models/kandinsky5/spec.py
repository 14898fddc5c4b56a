"""Kandinsky 5 as plain data: flavours, defaults, sizes and the checks that only this family needs."""

from __future__ import annotations

from simpletuner.config.load import RunConfig
from simpletuner.errors import Problem
from simpletuner.models.spec import Component, FamilySpec, Flavour

# The bare name out_layer also matches the final layer, which takes another input; hence a regular expression.
ALL_LINEAR = (
    r"(text|visual)_transformer_blocks\.\d+\."
    r"((self|cross)_attention\.(to_query|to_key|to_value|out_layer)|feed_forward\.(in_layer|out_layer))"
)

# About one megapixel each, width x height: the sizes the image model was trained at.
IMAGE_SIZES = ((1024, 1024), (640, 1408), (1408, 640), (768, 1280), (1280, 768), (896, 1152), (1152, 896))


def _image_flavour(name: str, task: str, stage: str) -> Flavour:
    repository = f"kandinskylab/Kandinsky-5.0-{task.upper()}-Lite-{stage}-Diffusers"
    if task == "i2i":
        return Flavour(name, repository, "i2i", needs="a conditioning dataset with the source pictures")
    return Flavour(name, repository, "t2i")


def check_image(config: RunConfig, flavour: Flavour) -> list[Problem]:
    """Problems and hints for Kandinsky 5 Image."""
    problems = []
    shift = config.flow.flow_schedule_shift
    if shift is not None and not 1 / 3 <= shift <= 5:
        message = f"{shift:g} is far from 1; this model trains unstably with extreme shifts."
        problems.append(Problem("flow_schedule_shift", message, fatal=False))
    guidance = config.validation.validation_guidance
    if guidance is not None and guidance >= 7:
        message = f"{guidance:g} burns pictures of this model; about 5 is right."
        problems.append(Problem("validation_guidance", message, fatal=False))
    if config.text.rope_scale != "auto":
        message = f"{config.text.rope_scale!r}: pictures are sampled with 1,1,1 and nothing else; leave it at auto."
        problems.append(Problem("rope_scale", message))
    return problems


KANDINSKY5_IMAGE = FamilySpec(
    name="kandinsky5-image",
    title="Kandinsky 5 Image",
    media="image",
    flavours=(
        _image_flavour("t2i-lite-sft", "t2i", "sft"),
        _image_flavour("t2i-lite-pretrain", "t2i", "pretrain"),
        _image_flavour("i2i-lite-sft", "i2i", "sft"),
        _image_flavour("i2i-lite-pretrain", "i2i", "pretrain"),
    ),
    adapter="simpletuner.models.kandinsky5.image:Kandinsky5ImageAdapter",
    defaults={
        "flow_schedule_shift": 1.0,
        "resolution": 1024,
        "aspect_bucket_alignment": "16",
        "tokenizer_max_length": 256,
        "validation_guidance": 5.0,
        "validation_num_inference_steps": 30,
        "validation_resolution": "1024x1024",
        "validation_negative_prompt": "blurry, cropped, ugly",
    },
    components={
        "transformer": Component("transformer", "pretrained_transformer_model_name_or_path"),
        "vae": Component("vae", "pretrained_vae_model_name_or_path"),
        "text_encoder": Component("text_encoder", "qwen_text_encoder_model_name_or_path"),
        "tokenizer": Component("tokenizer", "qwen_text_encoder_model_name_or_path"),
        "text_encoder_2": Component("text_encoder_2"),
        "tokenizer_2": Component("tokenizer_2"),
        "scheduler": Component("scheduler"),
    },
    size_multiple=16,
    vae_stride=8,
    patch_size=2,
    largest_side=2048,
    native_sizes={1024: IMAGE_SIZES},
    text_length_cap=512,
    lora_targets=("to_query", "to_key", "to_value"),
    lora_presets={"all-linear": ALL_LINEAR},
    license="mit",
    check=check_image,
)
