"""Sana Video as plain data: the flavour, its defaults and sizes, and its checks."""

from __future__ import annotations

from typing import Any

from simpletuner.config.load import RunConfig
from simpletuner.errors import Problem
from simpletuner.models.sanavideo.cost import COST, COST_720, TEXT_LENGTH, TRANSFORMER_CLASS
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.sanavideo.prompts import bare_fingerprint, clean_caption, dataset_caption, text_fingerprint
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import Component, FamilySpec, Flavour

WAN, LTX2 = "AutoencoderKLWan", "AutoencoderKLLTX2Video"  # classes of the VAE
MODEL_KEY, VAE_KEY = "pretrained_model_name_or_path", "pretrained_vae_model_name_or_path"
SCHEDULERS = ("DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")
LONGEST_CLIP = 81  # frames that the model was trained with
POSITIONS = 1024  # tokens per side in the position table
NOT_SUPPORTED = {
    "longlive": "LongLive generates block by block, for which diffusers has no pipeline to train for",
    "video_2.0": "Sana Video 2.0 has another architecture, which diffusers does not have yet",
}

# The feed-forward has no linear layers, but its two pointwise convolutions are linear in each position.
ALL_LINEAR = r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.(conv_inverted|conv_point))"
SLIDER = r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)"
QUANTISED = r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"

# The pipeline's own 480p sizes, width x height, rounded to multiples of 32 pixels, which the pipeline requires.
SIZES_480 = (
    (640, 640),
    *((896, 448), (832, 480), (768, 512), (704, 576)),
    *((448, 896), (480, 832), (512, 768), (576, 704)),
    *((576, 672), (512, 832)),
)

SIZES_720 = (
    (960, 960),
    *((1344, 672), (1280, 704), (1248, 736), (1152, 800), (1088, 832), (1024, 896)),
    *((672, 1344), (704, 1280), (800, 1152), (832, 1088), (896, 1024)),
)

# From the pipeline's documentation.
NEGATIVE_PROMPT = (
    "A chaotic sequence with misshapen, deformed limbs in heavy motion blur, sudden disappearance, jump cuts, jerky"
    " movements, rapid shot changes, frames out of sync, inconsistent character shapes, temporal artifacts, jitter,"
    " and ghosting effects, creating a disorienting visual experience."
)

# Logit-normal sigmas with a shift of 3. The checkpoint's scheduler is for sampling and does not define training.
TRAINING_SIGMAS = {
    "flow_schedule_shift": 3.0,
    "flow_schedule_auto_shift": False,
    "flow_sigmoid_scale": 1.0,
    "flow_use_uniform_schedule": False,
    "flow_use_beta_schedule": False,
    "flow_beta_schedule_alpha": 2.0,
    "flow_beta_schedule_beta": 2.0,
}


def check_video(config: RunConfig, flavour: Flavour) -> list[Problem]:
    """Problems and hints for Sana Video."""
    named = f"video_{config.model.model_flavour} {config.model.pretrained_model_name_or_path}".lower()
    reasons = [reason for word, reason in NOT_SUPPORTED.items() if word in named]
    problems = [Problem("model_flavour", f"cannot be trained: {reason}.") for reason in reasons]
    if config.tread.tread_config is not None:
        message = (
            "cannot be used with Sana Video: its feed-forward is a convolution over the whole grid of tokens, "
            "so no token can be dropped; remove the key."
        )
        problems.append(Problem("tread_config", message))
    frames = config.validation.validation_num_video_frames
    if frames is not None and frames > LONGEST_CLIP:
        message = f"{frames}: the model was trained with up to {LONGEST_CLIP} frames."
        problems.append(Problem("validation_num_video_frames", message, fatal=False))
    if config.caching.vae_dtype not in (None, "fp32"):
        message = f"{config.caching.vae_dtype!r}: the pipelines encode and decode in fp32, so latents will differ."
        problems.append(Problem("vae_dtype", message, fatal=False))
    return problems


def check_checkpoint(flavour: Flavour, source: ModelSource) -> list[Problem]:
    """Problems of the parts on this machine: wrong classes, or parts that do not fit together."""
    transformer, vae = source.read_config("transformer"), source.read_config("vae")
    text_encoder = source.read_config("text_encoder")
    problems = []
    if transformer is not None and transformer.get("_class_name") != TRANSFORMER_CLASS:
        message = f"the transformer in {source['transformer'].location!r} is not a {TRANSFORMER_CLASS}."
        problems.append(Problem(MODEL_KEY, message))
    if vae is not None:
        problems += _check_vae(vae, source["vae"].location, flavour)
    if problems or transformer is None:
        return problems
    channels = transformer.get("in_channels")
    latent_channels = None if vae is None else vae.get("latent_channels" if vae_class(flavour) == LTX2 else "z_dim")
    if vae is not None and latent_channels != channels:
        problems.append(Problem(VAE_KEY, f"the VAE has {latent_channels} channels, the transformer {channels}."))
    if transformer.get("out_channels") not in (None, channels):
        message = f"the transformer takes {channels} channels but returns {transformer['out_channels']}."
        problems.append(Problem(MODEL_KEY, message))
    width = transformer.get("caption_channels")
    if text_encoder is not None and text_encoder.get("hidden_size") != width:
        message = f"the text encoder is {text_encoder.get('hidden_size')} wide, the transformer reads {width}."
        problems.append(Problem("pretrained_gemma_model_name_or_path", message))
    return problems


def vae_class(flavour: Flavour) -> str:
    """The class of a flavour's VAE."""
    return LTX2 if flavour.name == "2b-720p" else WAN


def _check_vae(vae: dict[str, Any], location: str, flavour: Flavour) -> list[Problem]:
    """Problems of the VAE's class and statistics: every channel of the latents must be normalised."""
    kind, wanted = vae.get("_class_name"), vae_class(flavour)
    if kind != wanted:
        message = f"the VAE in {location!r} is a {kind}, not an {wanted}, which model_flavour {flavour.name} has."
        return [Problem(VAE_KEY, message)]
    if wanted == LTX2:  # its statistics are among its weights
        return []
    problems = []
    for name in ("latents_mean", "latents_std"):
        count = len(vae.get(name) or ())
        if count != vae.get("z_dim"):
            message = f"the VAE in {location!r} has {count} values of {name} for {vae.get('z_dim')} channels."
            problems.append(Problem(VAE_KEY, message))
    return problems


SANA_VIDEO = FamilySpec(
    name="sanavideo",
    title="Sana Video",
    media="video",
    flavours=(
        Flavour("2b-480p", "Efficient-Large-Model/SANA-Video_2B_480p_diffusers", "t2v", dataset_task="i2v"),
        Flavour(
            "2b-720p",
            "Efficient-Large-Model/SANA-Video_2B_720p_diffusers",
            "t2v",
            dataset_task="i2v",
            defaults={"resolution": 720, "validation_resolution": "1280x704"},
            changes={
                "vae_stride": 32,
                "patch_size": 1,
                "frame_stride": 8,
                "largest_side": POSITIONS * 32,
                "native_sizes": {720: SIZES_720},
                "cost": COST_720,
                "decodes_in_strips": True,
            },
        ),
    ),
    adapter="simpletuner.models.sanavideo.video:SanaVideoAdapter",
    options=SanaOptions,
    block_counts={"transformer_blocks": "num_layers"},
    dataset_keys=frozenset({"sana_motion_score"}),
    defaults={
        "resolution": 480,
        "aspect_bucket_alignment": "32",
        "tokenizer_max_length": TEXT_LENGTH,
        "vae_dtype": "fp32",
        "framerate": 16,
        "validation_guidance": 6.0,
        "validation_num_inference_steps": 50,
        "validation_resolution": "832x480",
        "validation_num_video_frames": 81,
        "validation_negative_prompt": NEGATIVE_PROMPT,
        "crepa_block_index": 10,
    },
    fixed=TRAINING_SIGMAS,
    components={
        "transformer": Component("transformer", "pretrained_transformer_model_name_or_path"),
        "vae": Component("vae", VAE_KEY),
        "text_encoder": Component("text_encoder", "pretrained_gemma_model_name_or_path", ("gemma2",)),
        "tokenizer": Component("tokenizer", "pretrained_gemma_model_name_or_path"),
        "scheduler": Component("scheduler", kinds=SCHEDULERS),
    },
    size_multiple=32,
    vae_stride=8,
    patch_size=2,
    largest_side=POSITIONS * 16,
    native_sizes={480: SIZES_480},
    text_length_cap=TEXT_LENGTH,
    text_reserve=2,
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    lora_presets={"all-linear": ALL_LINEAR, "slider": SLIDER},
    adapter_classes={
        "Attention": r".+\.attn[12]",
        "FeedForward": r".+\.ff",
        "GLUMBTempConv": r".+\.ff",
        "SanaVideoTransformerBlock": r"transformer_blocks\.\d+",
    },
    quantised_layers=QUANTISED,
    license="other",
    check=check_video,
    check_checkpoint=check_checkpoint,
    clean_caption=clean_caption,
    text_fingerprint=text_fingerprint,
    cost=COST,
    bare_fingerprint=bare_fingerprint,
    dataset_caption=dataset_caption,
    frame_rate=16,
    frame_stride=4,
    decodes_in_strips=False,
)
