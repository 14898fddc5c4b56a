"""Sana Video as plain data: its flavours, its prompt format and its checks.

`family.toml` has its defaults and sizes. A caption is lower-cased and stripped, followed by an
optional motion score, and preceded by an instruction. Negative prompts and the empty caption have
neither. `text` takes the default instruction from the pipeline.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from typing import Any

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import FamilyOptions, RunConfig
from simpletuner.config.techniques.tread import TreadConfig
from simpletuner.config.types import Size
from simpletuner.errors import Problems
from simpletuner.models.sanavideo.cost import (
    COST,
    COST_720,
    FAMILY,
    LTX2,
    TEXT_LENGTH,
    TRANSFORMER_CLASS,
    WAN,
)
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.source import MODEL_KEY, VAE_KEY, ModelSource, check_channels
from simpletuner.models.spec import CaptionFormat, Component, FamilyChecks, FamilySpec, Flavour

SCHEDULERS = (
    "DPMSolverMultistepScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "UniPCMultistepScheduler",
)
LONGEST_CLIP = 81  # frames that the model was trained with
POSITIONS = 1024  # tokens per side in the position table

# The feed-forward has no linear layers, but its two pointwise convolutions are linear in each
# position.
ALL_LINEAR = (
    r"transformer_blocks\.\d+\."
    r"(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.(conv_inverted|conv_point))"
)
SLIDER = r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)"
QUANTISED = r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"

SIZES = {
    int(resolution): [Size(width, height) for width, height in sizes]
    for resolution, sizes in FAMILY["sizes"].items()
}

# A caption that already ends with a motion score keeps it.
MOTION_SCORE = re.compile(r"motion score: *\d+(\.\d+)?\.?$")


def clean_caption(caption: str) -> str:
    """Clean a caption as the pipeline does."""
    return caption.lower().strip()


def with_motion_score(caption: str, score: float | None) -> str:
    """Append the score to a cleaned caption, unless it is empty or already ends with one."""
    if score is None or not caption or MOTION_SCORE.search(caption):
        return caption
    return f"{caption} motion score: {score:g}."


def dataset_caption(dataset: DatasetConfig, caption: str) -> str:
    """Append the dataset's own score to a caption; the score of the run is then not appended."""
    if dataset.sana_motion_score is None:
        return caption
    return with_motion_score(clean_caption(caption), dataset.sana_motion_score)


def text_fingerprint(options: FamilyOptions, flavour: Flavour) -> str:
    """Instruction and motion score; the release of diffusers identifies its own instruction."""
    sana = options.of(SanaOptions)
    lines = sana.sana_complex_human_instruction
    if lines is True:
        instruction = f"diffusers {importlib.metadata.version('diffusers')} instruction"
    else:
        instruction = json.dumps(lines)
    return f"{instruction}; motion score {sana.sana_motion_score}"


def check_video(config: RunConfig, flavour: Flavour, report: Problems) -> None:
    """Problems and hints for Sana Video."""
    if config.techniques.of(TreadConfig).tread_config is not None:
        message = (
            "cannot be used with Sana Video: its feed-forward is a convolution over the whole "
            "grid of tokens, so no token can be dropped; remove the key."
        )
        report.error("tread_config", message)
    frames = config.validation.validation_num_video_frames
    if frames is not None and frames > LONGEST_CLIP:
        message = f"{frames}: the model was trained with up to {LONGEST_CLIP} frames."
        remedy = {"validation_num_video_frames": LONGEST_CLIP}
        report.warn("validation_num_video_frames", message, remedy=remedy)
    if config.caching.vae_dtype not in (None, "fp32"):
        message = (
            f"{config.caching.vae_dtype!r}: the pipelines encode and decode in fp32, so latents "
            "will differ."
        )
        report.warn("vae_dtype", message)


def check_checkpoint(flavour: Flavour, source: ModelSource, report: Problems) -> None:
    """Problems of parts on this machine that do not fit together."""
    vae = source["vae"].read_config() or {}
    if vae.get("_class_name") == WAN:
        check_channels(source, "in_channels", "z_dim", report)
        _check_statistics(vae, source["vae"].location, report)
    else:  # LTX-2 has its statistics among its weights
        check_channels(source, "in_channels", "latent_channels", report)
    transformer = source["transformer"].read_config()
    if transformer is None:
        return
    channels = transformer.get("in_channels")
    width = transformer.get("caption_channels")
    if transformer.get("out_channels") not in (None, channels):
        message = (
            f"the transformer takes {channels} channels but returns {transformer['out_channels']}."
        )
        report.error(MODEL_KEY, message)
    text_encoder = source["text_encoder"].read_config()
    if text_encoder is not None and text_encoder.get("hidden_size") != width:
        message = (
            f"the text encoder is {text_encoder.get('hidden_size')} wide, the transformer reads "
            f"{width}."
        )
        report.error("pretrained_gemma_model_name_or_path", message)


def _check_statistics(vae: Mapping[str, Any], location: str, report: Problems) -> None:
    """Report statistics in the config of a Wan VAE that do not cover every channel."""
    for name in ("latents_mean", "latents_std"):
        count = len(vae.get(name) or ())
        if count != vae.get("z_dim"):
            message = f"{count} values of {name} for {vae.get('z_dim')} channels."
            report.error(VAE_KEY, f"the VAE in {location!r} has {message}")


COMPONENTS = {
    "transformer": Component(
        "transformer", "pretrained_transformer_model_name_or_path", (TRANSFORMER_CLASS,)
    ),
    "vae": Component("vae", VAE_KEY, (WAN,)),
    "text_encoder": Component("text_encoder", "pretrained_gemma_model_name_or_path", ("gemma2",)),
    "tokenizer": Component("tokenizer", "pretrained_gemma_model_name_or_path"),
    "scheduler": Component("scheduler", kinds=SCHEDULERS),
}
SANA_VIDEO = FamilySpec(
    name="sanavideo",
    title="Sana Video",
    media="video",
    flavours=(
        Flavour(
            "2b-480p",
            "Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
            "t2v",
            dataset_task="i2v",
        ),
        Flavour(
            "2b-720p",
            "Efficient-Large-Model/SANA-Video_2B_720p_diffusers",
            "t2v",
            dataset_task="i2v",
            defaults={"resolution": 720, "validation_resolution": "1280x704"},
            changes={
                "vae_stride": 32,
                "patch_size": 1,
                "frame_stride": 8,  # 81 frames -> 11 latent frames
                # A token covers 32 pixels: stride 32, patches of 1.
                "largest_side": POSITIONS * 32,
                "native_sizes": {720: SIZES[720]},
                "components": {**COMPONENTS, "vae": Component("vae", VAE_KEY, (LTX2,))},
                "cost": COST_720,
                "decodes_in_strips": True,
            },
        ),
    ),
    adapter="simpletuner.models.sanavideo.video:SanaVideoAdapter",
    options=SanaOptions,
    block_counts={"transformer_blocks": "num_layers"},
    defaults=FAMILY["defaults"],
    fixed=FAMILY["fixed"],
    components=COMPONENTS,
    size_multiple=32,
    vae_stride=8,
    patch_size=2,
    # A token covers 16 pixels: stride 8, patches of 2.
    largest_side=POSITIONS * 16,
    native_sizes={480: SIZES[480]},
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    lora_presets={"all-linear": ALL_LINEAR, "slider": SLIDER},
    adapter_classes=FAMILY["adapter_classes"],
    quantised_layers=QUANTISED,
    license="other",
    checks=FamilyChecks(check_video, check_checkpoint),
    captions=CaptionFormat(
        longest=TEXT_LENGTH,
        reserved=2,
        clean=clean_caption,
        fingerprint=text_fingerprint,
        bare_fingerprint="bare",  # no instruction and no motion score
        dataset_keys=frozenset({"sana_motion_score"}),
        apply_dataset_keys=dataset_caption,
    ),
    cost=COST,
    frame_rate=16,
    frame_stride=4,  # 81 frames -> 21 latent frames
    decodes_in_strips=False,
)
